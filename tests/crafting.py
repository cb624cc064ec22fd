"""Adapters built byte by byte, so that anything in them can be wrong. Uses none of the library's own code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name → dtype, shape, bytes

BASE_CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4,  # and the sizes of `tensors`
    "hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 4,
}  # fmt: skip


def tensors(layers: int = 4, rank: int = 2, seed: int = 0, dtype: str = "F32", width: int = 4) -> Tensors:
    """Two modules per layer, (2·width)×width and width×(2·width)."""
    random = np.random.default_rng(seed)
    made: Tensors = {}
    for layer in range(layers):
        for module, out, into in (("self_attn.q_proj", 2 * width, width), ("mlp.down_proj", width, 2 * width)):
            for factor, shape in (("A", (rank, into)), ("B", (out, rank))):
                data = random.standard_normal(shape).astype(NUMPY[dtype]).tobytes()
                made[f"{PREFIX}model.layers.{layer}.{module}.lora_{factor}.weight"] = (dtype, shape, data)
    return made


def config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": True, "rank_pattern": {}, "alpha_pattern": {},
        "base_model_name_or_path": "org/base", "init_lora_weights": True, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "down_proj"], "peft_version": "0.21.2", "inference_mode": True, **changes,
    }  # fmt: skip


def parts(content: Tensors) -> tuple[dict[str, Any], bytes]:
    """The header before it is encoded as JSON, and the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in content.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def adapter(folder: Path, content: Tensors | None = None, settings: Mapping[str, Any] | None = None) -> Path:
    """A valid adapter, unless `content` or `settings` make it invalid."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(file_bytes(*parts(tensors() if content is None else content)))
    (folder / CONFIG).write_text(json.dumps(config() if settings is None else settings))
    return folder


def lora(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, base: Path | None = None, rank: int = 2, seed: int = 0,
    size: float = 1.0, **settings: Any,
) -> Path:  # fmt: skip
    """An adapter with random factors of these modules, each out×in; its targets are the last parts of their names."""
    random, content = np.random.default_rng(seed), {}
    for module, (out, into) in shapes.items():
        for factor, shape in (("A", (rank, into)), ("B", (out, rank))):
            data = (size * random.standard_normal(shape)).astype(np.float32).tobytes()
            content[f"{PREFIX}{module}.lora_{factor}.weight"] = ("F32", shape, data)
    targets = sorted({found[0] for module in shapes if (found := re.search(r"[^.]+(\.\d+)?$", module))})
    written = config(r=rank, base_model_name_or_path=base and str(base), target_modules=targets, **settings)
    return adapter(folder, content, written)


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a file's header in place and keep its data."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    (folder / WEIGHTS).write_bytes(file_bytes(header, raw[8 + length :]))


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below `folder`, with the SHA-256 of a file, the target of a link, or None for a folder."""
    result = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            result[name] = f"-> {path.readlink()}"
        else:
            result[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return result
