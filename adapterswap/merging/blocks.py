"""Read what a tensor of the result is made of, block by block, and hash it on the way.

A block is a range of rows; memory is bounded by blocks, not by tensors, wherever a method allows it. Knows files and
plans; computes nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from adapterswap.arithmetic.tensors import Bytes
from adapterswap.errors import AdapterswapError
from adapterswap.files.tensorfile import DTYPE_BYTES, Tensor
from adapterswap.planning.allocation import BASE
from adapterswap.planning.parameters import LowRankTerm, ParameterPlan, Stored

__all__ = ["Block", "Hashes", "Part", "Work", "read_blocks", "read_rows", "row_ranges"]

_COPIED = 2**22  # bytes of a block that is copied
_COMPUTED = 2**21  # elements of a block that is computed: 8 MB in float32


@dataclass(frozen=True)
class Work:
    """A tensor of the result: its plan, and its place in a file that is open for writing."""

    parameter: ParameterPlan
    place: Tensor
    output: int

    @property
    def copied(self) -> Stored | None:
        """The tensor whose bytes are the result's."""
        found = self.parameter.copied
        return found if found is not None and found.tensor.dtype == self.place.dtype else None

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape with all but the last axis as rows; a vector is a column."""
        shape = self.place.shape
        return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


@dataclass(frozen=True)
class Part:
    """The bytes of rows of one source tensor; `expert` is `base` for the base."""

    expert: str
    tensor: Tensor
    raw: Bytes


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` of a tensor of the result, and what they are made of.

    For a tensor that is copied, `start` and `stop` count bytes. `factors` are the whole A and B of each low-rank term,
    and come with the first block of a tensor alone.
    """

    work: Work
    start: int
    stop: int
    whole: tuple[Part, ...]
    base: Part | None
    factors: tuple[tuple[Part, Part], ...]


@dataclass
class Hashes:
    """The SHA-256 of every tensor that was read from end to end, by expert and name; see `of`."""

    tensors: dict[tuple[str, str], tuple[Tensor, str]] = field(default_factory=dict)

    def of(self, expert: str) -> dict[str, int | str]:
        """How many tensors and bytes of an expert entered, and one hash of them all.

        It is the SHA-256 over, in the order of their names, each tensor's name, dtype, shape and own SHA-256, in text,
        a line each: whoever has the checkpoint can compute it again. It says nothing of tensors that did not enter.
        """
        own = sorted((name, *found) for (owner, name), found in self.tensors.items() if owner == expert)
        lines = [f"{name} {tensor.dtype} {list(tensor.shape)} {digest}\n" for name, tensor, digest in own]
        return {
            "tensors": len(own),
            "bytes": sum(tensor.nbytes for _, tensor, _ in own),
            "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
        }


def read_blocks(works: Iterable[Work], files: Mapping[Path, int], hashes: Hashes) -> Iterator[Block]:
    """The blocks of all works, in order.

    Raises:
        AdapterswapError: a file cannot be read, or is shorter than its header said.
    """
    for work in works:
        digests: dict[str, hashlib._Hash] = {}

        def read(
            expert: str, stored: Stored, start: int, stop: int, digests: dict[str, hashlib._Hash] = digests
        ) -> Part:
            raw = read_rows(files[stored.path], stored.tensor, start, stop)
            key = f"{expert}\0{stored.tensor.name}"
            digests.setdefault(key, hashlib.sha256()).update(raw.data)
            if stop == stored.tensor.nbytes:
                hashes.tensors[expert, stored.tensor.name] = (stored.tensor, digests[key].hexdigest())
            return Part(expert, stored.tensor, raw)

        parameter, copied = work.parameter, work.copied
        if copied is not None:
            expert = parameter.owner or BASE
            for start, stop in row_ranges(copied.tensor.nbytes, _COPIED):
                yield Block(work, start, stop, (read(expert, copied, start, stop),), None, ())
            continue
        rows, columns = work.matrix
        base = parameter.base if parameter.needs_base else None
        step = max(1, _COMPUTED // columns) if parameter.is_linear else rows
        for first, last in row_ranges(rows, step):

            def part(expert: str, stored: Stored, first: int = first, last: int = last, columns: int = columns) -> Part:
                size = DTYPE_BYTES[stored.tensor.dtype] * columns
                return read(expert, stored, first * size, last * size)

            whole = tuple(part(term.expert, term.stored) for term in parameter.whole)
            factors = tuple(_factors(term, files) for term in parameter.low_rank) if first == 0 else ()
            yield Block(work, first, last, whole, part(BASE, base) if base else None, factors)


def _factors(term: LowRankTerm, files: Mapping[Path, int]) -> tuple[Part, Part]:
    a, b = (
        Part(term.expert, tensor, read_rows(files[term.path], tensor, 0, tensor.nbytes))
        for tensor in (term.module.a, term.module.b)
    )
    return a, b


def row_ranges(total: int, step: int) -> Sequence[tuple[int, int]]:
    """Ranges that cover 0 to `total`; one empty range for a tensor without elements."""
    return [(start, min(start + step, total)) for start in range(0, total, step)] or [(0, 0)]


def read_rows(file: int, tensor: Tensor, start: int, stop: int) -> Bytes:
    """Bytes `start` to `stop` of a tensor of the open file `file`.

    Raises:
        AdapterswapError: they cannot be read, or the file ends before them.
    """
    raw = np.empty(stop - start, np.uint8)
    done = 0
    while done < raw.size:
        try:
            count = os.preadv(file, [raw[done:].data], tensor.start + start + done)
        except OSError as error:
            raise AdapterswapError(f"{tensor.name} cannot be read: {error.strerror}", "Check the disk") from None
        if count == 0:
            raise AdapterswapError(f"{tensor.name} ends early", "The file changed while it was read: start again")
        done += count
    return raw
