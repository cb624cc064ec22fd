"""The cost of composing two rsLoRA experts, and the distance of the result from the exact average: adapterswap, PEFT,
mergekit.

    python benchmarks/peers.py --mergekit PATH/TO/mergekit-yaml [--size 0.4b|pico] [--runs 3]

mergekit needs a separate environment (`make peers` builds one). Each route starts from the base and two adapter
folders and ends with files on disk. The error is ‖ΔW - ΔW*‖ / ‖ΔW*‖ over all modules, against the average ΔW* in
float64; for full weights, ΔW is what was written minus the base.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

from measuring import Measured, run_once, side_by_side

SIZES = {
    "pico": {"hidden": 64, "intermediate": 128, "layers": 4, "heads": 4, "vocab": 256},
    "0.4b": {"hidden": 1024, "intermediate": 2816, "layers": 32, "heads": 16, "vocab": 8192},
}
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="mergekit-yaml in its own environment; left out without it.")
    parser.add_argument("--size", choices=SIZES, default="0.4b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--peft", nargs=2, metavar=("METHOD", "DIR"), help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peft:
        peft_route(options.peft[0], Path(options.peft[1]))
    elif options.make:
        make_inputs(options.make, options.size)
    else:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            compare(Path(scratch), options)


def make_inputs(scratch: Path, size: str) -> None:
    from shapes import llama_projections, random_adapter, random_llama

    shape = SIZES[size]
    random_llama(scratch / "base", **shape)
    projections = llama_projections(shape["hidden"], shape["intermediate"], shape["hidden"])
    for seed, name in enumerate(("math", "swahili")):
        random_adapter(
            scratch / name, seed=seed, rank=RANK, layers=shape["layers"], shapes=projections,
            base_model=str(scratch / "base"),
        )  # fmt: skip


def peft_route(method: str, scratch: Path) -> None:
    """Load the base and both adapters, combine them with PEFT's add_weighted_adapter, save the result."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(scratch / "base", dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(model, scratch / "math", adapter_name="math")
    model.load_adapter(scratch / "swahili", adapter_name="swahili")
    rank = {"svd_rank": 2 * RANK} if method == "svd" else {}
    model.add_weighted_adapter(["math", "swahili"], [0.5, 0.5], "both", combination_type=method, **rank)
    model.save_pretrained(scratch / f"peft-{method}", selected_adapters=["both"])


def compare(scratch: Path, options: argparse.Namespace) -> None:
    this = [sys.executable, Path(__file__), "--size", options.size]
    run_once([*this, "--make", scratch])
    experts = ["-t", scratch / "math", "-l", scratch / "swahili"]
    compose = [sys.executable, "-m", "adapterswap", "compose", *experts, "--overwrite"]
    commands = {
        "adapterswap soup": [*compose, "--method", "soup", "-o", scratch / "soup"],
        f"adapterswap soup --max-rank {RANK}": [
            *compose, "--method", "soup", "--max-rank", RANK, "-o", scratch / "small"
        ],
        "PEFT linear": [*this, "--peft", "linear", scratch],
        "PEFT cat": [*this, "--peft", "cat", scratch],
    }  # fmt: skip
    outputs = {
        "adapterswap soup": scratch / "soup",
        f"adapterswap soup --max-rank {RANK}": scratch / "small",
        "PEFT linear": scratch / "peft-linear" / "both",
        "PEFT cat": scratch / "peft-cat" / "both",
    }
    if options.size == "pico":  # dense SVDs of full matrices: hours at the larger size
        commands["PEFT svd"] = [*this, "--peft", "svd", scratch]
        outputs["PEFT svd"] = scratch / "peft-svd" / "both"
    if options.mergekit:
        recipe = scratch / "mergekit.yaml"
        recipe.write_text(mergekit_recipe(scratch))
        commands["mergekit base+lora"] = [
            options.mergekit,
            recipe,
            scratch / "merged",
            "--lora-merge-cache",
            scratch / "c",
        ]
        outputs["mergekit base+lora"] = scratch / "merged"
    found = side_by_side(commands, runs=options.runs)
    print("| route | seconds | processor seconds | peak MB | MB written | error of the average |")
    print("|---|---|---|---|---|---|")
    for name, measured in found.items():
        print(row(name, measured, written(outputs[name]), error(outputs[name], scratch)))


def mergekit_recipe(scratch: Path) -> str:
    models = "".join(
        f"  - model: {scratch / 'base'}+{scratch / name}\n    parameters: {{weight: 0.5}}\n"
        for name in ("math", "swahili")
    )
    return f"merge_method: linear\nmodels:\n{models}dtype: bfloat16\n"


def written(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def row(name: str, measured: Measured, megabytes: float, distance: float) -> str:
    return (
        f"| {name} | {measured.seconds:.1f} | {measured.cpu:.1f} | {measured.megabytes:.0f} | {megabytes:.0f} "
        f"| {distance:.2g} |"
    )


def error(folder: Path, scratch: Path) -> float:
    """The relative error over all modules; adapters by their factors, full weights by their distance from the base."""
    from safetensors import safe_open

    full = not (folder / "adapter_config.json").exists()
    config = None if full else json.loads((folder / "adapter_config.json").read_text())
    apart, size = 0.0, 0.0
    with safe_open(scratch / "math" / "adapter_model.safetensors", "pt") as file:
        keys = [key for key in file.keys() if "lora_A" in key]  # noqa: SIM118
    for key in keys:
        exact = sum(0.5 * delta(scratch / name, key) for name in ("math", "swahili"))
        name = key.removeprefix("base_model.model.").replace("lora_A.", "")
        found = weight(folder, name) - weight(scratch / "base", name) if config is None else delta(folder, key)
        apart += float((found - exact).square().sum())
        size += float(exact.square().sum())
    return math.sqrt(apart / size)


def delta(folder: Path, key: str):  # type: ignore[no-untyped-def]
    """s·B·A in float64, with PEFT's rule for s."""
    from safetensors import safe_open

    config = json.loads((folder / "adapter_config.json").read_text())
    module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        a, b = file.get_tensor(key).double(), file.get_tensor(key.replace("lora_A", "lora_B")).double()
    rank = config.get("rank_pattern", {}).get(module, config["r"])
    alpha = config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank) * (b @ a)


def weight(folder: Path, name: str):  # type: ignore[no-untyped-def]
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name).double()
    raise KeyError(name)


if __name__ == "__main__":
    main()
