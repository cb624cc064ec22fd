"""Compute the bytes of an output tensor: read its pieces as float32, combine them, round once.

`layout` decides which pieces make up a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from adapterswap.arithmetic.outputs import OutputTensor
from adapterswap.files.numbers import Bytes, finite_bytes, read_numbers

__all__ = ["assemble"]


def assemble(tensor: OutputTensor, files: Mapping[Path, int]) -> Bytes:
    """Compute an output tensor's bytes from its pieces.

    Args:
        tensor: the tensor to compute.
        files: the open files that hold the pieces.

    Raises:
        ExpertError: a piece holds NaN or infinity.
        UnsupportedError: the result overflows its dtype.
    """
    if tensor.data is not None:
        return tensor.data.read(tensor.shape)
    values = np.zeros(tensor.view or tensor.shape, np.float32)
    offsets: set[int] = set()
    with np.errstate(all="ignore"):  # as in `encode`
        for piece in tensor.pieces:
            numbers = read_numbers(piece.expert, files[piece.path], piece.source) * np.float32(piece.factor)
            if piece.rows is not None:
                numbers *= piece.rows[:, None]
            if tensor.axis is None:
                values += numbers
            else:
                width = piece.source.shape[tensor.axis]
                place = (slice(None),) * tensor.axis + (slice(piece.offset, piece.offset + width),)
                if piece.cut is not None and piece.offset in offsets:
                    values[place] += numbers
                else:
                    values[place] = numbers
                offsets.add(piece.offset)
    return finite_bytes(values, tensor.dtype, tensor.key)
