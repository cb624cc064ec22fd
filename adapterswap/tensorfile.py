"""Safetensors files as named byte ranges: read a header, check it, write one.

The safetensors library loads tensors; copying a tensor without loading it needs its place in the file, which that
library does not tell. Everything in a header is checked here before it is believed, because a header comes from a
stranger. Knows nothing of LoRA. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length,
JSON, data).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError

__all__ = ["DTYPE_BYTES", "Tensor", "TensorFile", "header_bytes", "read_header"]

# Bytes per element of every dtype that a safetensors file may hold and that is a whole number of bytes.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

_MAX_HEADER = 100_000_000  # the safetensors library's own limit, in bytes
_MEND = "The file is damaged or no safetensors file: download or save it again"


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in a file: `start` and `stop` count bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header has been read and found sound.

    Attributes:
        path: the file.
        tensors: by name, in the order of their bytes.
        data_start: where the tensor data begins, in bytes from the start of the file.
        size: the file's size in bytes.
        header: the header's raw bytes (length prefix included), to notice a file that changes later.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    data_start: int
    size: int
    header: bytes


def read_header(path: str | Path) -> TensorFile:
    """Read and check the header of a safetensors file, without touching the tensors.

    Raises:
        AdapterswapError: the file is missing, truncated, or its header is not one: too long, not UTF-8, not JSON, a
            name twice, an unknown dtype, a shape that disagrees with its bytes, ranges that overlap, leave gaps or run
            past the end.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
                told = f"a header of {length} bytes" if len(prefix) == 8 else "no header"
                raise AdapterswapError(f"{path} is {size} bytes long and announces {told}", _MEND)
            raw = file.read(length)
    except OSError as error:
        raise AdapterswapError(f"{path} cannot be read: {error.strerror}", "Give the path of a readable file") from None
    content = _parse(raw, path)
    data_start = 8 + length
    tensors = {
        name: _tensor(name, entry, data_start, path) for name, entry in content.items() if name != "__metadata__"
    }
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop))
    _check_ranges(ordered, data_start, size, path)
    return TensorFile(path, {tensor.name: tensor for tensor in ordered}, data_start, size, prefix + raw)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Tensor]]:
    """The header for tensors given as (name, dtype, shape), and where each of them goes in the file.

    Tensors are ordered by falling element size, then by name: every tensor stays aligned, and the same tensors give the
    same bytes. The header is padded with spaces to a multiple of 8 bytes.
    """
    placed: dict[str, Tensor] = {}
    offset = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape in sorted(tensors, key=lambda spec: (-DTYPE_BYTES[spec[1]], spec[0])):
        stop = offset + DTYPE_BYTES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        placed[name] = Tensor(name, dtype, shape, offset, stop)
        offset = stop
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    moved = {name: Tensor(name, t.dtype, t.shape, t.start + start, t.stop + start) for name, t in placed.items()}
    return len(raw).to_bytes(8, "little") + raw, moved


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            raise ValueError("a key stands twice")
        return mapping

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise AdapterswapError(f"{path} has a header that is not JSON in UTF-8: {_one_line(error)}", _MEND) from None
    if not isinstance(content, dict):
        raise AdapterswapError(f"{path} has a header that is not a JSON object", _MEND)
    return content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _tensor(name: str, entry: Any, data_start: int, path: Path) -> Tensor:
    def is_size(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**63

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise AdapterswapError(f"{path}: {name!r} lacks one of dtype, shape, data_offsets, or has more", _MEND)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise AdapterswapError(f"{path}: {name!r} has the unknown dtype {dtype!r}", _MEND)
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_size, shape)):
        raise AdapterswapError(f"{path}: {name!r} has the impossible shape {shape!r}"[:300], _MEND)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)) or offsets[0] > offsets[1]:
        raise AdapterswapError(f"{path}: {name!r} has the impossible offsets {offsets!r}"[:300], _MEND)
    if DTYPE_BYTES[dtype] * prod(shape) != offsets[1] - offsets[0]:
        raise AdapterswapError(
            f"{path}: {name!r} is {dtype} {shape}, which is not the {offsets[1] - offsets[0]} bytes that it takes",
            _MEND,
        )
    return Tensor(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_ranges(ordered: list[Tensor], data_start: int, size: int, path: Path) -> None:
    """Every byte after the header belongs to exactly one tensor, as the format demands."""
    position = data_start
    for tensor in ordered:
        if tensor.start != position:
            fault = "overlaps another tensor" if tensor.start < position else "leaves a gap before it"
            raise AdapterswapError(f"{path}: {tensor.name!r} {fault} (byte {tensor.start}, not {position})", _MEND)
        position = tensor.stop
    if position != size:
        fault = "is truncated" if position > size else "has bytes that no tensor owns"
        raise AdapterswapError(f"{path} {fault}: {size} bytes, and its header describes {position}", _MEND)
