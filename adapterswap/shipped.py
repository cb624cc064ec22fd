"""Recipes that come with adapterswap, by name: `train/llama-3.1-8b-instruct/math`.

They lie in `recipes/` of a checkout, and in the package itself once installed. Those in `train/`, `compose/` and
`sweep/` are whole; the other folders hold the fragments that they extend. Knows nothing of what recipes say.
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
    """Name → file of the shipped recipes, those under `kind` (a folder such as `train`) only if it is given."""
    folder = _folder()
    found = sorted((folder / kind).rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def find_recipe(reference: str | Path, kind: str = "") -> Path:
    """The recipe's file: `reference` itself if it is a file, else the shipped recipe of that name.

    Raises:
        NotFoundError: it is neither.
    """
    path = expand(reference)
    if exists(path) and not path.is_dir():  # its reader says what is wrong with a pipe or a device
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
    """What to use instead of `name`, as the end of a sentence: the shipped names most like it."""
    near = difflib.get_close_matches(name, shipped_recipes(kind), n=3, cutoff=0.4)
    examples = f", such as {', '.join(near)}" if near else ""
    return f"a name that `adapterswap recipes ls` lists{examples}"
