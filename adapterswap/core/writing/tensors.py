"""Write a safetensors file: copy byte ranges while hashing and checking the sources, and compute blends.

Memory does not grow with the adapter: copies go from file to file through one small buffer per expert, and blends are
computed one tensor at a time. `layout` decides which pieces make up a tensor.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.planning.plan import Plan
from adapterswap.core.writing.outputs import Layout, OutputTensor, header_bytes
from adapterswap.kit.errors import ExpertError
from adapterswap.kit.files.numbers import Dtype, write_at
from adapterswap.kit.files.tensorfile import Tensor, TensorFile, open_files

_BUFFER = 2**20  # bytes; a multiple of every element size, and small enough to stay in the processor's cache


def copy_and_hash(
    expert: str, source: TensorFile, targets: Mapping[str, Sequence[int]], output: int, known: str | None = None
) -> str:
    """Copy tensors of `source` to the byte offsets in `targets` of the open file `output`.

    Args:
        expert: the expert's name, for messages.
        source: the file; it is read once, from end to end.
        known: its SHA-256, if somebody computed it or its name states it; then only the tensors in `targets` are read.
        targets: tensor name → the offsets at which its bytes are written.
        output: a file descriptor open for writing.

    Returns:
        The SHA-256 of the whole source file, in hexadecimal.
    """
    digest = hashlib.sha256(source.header)
    buffer = np.empty(_BUFFER, np.uint8)
    with source.open() as file:
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
                if run.shifts and not Dtype(run.dtype).is_finite(view):
                    raise _first_not_finite(source, place, view).not_finite(expert)
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

    def dtype_and_shifts(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        return tensor.dtype, tuple(place - tensor.start for place in targets.get(tensor.name, ()))

    # Tensors are in the order of their bytes and without gaps: `TensorFile.read` checked it.
    for (dtype, shifts), group in groupby(source.tensors.values(), dtype_and_shifts):
        tensors = list(group)
        yield _Run(tensors[0].start, tensors[-1].stop, dtype, shifts)


def _first_not_finite(source: TensorFile, start: int, view: npt.NDArray[np.uint8]) -> Tensor:
    """The first tensor with NaN or infinity in the bytes `view`, which begin at `start` in the file."""
    for tensor in source.tensors.values():
        if tensor.stop <= start or start + view.size <= tensor.start:
            continue
        part = view[max(tensor.start - start, 0) : tensor.stop - start]
        if not Dtype(tensor.dtype).is_finite(part):
            return tensor
    raise AssertionError("all numbers are finite")


_BATCH = 2**19  # bytes that a thread computes before it takes the next batch


def write_tensors(plan: Plan, layout: Layout, path: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Write the file at `path`, which must not exist; return each expert's SHA-256 by name.

    Those in `known` are not computed. By default these are the ones that the names of downloaded files state.
    """
    if known is None:
        known = {name: adapter.file.stated_hash or "" for name, adapter in plan.adapters.items()}

    header, places = header_bytes((tensor.key, tensor.dtype, tensor.shape) for tensor in layout.tensors)
    targets = _copy_targets(plan, layout, places)
    size = max((place.stop for place in places.values()), default=len(header))
    computed = [tensor for tensor in layout.tensors if not tensor.is_copied]
    sources = [adapter.file for adapter in plan.adapters.values()]
    others: set[Path] = set()  # a base's shards
    for tensor in computed:
        others.update(piece.path for piece in tensor.pieces)

    def compute(tensors: Sequence[OutputTensor]) -> None:
        for tensor in tensors:
            write_at(output.fileno(), tensor.assemble(files), places[tensor.key].start)

    with (
        path.open("xb", buffering=0) as output,
        open_files(sources, others) as files,
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers,
    ):
        output.write(header)
        output.truncate(size)  # bytes that no piece fills read as zeros
        hashing: dict[str, Future[str]] = {}
        for name, adapter in plan.adapters.items():
            source, known_hash = adapter.file, known.get(name)
            hashing[name] = workers.submit(copy_and_hash, name, source, targets[name], output.fileno(), known_hash)
        hashes = {name: future.result() for name, future in hashing.items()}
        list(workers.map(compute, _batches(computed, places)))
    return hashes


def _batches(tensors: Iterable[OutputTensor], places: Mapping[str, Tensor]) -> Iterator[list[OutputTensor]]:
    """The tensors in groups: submitting each of a mixture's 18,000 small ones took longer than computing them."""
    batch: list[OutputTensor] = []
    size = 0
    for tensor in tensors:
        batch.append(tensor)
        size += places[tensor.key].nbytes
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _copy_targets(plan: Plan, layout: Layout, places: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Expert → source tensor → the offsets in the output at which its bytes are written."""
    targets: dict[str, dict[str, list[int]]] = {name: {} for name in plan.experts}
    for tensor in layout.tensors:
        if not tensor.is_copied:
            continue
        place = places[tensor.key]
        row = (place.stop - place.start) // tensor.shape[0]  # copied pieces follow each other along the first axis
        for piece in tensor.pieces:
            offset = place.start + piece.offset * row
            targets[piece.expert].setdefault(piece.tensor.name, []).append(offset)
    return targets
