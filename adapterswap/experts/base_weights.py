"""A base model's own weights: where a tensor lies in its safetensors shards. Nothing is loaded.

Knows Hugging Face's folder of shards and its index. Knows nothing of adapters.
"""

from __future__ import annotations

import json
from pathlib import Path

from adapterswap.errors import AdapterswapError
from adapterswap.experts.sources import find_source
from adapterswap.files.tensorfile import Tensor, TensorFile, read_header

__all__ = ["find_base_tensor"]

_INDEX = "model.safetensors.index.json"


def find_base_tensor(base_model: str, key: str, like: Tensor) -> tuple[Path, Tensor]:
    """The file and the place of the base's tensor `key`, which must have the shape of `like`.

    Raises:
        AdapterswapError: the base cannot be had, has no safetensors files, or no such tensor of that shape in floating
            point numbers.
    """
    files = ["config.json", "*.safetensors", _INDEX]
    folder = find_source(base_model, files, what="base model").folder
    shards = _shards(folder)
    for shard in shards:
        found = shard.tensors.get(key)
        if found is not None and found.shape == like.shape and found.dtype in ("F32", "F16", "BF16"):
            return shard.path, found
        if found is not None:
            raise AdapterswapError(
                f"{key} is {found.dtype} {list(found.shape)} in the base {base_model}, and {like.dtype} "
                f"{list(like.shape)} in an expert",
                "Give the base that the experts adapt, in floating point numbers",
            )
    raise AdapterswapError(f"the base {base_model} has no tensor {key}", "Give the base that the experts adapt")


def _shards(folder: Path) -> list[TensorFile]:
    if (folder / _INDEX).exists():
        try:
            names = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            plain = all(Path(name).name == name for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            plain = False
        if not plain:
            raise AdapterswapError(f"{folder / _INDEX} is no index of shards", "Download the base model again")
        return [read_header(folder / name) for name in names]
    if (folder / "model.safetensors").exists():
        return [read_header(folder / "model.safetensors")]
    raise AdapterswapError(f"{folder} has no safetensors weights", "Give the base model's folder, saved as safetensors")
