"""The data of your own tasks are first looked up in the folder of the task file, so the folder can be moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from refusals import refused

from adapterswap.experiments.evaluation.stock_tasks import load_stock
from adapterswap.kit.errors import DataError


def write_tasks(folder: Path, question: str, **options: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(json.dumps({"question": question}) + "\n")
    content = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": options or {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": ["yes", "no"], "doc_to_target": 0,
    }  # fmt: skip
    (folder / "own.yaml").write_text(json.dumps(content))
    return folder


def question_of(folder: Path) -> str:
    [task] = load_stock(["own"], str(folder), unsafe_code=False, trust_task_code=False)["tasks"].values()
    return str(task.dataset["test"][0]["question"])


@pytest.mark.parametrize(
    "options",
    [{}, {"data_files": {"test": ["rows.jsonl"]}}, {"data_files": {"test": "*.jsonl"}},
     {"data_dir": ".", "data_files": {"test": "rows.jsonl"}}],
    ids=["name", "list", "pattern", "data_dir"],
)  # fmt: skip
def test_the_data_lie_beside_the_task(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command runs; a copy has its own, and so has a folder that was moved."""
    monkeypatch.chdir(tmp_path)
    first = write_tasks(tmp_path / "first", "Is it dry?", **options)
    (tmp_path / "rows.jsonl").write_text('{"question": "Of the current folder"}\n')
    assert question_of(first) == "Is it dry?"

    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    (copy / "rows.jsonl").write_text('{"question": "Is it wet?"}\n')
    assert (question_of(copy), question_of(first)) == ("Is it wet?", "Is it dry?")
    moved = first.rename(tmp_path / "moved")
    assert question_of(moved) == "Is it dry?"


def test_other_places_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole path, and a file that only the current folder has, as in the harness."""
    elsewhere = write_tasks(tmp_path / "elsewhere", "Is it there?")
    whole = write_tasks(tmp_path / "whole", "Not this", data_files={"test": str(elsewhere / "rows.jsonl")})
    assert question_of(whole) == "Is it there?"
    current = write_tasks(tmp_path / "current", "Not this either", data_files={"test": "of_the_folder.jsonl"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_the_folder.jsonl").write_text('{"question": "Is it here?"}\n')
    assert question_of(current) == "Is it here?"
    lost = write_tasks(tmp_path / "lost", "Nor this", data_files={"test": str(tmp_path / "gone.jsonl")})
    with refused(DataError, "tasks"):
        question_of(lost)
