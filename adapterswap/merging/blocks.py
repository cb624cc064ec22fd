"""Read the sources of a tensor of the result, block by block, and record what was used.

A block is a range of rows. Memory is bounded by blocks rather than tensors wherever the method allows it. Knows files
and plans; computes nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from adapterswap.changes.kinds import ExpertRows, Opaque, Whole
from adapterswap.experts.adapters import LoraModule
from adapterswap.files.dtypes import DTYPE_BYTES
from adapterswap.files.numbers import Bytes, read_bytes, row_ranges
from adapterswap.files.tensorfile import Tensor
from adapterswap.planning.allocation import BASE
from adapterswap.planning.slots import Slot, Term

__all__ = ["Block", "Entered", "Part", "ResultTensor", "read_blocks"]

_REMEMBERED = 8  # parameters of mixtures: the changes of two experts in two layers
_COPIED = 2**20  # bytes of a block to copy, and
_COMPUTED = 2**18  # elements of a block to compute, 1 MB in float32: both fit in a core's cache


@dataclass(frozen=True)
class ResultTensor:
    """A tensor of the result: its slot, and its place in a file that is open for writing."""

    slot: Slot
    place: Tensor
    output: int

    @property
    def copied(self) -> Whole | None:
        """The tensor to copy byte for byte; None if the result must be computed."""
        source = self.slot.copied
        return source if source is not None and source.tensor.dtype == self.place.dtype else None

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape as (rows, columns): all axes but the last are rows, and a vector is one column."""
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
    """Rows `start` to `stop` of a tensor of the result, with their sources.

    For a tensor that is copied, `start` and `stop` count bytes. `factors` are the whole A and B of each low-rank term;
    only the first block of a tensor has them, or of each of its matrices (`Slot.matrices`), which begins at row
    `origin`, or of each range of `Slot.rows`. `opaque` are the tensors of each opaque term, by name.
    """

    result: ResultTensor
    start: int
    stop: int
    whole: tuple[Part, ...]
    base: Part | None
    factors: tuple[tuple[Part, Part], ...]
    opaque: tuple[Mapping[str, Part], ...] = ()
    origin: int = 0

    @property
    def parts(self) -> Iterator[Part]:
        """All parts that were read."""
        yield from self.whole
        if self.base is not None:
            yield self.base
        for pair in self.factors:
            yield from pair
        for tensors in self.opaque:
            yield from tensors.values()


