"""The same mergekit YAML in mergekit and in adapterswap, on full checkpoints: equal copies, blends up to rounding.

    python benchmarks/mergekit_yaml.py --mergekit PATH/TO/mergekit-yaml [--dtype bfloat16]

Prints, for every YAML, how many tensors have the same bytes, and the largest difference of the others.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from shapes import random_llama

from adapterswap.cli import main as adapterswap

SHAPE = {"hidden": 64, "intermediate": 128, "layers": 6, "heads": 4, "vocab": 256}
LINEAR = "merge_method: linear\nmodels:\n"
EVERY = "- {model: math, parameters: {weight: %s}}\n- {model: swahili, parameters: {weight: %s}}\n"
BASED = "base_model: base\nmodels:\n"
RECIPES = {
    "swap by slices": "merge_method: linear\nslices:\n"
    + "".join(
        f"- sources:\n  - {{model: math, layer_range: [{a}, {b}], parameters: {{weight: {m}}}}}\n"
        f"  - {{model: swahili, layer_range: [{a}, {b}], parameters: {{weight: {s}}}}}\n"
        for a, b, m, s in ((0, 2, 0, 1), (2, 5, 1, 0), (5, 6, 0.25, 0.75))
    ),
    "passthrough": "merge_method: passthrough\nslices:\n"
    "- sources: [{model: swahili, layer_range: [0, 2]}]\n- sources: [{model: math, layer_range: [2, 6]}]\n",
    "gradient": LINEAR + EVERY % ("[0, 0.5, 1, 1, 1, 0]", "[1, 0.5, 0, 0, 0, 1]"),
    "filters": LINEAR + EVERY % (
        "[{filter: self_attn, value: [0, 1]}, {filter: mlp, value: 1}, {value: 0.5}]",
        "[{filter: mlp, value: 0}, {value: 0.5}]",
    ),
    "task arithmetic": "merge_method: task_arithmetic\nparameters: {lambda: 0.7}\n" + BASED + EVERY % (1, "[0.2, 0.9]"),
    "ties": "merge_method: ties\nparameters: {density: 0.4, lambda: 0.9}\n" + BASED + EVERY % (1, 0.6),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", required=True, help="the command that runs mergekit-yaml")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        compare(Path(scratch), shlex.split(options.mergekit), options.dtype)


def compare(scratch: Path, mergekit: list[str], dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    random_llama(scratch / "made", **SHAPE)
    for seed, name in enumerate(("base", "math", "swahili")):
        model = AutoModelForCausalLM.from_pretrained(scratch / "made", dtype=torch.float32)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.02
        model.to(getattr(torch, dtype)).save_pretrained(scratch / name)
    for title, text in RECIPES.items():
        recipe = scratch / "recipe.yaml"
        recipe.write_text(text + f"dtype: {dtype}\n")
        theirs, ours = (scratch / f"{who}-{title.replace(' ', '-')}" for who in ("mergekit", "ours"))
        command = [*mergekit, recipe, theirs, "--no-copy-tokenizer", "--no-write-model-card"]
        subprocess.run(command, check=True, capture_output=True, cwd=scratch)
        adapterswap(["merge", str(recipe), "-o", str(ours)], standalone_mode=False)
        one, other = (weights(folder) for folder in (theirs, ours))
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        equal = [name for name in one if one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])]
        apart = max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
        print(
            f"{title}: {len(equal)} of {len(one)} tensors have the same bytes, the others differ by {apart:.1e} at most"
        )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


if __name__ == "__main__":
    main()
