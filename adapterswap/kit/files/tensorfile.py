"""Safetensors files as named byte ranges: read a header, check it, write one.

The safetensors library reads and checks headers: every byte belongs to exactly one tensor, and each tensor has the size
of its shape and dtype. The library does not report where a tensor is in the file, which copying without loading needs;
that follows from the order and the sizes. This module also refuses dtypes that we do not handle, names that cannot be
printed, and sizes beyond 64 bits. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length,
JSON, data).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from adapterswap.kit.errors import ExpertError
from adapterswap.kit.files.hashes import stamp
from adapterswap.kit.files.numbers import Bytes, Dtype, read_at
from adapterswap.kit.files.text import check_pointer, open_regular, shown

# In bytes; the safetensors library's own limit is 100 MB, and 140,000 tensors with long names take 21 MB.
_MAX_HEADER = 32 * 2**20
_MAX_NAME = 500  # characters
_SHA256 = re.compile("[0-9a-f]{64}")
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

    def not_finite(self, expert: str) -> ExpertError:
        """The error for NaN or infinity in this tensor of an expert."""
        return ExpertError(
            f"{self.name} of the expert {expert!r} holds NaN or infinity",
            "Its training diverged: use an earlier checkpoint",
        )

    def read_bytes(self, file: int, start: int, stop: int) -> Bytes:
        """Read bytes `start` to `stop` of this tensor, from the open file `file`."""
        raw = np.empty(stop - start, np.uint8)
        try:
            is_whole = read_at(file, raw.data, self.start + start) == raw.size
        except OSError as error:
            raise ExpertError(f"{self.name} cannot be read: {error.strerror}", "Check the disk") from None
        if not is_whole:
            raise ExpertError(f"The file ends in the middle of {self.name}", _AGAIN)
        return raw

    def read_elements(self, expert: str, file: int, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Read elements `start` to `stop` of this tensor, from the open file `file`, as a float32 vector."""
        size = Dtype.BYTES[self.dtype]
        raw = self.read_bytes(file, start * size, stop * size)
        if not Dtype(self.dtype).is_finite(raw):
            raise self.not_finite(expert)
        return Dtype(self.dtype).unpack(raw, (stop - start,))

    def read_numbers(self, expert: str, file: int) -> npt.NDArray[np.float32]:
        """Read this tensor from the open file `file` as float32; raises as `read_elements` does."""
        return self.read_elements(expert, file, 0, math.prod(self.shape)).reshape(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header has been read and checked.

    Attributes:
        path: the file.
        tensors: by name, in the order of their bytes.
        data_start: where the tensor data begins, in bytes from the start of the file.
        size: the file's size in bytes.
        header: the header's raw bytes (length prefix included).
        stamp: its size, times and inode, which change when the file is replaced or written to; see `open`.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    data_start: int
    size: int
    header: bytes
    stamp: tuple[int, ...]

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the file, to read its tensors."""
        with open_regular(self.path, "Run the command again once the file is complete") as file:
            _check_stamp(file, self)
            yield file
            _check_stamp(file, self)

    @property
    def stated_hash(self) -> str | None:
        """The SHA-256 that a downloaded file's name states, in hexadecimal; None for a file of any other kind.

        The Hub's cache keeps a large file as `models--ORG--NAME/blobs/SHA256`, and its snapshots contain links to it.
        """
        blob = Path(os.path.realpath(self.path))
        is_cached = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
        if not is_cached or not _SHA256.fullmatch(blob.name):
            return None
        return blob.name

    @staticmethod
    def read(path: str | Path) -> TensorFile:
        """Read and check the header of a safetensors file, without touching the tensors."""
        path = Path(path)
        with open_regular(path, "Pass the path of a readable file") as file:
            try:
                file_stat = os.fstat(file.fileno())
                size = file_stat.st_size
                prefix = file.read(8)
                check_pointer(prefix + file.peek(100), path)
                if len(prefix) < 8:
                    raise ExpertError(f"{path} is {size} bytes long, but it has no header", _REMEDY)

                length = int.from_bytes(prefix, "little")
                if length > min(size - 8, _MAX_HEADER):
                    raise ExpertError(f"{path} is {size} bytes long, but its header claims {length} bytes", _REMEDY)
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
        for name, dtype, shape in specs:
            # The library accepts these.
            if not name.isprintable() or len(name) > _MAX_NAME:
                raise ExpertError(f"{path}: {shown(name)} is not the name of a tensor", _REMEDY)
            if dtype not in Dtype.BYTES:
                raise ExpertError(f"{path}: {name!r} has the unknown dtype {shown(dtype)}", _REMEDY)
            if len(shape) > 8 or max(shape, default=0) >= 2**63:
                raise ExpertError(f"{path}: {name!r} has the impossible shape {shown(list(shape))}", _REMEDY)

            stop = position + Dtype.BYTES[dtype] * prod(shape)
            tensors[name] = Tensor(name, dtype, shape, position, stop)
            position = stop
        return TensorFile(path, tensors, data_start, size, prefix + raw, stamp(file_stat))


def _check_stamp(file: BufferedReader, source: TensorFile) -> None:
    if stamp(os.fstat(file.fileno())) != source.stamp:
        raise ExpertError(
            f"{source.path} has changed since it was opened", "Run the command again once the file is complete"
        )


_AGAIN = "The file changed while it was read. Run the command again"


@contextmanager
def open_files(sources: Iterable[TensorFile], others: Iterable[Path] = ()) -> Iterator[dict[Path, int]]:
    """Open the files for reading; yields their file descriptors by path."""
    with ExitStack() as stack:
        by_path = {source.path: source for source in sources}
        files = {path: stack.enter_context(source.open()) for path, source in by_path.items()}
        files |= {path: stack.enter_context(open_regular(path, _AGAIN)) for path in set(others) - files.keys()}
        yield {path: file.fileno() for path, file in files.items()}
