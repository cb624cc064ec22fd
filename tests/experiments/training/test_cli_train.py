from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from .conftest import echo_rows, write_jsonl
from .spying import spied

Run = Callable[..., Result]


@pytest.fixture
def recipe(tmp_path: Path, pico: Any) -> Path:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "rows.jsonl", echo_rows(40))
    content = {
        "base_model": str(pico("llama")),
        "out_path": str(tmp_path / "expert"),
        "adapter": {"r": 4},
        "datasets": [{"path": "data/rows.jsonl", "prompt": "{question}", "completion": " {answer}"}],
        "training": {"batch_size": 4, "gradient_accumulation": 2, "max_length": 32, "save_every_samples": None},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_train_and_train_again(run: Run, recipe: Path, tmp_path: Path) -> None:
    result = run("train", recipe, "--set", "training.max_steps=3")
    assert result.exit_code == 0, result.stderr
    assert "steps       3" in result.stdout
    assert f"written to {tmp_path / 'expert'}" in result.stderr
    again = run("train", recipe)
    assert again.exit_code == 3
    assert "exists" in again.stderr
    assert "--overwrite" in again.stderr
    other = run(
        "train", recipe, "--out-path", tmp_path / "other", "--seed", "3", "--json", "--set", "training.max_steps=3"
    )
    output = json.loads(other.stdout)
    assert output["path"] == str(tmp_path / "other")
    assert (output["steps"], output["dry_run"], output["rows"]["train"]) == (3, False, 40)
    assert json.loads((tmp_path / "other" / "training.json").read_text())["recipe"]["training"]["data_seed"] == 3


def test_the_account_of_a_run_says_where_it_starts(run: Run, recipe: Path, tmp_path: Path) -> None:
    assert run("train", recipe, "--set", "training.max_steps=1").exit_code == 0
    expert = tmp_path / "expert"
    further = run("train", recipe, "--start", expert, "--out-path", tmp_path / "further", "--dry-run")
    assert further.exit_code == 0, further.stderr
    [line] = [line for line in further.stdout.splitlines() if line.startswith("start ")]
    assert "expert: 42 modules of rank 4" in line


def test_dry_run(run: Run, recipe: Path, tmp_path: Path) -> None:
    output = json.loads(run("train", recipe, "--dry-run", "--json").stdout)
    assert output["dry_run"] is True
    assert output["steps"] == 5
    assert output["tokens"] == 40 * 7
    assert output["trainable_parameters"] == 4 * 6 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    text = run("train", recipe, "--dry-run")
    assert "rows        40 for training" in text.stdout
    assert "nothing trained" in text.stderr
    assert not (tmp_path / "expert").exists()
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert" / "thesis.txt").touch()
    refused = run("train", recipe, "--dry-run")
    assert refused.exit_code == 3
    assert "exists" in refused.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("adapter.r=0", "adapter.r is 0"),
        ("adapter.rank=4", "adapter.rank is not a known key"),
        ("training.schedule=wsd", "training.schedule is 'wsd'"),
        ("datasets.0.prompt='{q}'", "names the column 'q', which does not exist"),
        ("base_model=nowhere", "The path nowhere does not exist"),
        ("nonsense", "is not key=value"),
    ],
)
def test_errors_are_one_line_with_a_remedy(run: Run, recipe: Path, setting: str, message: str) -> None:
    result = run("train", recipe, "--set", setting)
    assert result.exit_code in (2, 3)
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_an_unknown_recipe_names_the_known_ones(run: Run) -> None:
    result = run("train", "train/llama-3.1-8b/maths")
    assert result.exit_code == 3
    assert "train/llama-3.1-8b/math" in result.stderr


def ctrl_c() -> None:
    raise KeyboardInterrupt


def end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("how", "code", "reached"), [(ctrl_c, 130, "4"), (end, 143, "5")])
def test_an_ended_run_says_how_to_go_on(
    run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[], None], code: int, reached: str
) -> None:
    """Ctrl-C ends a step and goes back to the last checkpoint; SIGTERM finishes the step and writes one."""
    options = ["--set", "training.save_every_samples=16", "--set", "training.max_steps=7"]  # a checkpoint in two steps
    handler = signal.getsignal(signal.SIGTERM)
    with spied(monkeypatch, lambda step, *_: how() if step + 1 == 5 else None):
        result = run("train", recipe, *options)
    signal.signal(signal.SIGTERM, handler)
    assert result.exit_code == code
    assert "after step 5 of 7" in result.stderr
    assert "--resume" in result.stderr

    changed = run("train", recipe, *options, "--resume", "--set", "training.learning_rate=0.25")
    assert changed.exit_code == 3
    assert "training.learning_rate: 0.0001, now 0.25" in changed.stderr
    resumed = run("train", recipe, *options, "--resume")
    assert resumed.exit_code == 0
    assert f"resumed from {reached}" in resumed.stdout


def test_without_a_checkpoint_nothing_is_promised(run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with spied(monkeypatch, lambda step, *_: ctrl_c() if step + 1 == 2 else None):
        result = run("train", recipe)
    assert result.exit_code == 130
    assert "after step 2 of 5" in result.stderr
    assert "--resume" not in result.stderr


def test_a_mistake_is_named_where_it_is(run: Run, recipe: Path) -> None:
    setting = run("train", recipe, "--dry-run", "--set", "training.epochs=-1")
    assert setting.exit_code == 2
    assert setting.stderr.startswith("Error: --set: training.epochs")
    recipe.write_text(recipe.read_text().replace("batch_size: 4", "batch_size: 0"))
    file = run("train", recipe, "--dry-run", "--set", "training.epochs=2")
    assert file.stderr.startswith(f"Error: {recipe}: training.batch_size")


def test_an_existing_output_is_refused_before_the_rest_is_read(run: Run, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert" / "mine").touch()
    recipe.write_text(recipe.read_text().replace("base_model: ", "base_model: no/such/folder"))
    for options in ([], ["--dry-run"]):
        result = run("train", recipe, *options)
        assert result.exit_code == 3
        assert str(tmp_path / "expert") in result.stderr
