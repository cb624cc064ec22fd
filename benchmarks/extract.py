"""Extracting an adapter from a full fine-tune, compared with mergekit-extract-lora: time, memory and error.

    python benchmarks/extract.py [--mergekit PATH/TO/mergekit-extract-lora] [--size 0.1b] [--rank 64] [--runs 1]

The fine-tune is random: 16 strong directions of falling size per matrix, over noise. The error is ‖ΔW - s·B·A‖ / ‖ΔW‖
over all matrices of the layers, in float64, from the written files; the smallest possible error comes from numpy.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import run_once, side_by_side

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="mergekit-extract-lora in its own environment; left out without.")
    parser.add_argument("--size", default="0.1b", help="pico, 0.1b, 0.4b or 1.1b.")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--judge", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        judge(options.judge[0], Path(options.judge[1]), options.scratch, options.size, options.rank)
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        compare(Path(scratch), options)


def compare(scratch: Path, options: argparse.Namespace) -> None:
    checkpoint = [sys.executable, HERE / "checkpoints.py", "--size", options.size]
    run_once([*checkpoint, scratch / "base"])
    run_once([*checkpoint, scratch / "full", "--base", scratch / "base", "--seed", 1])
    extract = [sys.executable, "-m", "adapterswap", "extract", scratch / "full", "--base-model", scratch / "base"]
    outputs = {"adapterswap": scratch / "ours"}
    commands: dict[str, list[object]] = {
        "adapterswap": [
            *extract, "--rank", options.rank, "--device", options.device, "--overwrite", "-o", scratch / "ours"
        ],
    }  # fmt: skip
    if options.mergekit:
        outputs["mergekit"] = scratch / "theirs"
        commands["mergekit"] = [
            options.mergekit, "--model", scratch / "full", "--base-model", scratch / "base", "--max-rank", options.rank,
            "--out-path", scratch / "theirs", "--exclude-regex", "embed_tokens|lm_head", "--skip-undecomposable",
            *(["--device", options.device] if options.device != "cpu" else []),
        ]  # fmt: skip
    found = side_by_side(commands, runs=options.runs, before_each=os.sync)
    print("| | seconds | processor seconds | peak MB |\n|---|---|---|---|")
    for name, measured in found.items():
        print(f"| {name} | {measured.seconds:.1f} | {measured.cpu:.1f} | {measured.megabytes:.0f} |", flush=True)
    for name, folder in outputs.items():
        judging = [sys.executable, Path(__file__), "--size", options.size, "--rank", options.rank, "--scratch", scratch]
        subprocess.run([str(part) for part in [*judging, "--judge", name, folder]], check=True)


def judge(name: str, folder: Path, scratch: Path, size: str, rank: int) -> None:
    """Print the error over all matrices, and over the first of each shape with the smallest possible error."""
    import numpy as np
    from checkpoints import parameters, tensor
    from peers import delta

    matrices = [key for key in parameters(size) if "_proj" in key]
    apart = change = best = sampled = 0.0
    shapes = set()
    for key in matrices:
        exact = tensor(scratch / "full", key).double() - tensor(scratch / "base", key).double()
        stored = f"base_model.model.{key.removesuffix('.weight')}.lora_A.weight"
        error = float((exact - delta(folder, stored)).square().sum())
        apart, change = apart + error, change + float(exact.square().sum())
        if exact.shape not in shapes:
            shapes.add(exact.shape)
            sampled += error
            best += float(np.sum(np.linalg.svd(exact.numpy(), compute_uv=False)[rank:] ** 2))
    print(
        f"{name}: relative error {math.sqrt(apart / change):.5f} over {len(matrices)} matrices; "
        f"{math.sqrt(sampled / best):.5f} × the smallest possible (one matrix of each of {len(shapes)} shapes)"
    )


if __name__ == "__main__":
    main()
