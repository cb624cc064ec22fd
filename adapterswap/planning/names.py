"""Which names an expert may have, and why.

Recipes accept nearly every name. Short names and PEFT accept fewer; all their rules are here.
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
"""An expert in a short name such as `math+swahili@top=1`. `+`, `@`, `=` and `,` separate its parts, and a leading `-`
would look like an option. Other characters are excluded because short names also come in untrusted requests."""

_MEANINGFUL = frozenset("[]{}<>'\"`|\\:;*?!$")  # in recipes, tables and shells


def why_no_name(name: str) -> str | None:
    """Why an expert cannot have this name in any composition; None if it can.

    `base` is reserved for the unchanged base model. Names are printed in lines of text, so line breaks, and spaces at
    the ends, are not allowed.
    """
    if name == BASE:
        return f"the expert name {BASE!r} is reserved for the unchanged base: rename the expert"
    if name != " ".join(name.split()) or not name:
        return f"the expert name {name!r} must be one line, without spaces at its ends or repeated spaces"
    return None


def fits_short_names(name: str) -> bool:
    """Whether short names and requests can contain this name."""
    return why_no_name(name) is None and re.fullmatch(SHORT_NAME, name) is not None


def fits_peft(name: str) -> bool:
    """Whether PEFT can hold an adapter under this name.

    PEFT makes it a part of parameter names, so it cannot contain a dot. A substring of `lora_` is taken for the prefix
    of PEFT's keys.
    """
    return bool(name) and "." not in name and name != BASE and name not in "lora_"


def expert_name(reference: Adapter | Checkpoint | str | Path, taken: Collection[str], fallback: str) -> str:
    """A name for an expert without one: that of its folder or repository, or `fallback`.

    `fallback` is used if that name is taken, is not allowed, or would need quotes in a recipe or a shell.
    """
    name = own_name(reference)
    if name not in taken and why_no_name(name) is None and name.isprintable() and not _MEANINGFUL & set(name):
        return name
    while fallback in taken:
        fallback += "_"
    return fallback


def own_name(reference: Adapter | Checkpoint | str | Path) -> str:
    """The name of an expert's folder, or of its repository (or subfolder) on the Hub."""
    if isinstance(reference, Adapter | Checkpoint):
        return reference.source.name.rpartition("/")[2]
    if isinstance(reference, str) and (hub_id := parse_hub_id(reference)) is not None:
        return hub_id.folder.rpartition("/")[2]
    return Path(os.path.abspath(Path(reference).expanduser())).name
