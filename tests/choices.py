"""A multiple-choice task that needs no network: the harness's XCOPA in Swahili over sentences of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval

TASK = "xcopa_own_sw"
SHOTS, QUESTIONS = 5, 40
_CAUSES = ["mvua ilinyesha", "jua liliwaka sana", "mwalimu alichelewa", "umeme ulikatika", "soko lilifungwa"]
_EFFECTS = ["watoto walibaki nyumbani", "nguo zilikauka", "darasa lilianza saa nne", "taa zilizimika"]


def rows(count: int) -> list[dict[str, Any]]:
    """Rows with XCOPA's columns; no two premises are alike."""
    return [
        {
            "premise": f"Siku ya {number + 1}, {_CAUSES[number % 5]}.",
            "choice1": _EFFECTS[number % 4].capitalize(),
            "choice2": _EFFECTS[(number + 1 + number // 4) % 4].capitalize(),
            "question": ("cause", "effect")[number % 3 == 0],
            "label": number % 2,
        }
        for number in range(count)
    ]


def write_task(folder: Path) -> Path:
    """A folder for `include_path`: the harness's own task file, with other data."""
    (folder / "tasks").mkdir(parents=True)
    data = {"validation": rows(SHOTS), "test": rows(QUESTIONS)}
    for split, lines in data.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    content = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / "xcopa" / "default_sw.yaml"),
        "task": TASK,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(folder / f"{split}.jsonl") for split in data},
        },
    }
    (folder / "tasks" / "xcopa.yaml").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tasks"
