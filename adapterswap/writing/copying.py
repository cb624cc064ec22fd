"""Read a source file once: hash it, check the requested tensors for NaN and infinity, and copy their bytes.

Bytes go from file to file through one small buffer, so memory does not grow with the adapter. Knows byte ranges,
nothing of plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from adapterswap.errors import ExpertError
from adapterswap.files.numbers import check_finite, not_finite, write_at
from adapterswap.files.tensorfile import TensorFile, open_tensors

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
        for tensor in source.tensors.values():  # in the order of their bytes and without gaps: `read_header` checked it
            places = targets.get(tensor.name, ())
            if known and not places:
                file.seek(tensor.stop)
                continue
            copied = 0
            while copied < tensor.nbytes:
                view = buffer[: min(_BUFFER, tensor.nbytes - copied)]
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
                if places and not check_finite(view, tensor.dtype):
                    raise not_finite(expert, tensor.name)
                for place in places:
                    write_at(output, view, place + copied)
                copied += view.size
    return known or digest.hexdigest()
