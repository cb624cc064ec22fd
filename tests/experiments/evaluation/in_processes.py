"""Run by torchrun in two processes: evaluates cases in order, and each process writes its results.

in_processes.py FOLDER           # holds model/ and cases.json: name → tasks, settings, documents, context
in_processes.py FOLDER failing   # `adapterswap evaluate`, of which process 1 fails when it first generates
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap.cli import main as command
from adapterswap.engines.live import Reading
from adapterswap.experiments.evaluation import Settings, evaluate_model, write_result
from adapterswap.experiments.evaluation.harness import EvaluatedModel
from adapterswap.kit.errors import RunError
from adapterswap.kit.processes import Processes


def judge(folder: Path, out: Path, processes: Processes | None = None) -> dict[str, Any]:
    """Evaluate the cases; case → how often the model was called, and what was reported of progress."""
    collected: dict[str, Any] = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        model.config.max_position_embeddings = case.get("context", 16384)
        reading = Reading.of(model)  # measured in each process, and not counted
        _ = reading.left, reading.right, reading.causal, reading.positions
        calls: list[int] = []
        progress: list[tuple[int, int]] = []
        model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        result = evaluate_model(
            model,
            AutoTokenizer.from_pretrained(folder / "model"),
            case["tasks"],
            Settings(**case["settings"]),
            documents=case.get("documents"),
            processes=processes,
            on_progress=lambda done, total, progress=progress: progress.append((done, total)),
        )
        write_result(result, out / name)
        collected[name] = {"calls": len(calls), "last": progress[-1]}
    return collected


def main(folder: Path) -> None:
    with Processes.joined("cpu") as processes:
        told: dict[str, Any] = {"cases": judge(folder, folder / f"process-{processes.rank}", processes)}
        told["squares"] = [processes.shared(range(count), lambda number: number**2) for count in range(6)]
        told["main"] = processes.from_main(processes.rank)
        processes.wait()
    Processes.leave()
    (folder / f"told-{processes.rank}.json").write_text(json.dumps(told))


def fail(folder: Path) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RunError("process 1 fails", "Correct it")

    if os.environ["RANK"] == "1":
        EvaluatedModel._model_generate = failing
    fast = ["--limit", "4", "--batch-size", "1", "--num-fewshot", "0", "--max-gen-toks", "4", "--device", "cpu"]
    out = ["--tasks", "mgsm_direct_sw", "-o", str(folder / "failing")]
    command(["evaluate", "--base-model", str(folder / "model"), *fast, *out])


if __name__ == "__main__":
    place = Path(sys.argv[1])
    fail(place) if sys.argv[2:] else main(place)
