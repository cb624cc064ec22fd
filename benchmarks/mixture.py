"""Composing adapters with LoRA on each expert of a large mixture, compared with `cp`: 128 experts in 48 layers,
as in Qwen3-30B-A3B, which makes 18,624 modules. Whole processes, medians of interleaved runs.

python benchmarks/mixture.py [--runs 5] [--rank 8] [--scratch DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from compose import WEIGHTS, report
from measuring import side_by_side

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, ATTENTION = 48, 128, 2048, 768, 4096
SHAPES = {  # (out, in)
    "self_attn.q_proj": (ATTENTION, HIDDEN), "self_attn.k_proj": (512, HIDDEN), "self_attn.v_proj": (512, HIDDEN),
    "self_attn.o_proj": (HIDDEN, ATTENTION),
}  # fmt: skip
OF_EXPERT = {
    "gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)
}  # fmt: skip


def write_adapter(folder: Path, seed: int, rank: int, base: Path) -> None:
    """An adapter in bfloat16 of random bits, with signs and the largest exponents cleared."""
    import numpy as np

    folder.mkdir()
    random = np.random.default_rng(seed)
    header: dict[str, object] = {}
    end = 0
    for layer in range(LAYERS):
        shapes = {
            f"mlp.experts.{expert}.{name}": shape for expert in range(EXPERTS) for name, shape in OF_EXPERT.items()
        }
        for name, (out, into) in (SHAPES | shapes).items():
            for factor, dims in (("A", [rank, into]), ("B", [out, rank])):
                size = dims[0] * dims[1] * 2
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{factor}.weight"
                header[key] = {"dtype": "BF16", "shape": dims, "data_offsets": [end, end + size]}
                end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        block = (random.integers(0, 2**16, 2**24, np.uint16) & 0x3CFF).tobytes()
        while end > 0:
            end -= file.write(block[:end])
    names = [*(name.rpartition(".")[2] for name in SHAPES), *OF_EXPERT]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": names,
        "base_model_name_or_path": str(base), "peft_version": "0.21.2",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_base(folder: Path) -> None:
    """Only the config: no weights are needed."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS, "num_experts_per_tok": 8, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="A folder with 6 GB free; default: a temporary one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as place:
        scratch = Path(place)
        write_base(scratch / "base")
        for seed, name in ((1, "math"), (2, "swahili")):
            write_adapter(scratch / name, seed, options.rank, scratch / "base")
        adapterswap = [sys.executable, "-m", "adapterswap"]
        compose = [*adapterswap, "compose", "-t", scratch / "math", "-l", scratch / "swahili", "--overwrite"]
        subprocess.run([*compose, "-o", scratch / "swap"], check=True, stdout=subprocess.DEVNULL)
        commands = {
            "plan (--dry-run)": [*compose, "-o", scratch / "dry", "--dry-run"],
            "swap": [*compose, "-o", scratch / "swap"],
            "inspect": [*adapterswap, "inspect", scratch / "math"],
            "cp": ["cp", scratch / "swap" / WEIGHTS, scratch / "copy"],
            "import torch": [sys.executable, "-c", "import torch"],
        }
        found = side_by_side(commands, runs=options.runs)
    for name, measured in found.items():
        print(f"{name:18} {measured.seconds:6.2f} s  {measured.cpu:6.2f} CPU s  {measured.megabytes:6.0f} MB")
    allowed = 3 * found["cp"].seconds + 2
    for name in ("plan (--dry-run)", "swap"):
        report(name, found[name], allowed, "3 × cp + 2 s", 1000)


if __name__ == "__main__":
    main()
