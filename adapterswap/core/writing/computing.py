"""The numbers of full weights: add up what `blocks` has read in float32, and round once.

In every span of rows

    W' = b·W + Σ c_i·W_i + [c_1·s_1·B_1, …]·[A_1; …]

torch computes products of factors, and everything on a GPU. numpy computes averages of stored weights on the CPU, which
saves the import of torch, and nonlinear methods (`methods`), which need whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from adapterswap.core.changes.factors import Factors
from adapterswap.core.planning.rules import Rule
from adapterswap.core.planning.slots import Slot, Span
from adapterswap.core.writing.blocks import Block, Numbers, ReadTerm, SourcePart
from adapterswap.core.writing.resolution import KeptRows
from adapterswap.kit.errors import UnsupportedError
from adapterswap.kit.files.numbers import Bytes, Dtype, too_large

_CHECKED = 2**20  # bytes to check at a time, so that they stay in the processor's cache


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
    """Refuse a source with NaN or infinity."""
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
    for pair in block.factors:
        term = pair.term
        a = _tensor(pair.a, device).view(pair.a.tensor.shape)
        b = _tensor(pair.b, device).view(pair.b.tensor.shape) * (term.coefficient * term.lora.scale)
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
    """Whether computing a span of a slot needs torch: for our own sum, or because PEFT computes with it."""
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
            yield coefficient, part.numbers((-1,))
        return

    (own,) = block.base
    base = own.part.numbers(shape)
    sources: tuple[ReadTerm, ...] = (*block.opaque, *block.whole, *block.factors)
    for source in sources:
        yield source.coefficient, source.matrix(base, slot, kept_rows, as_delta=False)
    if span.rest:
        yield span.rest, base


def _finite(raw: Bytes, block: Block) -> Bytes:
    """The bytes of a result, unless it overflowed."""
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
        base = block.base[0].part.numbers(place.shape)

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
        share = rule.sides[pair.side][pair.expert]
        shares_of.setdefault(pair.side, []).append((share, pair.factors(kept_rows)))

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

    sources: tuple[ReadTerm, ...] = (*block.whole, *block.opaque, *block.factors)
    for source in sources:
        side, share = source.side, rule.sides[source.side][source.expert]
        matrix = source.matrix(base, block.result.slot, kept_rows, as_delta=not rule.acts_on_weights)
        matrix = _turned(matrix, is_across)
        if share != 1:
            matrix = np.float32(share) * matrix
        if side in by_side:
            matrix = by_side[side] + matrix
        by_side[side] = matrix
    return by_side
