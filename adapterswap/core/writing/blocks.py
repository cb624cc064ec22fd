"""Read the sources of full weights block by block; `computing` computes the result from them.

A block is a range of rows. Memory is bounded by blocks rather than tensors wherever the method allows it. What is read
for a computation is hashed on the way, for the record.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.kinds import LowRank, Opaque, Term, Whole
from adapterswap.core.changes.opaque import merged
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.base import ExpertRows
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.slots import Slot, Span
from adapterswap.core.writing.resolution import KeptRows
from adapterswap.kit.files.numbers import Bytes, Dtype, row_ranges
from adapterswap.kit.files.tensorfile import Tensor

Numbers = npt.NDArray[np.float32]

_REMEMBERED = 8  # parameters of mixtures: the changes of two experts in two layers
_COPIED = 2**20  # bytes of a block to copy, and
_COMPUTED = 2**18  # elements of a block to compute, 1 MB in float32: both fit in a core's cache


class ResultTensor(NamedTuple):
    """A tensor of the result: its slot, and its place in a file that is open for writing."""

    slot: Slot
    place: Tensor
    output: int

    @property
    def copied(self) -> Whole | None:
        """The tensor to copy byte for byte; None if the result must be computed."""
        source = self.slot.copied
        if source is None or source.tensor.dtype != self.place.dtype:
            return None
        return source

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape as (rows, columns): all axes but the last are rows, and a vector is one column."""
        shape = self.place.shape
        if len(shape) < 2:
            return prod(shape), 1
        return prod(shape[:-1]), shape[-1]


class SourcePart(NamedTuple):
    """The bytes of rows of one source tensor; `expert` is `base` for the base."""

    expert: str
    tensor: Tensor
    raw: Bytes

    def numbers(self, shape: tuple[int, ...] | None = None) -> Numbers:
        """The numbers in float32, in this shape; by default the tensor's, of which all rows were read."""
        if shape is None:
            shape = self.tensor.shape
        return Dtype(self.tensor.dtype).unpack(self.raw, shape)


class StoredRows(NamedTuple):
    """Rows of a weight that is stored, an expert's or the base's: their side, and their coefficient in a sum."""

    side: str
    coefficient: float
    part: SourcePart

    @property
    def expert(self) -> str:
        return self.part.expert

    @property
    def parts(self) -> tuple[SourcePart, ...]:
        return (self.part,)

    def matrix(self, base: Numbers, slot: Slot, kept_rows: KeptRows, *, as_delta: bool) -> Numbers:
        """W_i, or W_i - W."""
        weight = self.part.numbers(base.shape)
        if as_delta:
            weight = weight - base
        return weight


_Kind = TypeVar("_Kind", LowRank, Opaque)


@dataclass
class _OfTerm(Generic[_Kind]):
    """What was read of a term, with the term's side, expert and coefficient."""

    term: Term[_Kind]

    @property
    def side(self) -> str:
        return self.term.side

    @property
    def expert(self) -> str:
        return self.term.expert

    @property
    def coefficient(self) -> float:
        return self.term.coefficient


@dataclass
class Pair(_OfTerm[LowRank]):
    """The whole A and B of a low-rank term."""

    a: SourcePart
    b: SourcePart

    @property
    def parts(self) -> tuple[SourcePart, ...]:
        return self.a, self.b

    def factors(self, kept_rows: KeptRows) -> Factors:
        """The factors of ΔW (out×in), with zeros in rows that are not kept."""
        factors = Factors.scaled(self.a.numbers(), self.b.numbers(), self.term.lora.scale, self.term.lora.name)
        rows = kept_rows.get((self.side, self.term.lora.name))
        if rows is None:
            return factors
        return factors.masked(rows)

    def matrix(self, base: Numbers, slot: Slot, kept_rows: KeptRows, *, as_delta: bool) -> Numbers:
        """s·B·A, which is ΔW_i in any case."""
        delta = self.factors(kept_rows).rows()
        return delta.T if self.term.change.transposed else delta


