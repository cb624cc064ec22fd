"""Read a source file once: hash it, check the requested tensors for NaN and infinity, and copy their bytes.

Bytes go from file to file through one small buffer, so memory does not grow with the adapter. Knows byte ranges,
nothing of plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.errors import ExpertError
from adapterswap.files.numbers import check_finite, not_finite, write_at
from adapterswap.files.tensorfile import Tensor, TensorFile, open_tensors

__all__ = ["copy_and_hash"]

_BUFFER = 4 * 2**20  # bytes; a multiple of every element size, large enough to keep the hash busy


def copy_and_hash(
    expert: str, source: TensorFile, targets: Mapping[str, Sequence[int]], output: int, known: str | None = None
) -> str:
    """Copy tensors of `source` to the byte offsets in `targets` of the open file `output`.

    Args:
        expert: the expert's name, for messages.
        source: the file; it is read once, from end to end.
        known: its SHA-256, if it was computed since the file last changed; then only the tensors in `targets` are read.
        targets: tensor name → the offsets at which its bytes are written.
        output: a file descriptor open for writing.

    Returns:
        The SHA-256 of the whole source file, in hexadecimal.

    Raises:
        ExpertError: a tensor in `targets` holds NaN or infinity, the file cannot be read, or it changed since its
            header was read.
        OSError: the output cannot be written.
    """
    digest = hashlib.sha256(source.header)
    buffer = np.empty(_BUFFER, np.uint8)
    with open_tensors(source) as file:
        file.seek(source.data_start)
        for run in _runs(source, targets):
            if known and not run.shifts:
                file.seek(run.stop)
                continue
            place = run.start
            while place < run.stop:
                view = buffer[: min(_BUFFER, run.stop - place)]
                try:
                    read = file.readinto(view.data)
                except OSError as error:
                    raise ExpertError(f"{source.path} cannot be read: {error.strerror}", "Check the disk") from None
                if read != view.size:
                    raise ExpertError(
                        f"{source.path} became shorter while it was read", "Start again when the file is complete"
                    )
                if not known:
                    digest.update(view.data)
                if run.shifts and not check_finite(view, run.dtype):
                    raise not_finite(expert, _first_not_finite(source, place, view))
                for shift in run.shifts:
                    write_at(output, view, place + shift)
                place += view.size
    return known or digest.hexdigest()


class _Run(NamedTuple):
    """Tensors of one dtype that follow each other in a file, and in each of the places to which they are copied.

    Attributes:
        start, stop: their bytes in the file.
        shifts: what to add to an offset in the file, for each offset in the output.
    """

    start: int
    stop: int
    dtype: str
    shifts: tuple[int, ...]


def _runs(source: TensorFile, targets: Mapping[str, Sequence[int]]) -> Iterator[_Run]:
    """All tensors of a file in runs: a mixture's 37,000 small tensors one by one took twice as long."""

    def destination(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        return tensor.dtype, tuple(place - tensor.start for place in targets.get(tensor.name, ()))

    # Tensors are in the order of their bytes and without gaps: `read_header` checked it.
    for (dtype, shifts), group in groupby(source.tensors.values(), destination):
        tensors = list(group)
        yield _Run(tensors[0].start, tensors[-1].stop, dtype, shifts)


def _first_not_finite(source: TensorFile, start: int, view: npt.NDArray[np.uint8]) -> str:
    """The name of the first tensor with NaN or infinity in the bytes `view`, which begin at `start` in the file."""
    within = (tensor for tensor in source.tensors.values() if start < tensor.stop and tensor.start < start + view.size)
    parts = ((tensor, view[max(tensor.start - start, 0) : tensor.stop - start]) for tensor in within)
    return next(tensor.name for tensor, part in parts if not check_finite(part, tensor.dtype))
