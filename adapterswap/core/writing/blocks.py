"""The numbers of full weights: read a tensor's sources block by block, add up in float32, round once.

A block is a range of rows. Memory is bounded by blocks rather than tensors wherever the method allows it. In every span

    W' = b·W + Σ c_i·W_i + [c_1·s_1·B_1, …]·[A_1; …]

torch computes products of factors, and everything on a GPU. numpy computes averages of stored weights on the CPU, which
saves the import of torch, and nonlinear methods (`methods`), which need whole tensors.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.kinds import LowRank, Opaque, Term, Whole
from adapterswap.core.changes.opaque import merged
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.base import ExpertRows
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slots import Slot, Span
from adapterswap.core.writing.resolution import KeptRows
from adapterswap.kit.errors import UnsupportedError
from adapterswap.kit.files.numbers import Bytes, Dtype, row_ranges, too_large
from adapterswap.kit.files.tensorfile import Tensor

Numbers = npt.NDArray[np.float32]

_REMEMBERED = 8  # parameters of mixtures: the changes of two experts in two layers
_COPIED = 2**20  # bytes of a block to copy, and
_COMPUTED = 2**18  # elements of a block to compute, 1 MB in float32: both fit in a core's cache
_CHECKED = 2**20  # bytes to check at a time, for the same reason


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


class StoredRows(NamedTuple):
    """Rows of a weight that is stored, an expert's or the base's: their side, and their coefficient in a sum."""

    side: str
    coefficient: float
    part: SourcePart


class Pair(NamedTuple):
    """The whole A and B of a low-rank term."""

    term: Term[LowRank]
    a: SourcePart
    b: SourcePart

    def factors(self, kept_rows: KeptRows) -> Factors:
        """The factors of ΔW (out×in), with zeros in rows that are not kept."""
        a = _numbers(self.a, self.a.tensor.shape)
        b = _numbers(self.b, self.b.tensor.shape)
        factors = Factors.scaled(a, b, self.term.lora.scale, self.term.lora.name)
        rows = kept_rows.get((self.term.side, self.term.lora.name))
        if rows is None:
            return factors
        return factors.masked(rows)


class Inputs(NamedTuple):
    """All tensors of an opaque term's module by name, from which PEFT computes its weight."""

    term: Term[Opaque]
    tensors: Mapping[str, SourcePart]

    def merged(self, base: Numbers, slot: Slot, *, as_delta: bool = False) -> Numbers:
        """The term's W_i, or its ΔW_i, as the model stores it."""
        parameter = slot.name.rpartition(".")[2]
        tensors = {name: _numbers(part, part.tensor.shape) for name, part in self.tensors.items()}
        return merged(self.term.change, parameter, base, tensors, as_delta=as_delta)


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
        for stored in (*self.whole, *self.base):
            yield stored.part
        for pair in self.factors:
            yield from (pair.a, pair.b)
        for inputs in self.opaque:
            yield from inputs.tensors.values()


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


def _numbers(part: SourcePart, shape: tuple[int, ...]) -> Numbers:
    """A part's numbers in float32."""
    return Dtype(part.tensor.dtype).unpack(part.raw, shape)


class Chunk(NamedTuple):
    """Bytes of the result, and their offset in its file."""

    offset: int
    data: Bytes


class _Product(NamedTuple):
    """left·right is the sum of a tensor's low-rank terms, in the orientation in which it is stored."""

    left: Any
    right: Any


def compute(blocks: Iterable[Block], device: str, kept_rows: KeptRows, seed: int) -> Iterator[Chunk]:
    """Compute the results of blocks, in order.

    Args:
        blocks: the blocks of one tensor after another.
        device: torch's name of the device.
        kept_rows: which rows of an adapter's ΔW are kept; all rows of modules that it does not list.
        seed: the seed of random methods.
    """
    product: _Product | None = None
    for block in blocks:
        result = block.result
        for part in block.parts:
            _check(part)

        if block.copied is not None:
            yield Chunk(result.place.start + block.start, block.copied.raw)
            continue

        if not result.slot.is_linear:
            try:
                data = _nonlinear(block, kept_rows, seed)
            except np.linalg.LinAlgError:  # an SVD of infinite numbers
                raise _overflow(block) from None
        elif _is_summed_by_torch(result.slot, block.span, device):
            if block.start == block.span.start:
                product = _product(block, device, kept_rows)
            data = _summed_by_torch(block, product, device)
        else:
            data = _summed_by_numpy(block, kept_rows)

        size = Dtype.BYTES[result.place.dtype] * result.matrix[1]
        yield Chunk(result.place.start + block.start * size, data)


def _check(part: SourcePart) -> None:
    if part.tensor.dtype not in Dtype.FLOATS:
        return
    for start in range(0, part.raw.size, _CHECKED):
        if not Dtype(part.tensor.dtype).is_finite(part.raw[start : start + _CHECKED]):
            raise part.tensor.not_finite(part.expert)


