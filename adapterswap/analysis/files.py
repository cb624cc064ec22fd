"""The files of an analysis: what `overwrite` may replace."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.files.folders import OutputKind

__all__ = ["ANALYSIS"]

_RECORD = "analysis.json"


def _names(record: Mapping[str, Any]) -> Sequence[str]:
    experts, pairs = record.get("experts"), record.get("pairs")
    if not isinstance(experts, dict) or not isinstance(pairs, list):
        return ()
    names = [pair["experts"] for pair in pairs if isinstance(pair, dict) and isinstance(pair.get("experts"), list)]
    pictures = [f"{glob.escape('-'.join(map(str, each)))}.png" for each in names]
    return (_RECORD, "changes.csv", "changes.png", "norms.png", *pictures)


ANALYSIS = OutputKind(_RECORD, _names)
"""What `analyze` writes."""
