"""Time commands and methods that use the joint core, with two experts of rank 64 at Llama-3.1-8B's shape.

python benchmarks/core.py [--runs 3] [--scratch DIR] [--against CHECKOUT] [--skip analyze …]

`--against` also runs each command in another checkout, in turn with this one. On a busy machine, compare processor
seconds rather than wall seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import side_by_side

HERE = Path(__file__).resolve().parent
# the allowed wall seconds, processor seconds and megabytes on two quiet cores; None means no bound
ALLOWED: dict[str, tuple[float | None, float | None, float]] = {
    "soup --max-rank 64": (None, 8, 250), "diff": (1.5, None, 500), "analyze": (20, None, 500),
}  # fmt: skip
FUNCTION_ALLOWED = 12  # processor seconds per method for all 224 modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="A folder with 3 GB of free space; by default a temporary one.")
    parser.add_argument("--against", type=Path, help="Another checkout of adapterswap.")
    parser.add_argument("--skip", nargs="*", default=[], choices=ALLOWED)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        processes(Path(scratch), options)
    functions()


def processes(scratch: Path, options: argparse.Namespace) -> None:
    experts = scratch / "math", scratch / "swahili"
    for seed, folder in enumerate(experts, start=1):
        subprocess.run([sys.executable, HERE / "shapes.py", folder, str(seed)], check=True)
    pair = ["-t", experts[0], "-l", experts[1], "--num-layers", "32", "--method", "soup"]
    arguments = {
        "soup --max-rank 64": ["compose", *pair, "--max-rank", "64", "--overwrite", "-o", scratch / "soup"],
        "diff": ["diff", *experts],
        "analyze": ["analyze", *experts, "--overwrite", "-o", scratch / "analysis"],
    }
    checkouts = {"": HERE.parent, **({" there": options.against} if options.against else {})}
    commands = {
        name + where: ["env", f"PYTHONPATH={checkout}", sys.executable, "-m", "adapterswap", *arguments[name]]
        for name in ALLOWED
        if name not in options.skip
        for where, checkout in checkouts.items()
    }
    found = side_by_side(commands, runs=options.runs)
    for name, measured in found.items():
        print(f"{name:25} {measured.seconds:6.2f} s {measured.cpu:6.2f} CPU s {measured.megabytes:5.0f} MB", end="")
        if name in ALLOWED:
            wall, cpu, megabytes = ALLOWED[name]
            shares = [
                (measured.seconds, wall, "s"),
                (measured.cpu, cpu, "CPU s"),
                (measured.megabytes, megabytes, "MB"),
            ]
            ratios = [f"{value / bound:.2f} of {bound:g} {unit}" for value, bound, unit in shares if bound is not None]
            print(f"  ({', '.join(ratios)} allowed)", end="")
        print()


def functions() -> None:
    """Time the spectral methods on one module of each shape, multiplied by the number of such modules."""
    import numpy as np
    from shapes import llama_projections

    from adapterswap.core.methods.method import MethodSettings
    from adapterswap.core.methods.registry import find_method
    from adapterswap.core.methods.spectral import CoreMethod
    from adapterswap.core.writing.outputs import one_blas_thread

    shapes = list(llama_projections(4096, 14336, 1024).values())
    random = np.random.default_rng(0)

    def expert(out: int, into: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = random.standard_normal((64, into)) / into**0.5, random.standard_normal((out, 64)) * 0.04
        return b.astype(np.float32), a.astype(np.float32)

    weights = {"math": 1.0, "swahili": 1.0}
    with one_blas_thread():
        for name in ("tsv", "iso_c", "iso_cts", "knots_ties", "core_ties"):
            method = find_method(name)
            assert isinstance(method, CoreMethod)
            settings = MethodSettings({parameter.name: parameter.default for parameter in method.parameters})
            total = 0.0
            for out, into in set(shapes):
                pairs = {side: expert(out, into) for side in weights}
                times = []
                for _ in range(4):
                    start = time.process_time()
                    method.combine_factors(pairs, weights, settings)
                    times.append(time.process_time() - start)
                total += 32 * shapes.count((out, into)) * statistics.median(times[1:])
            print(f"{name:11} {total:5.2f} CPU s of {FUNCTION_ALLOWED} allowed for 224 modules")


if __name__ == "__main__":
    main()
