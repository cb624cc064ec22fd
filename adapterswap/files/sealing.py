"""JSON with its own hash, so that a later change is noticed.

This guards against accidents and well-meant edits, not against forgery. Knows nothing of what the JSON says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["SEAL", "is_sealed", "sealed"]

SEAL = "sha256"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with the hash of its JSON as its last key, `sha256`."""
    return {**content, SEAL: _digest(content)}


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Whether `content`, as read back, is unchanged since it was sealed."""
    unsealed = {key: value for key, value in content.items() if key != SEAL}
    return content.get(SEAL) == _digest(unsealed)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