def _torch_dtype(dtype: str) -> Any:
    """torch's dtype for one that a file names."""
    import torch

    names = {stored: name for name, stored in Dtype.NAMES.items()}
    return getattr(torch, names[dtype])


def _tensor(part: SourcePart, device: str) -> Any:
    """A part's numbers as a float32 vector on the device."""
    import torch

    return torch.from_numpy(part.raw).view(_torch_dtype(part.tensor.dtype)).to(device).float()


def _product(block: Block, device: str, kept_rows: KeptRows) -> _Product | None:
    """The concatenated factors of Σ c_i·s_i·B_i·A_i, in the orientation in which the weight is stored."""
    import torch

    lefts, rights = [], []  # B (out×rank) and A (rank×in), or Aᵀ and Bᵀ
    for term, a_part, b_part in block.factors:
        a = _tensor(a_part, device).view(a_part.tensor.shape)
        b = _tensor(b_part, device).view(b_part.tensor.shape) * (term.coefficient * term.lora.scale)
        rows = kept_rows.get((term.side, term.lora.name))
        if rows is not None:
            b *= torch.from_numpy(rows).to(device)[:, None]
        if not bool(torch.isfinite(b).all()):
            raise too_large(term.lora.name)
        if term.change.transposed:  # (B·A)ᵀ = Aᵀ·Bᵀ
            lefts.append(a.T)
            rights.append(b.T)
        else:
            lefts.append(b)
            rights.append(a)
    if not lefts:
        return None

    height = min(map(len, lefts))  # one expert's vocabulary may be larger
    left = torch.cat([left[:height] for left in lefts], dim=1)
    return _Product(left, torch.cat(rights, dim=0))


def _is_summed_by_torch(slot: Slot, span: Span, device: str) -> bool:
    """Whether torch adds a span up: products of factors, and everything on a GPU; but not what PEFT computes."""
    if not slot.is_linear or span.opaque:
        return False
    return bool(span.low_rank) or device != "cpu"


def needs_torch(slot: Slot, span: Span, device: str) -> bool:
    """Whether a span of a slot cannot be computed without torch, by which PEFT computes, too."""
    return bool(span.opaque) or _is_summed_by_torch(slot, span, device)


def _weighted(block: Block) -> Iterator[tuple[float, SourcePart]]:
    """The stored weights of the sum, each with its coefficient; the base comes last."""
    for rows in (*block.whole, *block.base):
        yield rows.coefficient, rows.part


def _summed_by_numpy(block: Block, kept_rows: KeptRows) -> Bytes:
    """b·W + Σ c_i·X_i, added up by numpy: what PEFT computes from the base, stored weights, products of factors."""
    total: Numbers | None = None
    with np.errstate(all="ignore"):  # what overflows is found by `_finite`
        for coefficient, numbers in _addends(block, kept_rows):
            if coefficient != 1:
                numbers *= np.float32(coefficient)  # in place: nothing else uses them
            if total is None:
                total = numbers
            else:
                total += numbers
    assert total is not None
    return _finite(Dtype(block.result.place.dtype).pack(total), block)


def _addends(block: Block, kept_rows: KeptRows) -> Iterator[tuple[float, Numbers]]:
    """The terms of a sum as the model stores them, each with its coefficient; the base comes last."""
    slot, span, shape = block.result.slot, block.span, block.result.place.shape
    if not span.opaque:
        for coefficient, part in _weighted(block):
            yield coefficient, _numbers(part, (-1,))
        return

    (own,) = block.base
    base = _numbers(own.part, shape)
    for inputs in block.opaque:
        yield inputs.term.coefficient, inputs.merged(base, slot)
    for rows in block.whole:
        yield rows.coefficient, _numbers(rows.part, shape)
    for pair in block.factors:
        delta = pair.factors(kept_rows).rows()
        yield pair.term.coefficient, _turned(delta, pair.term.change.transposed)
    if span.rest:
        yield span.rest, base


def _finite(raw: Bytes, block: Block) -> Bytes:
    if Dtype(block.result.place.dtype).is_finite(raw):
        return raw
    raise _overflow(block)


def _overflow(block: Block) -> UnsupportedError:
    name, dtype = block.result.slot.name, block.result.place.dtype
    if dtype != "F16":  # bfloat16 and float32 have one range
        return too_large(name, dtype)
    return UnsupportedError(
        f"{name} overflows F16 when it is computed", "Pass `dtype=bfloat16` or `dtype=float32`", parameter="dtype"
    )


