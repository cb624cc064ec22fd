"""Read the recipe of a composition: our own, or a mergekit YAML."""

from __future__ import annotations

import os
from pathlib import Path

from adapterswap.core.planning.composition import Composition
from adapterswap.kit.errors import UnsupportedError, check_type
from adapterswap.kit.files.text import expand
from adapterswap.kit.files.yaml import find_recipe, read_recipe
from adapterswap.tools.mergekit import MergekitMerge, read_mergekit


def read_composition(recipe: str | Path) -> Composition:
    """Read the recipe of a composition. Relative paths of experts may be relative to the recipe's folder.

    Args:
        recipe: a YAML file, or the name of a shipped recipe such as `compose/llama-3.1-8b/swahili`. The file may be a
            mergekit YAML; see `read_mergekit`.

    Returns:
        The composition, for `compose`.

    Raises:
        NotFoundError: the recipe does not exist.
        FieldError: the recipe has mistakes; all of them are listed.
        UnsupportedError: a mergekit YAML sets a dtype, which a composition cannot hold, or uses an unsupported feature.
    """
    check_type(recipe, (str, Path), "recipe", "Pass a YAML file, or the name of a shipped recipe")
    path = find_recipe(recipe, "compose")

    if MergekitMerge.is_at(path):
        merge = read_mergekit(path)
        if merge.dtype is not None:
            raise UnsupportedError(
                f"{path}: dtype is {merge.dtype}, but a composition does not say how its weights are stored",
                "Remove it from the file and pass `dtype` to `merge`, or call `read_mergekit`, which returns both",
                parameter="dtype",
            )
        return merge.composition

    composition = read_recipe(path, Composition, paths=["experts.*"], kind="compose")
    experts: dict[str, str] = {}
    for name, place in composition.experts.items():
        sibling = path.parent / expand(place)
        experts[name] = str(sibling) if os.path.isdir(sibling) else place
    return composition.model_copy(update={"experts": experts})
