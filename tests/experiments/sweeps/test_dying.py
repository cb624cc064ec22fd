"""A sweep that is killed anywhere or runs out of disk space resumes, and ends with the folder of an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapterswap.experiments.sweeps import SweepRecipe, sweep

from .conftest import plain

Content = Callable[..., dict[str, Any]]
HERE = Path(__file__).parent
FAMILIES = [
    {"bottom": [1, 2], "top": [0, 1]},
    {"method": "ties", "density": 0.5, "max_rank": 4},
    {"name": "again", "bottom": 1, "top": 1},
]


def dying(recipe: dict[str, Any], **modes: Any) -> dict[str, Any]:
    program = [sys.executable, str(HERE / "dying.py"), json.dumps({"recipe": recipe, **modes})]
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[2]}:{HERE.parents[1]}"}
    process = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    output: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return output


def test_killed_or_on_a_full_disk_it_ends_the_same(content: Content, tmp_path: Path) -> None:
    recipe = content(compositions=FAMILIES)
    run = sweep(SweepRecipe.model_validate(recipe), tmp_path / "peace", device="cpu")
    assert len(run.results) == 3 + 4 + 1 + 1
    shutil.copytree(tmp_path / "peace", tmp_path / "full")
    lines = (tmp_path / "peace" / "cells.jsonl").read_bytes().splitlines(keepends=True)
    done = b"".join(lines[:4])
    (tmp_path / "full" / "cells.jsonl").write_bytes(done)
    samples = (tmp_path / "peace" / "samples").iterdir()
    assert max(path.stat().st_size for path in samples) < len(done)
    found = dying(
        recipe,
        kill={"folder": str(tmp_path / "killed"), "kills": 4, "seed": 0},
        fill={"folder": str(tmp_path / "full"), "steps": [100, len(done) + 100]},
    )
    assert [code for code, _ in found["kill"]["killed_at"]][:2] == [-9] * 2  # the last two may have been done before
    counts = [count for _, count in found["kill"]["killed_at"]]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert found["kill"]["last"] == 0
    assert plain(tmp_path / "killed") == plain(tmp_path / "peace")
    # No finished cell is lost where the disk is full, in samples or in a line.
    assert found["fill"]["found"] == 2 * [{"code": 3, "cells": 4, "whole": True, "left": []}]
    assert found["fill"]["last"] == 0
    assert plain(tmp_path / "full") == plain(tmp_path / "peace")
