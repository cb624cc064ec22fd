"""How short is the path? Functions and calls of a plain compose, and the processor seconds of the whole process.

python benchmarks/path.py [--runs 7] [--calls]

Functions are those of adapterswap that are entered between `import adapterswap` and the written folder, without
lambdas and comprehensions; they are counted with and without gates. Seconds are medians of whole processes, beside
an empty Python with numpy.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

LAYERS, RANK, WIDTH = 6, 8, 32
MODULES = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--calls", action="store_true", help="List the functions that are called most.")
    parser.add_argument("--count", nargs=2, metavar=("INPUTS", "GATES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(Path(options.count[0]), with_gates=options.count[1] == "closed")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for place in ("local", "hub"):
            write_inputs(folder / place, folder / "cache", local=place == "local")
        os.environ.update(HF_HUB_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        for gates in ("open", "closed"):
            command = [sys.executable, __file__, "--count", folder / "local", gates]
            calls = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"gates {gates}: {len(calls)} functions, {sum(calls.values())} calls")
        for name, number in Counter(calls).most_common(40 if options.calls else 0):
            print(f"{number:6} {name}")
        seconds: dict[str, list[float]] = {"empty": [], "local": [], "hub": []}
        for _ in range(options.runs):
            seconds["empty"].append(processor_seconds([sys.executable, "-c", "import numpy"]))
            for place in ("local", "hub"):
                experts = ["-t", folder / place / "math", "-l", folder / place / "swahili"]
                command = [
                    sys.executable,
                    "-m",
                    "adapterswap",
                    "compose",
                    *experts,
                    "-o",
                    folder / "out",
                    "--overwrite",
                ]
                seconds[place].append(processor_seconds(command))
        for name, times in seconds.items():
            print(f"{name}: {median(times):.3f} processor seconds ({min(times):.3f} to {max(times):.3f})")


def write_inputs(folder: Path, cache: Path, *, local: bool) -> None:
    """Two plain adapters, and their base's config in a folder or in a Hub cache."""
    import numpy as np
    from safetensors.numpy import save_file

    base = folder / "base" if local else cache / "models--org--base" / "snapshots" / ("0" * 40)
    base.mkdir(parents=True)
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": WIDTH,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96,
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps(config))
    if not local:
        (cache / "models--org--base" / "refs").mkdir()
        (cache / "models--org--base" / "refs" / "main").write_text("0" * 40)
    for seed, name in enumerate(("math", "swahili")):
        random = np.random.default_rng(seed)
        (folder / name).mkdir(parents=True)
        config = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "use_rslora": True, "task_type": "CAUSAL_LM",
            "target_modules": [module.rpartition(".")[2] for module in MODULES],
            "base_model_name_or_path": str(base) if local else "org/base",
        }  # fmt: skip
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        tensors = {
            f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight": random.normal(
                size=(RANK, WIDTH) if factor == "A" else (WIDTH, RANK)
            ).astype(np.float32)
            for layer in range(LAYERS)
            for module in MODULES
            for factor in "AB"
        }
        save_file(tensors, folder / name / "adapter_model.safetensors")


def count(inputs: Path, *, with_gates: bool) -> None:
    """Print how often each function is called, as JSON."""
    import adapterswap

    root = str(Path(adapterswap.__file__).parent)
    calls: Counter[str] = Counter()

    def called(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        is_function = code.co_flags & inspect.CO_OPTIMIZED and "<" not in code.co_name  # not a class's body
        if event == "call" and is_function and code.co_filename.startswith(root):
            calls[f"{code.co_filename.removeprefix(root)}:{code.co_firstlineno}:{code.co_qualname}"] += 1

    if not with_gates:
        open_all_gates()
    sys.setprofile(called)
    experts = {name: str(inputs / name) for name in ("math", "swahili")}
    with tempfile.TemporaryDirectory() as out:
        adapterswap.compose("math+swahili", experts).write(Path(out) / "composed")
    sys.setprofile(None)
    print(json.dumps(calls))


def open_all_gates() -> None:
    """Empty every table of gates."""
    from adapterswap.core.experts import gates as of_experts
    from adapterswap.core.planning import gates as of_planning
    from adapterswap.core.writing import gates as of_writing

    of_experts.GATES = of_planning.GATES = of_writing.GATES = {}


def processor_seconds(command: list[object]) -> float:
    """The processor seconds of a process that succeeds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
