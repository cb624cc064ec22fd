"""The result of comparing an adapter or a model with its sources, as data. Reads and prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterswap.experts.adapters import CONFIG

__all__ = ["Verification"]


@dataclass(frozen=True)
class Verification:
    """The differences between an adapter or a model and the result recomputed from its sources.

    Attributes:
        changed_sources: experts, or `base`, that have changed since they were composed or cut: name → the file that
            differs, or `weights`.
        differing: tensors that differ from the recomputed ones, are missing, or should not be there. Of an extracted
            adapter: its file, if it is not the one that was written, and modules whose ‖ΔW‖ or error differs from the
            record.
        config_differs: whether the config differs from the recomputed one, or from the one that was extracted.
        config: the config's file name.
        extracted: whether it is an adapter that was cut out of a full fine-tune.
        record_differs: the keys of adapterswap.json whose values differ from the recomputed ones.
        unchecked: sources that were not compared, because their location is not known: those of an extracted adapter,
            or `base`.
        notes: what else was found and makes no difference to the result: files beside it, an edited model card, and a
            revision that could not be compared because a folder was passed.
    """

    changed_sources: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    config_differs: bool = False
    config: str = CONFIG
    extracted: bool = False
    unchecked: tuple[str, ...] = ()
    record_differs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.changed_sources or self.differing or self.config_differs or self.record_differs)

    def as_json(self) -> dict[str, Any]:
        """As plain data: what `adapterswap verify --json` prints."""
        return {
            "equal": self.equal,
            "changed_sources": dict(self.changed_sources),
            "differing": list(self.differing),
            "config_differs": self.config_differs,
            "record_differs": list(self.record_differs),
            "unchecked": list(self.unchecked),
            "notes": list(self.notes),
        }
