"""Safetensors files as named byte ranges: read a header, check it, write one.

The safetensors library reads and checks headers: every byte belongs to exactly one tensor, and each tensor has the size
of its shape and dtype. The library does not report where a tensor is in the file, which copying without loading needs;
that follows from the order and the sizes. This module also refuses dtypes that we do not handle, names that cannot be
printed, and sizes beyond 64 bits. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length,
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

from safetensors import SafetensorError, safe_open

from adapterswap.kit.errors import ExpertError
from adapterswap.kit.files.hashes import stamp
from adapterswap.kit.files.text import check_pointer, open_regular, shown

# Bytes per element of every dtype that a safetensors file may hold and that is a whole number of bytes.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

FLOATS = ("F32", "F16", "BF16")  # the dtypes used in arithmetic, most precise first

FLOAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # the same, by their names in torch and numpy


# In bytes; the safetensors library's own limit is 100 MB, and 140,000 tensors with long names take 21 MB.
_MAX_HEADER = 32 * 2**20
_MAX_NAME = 500  # characters
_REMEDY = "The file is damaged or not a safetensors file: download or save it again"


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
    """A safetensors file whose header has been read and checked.

    Attributes:
        path: the file.
        tensors: by name, in the order of their bytes.
        data_start: where the tensor data begins, in bytes from the start of the file.
        size: the file's size in bytes.
        header: the header's raw bytes (length prefix included).
        stamp: its size, times and inode, which change when the file is replaced or written to; see `open_tensors`.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    data_start: int
    size: int
    header: bytes
    stamp: tuple[int, ...]


def read_header(path: str | Path) -> TensorFile:
    """Read and check the header of a safetensors file, without touching the tensors."""
    path = Path(path)
    with open_regular(path, "Pass the path of a readable file") as file:
        try:
            file_stat = os.fstat(file.fileno())
            size = file_stat.st_size
            prefix = file.read(8)
            check_pointer(prefix + file.peek(100), path)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
                announced = f"its header claims {length} bytes" if len(prefix) == 8 else "it has no header"
                raise ExpertError(f"{path} is {size} bytes long, but {announced}", _REMEDY)
            raw = file.read(length)
        except OSError as error:
            raise ExpertError(f"{path} cannot be read: {error.strerror}", "Check the disk") from None
    try:
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            specs = [(name, view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()]
    except (SafetensorError, OSError) as error:
        raise ExpertError(f"{path} ({size} bytes) is not a valid safetensors file: {error}", _REMEDY) from None
    tensors: dict[str, Tensor] = {}
    position = data_start = 8 + length
    _check(specs, path)
    for name, dtype, shape in specs:
        tensors[name] = Tensor(name, dtype, shape, position, position + DTYPE_BYTES[dtype] * prod(shape))
        position = tensors[name].stop
    return TensorFile(path, tensors, data_start, size, prefix + raw, stamp(file_stat))


@contextmanager
def open_tensors(source: TensorFile) -> Iterator[BufferedReader]:
    """Open a file whose header has been read, to read its tensors."""
    with open_regular(source.path, "Run the command again once the file is complete") as file:
        _check_stamp(file, source)
        yield file
        _check_stamp(file, source)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Tensor]]:
    """The header for tensors, each a (name, dtype, shape), and each tensor's place in the file.

    Tensors with larger elements come first, then they are sorted by name: so every tensor is aligned, and the same
    tensors give the same bytes. The header is padded with spaces to a multiple of 8 bytes.
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


def _check_stamp(file: BufferedReader, source: TensorFile) -> None:
    if stamp(os.fstat(file.fileno())) != source.stamp:
        raise ExpertError(
            f"{source.path} has changed since it was opened", "Run the command again once the file is complete"
        )


def _check(specs: Iterable[tuple[str, str, tuple[int, ...]]], path: Path) -> None:
    """Refuse what the library accepts but we do not."""
    for name, dtype, shape in specs:
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise ExpertError(f"{path}: {shown(name)} is not the name of a tensor", _REMEDY)
        if dtype not in DTYPE_BYTES:
            raise ExpertError(f"{path}: {name!r} has the unknown dtype {shown(dtype)}", _REMEDY)
        if len(shape) > 8 or max(shape, default=0) >= 2**63:
            raise ExpertError(f"{path}: {name!r} has the impossible shape {shown(list(shape))}", _REMEDY)
