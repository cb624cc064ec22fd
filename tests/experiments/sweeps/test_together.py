"""Two processes that judge every cell together write the same as one, also if they are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import choices
import psutil
import pytest
import yaml
from launching import FORKED, TORCHRUN, started
from refusals import refused
from tiers import ALL

from adapterswap.experiments.sweeps import Run, SweepRecipe, sweep
from adapterswap.experiments.sweeps.judge import agreed
from adapterswap.kit.errors import ArgumentError, RunError
from adapterswap.kit.processes import Processes

from .conftest import plain

Content = Callable[..., dict[str, Any]]
FAMILIES = [
    {"bottom": [1, 2], "top": [0, 1]},
    {"method": "ties", "density": 0.5, "max_rank": 4},
    {"name": "again", "bottom": 1, "top": 1},
]
TWO_TASKS = {"tasks": ["mgsm_direct_sw"], "retention": [choices.TASK]}


def arguments(content: dict[str, Any], folder: Path) -> list[str]:
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(content))
    return ["sweep", str(recipe), "-o", str(folder), "--device", "cpu"]


def cells(folder: Path) -> int:
    path = folder / "cells.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.full
@pytest.mark.slow
def test_two_killed_processes_resumed_by_one_write_the_same(content: Content, tmp_path: Path) -> None:
    """The number of processes is no setting: a folder that two began may be completed by one."""
    settings = content()["settings"] | {"include_path": str(choices.write_task(tmp_path / "own"))}
    requested = content(compositions=FAMILIES, settings=settings, **TWO_TASKS)
    sweep(SweepRecipe.model_validate(requested), tmp_path / "peace", device="cpu")
    held = {"folder": str(tmp_path / "killed"), "cells": 4, "arguments": arguments(requested, tmp_path / "killed")}
    with started(Path(__file__).with_name("dying.py"), "held", json.dumps(held)) as run:
        assert run.stdout is not None
        assert "held\n" in iter(run.stdout.readline, ""), run.communicate()[1]
        family = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family)
    assert 4 <= cells(tmp_path / "killed") < len(Run.read(tmp_path / "peace").results)
    sweep(SweepRecipe.model_validate(requested), tmp_path / "killed", device="cpu")
    assert plain(tmp_path / "killed") == plain(tmp_path / "peace")


@pytest.mark.slow
def test_two_processes_search_like_one(content: Content, tmp_path: Path) -> None:
    """By halving, so that questions are about some of the documents; and a finished folder is left as it is."""
    pytest.importorskip("optuna")
    search = {"sampler": "random", "trials": 4, "halving": {"min_documents": 3, "reduction_factor": 2}}
    settings = content()["settings"] | {"limit": 9, "include_path": str(choices.write_task(tmp_path / "own"))}
    requested = content(
        compositions=[{"bottom": [1, 2, 3], "top": [0, 1]}], search=search, settings=settings, **TWO_TASKS
    )
    alone = sweep(SweepRecipe.model_validate(requested), tmp_path / "alone", device="cpu")
    assert len(alone.rungs) >= 4
    for _ in range(2 if ALL else 1):
        words = ["-m", "adapterswap", *arguments(requested, tmp_path / "together"), "--json"]
        with started(*words, by=TORCHRUN if ALL else FORKED) as run:
            out, message = run.communicate()
        assert run.returncode == 0, message
        assert json.loads(out)["cells"] == cells(tmp_path / "alone")
        assert message.count("written to") == 1
        assert plain(tmp_path / "together") == plain(tmp_path / "alone")


def test_processes_with_different_results_are_refused() -> None:
    known = {"experts": {"math": "1"}, "settings": {"dtype": "float32"}, "recipe": {}, "versions": {"torch": "2"}}
    assert agreed(known, known) == known
    with refused(RunError, match="versions, dtype"):
        agreed(known, known | {"versions": {"torch": "3"}, "settings": {"dtype": "bfloat16"}})


def test_processes_and_ray_exclude_each_other(content: Content, tmp_path: Path) -> None:
    class State:
        num_processes, process_index = 2, 0

    with refused(ArgumentError, "ray"):
        sweep(SweepRecipe.model_validate(content()), tmp_path / "run", ray="local", processes=Processes(State()))
