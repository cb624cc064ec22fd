"""Recipes as files: list the shipped ones, check one, resolve what it extends, and make a copy to edit.

Each kind of recipe is checked by the model of its fields. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from adapterswap.core import Composition, check_names
from adapterswap.core.planning.checks import check_rules
from adapterswap.experiments.sweeps import SweepRecipe
from adapterswap.experiments.training import TrainRecipe
from adapterswap.kit.errors import AdapterswapError, CompositionError, NotFoundError, Problems, did_you_mean
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.yaml import RecipeFile, dump_yaml, read_recipe, shipped_recipes

_DEPTH = 512  # layers to assume if a recipe does not say how many its base has: more than any model has
_COMMENTS_AT = 60  # the column of comments; after a longer line they follow directly


@dataclass(frozen=True)
class RecipeKind:
    """A kind of recipe.

    Attributes:
        model: what checks it.
        paths: its keys that may be local paths, as in `RecipeFile.read`.
        check: raises the other errors that the command would raise before it reads a model.
    """

    model: type[Declared]
    paths: tuple[str, ...]
    check: Callable[[Any], None] = lambda recipe: None


def _check_composition(composition: Composition) -> None:
    """Check a composition as far as it can be checked without experts: its names, and its rules for some depth."""
    problems = Problems(CompositionError)
    check_names(composition.expert_names, composition.experts, problems, composition.allocation)
    num_layers = composition.num_layers or _DEPTH
    with problems.collect():
        check_rules(composition.rules(num_layers), num_layers, problems)
    problems.raise_if_any()


def _check_sweep(recipe: SweepRecipe) -> None:
    """Check each cell's composition for some depth."""
    recipe.check_cells(recipe.num_layers or _DEPTH)


_KINDS = {
    "train": RecipeKind(TrainRecipe, TrainRecipe.PATHS),
    "compose": RecipeKind(Composition, ("experts.*",), _check_composition),
    "sweep": RecipeKind(SweepRecipe, SweepRecipe.PATHS, _check_sweep),
}


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with adapterswap: `about` is the first line of its comment."""

    name: str
    kind: str
    about: str


def list_recipes() -> list[ShippedRecipe]:
    """The shipped recipes: whole ones (train, compose, sweep) and fragments (models, data, regimes)."""
    recipes = []
    for name, path in shipped_recipes().items():
        kind = name.partition("/")[0]
        first_line = path.read_text("utf-8").partition("\n")[0]
        recipes.append(ShippedRecipe(name, kind, first_line.removeprefix("# ")))
    return recipes


def check_recipe(path: Path) -> str:
    """Check the recipe at `path` and return its kind: train, compose or sweep."""
    name = RecipeFile.read(path).kind
    kind = _KINDS[name]
    recipe = read_recipe(path, kind.model, paths=kind.paths)
    try:
        kind.check(recipe)
    except AdapterswapError as error:
        raise error.within(str(path)) from None
    return name


def resolve_recipe(path: Path) -> tuple[dict[str, Any], str]:
    """The recipe at `path` with what it extends: as data, and as YAML with a comment that names each line's file."""
    patterns: list[str] = []
    for kind in _KINDS.values():
        patterns += kind.paths
    recipe = RecipeFile.read(path, paths=patterns)
    names: dict[Path | None, str] = {file: name for name, file in shipped_recipes().items()}
    return recipe.content, dump_yaml(_commented(recipe.content, (), recipe, names))


def _commented(
    content: dict[str, Any], location: tuple[str, ...], recipe: RecipeFile, names: dict[Path | None, str]
) -> CommentedMap:
    """`content` with a comment after each key that names the file that set it."""
    mapping = CommentedMap(content)
    for key, value in content.items():
        here = (*location, key)
        written = {recipe.source_of(place) for place in _leaves(value, here)}
        if isinstance(value, dict) and len(written) > 1:
            mapping[key] = _commented(value, here, recipe, names)
        else:
            (source,) = written
            mapping.yaml_add_eol_comment(names.get(source, str(source)), key, column=_COMMENTS_AT)
    return mapping


def _leaves(value: Any, location: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The locations of all values below a key that are not mappings; an empty mapping is a value."""
    if not isinstance(value, dict) or not value:
        return [location]
    leaves: list[tuple[str, ...]] = []
    for key, inner in value.items():
        leaves += _leaves(inner, (*location, key))
    return leaves


def standalone_copy(names: Sequence[str]) -> dict[str, str]:
    """The shipped recipes `names` and all that they extend, as relative path → text.

    The files extend each other by relative paths, so you can put them anywhere, and they need no shipped recipe.
    """
    shipped = shipped_recipes()
    problems = Problems(NotFoundError)
    for name in names:
        if name not in shipped:
            problems.add(
                f"There is no shipped recipe {name!r}",
                did_you_mean(name, shipped, "Use a name that `adapterswap recipes ls` lists"),
                parameter="names",
            )
    problems.raise_if_any()

    places = {file: f"{name}.yaml" for name, file in shipped.items()}
    files: set[Path] = set()
    for name in names:
        files |= set(RecipeFile.read(shipped[name]).files)
    return {places[file]: _with_relative_names(file, places) for file in sorted(files)}


COPIES = OutputKind(None, names=lambda: [f"{name}.yaml" for name in shipped_recipes()])
"""The output of `recipes cp`."""


def copy_recipes(
    names: Sequence[str], folder: str | Path, *, overwrite: bool = False, dry_run: bool = False
) -> list[str]:
    """Write `standalone_copy(names)` into a folder.

    Args:
        names: shipped recipes.
        folder: the folder to write; it appears whole or not at all.
        overwrite: replace the folder, if it holds only copies of shipped recipes.
        dry_run: check everything, but write nothing.

    Returns:
        The files' paths within the folder.
    """
    files = standalone_copy(names)
    inputs = shipped_recipes().values()
    if dry_run:
        COPIES.check(folder, overwrite=overwrite, inputs=inputs)
    else:
        with COPIES.folder(folder, overwrite=overwrite, inputs=inputs) as place:
            for name, text in files.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(text, encoding="utf-8")
    return list(files)


def _with_relative_names(file: Path, places: dict[Path, str]) -> str:
    """The text of a shipped recipe, comments included, with relative paths in its `extends`."""
    recipe = RecipeFile.read(file)
    return recipe.with_names(lambda fragment: os.path.relpath(places[fragment], Path(places[file]).parent))
