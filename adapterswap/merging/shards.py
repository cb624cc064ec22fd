"""How the result is stored: the shard, offset and dtype of each tensor.

By default the skeleton's shards and their names are kept; another size can be requested in Hugging Face's notation.
Knows names, shapes and bytes; reads and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from adapterswap.errors import ArgumentError, check_type
from adapterswap.experts.checkpoints import MODEL_INDEX, MODEL_WEIGHTS
from adapterswap.files.dtypes import DTYPE_BYTES, FLOAT_NAMES, FLOATS
from adapterswap.files.smallfiles import read_json
from adapterswap.files.tensorfile import Tensor, header_bytes
from adapterswap.planning.plan import Plan

__all__ = ["ModelForm", "OutputShard", "index_of", "lay_out_model"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ModelForm:
    """How full weights are written.

    Attributes:
        max_shard_size: such as `2GB`; None keeps the skeleton's shards.
        dtype: float32, float16 or bfloat16 for all floating point tensors; None keeps each tensor's dtype.
        dequantize: dequantise a quantised base first; None means False.
    """

    max_shard_size: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    dequantize: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOAT_NAMES:
            remedy = f"Pass {', '.join(FLOAT_NAMES)}"
            raise ArgumentError(f"the dtype {self.dtype!r} is unknown", remedy, parameter="dtype")
        check_type(self.max_shard_size, (str, type(None)), "max_shard_size", "Write for instance 2GB, 500MB or 4GiB")
        _ = self.shard_bytes

    @property
    def shard_bytes(self) -> int | None:
        """`max_shard_size` in bytes; raises an `ArgumentError` if it is not a size."""
        if self.max_shard_size is None:
            return None
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*([A-Za-z]*)\s*", self.max_shard_size)
        if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
            raise ArgumentError(
                f"the shard size {self.max_shard_size!r} is not a size",
                "Write for instance 2GB, 500MB or 4GiB",
                parameter="max_shard_size",
            )
        return int(float(match[1]) * _UNITS[match[2].upper()])

    def dtype_of(self, stored: str) -> str:
        """The output dtype of a tensor that the skeleton stores as `stored`."""
        return FLOAT_NAMES[self.dtype] if self.dtype and stored in FLOATS else stored


@dataclass(frozen=True)
class OutputShard:
    """A safetensors file to write: its name, its header's bytes, and the place of every tensor in it."""

    name: str
    header: bytes
    places: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        return max((place.stop for place in self.places.values()), default=len(self.header))


def lay_out_model(plan: Plan, form: ModelForm) -> tuple[OutputShard, ...]:
    """The shards of a plan's result, in the order in which they are written."""
    dtypes = {slot.name: form.dtype_of(slot.dtype) for slot in plan}
    groups = _own_shards(plan) if form.shard_bytes is None else _sized(plan, dtypes, form.shard_bytes)
    shards = []
    for name, members in groups.items():
        header, places = header_bytes((key, dtypes[key], plan.slots[key].shape) for key in members)
        shards.append(OutputShard(name, header, places))
    return tuple(shards)


def index_of(plan: Plan, shards: tuple[OutputShard, ...], form: ModelForm) -> dict[str, Any] | None:
    """The content of model.safetensors.index.json; None if a single file needs no index."""
    theirs = plan.skeleton.source.folder / MODEL_INDEX
    keeps_shards = form.shard_bytes is None and plan.skeleton.shards[0].path.name != MODEL_WEIGHTS
    if len(shards) == 1 and not keeps_shards:
        return None
    total = sum(place.nbytes for shard in shards for place in shard.places.values())
    metadata = read_json(theirs).get("metadata") if keeps_shards else None
    return {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": dict(sorted((key, shard.name) for shard in shards for key in shard.places)),
    }


def _own_shards(plan: Plan) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    file_of = {name: slot.path.name for name, slot in plan.skeleton.parameters.items()}
    last = next(iter(file_of.values()))
    for key in plan.slots:
        last = file_of.get(key, last)  # an untied head follows its embedding
        groups.setdefault(last, []).append(key)
    return groups


def _sized(plan: Plan, dtypes: Mapping[str, str], limit: int) -> dict[str, list[str]]:
    """Tensors in order, with a new shard whenever the next one does not fit; a larger tensor gets its own shard."""
    groups: list[list[str]] = [[]]
    size = 0
    for slot in plan:
        nbytes = DTYPE_BYTES[dtypes[slot.name]] * prod(slot.shape)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(slot.name)
        size += nbytes
    if len(groups) == 1:
        return {MODEL_WEIGHTS: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups, 1)}
