"""A run that is killed at any access to the disk leaves no part of an expert, and the same command ends the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterswap.experiments.training import TrainRecipe

HERE = Path(__file__).parent

pytest.importorskip("trl")


@pytest.mark.full
def test_killed_four_times(make_recipe: Callable[..., TrainRecipe], tmp_path: Path) -> None:
    recipe = make_recipe(training={"save_every_samples": 16}).model_dump(mode="json", exclude_unset=True)
    settings = {"recipe": recipe, "folder": str(tmp_path / "outputs"), "kills": 4, "seed": 0}
    process = subprocess.run(
        [sys.executable, str(HERE / "dying.py"), json.dumps(settings)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{HERE.parents[2]}:{HERE.parents[1]}"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert [each["code"] for each in found] == [-9] * 4
    assert {each["left"] for each in found} <= {"old", "new"}
    assert "old" in {each["left"] for each in found}
    assert [(each["again"], each["same"], each["beside"]) for each in found] == [(0, True, ["out"])] * 4