@dataclass
class Inputs(_OfTerm[Opaque]):
    """All tensors of an opaque term's module by name, from which PEFT computes its weight."""

    tensors: Mapping[str, SourcePart]

    @property
    def parts(self) -> tuple[SourcePart, ...]:
        return tuple(self.tensors.values())

    def matrix(self, base: Numbers, slot: Slot, kept_rows: KeptRows, *, as_delta: bool) -> Numbers:
        """f(W), or f(W) - W, for the base's weight W."""
        parameter = slot.name.rpartition(".")[2]
        tensors = {name: part.numbers() for name, part in self.tensors.items()}
        return merged(self.term.change, parameter, base, tensors, as_delta=as_delta)


ReadTerm = StoredRows | Pair | Inputs
"""What was read of one term. `matrix` is its W_i or, `as_delta`, its ΔW_i, as the model stores the weight."""


class Block(NamedTuple):
    """Rows `start` to `stop` of a tensor of the result, with their sources: what was read of each term of `span`.

    Only the first block of a span has `factors`, which begin at row `origin`. For a tensor that is copied, `start` and
    `stop` count bytes, and `copied` is what they are copied from.
    """

    result: ResultTensor
    span: Span
    start: int
    stop: int
    whole: tuple[StoredRows, ...] = ()
    base: tuple[StoredRows, ...] = ()
    factors: tuple[Pair, ...] = ()
    opaque: tuple[Inputs, ...] = ()
    origin: int = 0
    copied: SourcePart | None = None

    @property
    def parts(self) -> Iterator[SourcePart]:
        """All parts that were read."""
        if self.copied is not None:
            yield self.copied
        sources: tuple[ReadTerm, ...] = (*self.whole, *self.base, *self.factors, *self.opaque)
        for source in sources:
            yield from source.parts


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
                raw = lora.b.read_bytes(file, 0, lora.b.nbytes).view(f"u{Dtype.BYTES[lora.b.dtype]}")
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

        inputs = []
        digest = hashlib.sha256()
        for (owner, name), (tensor, own_digest) in sorted(self.computed.items(), key=lambda entry: entry[0]):
            if owner == expert:
                inputs.append(tensor)
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {own_digest}\n".encode())

        return {
            "copied": {"tensors": len(copied), "bytes": sum(tensor.nbytes for tensor in copied)},
            "computed": {
                "tensors": len(inputs),
                "bytes": sum(tensor.nbytes for tensor in inputs),
                "sha256": digest.hexdigest(),
            },
        }


def read_blocks(result: ResultTensor, files: Mapping[Path, int], entered: Entered) -> Iterator[Block]:
    """The blocks of a tensor of the result, in order."""
    if result.copied is None:
        yield from _computed_blocks(result, _Reader(files, entered))
        return
    owner, tensor = result.slot.owner or BASE, result.copied.tensor
    for start, stop in row_ranges(tensor.nbytes, _COPIED):
        raw = tensor.read_bytes(files[result.copied.path], start, stop)
        yield Block(result, result.slot.ordinary, start, stop, copied=SourcePart(owner, tensor, raw))
    entered.copied[owner, tensor.name] = tensor


