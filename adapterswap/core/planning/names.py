"""Names of experts: which ones compositions, short names and PEFT accept, and how an expert without one is called."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.sources import Reference
from adapterswap.core.planning.rules import BASE

SHORT_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
"""An expert in a short name such as `math+swahili@top=1`. `+`, `@`, `=` and `,` separate its parts, and a leading `-`
would look like an option. Other characters are excluded because short names also come in untrusted requests."""

_MEANINGFUL = frozenset("[]{}<>'\"`|\\:;*?!$")  # in recipes, tables and shells


class ExpertName(str):
    """The name of an expert in a composition. Recipes accept nearly every name; short names and PEFT accept fewer."""

    __slots__ = ()

    @property
    def fault(self) -> str | None:
        """Why an expert cannot have this name in any composition; None if it can.

        `base` is reserved for the unchanged base model. Names are printed in lines of text, so line breaks, and spaces
        at the ends, are not allowed.
        """
        if self == BASE:
            return f"the expert name {BASE!r} is reserved for the unchanged base: rename the expert"
        if not self or self != " ".join(self.split()):
            return f"the expert name {str(self)!r} must be one line, without spaces at its ends or repeated spaces"
        return None

    @property
    def fits_short_names(self) -> bool:
        """Whether short names and requests can contain it."""
        return self.fault is None and re.fullmatch(SHORT_NAME, self) is not None

    @property
    def fits_peft(self) -> bool:
        """Whether PEFT can hold an adapter under it.

        PEFT makes it a part of parameter names, so it cannot contain a dot. A substring of `lora_` is taken for the
        prefix of PEFT's keys.
        """
        return bool(self) and "." not in self and self != BASE and self not in "lora_"

    @classmethod
    def of(cls, reference: Adapter | Checkpoint | str | Path) -> ExpertName:
        """The name of an expert's folder, or of its repository (or subfolder) on the Hub."""
        if isinstance(reference, Adapter | Checkpoint):
            return cls(reference.source.name.rpartition("/")[2])
        if isinstance(reference, str) and (hub_id := Reference(reference).hub_id) is not None:
            return cls(hub_id.folder.rpartition("/")[2])
        return cls(Path(os.path.abspath(Path(reference).expanduser())).name)

    @classmethod
    def choose(cls, reference: Adapter | Checkpoint | str | Path, taken: Collection[str], fallback: str) -> str:
        """A name for an expert without one: that of its folder or repository, or `fallback`.

        `fallback` is used if that name is taken, is not allowed, or would need quotes in a recipe or a shell.
        """
        name = cls.of(reference)
        if name not in taken and name.fault is None and name.isprintable() and not _MEANINGFUL & set(name):
            return str(name)
        while fallback in taken:
            fallback += "_"
        return fallback
