"""Full weights compared with `cp`, PEFT and mergekit: time, memory, and the distance from the exact weights.

    python benchmarks/merge.py [--mergekit PATH/TO/mergekit-yaml] [--size 1.1b] [--runs 3] [--scratch DIR]

1. A layer swap of two adapters (rank 64) merged into a base of 1.1 B parameters (bf16, 5 shards): adapterswap, and
   from_pretrained + merge_and_unload + save_pretrained of the same composed adapter.
2. A layer swap of two full checkpoints of that size: adapterswap, mergekit's `slices`, `cp -r`.
3. The error of merged weights, against the exact ones in float64: units in the last place of bf16.
4. A comparison with mergekit bit by bit on a pair of 0.4 B (32 layers).

Whole processes, interleaved; medians of time and the largest peak of resident memory. Needs 20 GB of scratch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Measured, run_once, side_by_side

HERE = Path(__file__).parent
RANK = 64
BOTTOM, TOP = 3, 1  # the paper's 5 and 2 of 32 layers, in proportion for 22
SWAP = ["--bottom", BOTTOM, "--top", TOP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="mergekit-yaml in its own environment; left out without it.")
    parser.add_argument("--size", default="1.1b", help="1.1b or pico.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="A folder with 20 GB free; default: a temporary one.")
    parser.add_argument("--peft", nargs=2, type=Path, metavar=("ADAPTER", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--adapter", nargs=2, metavar=("FOLDER", "SEED"), help=argparse.SUPPRESS)
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--same", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peft:
        peft_route(options.scratch / "base", *options.peft)
    elif options.adapter:
        make_adapter(Path(options.adapter[0]), int(options.adapter[1]), options.size, options.scratch / "base")
    elif options.judge:
        judge(options.scratch, options.size)
    elif options.same:
        print_differences(*options.same, options.size)
    else:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            merging(Path(scratch), options)
        if options.mergekit:
            with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
                bit_by_bit(Path(scratch), options.mergekit, "pico" if options.size == "pico" else "0.4b")


def merging(scratch: Path, options: argparse.Namespace) -> None:
    this = [sys.executable, Path(__file__), "--size", options.size, "--scratch", scratch]
    checkpoint = [sys.executable, HERE / "checkpoints.py", "--size", options.size]
    adapterswap = [sys.executable, "-m", "adapterswap"]
    base = scratch / "base"
    run_once([*checkpoint, base])
    for seed, name in enumerate(("math", "swahili"), start=1):
        run_once([*this, "--adapter", scratch / name, seed])
        run_once([*checkpoint, scratch / f"full-{name}", "--base", base, "--seed", seed])
    experts = ["-t", scratch / "math", "-l", scratch / "swahili"]
    fulls = ["-t", scratch / "full-math", "-l", scratch / "full-swahili"]
    run_once([*adapterswap, "compose", *experts, *SWAP, "-o", scratch / "swap"])
    merge = [*adapterswap, "merge", "--base-model", base, "--overwrite"]
    reference: dict[str, list[object]] = {
        "cp -r": ["cp", "-r", base, scratch / "copied"],
        "import torch": [sys.executable, "-c", "import torch"],
    }
    adapters: dict[str, list[object]] = {
        "merge a swap": [*merge, *experts, *SWAP, "-o", scratch / "merged"],
        "merge a composed adapter": [*merge, scratch / "swap", "-o", scratch / "merged-adapter"],
        "PEFT merge_and_unload": [*this, "--peft", scratch / "swap", scratch / "merged-peft"],
    }
    checkpoints: dict[str, list[object]] = {
        "swap of full checkpoints": [
            *adapterswap, "compose", *fulls, *SWAP, "--overwrite", "-o", scratch / "full-swap"
        ],
    }  # fmt: skip
    if options.mergekit:
        recipe = scratch / "slices.yaml"
        layers = 4 if options.size == "pico" else 22
        recipe.write_text(slices(scratch / "full-math", scratch / "full-swahili", layers, BOTTOM, TOP))
        checkpoints["mergekit slices"] = [options.mergekit, recipe, scratch / "mergekit"]
    outputs = [command[-1] for command in (*reference.values(), *adapters.values(), *checkpoints.values())]

    def clear() -> None:
        """Delete the outputs and flush the disk, so that earlier runs do not slow down the next one."""
        for folder in outputs:
            if isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)
        os.sync()

    for routes in (adapters, checkpoints):
        found = side_by_side(routes | reference, runs=options.runs, before_each=clear)
        print("| route | seconds | processor seconds | peak MB |\n|---|---|---|---|")
        for name, measured in found.items():
            print(f"| {name} | {measured.seconds:.1f} | {measured.cpu:.1f} | {measured.megabytes:.0f} |", flush=True)
        limits(found)
    clear()
    for name in ("merge a swap", "PEFT merge_and_unload"):
        run_once(adapters[name])
    mean = ["--method", "soup"]
    run_once([*merge, *experts, *mean, "-o", scratch / "soup"])
    run_once([*adapterswap, "compose", *experts, *mean, "-o", scratch / "soup-adapter"])
    run_once([*this, "--peft", scratch / "soup-adapter", scratch / "soup-peft"])
    if options.mergekit:
        recipe.write_text(linear(base, scratch / "math", scratch / "swahili"))
        run_once([options.mergekit, recipe, scratch / "soup-mergekit", "--lora-merge-cache", scratch / "cache"])
    subprocess.run([str(part) for part in [*this, "--judge"]], check=True)


def limits(found: dict[str, Measured]) -> None:
    """The goals: merge a swap 3 × as fast as PEFT; swap full checkpoints in 1.3 × cp + import torch."""
    copying, torch_import = found["cp -r"].seconds, found["import torch"].seconds
    for name in ("merge a swap", "merge a composed adapter"):
        if ours := found.get(name):
            print(
                f"{name}: {found['PEFT merge_and_unload'].seconds / ours.seconds:.1f} × as fast as PEFT (at least 3), "
                f"{ours.seconds / copying:.1f} × cp -r, {ours.megabytes:.0f} MB of 700"
            )
    if full := found.get("swap of full checkpoints"):
        print(
            f"swap of full checkpoints: {full.seconds / copying:.2f} × cp -r; beyond importing torch "
            f"{(full.seconds - torch_import) / copying:.2f} × (at most 1.3); {full.megabytes:.0f} MB of 500"
        )
    sys.stdout.flush()


def make_adapter(folder: Path, seed: int, size: str, base: Path) -> None:
    from checkpoints import SIZES, kv_width
    from shapes import llama_projections, random_adapter

    shape = SIZES[size]
    projections = llama_projections(shape["hidden"], shape["intermediate"], kv_width(size))
    random_adapter(
        folder, seed=seed, rank=RANK, layers=shape["layers"], shapes=projections, base_model=str(base)
    )  # fmt: skip


def peft_route(base: Path, adapter: Path, out: Path) -> None:
    """The usual way: load the model, merge the adapter into it, save it in shards of the same size."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out, max_shard_size="460MB")


