"""The numbers in safetensors files: read in blocks as float32, checked for NaN and infinity, rounded once when written.

Uses numpy with ml_dtypes (for bfloat16), so composing needs no torch.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from adapterswap.kit.errors import ExpertError, UnsupportedError
from adapterswap.kit.files.tensorfile import DTYPE_BYTES, Tensor, TensorFile, open_tensors
from adapterswap.kit.files.text import open_regular

_NUMPY = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

# An IEEE number is infinite or NaN exactly when all bits of its exponent are set.
_EXPONENT = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}

_AGAIN = "The file changed while it was read. Run the command again"

Bytes = npt.NDArray[np.uint8]


def decode(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The tensor in `raw` as float32; exact, since float32 holds every float16 and bfloat16."""
    numbers: npt.NDArray[np.float32] = raw.view(_NUMPY[dtype]).reshape(shape).astype(np.float32)
    return numbers


def encode(values: npt.NDArray[np.float32], dtype: str) -> Bytes:
    """The bytes of `values` in `dtype`, rounded to nearest, ties to even."""
    with np.errstate(all="ignore"):  # an overflow becomes infinite, and `check_finite` reports it
        return np.ascontiguousarray(values.astype(_NUMPY[dtype], copy=False)).reshape(-1).view(np.uint8)


def check_finite(raw: Bytes, dtype: str) -> bool:
    """Whether `raw`, the bytes of whole `dtype` elements, is free of NaN and infinity."""
    unsigned, exponent = _EXPONENT[dtype]
    bits = raw.view(unsigned) & exponent
    return bool(bits.size == 0 or bits.max() != exponent)


def finite_bytes(values: npt.NDArray[np.float32], dtype: str, key: str) -> Bytes:
    """`encode`; raises an `UnsupportedError` where a number does not fit the dtype."""
    encoded = encode(values, dtype)
    if not check_finite(encoded, dtype):
        if dtype != "F16":  # bfloat16 and float32 have the same range
            raise too_large(key, dtype)
        raise UnsupportedError(f"{key} overflows F16 when blended", "Save the experts in bfloat16 or float32")
    return encoded


def read_numbers(expert: str, file: int, tensor: Tensor) -> npt.NDArray[np.float32]:
    """Read a tensor of the open file `file` as float32; raises as `read_elements` does."""
    return read_elements(expert, file, tensor, 0, math.prod(tensor.shape)).reshape(tensor.shape)


def read_elements(expert: str, file: int, tensor: Tensor, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Read elements `start` to `stop` of a tensor of the open file `file`, as a float32 vector."""
    size = DTYPE_BYTES[tensor.dtype]
    raw = read_bytes(file, tensor, start * size, stop * size)
    if not check_finite(raw, tensor.dtype):
        raise not_finite(expert, tensor.name)
    return decode(raw, tensor.dtype, (stop - start,))


_MOVING = threading.Lock()  # a system without positioned access moves the position that all threads share


def read_at(file: int, into: memoryview, offset: int) -> int:
    """Read bytes at `offset` of an open file into a buffer; how many there were, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [into], offset)
    with _MOVING:
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, len(into))
    into[: len(data)] = data
    return len(data)


def write_some(file: int, data: memoryview, offset: int) -> int:
    """Write bytes at `offset` of an open file; how many were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    with _MOVING:
        os.lseek(file, offset, os.SEEK_SET)
        return os.write(file, data)


def read_bytes(file: int, tensor: Tensor, start: int, stop: int) -> Bytes:
    """Read bytes `start` to `stop` of a tensor of the open file `file`."""
    raw = np.empty(stop - start, np.uint8)
    bytes_read = 0
    while bytes_read < raw.size:
        try:
            count = read_at(file, raw[bytes_read:].data, tensor.start + start + bytes_read)
        except OSError as error:
            raise ExpertError(f"{tensor.name} cannot be read: {error.strerror}", "Check the disk") from None
        if count == 0:
            raise ExpertError(f"The file ends in the middle of {tensor.name}", _AGAIN)
        bytes_read += count
    return raw


def write_at(output: int, data: Bytes, offset: int) -> None:
    """Write all of `data` at `offset`; a single system call may write less, for instance on a disk that fills up."""
    bytes_written = 0
    while bytes_written < data.size:
        bytes_written += write_some(output, data[bytes_written:].data, offset + bytes_written)


def row_ranges(total: int, step: int) -> Sequence[tuple[int, int]]:
    """Ranges that cover 0 to `total`; one empty range for a tensor without elements."""
    return [(start, min(start + step, total)) for start in range(0, total, step)] or [(0, 0)]


def not_finite(expert: str, key: str) -> ExpertError:
    return ExpertError(
        f"{key} of the expert {expert!r} holds NaN or infinity", "Its training diverged: use an earlier checkpoint"
    )


@contextmanager
def open_files(sources: Iterable[TensorFile], others: Iterable[Path] = ()) -> Iterator[dict[Path, int]]:
    """Open the files for reading; yields their file descriptors by path."""
    with ExitStack() as stack:
        by_path = {source.path: source for source in sources}
        files = {path: stack.enter_context(open_tensors(source)) for path, source in by_path.items()}
        files |= {path: stack.enter_context(open_regular(path, _AGAIN)) for path in set(others) - files.keys()}
        yield {path: file.fileno() for path, file in files.items()}


def too_large(name: str, dtype: str = "F32") -> UnsupportedError:
    """The error for numbers that overflow the widest dtype."""
    return UnsupportedError(
        f"{name} overflows {dtype} when computed",
        "Check the experts' weights, their lora_alpha and the composition's weights: one of them is far too large",
    )
