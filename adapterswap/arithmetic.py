"""The numbers of a plan: tensors read as float32, put together, rounded once.

numpy with ml_dtypes (for bfloat16), so that composing needs no torch. Knows pieces and bytes; knows nothing of LoRA's
meaning, which `layout` has turned into factors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

from adapterswap.errors import AdapterswapError
from adapterswap.layout import OutputTensor
from adapterswap.tensorfile import Tensor

__all__ = ["assemble", "check_finite", "decode", "encode"]

_NUMPY = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

# An IEEE number is infinite or NaN exactly when all bits of its exponent are set.
_EXPONENT = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}


def decode(raw: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The tensor in `raw` as float32; exact, since float32 holds every float16 and bfloat16."""
    return np.frombuffer(raw, _NUMPY[dtype]).reshape(shape).astype(np.float32)


def encode(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of `values` in `dtype`, rounded to nearest, ties to even."""
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and check_finite tells of it with its name
        return np.ascontiguousarray(values.astype(_NUMPY[dtype], copy=False)).reshape(-1).view(np.uint8)


def check_finite(raw: npt.NDArray[np.uint8], dtype: str) -> bool:
    """Whether `raw`, whole elements of `dtype`, holds no NaN and no infinity."""
    unsigned, exponent = _EXPONENT[dtype]
    bits = raw.view(unsigned) & exponent
    return bool(bits.size == 0 or bits.max() != exponent)


def assemble(tensor: OutputTensor, files: Mapping[str, int]) -> npt.NDArray[np.uint8]:
    """Compute an output tensor's bytes from its pieces.

    Args:
        tensor: what to make.
        files: the open file of each expert.

    Raises:
        AdapterswapError: a piece holds NaN or infinity, or the result overflows its dtype.
    """
    values = np.empty(tensor.shape, np.float32)
    for piece in tensor.pieces:
        raw = read_tensor(files[piece.expert], piece.tensor)
        if not check_finite(raw, piece.tensor.dtype):
            raise not_finite(piece.expert, piece.tensor.name)
        width = piece.tensor.shape[tensor.axis]
        place = (slice(None),) * tensor.axis + (slice(piece.offset, piece.offset + width),)
        np.multiply(
            decode(raw.data, piece.tensor.dtype, piece.tensor.shape), np.float32(piece.factor), out=values[place]
        )
    encoded = encode(values, tensor.dtype)
    if not check_finite(encoded, tensor.dtype):
        raise AdapterswapError(
            f"{tensor.key} overflows {tensor.dtype} when it is blended", "Save the experts in bfloat16 or float32"
        )
    return encoded


def read_tensor(file: int, tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor from the open file `file`."""
    raw = np.empty(tensor.nbytes, np.uint8)
    if os.preadv(file, [raw.data], tensor.start) != tensor.nbytes and tensor.nbytes:
        raise AdapterswapError(f"{tensor.name} ends early", "The file changed while it was read: compose again")
    return raw


def not_finite(expert: str, key: str) -> AdapterswapError:
    return AdapterswapError(
        f"{key} of the expert {expert!r} holds NaN or infinity", "Its training diverged: use an earlier checkpoint"
    )
