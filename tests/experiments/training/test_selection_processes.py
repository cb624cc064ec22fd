"""With several processes one evaluates, and all use its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from adapterswap.experiments.training import TrainRecipe, train

from .conftest import echo_rows, write_jsonl
from .test_selection import own_tasks

__all__ = ["own_tasks"]  # the fixture


@pytest.mark.full
@pytest.mark.slow
def test_two_processes_choose_the_same_as_one(tmp_path: Path, pico: Callable[[str], Path], own_tasks: Path) -> None:
    content = {
        "base_model": str(pico("llama")),
        "adapter": {"r": 4, "alpha": 8},
        "datasets": [
            {
                "path": str(write_jsonl(tmp_path / "rows.jsonl", echo_rows(96))),
                "prompt": "{question}",
                "completion": " {answer}",
            }
        ],
        "training": {"batch_size": 4, "learning_rate": 0.05, "max_length": 32, "save_every_samples": 16},
        "selection": {"tasks": ["pico_last", "pico_first"], "include_path": str(own_tasks), "early_stopping": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    alone = train(
        TrainRecipe.read(path, ["training.gradient_accumulation=2"]), out_path=tmp_path / "alone", progress=False
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "adapterswap"]
    run = subprocess.run(
        [
            *launcher,
            "train",
            str(path),
            "-o",
            str(tmp_path / "together"),
            "--set=training.gradient_accumulation=1",
            "--json",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    together = json.loads(run.stdout)
    assert together["processes"] == 2
    assert alone.selection is not None
    assert together["selection"] == json.loads(json.dumps(asdict(alone.selection)))
    assert together["selection"]["stopped_early"]
    assert together["steps"] == alone.steps < 12