def _computed_blocks(result: ResultTensor, reader: _Reader) -> Iterator[Block]:
    """The blocks of a tensor that is computed, span by span.

    If any row of a tensor is used, all are read, so that its hash covers the whole tensor.
    """
    slot, columns = result.slot, result.matrix[1]
    step = max(1, _COMPUTED // columns)
    used: dict[tuple[str, str], Whole] = {}
    for span in slot.ranges:
        used |= _stored(slot, span)

    for span in slot.ranges:
        entering = _stored(slot, span)
        factors = tuple(reader.factors(term, span.matrix) for term in span.low_rank)
        origin = span.start if slot.matrices > 1 else 0  # factors are of the tensor, or of one of its matrices
        height = span.stop - span.start
        rows_at_once = height if slot.is_held_whole else step
        for first, last in row_ranges(height, rows_at_once):
            start, stop = span.start + first, span.start + last

            # An expert on two sides is read and hashed once. What does not enter here is hashed all the same.
            parts: dict[tuple[str, str], SourcePart] = {}
            for (expert, name), change in used.items():
                if (expert, name) in entering:
                    shift = change.place_of(span.start) - span.start  # of a tensor that holds only trained rows
                    part = reader.elements(expert, change, (start + shift) * columns, (stop + shift) * columns)
                    parts[expert, name] = part
                else:
                    reader.skip(expert, change, start * columns, stop * columns)

            whole = []
            for term in span.whole:
                part = parts[term.expert, term.change.tensor.name]
                whole.append(StoredRows(term.side, term.coefficient, part))
            base = []
            for share, weight in zip(span.base, slot.base_of(span), strict=True):
                part = parts[share.expert, weight.tensor.name]
                base.append(StoredRows(share.side, share.coefficient or 0.0, part))

            opaque = tuple(map(reader.opaque, span.opaque))
            yield Block(result, span, start, stop, tuple(whole), tuple(base), factors, opaque, origin)
            factors = ()  # they are read once, and come with the first block

    # Of an expert's larger vocabulary, the rows that the result does not have
    if slot.spans:
        height = slot.shape[0]
        for (expert, _), change in used.items():
            for first, last in row_ranges(max(0, change.tensor.shape[0] - height), step):
                reader.skip(expert, change, (height + first) * columns, (height + last) * columns)


def _stored(slot: Slot, span: Span) -> dict[tuple[str, str], Whole]:
    """The stored weights of a span, by their expert and their tensor's name; the base comes last."""
    weights = {(term.expert, term.change.tensor.name): term.change for term in span.whole}
    for share, weight in zip(span.base, slot.base_of(span), strict=True):
        weights[share.expert, weight.tensor.name] = weight
    return weights


class _Reader:
    """Reads the sources of a computed tensor from their first byte to their last, and hashes them on the way."""

    def __init__(self, files: Mapping[Path, int], entered: Entered) -> None:
        self._files = files
        self._entered = entered
        self._digests: defaultdict[tuple[str, str], hashlib._Hash] = defaultdict(hashlib.sha256)

    def elements(self, expert: str, whole: Whole, start: int, stop: int) -> SourcePart:
        """Elements `start` to `stop` of a tensor of an expert."""
        tensor = whole.tensor
        size = Dtype.BYTES[tensor.dtype]
        raw = tensor.read_bytes(self._files[whole.path], start * size, stop * size)
        digest = self._digests[expert, tensor.name]
        digest.update(raw.data)
        if stop * size == tensor.nbytes:
            self._entered.computed[expert, tensor.name] = (tensor, digest.hexdigest())
        return SourcePart(expert, tensor, raw)

    def skip(self, expert: str, whole: Whole, start: int, stop: int) -> None:
        """Hash elements of a tensor that the result does not use; those after its end are left out."""
        stop = min(stop, whole.tensor.nbytes // Dtype.BYTES[whole.tensor.dtype])
        if start < stop and not whole.rows:
            self.elements(expert, whole, start, stop)

    def factors(self, term: Term[LowRank], matrix: int) -> Pair:
        """The whole A and B, or those of one expert of a mixture. They are not hashed: the adapter's file is."""
        lora, file = term.lora, self._files[term.change.path]
        if lora.experts > 1 or term.change.within is not None:
            within = term.change.within or ExpertRows(matrix, 0, lora.out_features)
            a, b = self._of_expert(term.expert, lora, within, file)
            return Pair(term, a, b)

        a = SourcePart(term.expert, lora.a, lora.a.read_bytes(file, 0, lora.a.nbytes))
        b = SourcePart(term.expert, lora.b, lora.b.read_bytes(file, 0, lora.b.nbytes))
        return Pair(term, a, b)

    def _of_expert(self, expert: str, lora: LoraModule, within: ExpertRows, file: int) -> tuple[SourcePart, SourcePart]:
        """One expert's rows of A, and its columns of B, which are `lora.experts` apart in the file."""
        rank, row_size = lora.rank, Dtype.BYTES[lora.a.dtype] * lora.in_features
        first = within.expert * rank
        a = lora.a.read_bytes(file, first * row_size, (first + rank) * row_size)
        b = self._entered.columns_by_expert(file, lora)[within.expert, within.start : within.stop]
        return (
            SourcePart(expert, replace(lora.a, shape=(rank, lora.in_features)), a),
            SourcePart(expert, replace(lora.b, shape=b.shape), b.reshape(-1).view(np.uint8)),
        )

    def opaque(self, term: Term[Opaque]) -> Inputs:
        """All tensors of a module, including those that it shares."""
        file = self._files[term.change.path]
        tensors = {**term.change.part.tensors, **term.change.part.shared}
        parts = {}
        for name, tensor in tensors.items():
            parts[name] = SourcePart(term.expert, tensor, tensor.read_bytes(file, 0, tensor.nbytes))
        return Inputs(term, parts)
