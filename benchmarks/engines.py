"""One sweep in transformers and in vLLM, cell by cell and with all cells in flight: ratios measured in one run.

    .venv-vllm/bin/python benchmarks/engines.py [--swaps 8] [--documents 16] [--tokens 64]

A random Llama (about 70 million parameters; with `--base` your own), layer swaps over one pair, no shots. Each way is a
process of its own; seconds are those of the cells, without starting and loading. Steps are the model's calls that
decode. `writing` is the share of wall time in which adapters were written. Answers are compared with those of the first
way. On a GPU: `--base meta-llama/Llama-3.1-8B --task EXPERT --language EXPERT --device cuda --dtype bfloat16`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {"hidden": 640, "intermediate": 1792, "layers": 12, "heads": 10, "vocab": 259}
WAYS = {
    "transformers": {"engine": "transformers"},
    "vLLM, one by one": {"engine": "vllm", "in_flight": 1},
    "vLLM, all in flight": {"engine": "vllm", "in_flight": 8},
}


def make_world(folder: Path) -> dict[str, Path]:
    from sweep import random_world

    random_world(folder, SHAPE)
    return {name: folder / name for name in ("base", "math", "swahili")}


def measured(recipe: dict[str, Any], out: str, device: str, dtype: str) -> dict[str, Any]:
    """One way, in this process."""
    from adapterswap.experiments.evaluation.harness import EvaluatedModel
    from adapterswap.experiments.evaluation.vllm_engine import VLLMEngine
    from adapterswap.experiments.sweeps import SweepRecipe, sweep
    from adapterswap.experiments.sweeps.engines import EngineJudge
    from adapterswap.experiments.sweeps.judge import LocalJudge

    steps, wall, processor = 0, 0.0, 0.0

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            return original(*arguments, **options)

        return call

    def decoded(original: Any) -> Any:
        def call(self: Any, context: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal steps
            tokens = original(self, context, *arguments, **options)
            steps += tokens.shape[1] - context.shape[1]
            return tokens

        return call

    def timed(original: Any) -> Any:
        def judged(*arguments: Any) -> Any:
            nonlocal wall, processor
            results = original(*arguments)
            while True:
                began = time.perf_counter(), time.process_time()
                result = next(results, None)
                wall, processor = wall + time.perf_counter() - began[0], processor + time.process_time() - began[1]
                if result is None:
                    return
                yield result

        return judged

    EvaluatedModel._tokens = decoded(EvaluatedModel._tokens)  # type: ignore[method-assign]
    VLLMEngine.answers = counted(VLLMEngine.answers)  # type: ignore[method-assign]
    for judge in (LocalJudge, EngineJudge):
        judge.judged = timed(judge.judged)  # type: ignore[method-assign]
    run = sweep(SweepRecipe.model_validate(recipe), out, device=device, dtype=dtype)
    writing = sum(result.seconds["switch"] for result in run.results)
    return {"steps": steps, "processor": processor, "wall": wall, "writing": writing / wall}


def answers(out: Path) -> list[str]:
    lines = (line for path in sorted((out / "samples").iterdir()) for line in path.read_text().splitlines())
    return [json.loads(line)["output"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("swaps", 8), ("documents", 16), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, text in (("base", ""), ("task", ""), ("language", ""), ("device", "auto"), ("dtype", "float32")):
        parser.add_argument(f"--{name}", default=text)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("MEASURED" + json.dumps(measured(**json.loads(options.one))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.base:
            world = {"base": options.base, "math": options.task, "swahili": options.language}
        else:
            world = make_world(folder)
        recipe = {
            "base_model": str(world["base"]),
            "task_experts": {"math": str(world["math"])},
            "language_experts": {"swahili": str(world["swahili"])},
            "compositions": [{"bottom": list(range(1, options.swaps + 1)), "top": 1}],
            "baselines": [],
            "tasks": ["mgsm_direct_sw"],
        }
        settings = {"num_fewshot": 0, "limit": options.documents, "max_gen_toks": options.tokens, "batch_size": 16}
        reference: list[str] = []
        print(f"{'':<22}{'steps':>8}{'processor s':>13}{'wall s':>9}{'writing':>9}{'equal answers':>15}")
        for number, (name, way) in enumerate(WAYS.items()):
            out = folder / f"run-{number}"
            content = {**recipe, "settings": {**settings, **way}}
            one = {"recipe": content, "out": str(out), "device": options.device, "dtype": options.dtype}
            command = [sys.executable, __file__, "--one", json.dumps(one)]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ).stdout
            result = json.loads(told.partition("MEASURED")[2])
            texts = answers(out)
            reference = reference or texts
            equal = sum(one == other for one, other in zip(texts, reference, strict=True))
            numbers = f"{result['steps']:>8}{result['processor']:>13.1f}{result['wall']:>9.1f}{result['writing']:>9.1%}"
            print(f"{name:<22}{numbers}{f'{equal}/{len(texts)}':>15}", flush=True)


if __name__ == "__main__":
    main()
