"""Which folders adapterswap wrote, so that `overwrite` may replace them.

Knows file names; nothing of plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.experts.adapters import CONFIG, WEIGHTS
from adapterswap.experts.checkpoints import MODEL_CONFIG, MODEL_INDEX, MODEL_WEIGHTS
from adapterswap.experts.slices import PROVENANCE
from adapterswap.files.folders import OutputKind

__all__ = ["ADAPTER_FILES", "CARD", "COMPOSED", "MODEL_FILES"]

CARD = "README.md"
ADAPTER_FILES = (CONFIG, WEIGHTS)
MODEL_FILES = (
    MODEL_CONFIG, MODEL_WEIGHTS, MODEL_INDEX, "model-*-of-*.safetensors", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
)  # fmt: skip
"""The files of a full checkpoint, as names and patterns."""


def _names(record: Mapping[str, Any]) -> Sequence[str]:
    if not record.keys() >= {"format", "adapterswap_version"}:
        return ()
    return (PROVENANCE, CARD, *(MODEL_FILES if record.get("kind") == "model" else ADAPTER_FILES))


COMPOSED = OutputKind(PROVENANCE, _names)
"""The folders that `compose`, `slice`, `convert`, `merge` and `extract` write."""
