"""Recipes that come with adapterswap, by name: `train/llama-3.1-8b-instruct/math`.

In a checkout they are in `recipes/`; once installed, in the package itself. The recipes in `train/`, `compose/` and
`sweep/` are complete; the other folders hold fragments that they extend. Does not read what recipes say.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from adapterswap.errors import NotFoundError
from adapterswap.files.smallfiles import exists, expand

__all__ = ["find_recipe", "near_names", "shipped_recipes"]


def _folder() -> Path:
    package = Path(__file__).parent
    installed = package / "shipped_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes(kind: str = "") -> dict[str, Path]:
    """The shipped recipes as name → file; with `kind`, only those in that folder, such as `train`."""
    folder = _folder()
    recipes = sorted((folder / kind).rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in recipes}


def find_recipe(reference: str | Path, kind: str = "") -> Path:
    """The recipe's file: `reference` itself if it is a file, else the shipped recipe of that name.

    Raises:
        NotFoundError: `reference` is neither.
    """
    path = expand(reference)
    if exists(path) and not path.is_dir():  # a pipe or a device is refused when it is read
        return path
    shipped = shipped_recipes(kind)
    if str(reference) in shipped:
        return shipped[str(reference)]
    reason = "is a folder" if path.is_dir() else "is neither a file nor a shipped recipe"
    raise NotFoundError(
        f"the recipe {reference} {reason}",
        f"Use a YAML file, or {near_names(str(reference), kind)}",
        parameter="recipe",
    )


def near_names(name: str, kind: str = "") -> str:
    """What to use instead of `name`, as the end of a sentence: the most similar shipped names."""
    near = difflib.get_close_matches(name, shipped_recipes(kind), n=3, cutoff=0.4)
    examples = f", such as {', '.join(near)}" if near else ""
    return f"a name that `adapterswap recipes ls` lists{examples}"