@dataclass
class Entered:
    """The source tensors of the result, by expert and name: copied ones, and inputs of computed ones.

    Only the inputs of computed tensors are hashed. A copied tensor can be compared with the result byte for byte, and
    hashing it would take longer than copying.
    """

    copied: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    computed: dict[tuple[str, str], tuple[Tensor, str]] = field(default_factory=dict)
    _sorted: OrderedDict[tuple[int, str], npt.NDArray[np.unsignedinteger]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def columns_by_expert(self, file: int, lora: LoraModule) -> npt.NDArray[np.unsignedinteger]:
        """B of a mixture's experts as experts×out×rank, with the bits as integers. The last few are cached."""
        key = (file, lora.b.name)
        with self._lock:
            if key not in self._sorted:
                raw = read_bytes(file, lora.b, 0, lora.b.nbytes).view(f"u{DTYPE_BYTES[lora.b.dtype]}")
                stored = raw.reshape(lora.out_features, lora.rank, lora.experts)
                self._sorted[key] = np.ascontiguousarray(stored.transpose(2, 0, 1))
                while len(self._sorted) > _REMEMBERED:
                    self._sorted.popitem(last=False)
            return self._sorted[key]

    def of(self, expert: str) -> dict[str, dict[str, int | str]]:
        """How many tensors and bytes of an expert were copied, how many were inputs of computations, and their hash.

        The hash is the SHA-256 of a text with one line per tensor, sorted by name: its name, dtype, shape and own
        SHA-256. You can compute it again from the checkpoint. It does not cover other tensors.
        """
        copied = [tensor for (owner, _), tensor in self.copied.items() if owner == expert]
        inputs = sorted((name, *entry) for (owner, name), entry in self.computed.items() if owner == expert)
        lines = [f"{name} {tensor.dtype} {list(tensor.shape)} {digest}\n" for name, tensor, digest in inputs]
        return {
            "copied": {"tensors": len(copied), "bytes": sum(tensor.nbytes for tensor in copied)},
            "computed": {
                "tensors": len(inputs),
                "bytes": sum(tensor.nbytes for _, tensor, _ in inputs),
                "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
            },
        }


def read_blocks(result: ResultTensor, files: Mapping[Path, int], entered: Entered) -> Iterator[Block]:
    """The blocks of a tensor of the result, in order.

    Raises:
        ExpertError: a file cannot be read, or is shorter than its header says.
    """
    if result.copied is None:
        yield from _computed_blocks(result, _Reader(files, entered))
        return
    owner, tensor = result.slot.owner or BASE, result.copied.tensor
    for start, stop in row_ranges(tensor.nbytes, _COPIED):
        raw = read_bytes(files[result.copied.path], tensor, start, stop)
        yield Block(result, start, stop, (Part(owner, tensor, raw),), None, ())
    entered.copied[owner, tensor.name] = tensor


def _computed_blocks(result: ResultTensor, reader: _Reader) -> Iterator[Block]:
    slot = result.slot
    if slot.rows:
        yield from _blocks_by_rows(result, reader)
        return
    base = slot.base if slot.needs_base else None
    rows, columns = result.matrix
    step = rows if slot.is_held_whole else max(1, _COMPUTED // columns)
    height = rows // slot.matrices
    for matrix, (first, last) in product(range(slot.matrices), row_ranges(height, step)):
        origin = matrix * height
        start, stop = origin + first, origin + last
        cut = (start * columns, stop * columns)
        # An expert on two sides is read and hashed once.
        read = {term.expert: term.whole for term in slot.whole}
        parts = {expert: reader.elements(expert, whole, *cut) for expert, whole in read.items()}
        weights = tuple(parts[term.expert] for term in slot.whole)
        factors = tuple(reader.factors(term, matrix) for term in slot.low_rank) if start == origin else ()
        opaque = tuple(map(reader.opaque, slot.opaque))
        base_part = reader.elements(BASE, base, *cut) if base else None
        yield Block(result, start, stop, weights, base_part, factors, opaque, origin)


def _blocks_by_rows(result: ResultTensor, reader: _Reader) -> Iterator[Block]:
    """The blocks of an embedding or head whose rows have different terms.

    If any row of a tensor is used, all are read, so that its hash covers the whole tensor.
    """
    slot, columns = result.slot, result.matrix[1]
    whole = {(t.expert, t.whole.tensor.name): t.whole for t in slot.all_terms if isinstance(t.change, Whole)}
    if slot.base is not None and any(part.rest for part in slot.rows):
        whole[BASE, slot.base.tensor.name] = slot.base
    for rows in slot.rows:
        if slot.opaque:  # one range of all rows, which PEFT computes from the copy that the expert lends
            (lent,), computed = rows.lent, replace(result, slot=replace(slot, terms=rows.terms))
            copy = reader.elements(lent.expert, lent.whole, rows.start * columns, rows.stop * columns)
            yield Block(computed, rows.start, rows.stop, (), copy, (), tuple(map(reader.opaque, slot.opaque)))
            continue
        terms = (*rows.terms, *rows.lent)
        tensor_of_rows = replace(result, slot=replace(slot, terms=terms))
        factors = tuple(reader.factors(term, 0) for term in tensor_of_rows.slot.low_rank)
        entering = {(term.expert, term.whole.tensor.name): term.whole for term in tensor_of_rows.slot.whole}
        if rows.rest and slot.base is not None:
            entering[BASE, slot.base.tensor.name] = slot.base
        for start, stop in row_ranges(rows.stop - rows.start, max(1, _COMPUTED // columns)):
            first, last = start + rows.start, stop + rows.start
            parts = {}
            for key, source in entering.items():
                shift = source.place_of(rows.start) - rows.start
                parts[key] = reader.elements(key[0], source, (first + shift) * columns, (last + shift) * columns)
            for key, source in whole.items():
                if key not in entering:
                    reader.skip(key[0], source, first * columns, last * columns)
            weights = tuple(parts[term.expert, term.whole.tensor.name] for term in tensor_of_rows.slot.whole)
            base_part = None if slot.base is None else parts.get((BASE, slot.base.tensor.name))
            yield Block(tensor_of_rows, first, last, weights, base_part, factors if start == 0 else ())
    for (expert, _), source in whole.items():
        rows_left = row_ranges(max(0, source.tensor.shape[0] - slot.shape[0]), max(1, _COMPUTED // columns))
        for start, stop in rows_left:
            reader.skip(expert, source, (slot.shape[0] + start) * columns, (slot.shape[0] + stop) * columns)


class _Reader:
    """Reads the sources of a computed tensor from their first byte to their last, and hashes them on the way."""

    def __init__(self, files: Mapping[Path, int], entered: Entered) -> None:
        self._files = files
        self._entered = entered
        self._digests: defaultdict[tuple[str, str], hashlib._Hash] = defaultdict(hashlib.sha256)

    def elements(self, expert: str, whole: Whole, start: int, stop: int) -> Part:
        """Elements `start` to `stop` of a tensor of an expert."""
        tensor = whole.tensor
        size = DTYPE_BYTES[tensor.dtype]
        raw = read_bytes(self._files[whole.path], tensor, start * size, stop * size)
        digest = self._digests[expert, tensor.name]
        digest.update(raw.data)
        if stop * size == tensor.nbytes:
            self._entered.computed[expert, tensor.name] = (tensor, digest.hexdigest())
        return Part(expert, tensor, raw)

    def skip(self, expert: str, whole: Whole, start: int, stop: int) -> None:
        """Hash elements of a tensor that the result does not use; those after its end are left out."""
        stop = min(stop, whole.tensor.nbytes // DTYPE_BYTES[whole.tensor.dtype])
        if start < stop and not whole.rows:
            self.elements(expert, whole, start, stop)

    def factors(self, term: Term, matrix: int) -> tuple[Part, Part]:
        """The whole A and B, or those of one expert of a mixture. They are not hashed: the adapter's file is."""
        file = self._files[term.change.path]
        if term.lora.experts > 1 or term.low_rank.within is not None:
            within = term.low_rank.within or ExpertRows(matrix, 0, term.lora.out_features)
            return self._of_expert(term.expert, term.lora, within, file)
        a, b = (
            Part(term.expert, tensor, read_bytes(file, tensor, 0, tensor.nbytes))
            for tensor in (term.lora.a, term.lora.b)
        )
        return a, b

    def _of_expert(self, expert: str, lora: LoraModule, within: ExpertRows, file: int) -> tuple[Part, Part]:
        """One expert's rows of A, and its columns of B, which are `lora.experts` apart in the file."""
        size, rank = DTYPE_BYTES[lora.a.dtype] * lora.in_features, lora.rank
        place = within.expert * rank
        a = read_bytes(file, lora.a, place * size, (place + rank) * size)
        b = self._entered.columns_by_expert(file, lora)[within.expert, within.start : within.stop]
        return (
            Part(expert, replace(lora.a, shape=(rank, lora.in_features)), a),
            Part(expert, replace(lora.b, shape=b.shape), b.reshape(-1).view(np.uint8)),
        )

    def opaque(self, term: Term) -> dict[str, Part]:
        """All tensors of a module, including those that it shares."""
        file = self._files[term.change.path]
        assert isinstance(term.change, Opaque)
        tensors = {**term.change.part.tensors, **term.change.part.shared}
        return {
            name: Part(term.expert, tensor, read_bytes(file, tensor, 0, tensor.nbytes))
            for name, tensor in tensors.items()
        }
