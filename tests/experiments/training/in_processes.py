"""Run by torchrun in two processes: trains recipes in order, and records the rows that each process saw.

    in_processes.py FOLDER    # holds recipes.json: name → recipe

A recipe named `failing` raises in process 1 alone, in its third step; it is run by the command line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from spying import spied

from adapterswap.cli import main as command
from adapterswap.experiments.training import TrainRecipe, train
from adapterswap.kit.errors import RunError


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    found = {}
    for name, content in json.loads((folder / "recipes.json").read_text()).items():
        steps: list[dict[str, Any]] = []

        def seen(step: int, before: Any, after: Any, tokens: Any, name: str = name, steps: Any = steps) -> None:
            if name == "failing" and step == 2 and rank == "1":
                raise RunError("process 1 fails", "Correct it")
            still = [
                key
                for key in before[0]
                if torch.equal(before[0][key], after[0][key])
                and all(torch.equal(before[1][key][part], after[1][key][part]) for part in before[1].get(key, ()))
                and (key in before[1]) == (key in after[1])
            ]
            steps.append({"still": still, "tokens": [batch.tolist() for batch in tokens]})

        with pytest.MonkeyPatch.context() as patch, spied(patch, seen) as trainers:
            if name == "failing":
                (folder / f"found-{rank}.json").write_text(json.dumps(found))
                (folder / "failing.yaml").write_text(json.dumps(content))
                command(["train", str(folder / "failing.yaml"), "-o", str(folder / name)])
            report = train(TrainRecipe.model_validate(content), out_path=folder / name, progress=False)
        found[name] = {
            "wrapper": f"{type(trainers[0].model_wrapped).__module__}.{type(trainers[0].model_wrapped).__name__}",
            "losses": [loss for _, loss in report.train_losses],
            "eval": [loss for _, loss in report.eval_losses],
            "tokens": report.tokens,
            "processes": report.processes,
            "written": (folder / name / "training.json").is_file(),
            "steps": steps,
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
