"""A sweep over tasks with Python code: the user must consent each time, and every worker gets the consent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from evaluation.test_task_code import Tasks

Content = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return Tasks(tmp_path_factory.mktemp("made"))


@pytest.fixture
def tasks(made: Tasks) -> Tasks:
    made.marker.unlink(missing_ok=True)
    return made


@pytest.fixture
def over(content: Content, tasks: Tasks) -> dict[str, Any]:
    """A recipe over the task that runs code."""
    settings = {"include_path": str(tasks.folder), "num_fewshot": 0}
    return content(compositions=[{"bottom": 1, "top": 1}], tasks=["own_function"], settings=settings)


def test_a_sweep_asks_for_trust_each_time(
    run: Callable[..., Result], over: dict[str, Any], tasks: Tasks, tmp_path: Path
) -> None:
    file, out = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(over), encoding="utf-8")
    command = ("sweep", file, "-o", out, "--device", "cpu")
    for options in ([], ["--dry-run"]):
        stopped = run(*command, *options)
        assert stopped.exit_code == 2
        assert "--trust-task-code" in stopped.stderr
        assert not tasks.ran
        assert not out.exists()
    for options in (["--dry-run"], []):
        result = run(*command, *options, "--trust-task-code")
        assert result.exit_code == 0, result.stderr
        assert tasks.ran
        tasks.marker.unlink()
    assert "trust_task_code" not in (out / "sweep.json").read_text(encoding="utf-8")
    lines = (out / "cells.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "cells.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    resumed = run(*command)
    assert resumed.exit_code == 2
    assert "--trust-task-code" in resumed.stderr
    assert not tasks.ran
    assert run(*command, "--trust-task-code").exit_code == 0
    assert len((out / "cells.jsonl").read_text(encoding="utf-8").splitlines()) == len(lines)
