"""Composing compared with `cp`: whole processes, medians of interleaved runs, Llama-3.1-8B's shape at rank 64, and a
swap of 126 layers of rank 4 (33 MB), which is mostly the start and the plan.

python benchmarks/compose.py [--runs 5] [--scratch DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import Measured, side_by_side

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="A folder with 3 GB free; default: a temporary one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        many_layers(Path(scratch), options.runs)
        whole_processes(Path(scratch), options.runs)
    truncation()


def many_layers(scratch: Path, runs: int) -> None:
    """A swap of one small module in each of 126 layers, beside an empty Python with numpy."""
    make = "import sys; from pathlib import Path; from shapes import random_adapter; random_adapter(Path(sys.argv[1]), "
    make += "seed=int(sys.argv[2]), rank=4, layers=126, shapes={'self_attn.q_proj': (16384, 16384)})"
    math, swahili = scratch / "wide-math", scratch / "wide-swahili"
    for seed, folder in enumerate((math, swahili)):
        subprocess.run([sys.executable, "-c", make, folder, str(seed)], check=True, cwd=Path(__file__).parent)
    compose = [sys.executable, "-m", "adapterswap", "compose", "--num-layers", "126", "-t", math, "-l", swahili]
    commands = {
        "dry run": [*compose, "--dry-run"],
        "swap": [*compose, "--overwrite", "-o", scratch / "wide"],
        "import numpy": [sys.executable, "-c", "import numpy"],
    }
    found = side_by_side(commands, runs=runs)
    above = {name: found[name].cpu - found["import numpy"].cpu for name in ("dry run", "swap")}
    for name, seconds in above.items():
        print(f"126 layers of rank 4, {name}: {found[name].cpu:.2f} CPU s, {seconds:.2f} above `import numpy`")


def whole_processes(scratch: Path, runs: int) -> None:
    math, swahili = scratch / "math", scratch / "swahili"
    for folder, seed in ((math, 1), (swahili, 2)):
        # In a separate process: the peak memory of this one would count for the processes that it starts.
        subprocess.run([sys.executable, Path(__file__).parent / "shapes.py", folder, str(seed)], check=True)
    adapterswap = [sys.executable, "-m", "adapterswap"]
    compose = [*adapterswap, "compose", "-t", math, "-l", swahili, "--num-layers", "32", "--overwrite"]
    commands = {
        "swap": [*compose, "-o", scratch / "swap"],
        "cp of the swap": ["cp", scratch / "swap" / WEIGHTS, scratch / "copy-swap"],
        "soup": [*compose, "--method", "soup", "-o", scratch / "soup"],
        "cp of the soup": ["cp", scratch / "soup" / WEIGHTS, scratch / "copy-soup"],
        "import torch": [sys.executable, "-c", "import torch"],
        "adapterswap -h": [*adapterswap, "-h"],
    }
    found = side_by_side(commands, runs=runs)
    for name, measured in found.items():
        print(f"{name:18} {measured.seconds:6.2f} s  {measured.cpu:6.2f} CPU s  {measured.megabytes:6.0f} MB")
    swap, soup, torch_import = found["swap"], found["soup"], found["import torch"].seconds
    report("swap", swap, 3 * found["cp of the swap"].seconds + 0.4, "3 × cp + 0.4 s", 150)
    allowed = 2.5 * found["cp of the soup"].seconds + torch_import
    report("soup", soup, allowed, "2.5 × cp + import torch", 1000)
    report("help", found["adapterswap -h"], 0.2, "0.2 s", 150)


def report(name: str, measured: Measured, allowed: float, formula: str, megabytes: float) -> None:
    print(
        f"{name}: {measured.seconds / allowed:.2f} of the time allowed ({formula} = {allowed:.2f} s), "
        f"{measured.megabytes / megabytes:.2f} of the memory allowed ({megabytes} MB)"
    )


def truncation() -> None:
    """A soup cut to rank 64 per module, against PEFT's `svd` combination of the same two modules."""
    import numpy as np  # here, since the peak memory of this process counts for those that it starts
    import torch
    from peft import get_peft_model

    from adapterswap.core.changes.factors import Factors
    from adapterswap.core.changes.joint import Joint, mixed

    for out, into in ((4096, 4096), (14336, 4096)):
        generator = torch.Generator().manual_seed(0)
        parts = [
            (torch.randn(64, into, generator=generator) / into**0.5, torch.randn(out, 64, generator=generator) * 0.02)
            for _ in range(2)
        ]
        scale = 16 / 8
        changes = [Factors(a.numpy(), scale * b.numpy()) for a, b in parts]
        times = []
        for _ in range(5):
            start = time.perf_counter()
            joint, weights = Joint(changes), [0.5, 0.5]
            spectrum, rank, _ = joint.cut(weights, rank=64, error=None)
            left, right = joint.mixture(weights, spectrum, rank)
            mixed([change.a for change in changes], right.T, 0).astype(np.float32)
            mixed([change.b for change in changes], left, 1).astype(np.float32)
            times.append(time.perf_counter() - start)
        model = get_peft_model(
            torch.nn.Sequential(torch.nn.Linear(into, out, bias=False)), lora("0"), adapter_name="a0"
        )
        model.add_adapter("a1", lora("0"))
        layer = model.base_model.model[0]
        for name, (a, b) in zip(("a0", "a1"), parts, strict=True):
            layer.lora_A[name].weight.data, layer.lora_B[name].weight.data = a.clone(), b.clone()
        start = time.perf_counter()
        model.add_weighted_adapter(["a0", "a1"], [0.5, 0.5], "both", combination_type="svd", svd_rank=64)
        theirs = time.perf_counter() - start
        core = (
            np.linalg.svd(
                np.linalg.qr(np.concatenate([change.b for change in changes], axis=1).astype(np.float64))[1]
                @ np.linalg.qr(np.concatenate([change.a for change in changes]).T.astype(np.float64))[1].T,
                compute_uv=False,
            )[:64]
            / 2
        )
        print(
            f"truncate {out}×{into} from rank 128 to 64: {np.median(times) * 1000:.0f} ms; PEFT svd {theirs:.1f} s, "
            f"{theirs / np.median(times):.0f} × as long; singular values agree to "
            f"{np.max(np.abs(spectrum.sigma[:64] - core) / core[0]):.1e} with float64"
        )


def lora(target: str) -> object:
    from peft import LoraConfig

    return LoraConfig(r=64, lora_alpha=16, use_rslora=True, target_modules=[target], init_lora_weights=False)


if __name__ == "__main__":
    main()
