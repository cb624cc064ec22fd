"""Exporting to GGUF compared with `cp`: whole processes, medians of interleaved runs, Llama-3.1-8B's shape at
rank 64 in bfloat16 (336 MB).

python benchmarks/export.py [--runs 5] [--scratch DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import side_by_side

WEIGHTS = "adapter_model.safetensors"
BASE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="A folder with 3 GB free; default: a temporary one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        measure(Path(scratch), options.runs)


def measure(scratch: Path, runs: int) -> None:
    math, base = scratch / "math", scratch / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(BASE))
    # In a separate process: the peak memory of this one would count for the processes that it starts.
    subprocess.run([sys.executable, Path(__file__).parent / "shapes.py", math, "1"], check=True)
    export = [sys.executable, "-m", "adapterswap", "export", math, "--base-model", base, "--overwrite"]
    found = side_by_side(
        {
            "cp": ["cp", math / WEIGHTS, scratch / "copy"],
            **{kind: [*export, "--outtype", kind, "-o", scratch / kind] for kind in ("bf16", "f16", "f32", "q8_0")},
            "pieces": [*export, "--outtype", "bf16", "--pieces", "-o", scratch / "pieces"],
        },
        runs=runs,
    )
    allowed = 3 * found["cp"].seconds + 1
    for name, measured in found.items():
        line = f"{name:8} {measured.seconds:6.2f} s  {measured.cpu:6.2f} CPU s  {measured.megabytes:6.0f} MB"
        print(line if name == "cp" else f"{line}  {measured.seconds / allowed:.2f} of 3 × cp + 1 s")


if __name__ == "__main__":
    main()
