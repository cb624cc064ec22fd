"""What a comparison with the sources found, as data. Reads and prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterswap.experts.adapters import CONFIG

__all__ = ["Verification"]


@dataclass(frozen=True)
class Verification:
    """What a comparison found.

    Attributes:
        changed_sources: experts, or `base`, that are not what was composed, or cut: name → the file that differs, or
            `weights`.
        differing: tensors that are not what the sources give (or are missing, or too many). Of an extracted adapter:
            its file, where that is not the one that was written, and modules whose ΔW is not the recorded one, or as
            far from it.
        config_differs: the config is not what the sources give, or not the one that was extracted.
        config: the config's file name.
        extracted: it is an adapter that was cut out of a full fine-tune.
        record_differs: the keys of adapterswap.json whose values are not what the sources give.
        unchecked: what an extracted adapter was cut out of, or `base`, where nothing says where it lies.
    """

    changed_sources: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    config_differs: bool = False
    config: str = CONFIG
    extracted: bool = False
    unchecked: tuple[str, ...] = ()
    record_differs: tuple[str, ...] = ()

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
        }