def _summed_by_torch(block: Block, product: _Product | None, device: str) -> Bytes:
    """b·W + Σ c_i·W_i + the block's rows of the product of factors, added up by torch on the device."""
    import torch

    total: Any = None
    for coefficient, part in _weighted(block):
        numbers = _tensor(part, device)
        if total is not None:
            total.add_(numbers, alpha=coefficient)
        elif coefficient == 1:
            total = numbers
        else:
            total = numbers.mul_(coefficient)  # in place: the block is not used again

    if product is not None:
        left = product.left[block.start - block.origin : block.stop - block.origin]
        if total is None:
            total = left @ product.right
        else:
            total = total.view(-1, block.result.matrix[1]).addmm_(left, product.right)

    raw = total.reshape(-1).to(_torch_dtype(block.result.place.dtype)).view(torch.uint8).cpu().numpy()
    return _finite(np.asarray(raw), block)


def _turned(matrix: Numbers, is_across: bool) -> Numbers:
    """ΔW or W, transposed if `is_across`: from out×in to the way in which the model stores the weight, or back."""
    return matrix.T if is_across else matrix


def _nonlinear(block: Block, kept_rows: KeptRows, seed: int) -> Bytes:
    """The whole tensor: W_base plus the method's combination of dense ΔW, or its combination of whole weights."""
    slot, place = block.result.slot, block.result.place
    rule = slot.rule
    assert rule is not None
    name = slot.module if slot.name.endswith(".weight") else slot.name

    # W_base, if it enters; all parts of the base are of this weight
    base = np.zeros(place.shape, np.float32)
    if block.base:
        base = _numbers(block.base[0].part, place.shape)

    # The method takes and returns out×in. If any term is stored in×out, so is the weight.
    is_across = any(term.change.transposed for term in slot.terms)

    with np.errstate(all="ignore"):  # what overflows is found by `_finite`
        if rule.on_cores and slot.is_low_rank:
            result = _combined_factors(block, rule, kept_rows, seed, name)
        else:
            by_side = _dense_sides(block, rule, base, is_across, kept_rows)
            # In the rule's order, on which some methods depend.
            deltas = {side: by_side[side] for side in slot.weights if side in by_side}
            result = rule.combine(deltas, slot.weights, seed=seed, module=name)

        stored = _turned(result, is_across)
        if not rule.acts_on_weights:
            stored = base + stored
        return _finite(Dtype(place.dtype).pack(stored), block)


def _combined_factors(block: Block, rule: Rule, kept_rows: KeptRows, seed: int, module: str) -> Numbers:
    """The method's ΔW (out×in), computed in the joint space of the factors, without the dense ΔW of any side."""
    shares_of: dict[str, list[tuple[float, Factors]]] = {}
    for pair in block.factors:
        side, expert = pair.term.side, pair.term.expert
        shares_of.setdefault(side, []).append((rule.sides[side][expert], pair.factors(kept_rows)))

    pairs = {}
    for side, shares in shares_of.items():
        joined = Factors.concatenated(shares)
        pairs[side] = (joined.b, joined.a)
    left, right = rule.combine_factors(pairs, seed=seed, module=module)
    return np.asarray(left @ right, np.float32)


def _dense_sides(block: Block, rule: Rule, base: Numbers, is_across: bool, kept_rows: KeptRows) -> dict[str, Numbers]:
    """What each side enters a method with (out×in): the sum of its experts' shares, of their ΔW_i or of their W_i."""
    by_side: dict[str, Numbers] = {}

    # Of whole weights, the share of a side's experts that have none is the base's.
    if rule.acts_on_weights:
        for rows in block.base:
            if rows.coefficient == 1:
                by_side[rows.side] = _turned(base, is_across)
            elif rows.coefficient:
                by_side[rows.side] = np.float32(rows.coefficient) * _turned(base, is_across)

    for side, expert, matrix in _entering(block, base, is_across, kept_rows, as_delta=not rule.acts_on_weights):
        share = rule.sides[side][expert]
        if share != 1:
            matrix = np.float32(share) * matrix
        if side in by_side:
            matrix = by_side[side] + matrix
        by_side[side] = matrix
    return by_side


def _entering(
    block: Block, base: Numbers, is_across: bool, kept_rows: KeptRows, *, as_delta: bool
) -> Iterator[tuple[str, str, Numbers]]:
    """Each term's side, its expert, and its ΔW_i or W_i as out×in, one at a time: each is as large as the tensor."""
    slot = block.result.slot
    for rows in block.whole:
        weight = _numbers(rows.part, base.shape)
        if as_delta:
            weight = weight - base
        yield rows.side, rows.part.expert, _turned(weight, is_across)
    for inputs in block.opaque:
        weight = inputs.merged(base, slot, as_delta=as_delta)
        yield inputs.term.side, inputs.term.expert, _turned(weight, is_across)
    for pair in block.factors:
        yield pair.term.side, pair.term.expert, pair.factors(kept_rows).rows()
