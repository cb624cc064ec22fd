"""The files of an analysis, which `overwrite` may replace."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.drawing import FORMATS
from adapterswap.files.folders import OutputKind

__all__ = ["ANALYSIS"]

_RECORD = "analysis.json"


def _names(record: Mapping[str, Any]) -> Sequence[str]:
    experts, pairs = record.get("experts"), record.get("pairs")
    if not isinstance(experts, dict) or not isinstance(pairs, list):
        return ()
    names = [pair["experts"] for pair in pairs if isinstance(pair, dict) and isinstance(pair.get("experts"), list)]
    drawn = ["changes", "norms", "cosines", *(glob.escape("-".join(map(str, each))) for each in names)]
    return (_RECORD, "changes.csv", *(f"{name}.{suffix}" for name in drawn for suffix in FORMATS))


ANALYSIS = OutputKind(_RECORD, _names)
"""The kind of folder that `analyze` writes."""
