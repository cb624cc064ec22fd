"""Run by the vLLM environment's Python: sweeps and evaluations in one process. Its argument is a JSON list of steps.

A step is {"sweep": RECIPE, "out": FOLDER, …} or {"evaluate": ARGUMENTS}; prints a JSON list of what came of each.
`fail`: the steps of the engine, counted from 0, that raise; with `memory` for lack of it. `kill`: the process kills
itself when so many cells are recorded. `full`: from then on the disk is full, for files above a few kilobytes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from itertools import count
from typing import Any


def fail_at(steps: list[int], kind: type[Exception] = ValueError) -> list[str]:
    """From now on vLLM's model raises in these steps; returns a list of the engines that start."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    execute, load = CPUModelRunner.execute_model, CPUModelRunner.load_model
    numbers, engines = count(), list[str]()

    def failing(self: Any, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        if scheduled.total_num_scheduled_tokens and next(numbers) in steps:
            raise kind("a step that fails")
        return execute(self, scheduled, *arguments, **options)

    def loading(self: Any, *arguments: Any, **options: Any) -> Any:
        engines.append("started")
        return load(self, *arguments, **options)

    CPUModelRunner.execute_model, CPUModelRunner.load_model = failing, loading
    return engines


def do(step: dict[str, Any]) -> Any:
    import torch

    from adapterswap import evaluate
    from adapterswap.experiments.sweeps import SweepRecipe, sweep
    from adapterswap.experiments.sweeps.run import SweepProgress
    from adapterswap.kit.errors import AdapterswapError

    def tell(progress: SweepProgress) -> None:
        if progress.done >= step.get("kill", math.inf):
            os.kill(os.getpid(), signal.SIGKILL)
        if progress.done >= step.get("full", math.inf):
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        engines = fail_at(step.get("fail", []), torch.OutOfMemoryError if step.get("memory") else ValueError)
        if "sweep" in step:
            run = sweep(SweepRecipe.model_validate(step["sweep"]), step["out"], dtype="float32", tell=tell)
            return {"cells": len(run.results), "settings": run.described["settings"], "engines": len(engines)}
        result = evaluate(dtype="float32", **step["evaluate"])
        return [sample.output for sample in result.samples]
    except AdapterswapError as error:
        return {"error": type(error).__name__, "parameter": error.found[0].parameter, "message": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def main(steps: list[dict[str, Any]]) -> None:
    print("RESULTS" + json.dumps([do(step) for step in steps]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
