"""Recipes made of others: `extends:` names the fragments that a recipe builds on.

A fragment is a file, named relative to the file that names it, or a shipped one, by its name without suffix. Fragments
are merged in the order in which they are named, and the recipe itself comes last: mappings are merged key by key, all
else is replaced (by `null` too). Knows nothing of what recipes say.
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

_MAX_DEPTH = 8  # fragments below fragments
_MAX_FILES = 64  # in all; one may be named by several others

Location = Sequence[int | str]
"""The keys, and positions in lists, that lead to a value."""


@dataclass(frozen=True)
class Layer:
    """What one file says itself, without `extends`."""

    path: Path
    content: dict[str, Any]


def load_layers(path: str | Path) -> list[Layer]:
    """The files that a recipe is made of, in the order in which they are merged; the recipe itself is the last.

    Raises:
        NotFoundError: the recipe does not exist.
        FieldError: a file that `load_yaml` refuses; `extends` is not a name or a list of names, or names a fragment
            that does not exist; fragments extend each other in a circle, or more than 8 deep, or more than 64 in all.
    """
    layers: list[Layer] = []
    _collect(Path(path), (), layers)
    return layers


def _collect(path: Path, chain: tuple[Path, ...], layers: list[Layer]) -> None:
    """Append to `layers` what `path` extends, then what it says itself; `chain` are the files that led to it."""
    route = " → ".join(map(str, (*chain, path)))
    if path.resolve() in (earlier.resolve() for earlier in chain):
        raise FieldError(
            f"recipes extend each other in a circle: {route}", "Remove one `extends` from it", parameter="extends"
        )
    if len(chain) > _MAX_DEPTH:
        raise FieldError(
            f"recipes extend each other more than {_MAX_DEPTH} deep: {route}", "Nest fewer of them", parameter="extends"
        )
    content = load_yaml(path)
    problems = Problems(FieldError)
    for name in take_names(content, path):
        with problems.collect():
            _collect(find_fragment(name, path), (*chain, path), layers)
    problems.raise_if_any()
    if len(layers) == _MAX_FILES:
        raise FieldError(
            f"the recipe is made of more than {_MAX_FILES} files: {route}", "Extend fewer of them", parameter="extends"
        )
    layers.append(Layer(path, content))


def take_names(content: dict[str, Any], path: Path) -> list[str]:
    """The fragments that the recipe at `path` extends; their key is taken out of its `content`.

    Raises:
        FieldError: `extends` is not a name or a list of names.
    """
    value = content.pop("extends", None)
    names = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise FieldError(
            f"{path}: extends is {shown(value)}, and takes a name or a list of names",
            "Name files beside this one, or shipped fragments such as data/swahili",
            parameter="extends",
        )
    return names


def find_fragment(name: str, path: Path) -> Path:
    """The file that the recipe at `path` means by `name`.

    Raises:
        FieldError: there is none.
    """
    beside = path.parent / expand(name)
    if exists(beside) and beside.is_file():
        return beside
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    raise FieldError(
        f"{path}: extends names {shown(name)}, which is neither a file beside it nor a shipped recipe",
        f"Give a file's path from there, or {near_names(name)}",
        parameter="extends",
    )


def merge_layers(layers: Sequence[Layer]) -> dict[str, Any]:
    """What the files say together, the last one last."""
    return reduce(_merge, (layer.content for layer in layers), {})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = below | above
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _merge(below[key], value)
    return merged


def writer(layers: Sequence[Layer], location: Location) -> Path | None:
    """The file that wrote the value at `location`, or what stands in its place there; None if no file did."""
    return next((layer.path for layer in reversed(layers) if _says(layer.content, location)), None)


def _says(content: Any, location: Location) -> bool:
    for step in location:
        if not isinstance(content, dict):
            return True  # a plain value or a list is written as a whole
        if step not in content:
            return False
        content = content[step]
    return True
