"""Killed at any moment, the target is absent, old or complete; two writers to one target never mix.

`KILLS` in the environment sets how often each command is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crafting import adapter, snapshot, tensors
from tiers import ALL

from .writers import DRAWING, WRITERS, commands, make_inputs

Crashing = Callable[..., dict[str, Any]]
CRASHING = Path(__file__).parents[2] / "crashing.py"
ROUNDS = 25 if ALL else 10


@pytest.fixture
def crashing(tmp_path: Path) -> Crashing:
    """Run a mode of tests/crashing.py with two experts and a folder for outputs."""
    experts = [str(adapter(tmp_path / name, tensors(seed=seed))) for seed, name in enumerate(("math", "swahili"))]
    folder = tmp_path / "outputs"
    folder.mkdir()

    def command(*zones: object) -> list[str]:
        base = ["compose", "-t", experts[0], "-l", experts[1], "-o", str(folder / "out"), "--num-layers", "4"]
        return [*base, "--bottom", "1", "--top", "1", *map(str, zones)]

    def call(mode: str, *, composes: bool = True, **settings: Any) -> dict[str, Any]:
        if composes:
            settings |= {"first": command()} if mode != "retired" else {}
            settings |= {"arguments": command("--bottom-transition", 1)}
        program = [sys.executable, str(CRASHING)]
        settings["folder"] = str(folder)
        process = subprocess.run([*program, mode, json.dumps(settings)], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        output: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return output

    return call


def test_killed_at_every_step_of_a_first_write(crashing: Crashing) -> None:
    result = crashing("every", overwrite=False)
    assert result["kills"] >= 8
    assert set(result["states"][:-1]) == {"absent", "new"}  # new: killed after the rename, before the lock was removed
    assert result["states"][-1] == "new"
    assert set(result["recovered"]) == {"new"}
    assert result["left"] == []


def test_killed_at_every_step_of_a_replacement(crashing: Crashing) -> None:
    """Between its two renames the target is absent for a moment; the next run puts the old one back."""
    result = crashing("every", overwrite=True)
    assert result["kills"] >= 12
    assert set(result["states"]) == {"old", "absent", "new"}
    assert result["states"].count("absent") == 1
    absent = result["states"].index("absent")
    assert result["recovered"][absent] == "old"
    assert [then for then, now in zip(result["states"], result["recovered"], strict=False) if then != now] == ["absent"]
    assert result["left"] == []


def test_killed_at_a_random_moment(crashing: Crashing) -> None:
    result = crashing("random", kills=40 if ALL else 16, seed=1)
    assert len(set(result["states"]) - {"finished"}) >= 2
    assert result["left"] == []


def test_a_real_process_is_killed_while_it_writes(tmp_path: Path) -> None:
    """Larger adapters, in a process of their own that stops at a step and is killed there."""
    pair = [adapter(tmp_path / name, tensors(seed=i, width=128, layers=16)) for i, name in enumerate(("a", "b"))]
    folder = tmp_path / "outputs"
    folder.mkdir()
    command = ["compose", "-t", str(pair[0]), "-l", str(pair[1]), "--method", "soup", "--num-layers", "16"]
    command += ["--layout", "portable", "-o"]
    subprocess.run([sys.executable, "-m", "adapterswap", *command, str(tmp_path / "whole")], check=True)
    whole = snapshot(tmp_path / "whole")
    states = []
    for step in range(1, 100, 3 if ALL else 5):
        settings = {"folder": str(folder), "arguments": [*command, str(folder / "out")], "step": step}
        program = [sys.executable, str(CRASHING), "held", json.dumps(settings)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            was_held = "held\n" in iter(process.stdout.readline, "")
            if was_held:
                process.kill()
        states.append((folder / "out").exists())
        if states[-1]:
            assert snapshot(folder / "out") == whole
        if not was_held:
            break
        shutil.rmtree(folder / "out", ignore_errors=True)
    assert process.returncode == 0  # the last one finished
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert len(states) >= 4
    assert states == sorted(states)  # absent until the rename
    assert not states[0]


def test_every_command_that_writes_survives_its_kills(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """Afterwards the next run succeeds, and leaves nothing but its output."""
    make_inputs(tmp_path, base, expert)
    folder = tmp_path / "outputs"
    folder.mkdir()
    kills = int(os.environ.get("KILLS", "3" if ALL else "2"))
    names = [name for name in WRITERS if ALL or name not in DRAWING]
    settings = {"folder": str(folder), "commands": commands(*names), "kills": kills, "seed": 1}
    program = [sys.executable, str(CRASHING), "survives", json.dumps(settings)]
    process = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    for name, result in results.items():
        print(name, result)
        assert sum(result.get(state, 0) for state in ("absent", "old", "new")) == kills
        assert kills < 100 or result.keys() >= {"absent", "old", "new"}, name


def test_a_folder_that_is_half_removed_is_not_put_back(crashing: Crashing) -> None:
    result = crashing("retired")
    assert len(result["states"]) >= 12
    assert set(result["states"]) == {"new"}


def test_two_composes_at_once(crashing: Crashing) -> None:
    result = crashing("rivals", rounds=ROUNDS, overwrite=False)
    assert all(sorted(codes) == [0, 3] for codes in result["outcomes"])
    assert (result["broken"], result["left"]) == (0, [])


def test_two_composes_at_once_that_overwrite(crashing: Crashing) -> None:
    result = crashing("rivals", rounds=ROUNDS, overwrite=True)
    assert all(sorted(codes) in ([0, 3], [0, 0]) for codes in result["outcomes"])
    assert (result["broken"], result["left"]) == (0, [])


def test_only_one_writer_at_a_time(crashing: Crashing) -> None:
    result = crashing("exclusive", composes=False, writers=4, rounds=100)
    assert set(result["codes"]) <= {0, 7}  # 7: it ever held the lock; 255: two held it at once; 1: an exception
    assert (7 in result["codes"], result["left"]) == (True, ["out"])
