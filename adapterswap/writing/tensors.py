"""Write a layout's safetensors file: copy byte ranges while hashing the sources, and compute blends.

Knows layouts and files. Memory stays small: copies go through one buffer per expert, and blends are computed one tensor
at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapterswap.arithmetic.assembling import assemble
from adapterswap.arithmetic.outputs import Layout, OutputTensor
from adapterswap.files.numbers import open_files, write_at
from adapterswap.files.tensorfile import Tensor, header_bytes
from adapterswap.planning.plan import Plan
from adapterswap.writing.copying import copy_and_hash

__all__ = ["write_computed", "write_tensors"]

_BATCH = 2**19  # bytes that a thread computes before it takes the next batch


def write_tensors(plan: Plan, layout: Layout, path: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Write the file at `path`, which must not exist; return each expert's SHA-256 by name.

    Raises:
        ExpertError: NaN or infinity in a source, or a source that changed.
        UnsupportedError: overflow in a blend.
        OSError: the file cannot be written.
    """
    header, places = header_bytes((tensor.key, tensor.dtype, tensor.shape) for tensor in layout.tensors)
    targets = _copy_targets(plan, layout, places)
    size = max((place.stop for place in places.values()), default=len(header))
    computed = [tensor for tensor in layout.tensors if not tensor.is_copied]
    sources = [adapter.file for adapter in plan.adapters.values()]
    others = {piece.path for tensor in computed for piece in tensor.pieces}  # a base's shards

    def compute(tensors: Sequence[OutputTensor]) -> None:
        for tensor in tensors:
            write_at(output.fileno(), assemble(tensor, files), places[tensor.key].start)

    with (
        path.open("xb", buffering=0) as output,
        open_files(sources, others) as files,
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers,
    ):
        output.write(header)
        output.truncate(size)  # bytes that no piece fills read as zeros
        hashing = {
            name: workers.submit(
                copy_and_hash, name, adapter.file, targets[name], output.fileno(), (known or {}).get(name)
            )
            for name, adapter in plan.adapters.items()
        }
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


def write_computed(tensors: Sequence[OutputTensor], path: Path) -> None:
    """Write a file of tensors that are already computed, at `path`, which must not exist.

    Raises:
        OSError: the file cannot be written.
    """
    header, places = header_bytes((tensor.key, tensor.dtype, tensor.shape) for tensor in tensors)
    with path.open("xb", buffering=0) as output:
        output.write(header)
        for tensor in tensors:
            write_at(output.fileno(), assemble(tensor, {}), places[tensor.key].start)


def _copy_targets(plan: Plan, layout: Layout, places: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Expert → source tensor → the offsets in the output at which its bytes are written."""
    targets: dict[str, dict[str, list[int]]] = {name: {} for name in plan.experts}
    for tensor in layout.tensors:
        if not tensor.is_copied:
            continue
        place = places[tensor.key]
        row = place.nbytes // tensor.shape[0]  # copied pieces follow each other along the first axis
        for piece in tensor.pieces:
            offset = place.start + piece.offset * row
            targets[piece.expert].setdefault(piece.tensor.name, []).append(offset)
    return targets
