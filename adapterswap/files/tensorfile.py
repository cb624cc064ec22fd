"""Safetensors files as named byte ranges: read a header, check it, write one.

The safetensors library reads and checks headers: every byte belongs to one tensor, and each has the size of its shape
and dtype. It does not tell a tensor's place in the file, which copying without loading needs, but the order, and so the
sizes before it. What is left to check here is what no file of ours may hold: other dtypes, names that cannot be shown,
sizes beyond 64 bits. Knows nothing of LoRA. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian
header length, JSON, data).
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

from adapterswap.errors import ExpertError
from adapterswap.files.dtypes import DTYPE_BYTES
from adapterswap.files.smallfiles import check_pointer, open_regular, shown

__all__ = ["Tensor", "TensorFile", "header_bytes", "open_tensors", "read_header", "stamp"]

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
        ExpertError: the file is missing, not a regular file, or the safetensors library finds it damaged; its header is
            longer than 32 MiB, or holds a name that is not printable, a dtype that is not a whole number of bytes, or a
            shape of more than eight dimensions.
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
                announced = f"a header of {length} bytes" if len(prefix) == 8 else "no header"
                raise ExpertError(f"{path} is {size} bytes long and announces {announced}", _REMEDY)
            raw = file.read(length)
        except OSError as error:
            raise ExpertError(f"{path} cannot be read: {error.strerror}", "Check the disk") from None
    try:
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            held = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()]
    except (SafetensorError, OSError) as error:
        raise ExpertError(f"{path}, of {size} bytes, is not a valid safetensors file: {error}", _REMEDY) from None
    tensors: dict[str, Tensor] = {}
    position = data_start = 8 + length
    for name, dtype, shape in held:
        _check(name, dtype, shape, path)
        tensors[name] = Tensor(name, dtype, shape, position, position + DTYPE_BYTES[dtype] * prod(shape))
        position = tensors[name].stop
    return TensorFile(path, tensors, data_start, size, prefix + raw, stamp(found))


@contextmanager
def open_tensors(source: TensorFile) -> Iterator[BufferedReader]:
    """Open a file whose header has been read, to read its tensors.

    Raises:
        ExpertError: the file is gone, or was replaced or written to since, up to the end of the block.
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
        raise ExpertError(f"{source.path} changed since it was opened", "Start again once it is complete")


def _check(name: str, dtype: str, shape: tuple[int, ...], path: Path) -> None:
    """What the library takes and we do not."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise ExpertError(f"{path}: {shown(name)} is not the name of a tensor", _REMEDY)
    if dtype not in DTYPE_BYTES:
        raise ExpertError(f"{path}: {name!r} has the unknown dtype {shown(dtype)}", _REMEDY)
    if len(shape) > 8 or any(length >= 2**63 for length in shape):
        raise ExpertError(f"{path}: {name!r} has the impossible shape {shown(list(shape))}", _REMEDY)
