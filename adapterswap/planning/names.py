"""What an expert may be called, and why.

In a recipe nearly everything goes: a name there is only looked up. Each place that writes names down, or hands them to
something with rules of its own, narrows that, and every such rule is here. Knows nothing of what the names are for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.sources import parse_hub_id
from adapterswap.planning.allocation import BASE

__all__ = ["SHORT_NAME", "expert_name", "fits_peft", "fits_short_names", "own_name", "why_no_name"]

SHORT_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
"""An expert in a short name such as `math+swahili@top=1`: `+`, `@`, `=` and `,` have a meaning there, a leading `-`
would make an option of it, and requests of strangers come this way, so other characters are out too."""

_MEANINGFUL = frozenset("[]{}<>'\"`|\\:;*?!$")  # in recipes, tables and shells


def why_no_name(name: str) -> str | None:
    """Why no expert can be called this in any composition; None if one can.

    `base` means the unchanged base model wherever an expert is named. Names are printed in lines of text, where a line
    break would end the line and spaces at the ends could not be seen.
    """
    if name == BASE:
        return f"the expert name {BASE!r} is reserved for the unchanged base: rename the expert"
    if name != " ".join(name.split()) or not name:
        return f"the expert name {name!r} is not one line of text, without spaces around it"
    return None


def fits_short_names(name: str) -> bool:
    """Whether short names and requests can name an expert of this name."""
    return why_no_name(name) is None and re.fullmatch(SHORT_NAME, name) is not None


def fits_peft(name: str) -> bool:
    """Whether PEFT can hold an adapter under this name.

    It is a part of the names of the model's parameters, whose parts are joined by dots, and PEFT takes one that is
    itself a part of `lora_` for the prefix of its keys.
    """
    return bool(name) and "." not in name and name != BASE and name not in "lora_"


def expert_name(reference: Adapter | Checkpoint | str | Path, taken: Collection[str], fallback: str) -> str:
    """A name for an expert that was given none: its folder's or repository's own, or `fallback`.

    The own name is passed over where it is taken, cannot be a name, or would need quotes in a recipe or a shell.
    """
    name = own_name(reference)
    if name not in taken and why_no_name(name) is None and name.isprintable() and not _MEANINGFUL & set(name):
        return name
    while fallback in taken:
        fallback += "_"
    return fallback


def own_name(reference: Adapter | Checkpoint | str | Path) -> str:
    """The name of an expert's folder, or of its repository on the Hub or the subfolder there."""
    if isinstance(reference, Adapter | Checkpoint):
        return reference.source.name.rpartition("/")[2]
    if isinstance(reference, str) and (wanted := parse_hub_id(reference)) is not None:
        return wanted.folder.rpartition("/")[2]
    return Path(os.path.abspath(Path(reference).expanduser())).name
