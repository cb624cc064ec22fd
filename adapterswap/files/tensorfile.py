"""Safetensors files as named byte ranges: read a header, check it, write one.

The safetensors library loads tensors; copying a tensor without loading it needs its place in the file, which that
library does not tell. Everything in a header is checked here before it is believed, because a header comes from a
stranger. Knows nothing of LoRA. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length,
JSON, data).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.files.smallfiles import check_pointer, open_regular, parse_json, shown

__all__ = ["DTYPE_BYTES", "FLOATS", "Tensor", "TensorFile", "header_bytes", "open_tensors", "read_header", "stamp"]

# Bytes per element of every dtype that a safetensors file may hold and that is a whole number of bytes.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

FLOATS = ("F32", "F16", "BF16")  # the dtypes that take part in arithmetic

# In bytes; the safetensors library's own limit is 100 MB, and 140,000 tensors with long names take 21 MB.
_MAX_HEADER = 32 * 2**20
_MAX_NAME = 500  # characters
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
        header: the header's raw bytes (length prefix included).
        stamp: what changes when the file is replaced or written to: its size, times and inode; see `open_tensors`.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    data_start: int
    size: int
    header: bytes
    stamp: tuple[int, ...]


def read_header(path: str | Path) -> TensorFile:
    """Read and check the header of a safetensors file, without touching the tensors.

    Raises:
        AdapterswapError: the file is missing, no regular file, truncated, or its header is not one: too long, not
            UTF-8, not JSON, a name twice or not printable, an unknown dtype, a shape that disagrees with its bytes,
            ranges that overlap, leave gaps or run past the end.
    """
    path = Path(path)
    with open_regular(path, "Give the path of a readable file") as file:
        try:
            found = os.fstat(file.fileno())
            size = found.st_size
            prefix = file.read(8)
            check_pointer(prefix + file.peek(100), path)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
                told = f"a header of {length} bytes" if len(prefix) == 8 else "no header"
                raise AdapterswapError(f"{path} is {size} bytes long and announces {told}", _MEND)
            raw = file.read(length)
        except OSError as error:
            raise AdapterswapError(f"{path} cannot be read: {error.strerror}", "Check the disk") from None
    content = parse_json(raw, f"the header of {path}", _MEND)
    _check_metadata(content.pop("__metadata__", {}), path)
    data_start = 8 + length
    tensors = {name: _tensor(name, entry, data_start, path) for name, entry in content.items()}
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop))
    _check_ranges(ordered, data_start, size, path)
    return TensorFile(path, {tensor.name: tensor for tensor in ordered}, data_start, size, prefix + raw, stamp(found))


@contextmanager
def open_tensors(source: TensorFile) -> Iterator[BufferedReader]:
    """Open a file whose header has been read, to read its tensors.

    Raises:
        AdapterswapError: the file is gone, or was replaced or written to since, up to the end of the block.
    """
    with open_regular(source.path, "Start again once it is complete") as file:
        _check_stamp(file, source)
        yield file
        _check_stamp(file, source)


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


def stamp(found: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    # Size and modification time are not enough: images, archives and `cp -p` set the latter. No program sets ctime.
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _check_stamp(file: BufferedReader, source: TensorFile) -> None:
    if stamp(os.fstat(file.fileno())) != source.stamp:
        raise AdapterswapError(f"{source.path} changed since it was opened", "Start again once it is complete")


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterswapError(f"{path}: __metadata__ is {shown(metadata)}, and maps texts to texts", _MEND)


def _tensor(name: str, entry: Any, data_start: int, path: Path) -> Tensor:
    def is_size(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**63

    if not name.isprintable() or len(name) > _MAX_NAME:
        raise AdapterswapError(f"{path}: {shown(name)} is no name of a tensor", _MEND)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise AdapterswapError(f"{path}: {name!r} lacks one of dtype, shape, data_offsets, or has more", _MEND)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise AdapterswapError(f"{path}: {name!r} has the unknown dtype {shown(dtype)}", _MEND)
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_size, shape)):
        raise AdapterswapError(f"{path}: {name!r} has the impossible shape {shown(shape)}", _MEND)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)) or offsets[0] > offsets[1]:
        raise AdapterswapError(f"{path}: {name!r} has the impossible offsets {shown(offsets)}", _MEND)
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
