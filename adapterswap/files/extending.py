"""Recipes that build on others: `extends:` names the fragments to start from.

A fragment is a file, with a path relative to the file that names it, or a shipped fragment, by its name without suffix.
Fragments are merged in the order listed, and the recipe itself comes last: mappings are merged key by key, everything
else is replaced (also by `null`). Knows nothing of what recipes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from adapterswap.errors import FieldError, Problems
from adapterswap.files.smallfiles import exists, expand, shown
from adapterswap.files.yamltext import load_yaml
from adapterswap.shipped import near_names, shipped_recipes

__all__ = ["Layer", "find_fragment", "load_layers", "merge_layers", "take_names", "writer"]

_MAX_DEPTH = 8  # fragments that extend fragments
_MAX_FILES = 64  # in total, counting a fragment each time it is named

Location = Sequence[int | str]
"""The keys and list positions that lead to a value."""


@dataclass(frozen=True)
class Layer:
    """The content of one file, without its `extends`."""

    path: Path
    content: dict[str, Any]


def load_layers(path: str | Path) -> list[Layer]:
    """Read the files of a recipe, in the order in which they are merged; the recipe itself is last.

    Raises:
        NotFoundError: the recipe does not exist.
        FieldError: `load_yaml` refuses a file; `extends` is not a name or a list of names, or names a fragment that
            does not exist; fragments extend each other in a circle or more than 8 deep, or there are more than 64.
    """
    layers: list[Layer] = []
    _collect(Path(path), (), layers)
    return layers


def _collect(path: Path, chain: tuple[Path, ...], layers: list[Layer]) -> None:
    """Append to `layers` what `path` extends, then its own content; `chain` is the files that led to it."""
    route = " → ".join(map(str, (*chain, path)))
    if path.resolve() in (earlier.resolve() for earlier in chain):
        raise FieldError(
            f"recipes extend each other in a circle: {route}", "Remove one of these `extends`", parameter="extends"
        )
    if len(chain) > _MAX_DEPTH:
        raise FieldError(
            f"recipes extend each other more than {_MAX_DEPTH} deep: {route}", "Use fewer levels", parameter="extends"
        )
    content = load_yaml(path)
    problems = Problems(FieldError)
    for name in take_names(content, path):
        with problems.collect():
            _collect(find_fragment(name, path), (*chain, path), layers)
    problems.raise_if_any()
    if len(layers) == _MAX_FILES:
        raise FieldError(
            f"the recipe extends more than {_MAX_FILES} files: {route}", "Extend fewer files", parameter="extends"
        )
    layers.append(Layer(path, content))


def take_names(content: dict[str, Any], path: Path) -> list[str]:
    """The fragments that the recipe at `path` extends. Removes the `extends` key from `content`.

    Raises:
        FieldError: `extends` is not a name or a list of names.
    """
    value = content.pop("extends", None)
    names = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise FieldError(
            f"{path}: extends is {shown(value)}, but must be a name or a list of names",
            "Name files relative to this one, or shipped fragments such as data/swahili",
            parameter="extends",
        )
    return names


def find_fragment(name: str, path: Path) -> Path:
    """The file to which `name` refers in the recipe at `path`.

    Raises:
        FieldError: `name` is neither a file nor a shipped fragment.
    """
    local = path.parent / expand(name)
    if exists(local) and local.is_file():
        return local
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    raise FieldError(
        f"{path}: extends names {shown(name)}, which is neither a file nor a shipped recipe",
        f"Use a path relative to this file, or {near_names(name)}",
        parameter="extends",
    )


def merge_layers(layers: Sequence[Layer]) -> dict[str, Any]:
    """Merge the contents of the files; later files override earlier ones."""
    return reduce(_merge, (layer.content for layer in layers), {})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = below | above
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merge(below[key], value)
    return merged


def writer(layers: Sequence[Layer], location: Location) -> Path | None:
    """The file that set the value at `location`, or a value above it as a whole; None if no file did."""
    return next((layer.path for layer in reversed(layers) if _sets(layer.content, location)), None)


def _sets(content: Any, location: Location) -> bool:
    for step in location:
        if not isinstance(content, dict):
            return True  # a plain value or a list is set as a whole
        if step not in content:
            return False
        content = content[step]
    return True
