"""TIES and task arithmetic against mergekit's results on full float32 models: the largest difference of any weight.

    python benchmarks/mergekit_methods.py --mergekit PATH/TO/mergekit-yaml

adapterswap's ΔW is written at full rank (`--max-rank`), merged into the base by PEFT, and compared weight by weight.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from shapes import llama_projections, random_adapter, random_llama
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap import Composition

SHAPE = {"hidden": 64, "intermediate": 128, "layers": 4, "heads": 4, "vocab": 256}
METHODS = {
    "task_arithmetic": ({"scale": 0.7}, {"lambda": 0.7}, {}),
    "ties": ({"density": 0.4, "scale": 0.9}, {"lambda": 0.9}, {"density": 0.4}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        compare(Path(scratch), options.mergekit)


def compare(scratch: Path, mergekit: Path) -> None:
    random_llama(scratch / "bf16", **SHAPE)
    model = AutoModelForCausalLM.from_pretrained(scratch / "bf16", dtype=torch.float32)
    model.save_pretrained(scratch / "base")
    experts = {}
    for seed, name in enumerate(("math", "swahili")):
        shapes = llama_projections(SHAPE["hidden"], SHAPE["intermediate"], SHAPE["hidden"])
        experts[name] = random_adapter(
            scratch / name, seed=seed, rank=8, layers=SHAPE["layers"], shapes=shapes, base_model=str(scratch / "base"),
            dtype=torch.float32,
        )  # fmt: skip
        merged(scratch / "base", experts[name]).save_pretrained(scratch / f"full-{name}")
    for method, (ours, shared, own) in METHODS.items():
        composition = Composition(task="math", language="swahili", method=method, language_weight=0.6, **ours)
        plan = adapterswap.compose(composition, experts)
        out = adapterswap.write_adapter(plan, scratch / method, max_rank=64)
        weights = merged(scratch / "base", out).state_dict()
        theirs = run_mergekit(scratch, mergekit, method, shared, own)
        changed = [name for name in theirs if "proj" in name]
        apart = max(float((weights[name] - theirs[name]).abs().max()) for name in changed)
        size = max(float(theirs[name].abs().max()) for name in changed)
        print(f"{method}: {len(changed)} weights, largest difference {apart:.1e} beside weights of up to {size:.2f}")


def merged(base: Path, adapter: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def run_mergekit(
    scratch: Path, mergekit: Path, method: str, shared: dict[str, float], own: dict[str, float]
) -> dict[str, torch.Tensor]:
    lines = [f"merge_method: {method}", f"base_model: {scratch / 'base'}", "dtype: float32", f"parameters: {shared}"]
    lines.append("models:")
    for name, weight in (("math", 1.0), ("swahili", 0.6)):
        lines.append(f"  - model: {scratch / f'full-{name}'}\n    parameters: {own | {'weight': weight}}")
    (scratch / "recipe.yaml").write_text("\n".join(lines).replace("'", "") + "\n")
    out = scratch / f"mergekit-{method}"
    subprocess.run([mergekit, scratch / "recipe.yaml", out], check=True, capture_output=True)
    return {name: tensor for path in sorted(out.glob("*.safetensors")) for name, tensor in load_file(path).items()}


if __name__ == "__main__":
    main()
