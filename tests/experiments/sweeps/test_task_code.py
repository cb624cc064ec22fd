"""A sweep over the user's own tasks: their code needs consent each time, and a change of their files is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from refusals import refused

from adapterswap.experiments.sweeps import SweepProgress, SweepRecipe, prepare, sweep
from adapterswap.kit.errors import FieldError, RunError
from experiments.evaluation.test_task_code import Tasks

from .conftest import plain

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


def test_a_task_that_changes_does_not_change_a_run(content: Content, tmp_path: Path) -> None:
    """It is loaded once for all cells; the next run, also of the same process, notices the change."""
    tasks = Tasks(tmp_path)
    settings = {"include_path": str(tasks.folder), "num_fewshot": 0}
    requested = content(compositions=[{"bottom": [1, 2], "top": 1}], tasks=["own_plain"], settings=settings)
    recipe = SweepRecipe.model_validate(requested)
    sweep(recipe, tmp_path / "peace", device="cpu")
    file = tasks.folder / "plain.yaml"
    before = file.read_text(encoding="utf-8")

    def edit(progress: SweepProgress) -> None:
        if progress.done == 1:
            file.write_text(before + 'doc_to_text: "Methali: {{text}}"\n', encoding="utf-8")

    sweep(recipe, tmp_path / "edited", device="cpu", tell=edit)
    assert plain(tmp_path / "edited") == plain(tmp_path / "peace")
    with refused(RunError, "out_path", match="other tasks"):
        sweep(recipe, tmp_path / "edited", device="cpu")
    other = sweep(recipe, tmp_path / "other", device="cpu")
    assert any("Methali" in path.read_text(encoding="utf-8") for path in other.folder.rglob("*.jsonl"))


def test_a_group_that_changes_its_tasks_is_refused(content: Content, tmp_path: Path) -> None:
    """A row of a sweep's table has the name of a single task, and so do the commands of its report."""
    tasks = Tasks(tmp_path)
    settings = {"include_path": str(tasks.folder), "num_fewshot": None}
    lines = "group: own_shots", "task:", "  - task: own_plain", "    num_fewshot: 1"
    (tasks.folder / "shots.yaml").write_text("\n".join(lines), encoding="utf-8")
    recipe = content(compositions=[{"bottom": 1, "top": 1}], tasks=["own_shots"], settings=settings)
    with refused(FieldError, "tasks", match="own_plain@1"):
        prepare(SweepRecipe.model_validate(recipe))
    recipe["tasks"] = ["own_plain@1"]
    assert list(prepare(SweepRecipe.model_validate(recipe)).tasks) == ["own_plain@1"]
