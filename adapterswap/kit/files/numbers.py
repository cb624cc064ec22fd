"""The numbers in safetensors files: read in blocks as float32, checked for NaN and infinity, rounded once when written.

Uses numpy with ml_dtypes (for bfloat16), so composing needs no torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from adapterswap.kit.errors import UnsupportedError

_NUMPY = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

# An IEEE number is infinite or NaN exactly when all bits of its exponent are set.
_EXPONENT = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}


Bytes = npt.NDArray[np.uint8]


class Dtype(str):
    """The name of a dtype in safetensors files.

    Attributes:
        FLOATS: the dtypes used in arithmetic, most precise first.
        NAMES: the same, by their names in torch and numpy.
        BYTES: bytes per element of every dtype that a safetensors file may hold and that is a whole number of bytes.
    """

    __slots__ = ()

    FLOATS: ClassVar = ("F32", "F16", "BF16")
    NAMES: ClassVar = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    BYTES: ClassVar = {
        "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
        "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    }  # fmt: skip

    def pack(self, values: npt.NDArray[np.float32]) -> Bytes:
        """The bytes of `values`, rounded to nearest, ties to even."""
        with np.errstate(all="ignore"):  # an overflow becomes infinite, and `is_finite` reports it
            return np.ascontiguousarray(values.astype(_NUMPY[self], copy=False)).reshape(-1).view(np.uint8)

    def unpack(self, raw: Bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The tensor in `raw` as float32; exact, since float32 holds every float16 and bfloat16."""
        numbers: npt.NDArray[np.float32] = raw.view(_NUMPY[self]).reshape(shape).astype(np.float32)
        return numbers

    def is_finite(self, raw: Bytes) -> bool:
        """Whether `raw`, the bytes of whole elements, is free of NaN and infinity."""
        unsigned, exponent = _EXPONENT[self]
        bits = raw.view(unsigned) & exponent
        return bool(bits.size == 0 or bits.max() != exponent)

    def finite_bytes(self, values: npt.NDArray[np.float32], key: str) -> Bytes:
        """`pack`; raises an `UnsupportedError` where a number does not fit the dtype."""
        encoded = self.pack(values)
        if not self.is_finite(encoded):
            if self != "F16":  # bfloat16 and float32 have the same range
                raise too_large(key, self)
            raise UnsupportedError(f"{key} overflows F16 when blended", "Save the experts in bfloat16 or float32")
        return encoded


_MOVING = threading.Lock()  # a system without positioned access moves the position that all threads share


def read_at(file: int, into: memoryview, offset: int) -> int:
    """Fill a buffer with the bytes at `offset` of an open file; returns how many there were before the file's end."""
    bytes_read = 0
    while bytes_read < len(into):
        count = _read_some(file, into[bytes_read:], offset + bytes_read)
        if not count:
            break
        bytes_read += count
    return bytes_read


def _read_some(file: int, into: memoryview, offset: int) -> int:
    """Read bytes at `offset` of an open file into a buffer; how many, 0 at the end of the file."""
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


def write_at(output: int, data: Bytes, offset: int) -> None:
    """Write all of `data` at `offset`; a single system call may write less, for instance on a disk that fills up."""
    bytes_written = 0
    while bytes_written < data.size:
        bytes_written += write_some(output, data[bytes_written:].data, offset + bytes_written)


def row_ranges(total: int, step: int) -> Sequence[tuple[int, int]]:
    """Ranges that cover 0 to `total`; one empty range for a tensor without elements."""
    return [(start, min(start + step, total)) for start in range(0, total, step)] or [(0, 0)]


def too_large(name: str, dtype: str = "F32") -> UnsupportedError:
    """The error for numbers that overflow the widest dtype."""
    return UnsupportedError(
        f"{name} overflows {dtype} when computed",
        "Check the experts' weights, their lora_alpha and the composition's weights: one of them is far too large",
    )
