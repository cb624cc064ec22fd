"""XCOPA in Swahili: a premise, and which of two sentences is its cause or its effect, as published.

Reads the questions shipped in `data/xcopa/` (Ponti et al. 2020, "XCOPA: A Multilingual Dataset for Causal Commonsense
Reasoning"; CC BY 4.0, see the LICENSE there) and makes a sentence with two possible ends of each. Task name and wording
are those of lm-evaluation-harness's `xcopa_sw`. Knows nothing of the harness's code or of models.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

__all__ = ["MAX_SHOTS", "read_xcopa", "xcopa_choices", "xcopa_prompt", "xcopa_task_names"]

MAX_SHOTS = 100
"""The number of questions in val."""

_SPLITS = {"xcopa_sw": "test", "xcopa_val_sw": "val"}
_BECAUSE, _SO = "kwa sababu", "kwa hiyo"


def xcopa_task_names() -> list[str]:
    """`xcopa_sw`, the 500 questions of test, and `xcopa_val_sw`, the 100 of val, on which to choose compositions."""
    return list(_SPLITS)


@lru_cache
def read_xcopa(name: str) -> list[dict[str, Any]]:
    """The questions of the task of that name, in their published order.

    Returns:
        Rows with `premise`, `choice1`, `choice2`, `question` (cause or effect) and `label`: 0 for the first choice.
    """
    path = files("adapterswap.evaluation") / "data" / "xcopa" / f"sw.{_SPLITS[name]}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def xcopa_prompt(row: dict[str, Any]) -> str:
    """The premise without its full stop, and a conjunction: because, or so."""
    return f"{row['premise'].strip()[:-1]} {_BECAUSE if row['question'] == 'cause' else _SO}"


def xcopa_choices(row: dict[str, Any]) -> list[str]:
    """The two ends that the sentence may have."""
    return [choice[0].lower() + choice[1:] for choice in (row["choice1"], row["choice2"])]
