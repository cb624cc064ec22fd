"""JSON that says its own hash, so that a byte of it that was changed afterwards is noticed.

A guard against accidents and well-meant edits, not against forgery. Knows nothing of what the JSON says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["SEAL", "is_sealed", "sealed"]

SEAL = "sha256"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with the hash of its JSON under `sha256`, as its last key."""
    return {**content, SEAL: _digest(content)}


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Whether `content`, as it was read back, is what was sealed."""
    inside = {key: value for key, value in content.items() if key != SEAL}
    return content.get(SEAL) == _digest(inside)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