def slices(math: Path, swahili: Path, layers: int, bottom: int, top: int) -> str:
    """Algorithm 1 for mergekit. Every slice has both sources: one alone would silently drop the averages (0.1.5)."""
    text = "merge_method: linear\ndtype: bfloat16\nslices:\n"
    for first, last, own in ((0, bottom, 0), (bottom, layers - top, 1), (layers - top, layers, 0)):
        text += "- sources:\n"
        for folder, weight in ((math, own), (swahili, 1 - own)):
            text += f"  - model: {folder}\n    layer_range: [{first}, {last}]\n    parameters:\n      weight:\n"
            text += "".join(f"      - {{filter: {name}, value: 0.5}}\n" for name in ("embed_tokens", "lm_head", "norm"))
            text += f"      - value: {weight}\n"
    return text


def linear(base: Path, math: Path, swahili: Path) -> str:
    models = "".join(f"- model: {base}+{folder}\n  parameters: {{weight: 0.5}}\n" for folder in (math, swahili))
    return f"merge_method: linear\ndtype: bfloat16\nmodels:\n{models}"


def judge(scratch: Path, size: str) -> None:
    """Print how far written weights are from W + ΔW in float64, over the projections of three layers.

    `ulp`: the largest distance in units in the last place of bf16 of the larger of W and W + ΔW, where one rounding
    gives at most 0.5; and how many are further than half a unit from W + ΔW itself.
    """
    import torch
    from checkpoints import SIZES, tensor
    from peers import delta

    layers = SIZES[size]["layers"]
    names = [name for layer in (0, layers // 2, layers - 1) for name in _projections(layer, size)]
    routes = {
        "merge a swap": ("merged", _swapped), "PEFT, the composed swap": ("merged-peft", _swapped),
        "merge a soup": ("soup", _mean), "PEFT, the composed soup": ("soup-peft", _mean),
        "mergekit, base+lora": ("soup-mergekit", _mean),
    }  # fmt: skip
    print("| weights | error / ΔW | largest ulp | beyond half an ulp |\n|---|---|---|---|")
    for title, (folder, weights_of) in routes.items():
        if not (scratch / folder).exists():
            continue
        apart = change = 0.0
        worst = beyond = count = 0.0
        for name in names:
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            terms = weights_of(name, layers)
            added = sum(factor * delta(scratch / expert, key) for expert, factor in terms.items())
            before = tensor(scratch / "base", name).double()
            exact = before + added
            error = (tensor(scratch / folder, name).double() - exact).abs()
            ulps = error / unit(torch.maximum(exact.abs(), before.abs()))
            apart += float(error.square().sum())
            change += float(added.square().sum())
            worst = max(worst, float(ulps.max()))
            beyond += float((error > (0.5 + 1e-3) * unit(exact)).sum())
            count += exact.numel()
        print(f"| {title} | {(apart / change) ** 0.5:.4f} | {worst:.3f} | {beyond / count:.3%} |")


def unit(values: Any) -> Any:
    """The unit in the last place of bf16, which has 7 bits after the point."""
    import torch

    return torch.exp2(torch.floor(torch.log2(values.abs())) - 7)


def _projections(layer: int, size: str) -> list[str]:
    from checkpoints import parameters

    return [name for name in parameters(size) if f".layers.{layer}." in name and "norm" not in name]


def _swapped(name: str, layers: int) -> dict[str, float]:
    layer = int(name.split(".")[2])
    return {"swahili" if layer < BOTTOM or layer >= layers - TOP else "math": 1.0}


def _mean(name: str, layers: int) -> dict[str, float]:
    return {"math": 0.5, "swahili": 0.5}


def bit_by_bit(scratch: Path, mergekit: Path, size: str) -> None:
    """Compare every tensor with mergekit's, for a pair of 0.4 B with 32 layers, b = 5 and u = 2."""
    checkpoint = [sys.executable, HERE / "checkpoints.py", "--size", size]
    layers, bottom, top = (4, 1, 1) if size == "pico" else (32, 5, 2)
    run_once([*checkpoint, scratch / "base", "--shards", 1])
    for seed, name in enumerate(("math", "swahili"), start=1):
        run_once([*checkpoint, scratch / name, "--base", scratch / "base", "--seed", seed, "--shards", 2 * seed])
    (scratch / "slices.yaml").write_text(slices(scratch / "math", scratch / "swahili", layers, bottom, top))
    experts = ["-t", scratch / "math", "-l", scratch / "swahili", "--bottom", bottom, "--top", top]
    compose = [sys.executable, "-m", "adapterswap", "compose", *experts, "--overwrite"]
    commands = {
        "adapterswap": [*compose, "-o", scratch / "ours"],
        "mergekit slices": [mergekit, scratch / "slices.yaml", scratch / "theirs"],
    }
    for name, measured in side_by_side(commands, runs=1).items():
        print(f"{size}, {name}: {measured.seconds:.1f} s, {measured.cpu:.1f} CPU s, {measured.megabytes:.0f} MB")
    same = [sys.executable, __file__, "--size", size, "--same", scratch / "ours", scratch / "theirs"]
    subprocess.run(same, check=True)


def print_differences(ours: Path, theirs: Path, size: str) -> None:
    import torch
    from checkpoints import parameters, tensor

    pairs = {name: (tensor(ours, name), tensor(theirs, name)) for name in parameters(size)}
    equal = {name for name, (one, other) in pairs.items() if one.dtype == other.dtype and torch.equal(one, other)}
    print(f"{size}: {len(equal)} of {len(pairs)} tensors are bit-equal to mergekit's")
    for name in sorted(pairs.keys() - equal)[:5]:
        one, other = (part.double() for part in pairs[name])
        print(
            f"  {name}: {int((one != other).sum())} of {one.numel()} numbers, by up to {(one - other).abs().max():.1e}"
        )


if __name__ == "__main__":
    main()
