"""The numbers of a block: weights and ΔW added up in float32, rounded once.

    W' = Σ c_i·W_i + (1 - Σ c_i)·W_base + [c_1·s_1·B_1, …]·[A_1; …]

torch computes products of factors, and everything on a GPU. numpy computes averages of stored weights on the CPU, which
saves the import of torch, and nonlinear methods (`methods`), which need whole tensors. Knows blocks; reads and writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.lowrank import concatenate
from adapterswap.changes.deltas import Factors
from adapterswap.changes.kinds import LowRank, Opaque
from adapterswap.changes.opaque import merged_delta, merged_weight
from adapterswap.errors import UnsupportedError
from adapterswap.files.dtypes import DTYPE_BYTES, FLOAT_NAMES, FLOATS
from adapterswap.files.numbers import Bytes, check_finite, decode, encode, finite_bytes, not_finite, too_large
from adapterswap.merging.blocks import Block, Part
from adapterswap.planning.slots import Slot, Term

__all__ = ["Chunk", "Rows", "compute", "needs_torch"]

Rows = Mapping[tuple[str, str], npt.NDArray[np.bool_]]  # (side, module) → which rows of its ΔW are kept

_CHECKED = 2**20  # bytes to check at a time, so that they stay in the processor's cache

Delta = npt.NDArray[np.float32]


class Chunk(NamedTuple):
    """Bytes of the result, and their offset in its file."""

    offset: int
    data: Bytes


class _Product(NamedTuple):
    """left·right is the sum of a tensor's low-rank terms, in the orientation in which it is stored."""

    left: Any
    right: Any


def compute(blocks: Iterable[Block], device: str, kept_rows: Rows, seed: int) -> Iterator[Chunk]:
    """Compute the results of blocks, in order.

    Args:
        blocks: the blocks of one tensor after another.
        device: torch's name of the device.
        kept_rows: which rows of an adapter's ΔW are kept; all rows of modules that it does not list.
        seed: the seed of random methods.

    Raises:
        ExpertError: a source holds NaN or infinity.
        UnsupportedError: a result does not fit its dtype.
    """
    product: _Product | None = None
    for block in blocks:
        result = block.result
        for part in block.parts:
            _check(part)
        if result.copied is not None:
            yield Chunk(result.place.start + block.start, block.whole[0].raw)
            continue
        columns = result.matrix[1]
        if result.slot.opaque:
            data = _with_opaque(block, kept_rows, seed)
        elif result.slot.is_linear:
            if not needs_torch(result.slot, device):
                data = _averaged(block)
            else:
                if block.start == block.origin or block.factors:
                    product = _product(result.slot, block, device, kept_rows)
                data = _linear(block, product if result.slot.low_rank else None, device)
        else:
            try:
                data = _nonlinear(block, kept_rows, seed)
            except np.linalg.LinAlgError:  # an SVD of infinite numbers
                raise _overflow(result.slot.name, result.place.dtype) from None
        size = DTYPE_BYTES[result.place.dtype] * columns
        yield Chunk(result.place.start + block.start * size, data)


def _check(part: Part) -> None:
    if part.tensor.dtype not in FLOATS:
        return
    for start in range(0, part.raw.size, _CHECKED):
        if not check_finite(part.raw[start : start + _CHECKED], part.tensor.dtype):
            raise not_finite(part.expert, part.tensor.name)


def _torch_dtype(dtype: str) -> Any:
    """torch's dtype for one that a file names."""
    import torch

    return next(getattr(torch, name) for name, stored in FLOAT_NAMES.items() if stored == dtype)


def _tensor(part: Part, device: str) -> Any:
    """A part's numbers as a float32 vector on the device."""
    import torch

    return torch.from_numpy(part.raw).view(_torch_dtype(part.tensor.dtype)).to(device).float()


def _product(slot: Slot, block: Block, device: str, kept_rows: Rows) -> _Product | None:
    """The concatenated factors of Σ c_i·s_i·B_i·A_i, in the orientation in which the weight is stored."""
    import torch

    lefts, rights = [], []
    for term, (a_part, b_part) in zip(slot.low_rank, block.factors, strict=True):
        a = _tensor(a_part, device).view(a_part.tensor.shape)
        b = _tensor(b_part, device).view(b_part.tensor.shape) * (term.coefficient * term.lora.scale)
        rows = kept_rows.get((term.side, term.lora.name))
        if rows is not None:
            b *= torch.from_numpy(rows).to(device)[:, None]
        if not bool(torch.isfinite(b).all()):
            raise too_large(term.lora.name)
        lefts.append(a.T if term.low_rank.transposed else b)
        rights.append(b.T if term.low_rank.transposed else a)
    height = min(map(len, lefts), default=0)  # one expert's vocabulary may be larger
    lefts = [left[:height] for left in lefts]
    return _Product(torch.cat(lefts, dim=1), torch.cat(rights, dim=0)) if lefts else None


def needs_torch(slot: Slot, device: str) -> bool:
    """Whether torch computes this tensor."""
    return bool(slot.opaque) or (slot.is_linear and (bool(slot.low_rank) or device != "cpu"))


def _weighted(block: Block) -> list[tuple[float, Part]]:
    """The stored weights of the sum, each with its coefficient; the base comes last."""
    slot = block.result.slot
    terms = [(term.coefficient, part) for term, part in zip(slot.whole, block.whole, strict=True)]
    return terms + ([(slot.rest, block.base)] if block.base is not None else [])


def _averaged(block: Block) -> Bytes:
    total: Delta | None = None
    with np.errstate(all="ignore"):  # what overflows is found by `finite_bytes`
        for coefficient, part in _weighted(block):
            numbers = decode(part.raw, part.tensor.dtype, (-1,))
            numbers *= np.float32(coefficient)
            total = numbers if total is None else np.add(total, numbers, out=total)
        assert total is not None
    name, dtype = block.result.slot.name, block.result.place.dtype
    raw = encode(total, dtype)
    if not check_finite(raw, dtype):
        raise _overflow(name, dtype)
    return raw


def _overflow(name: str, dtype: str) -> UnsupportedError:
    if dtype != "F16":  # bfloat16 and float32 have one range
        return too_large(name, dtype)
    return UnsupportedError(
        f"{name} overflows F16 when it is computed", "Pass `dtype=bfloat16` or `dtype=float32`", parameter="dtype"
    )


def _linear(block: Block, product: _Product | None, device: str) -> Bytes:
    import torch

    slot, place = block.result.slot, block.result.place
    total: Any = None
    for coefficient, part in _weighted(block):
        numbers = _tensor(part, device)
        if total is not None:
            total.add_(numbers, alpha=coefficient)
        else:
            total = numbers if coefficient == 1 else numbers.mul_(coefficient)  # in place: the block is not used again
    columns = block.result.matrix[1]
    if product is not None:
        left = product.left[block.start - block.origin : block.stop - block.origin]
        total = left @ product.right if total is None else total.view(-1, columns).addmm_(left, product.right)
    raw = total.reshape(-1).to(_torch_dtype(place.dtype)).view(torch.uint8).cpu().numpy()
    if not check_finite(raw, place.dtype):
        raise _overflow(slot.name, place.dtype)
    return np.asarray(raw)


def _with_opaque(block: Block, kept_rows: Rows, seed: int) -> Bytes:
    """Σ c_i·W_i + (1 - Σ c_i)·W_base + Σ c_i·s_i·B_i·A_i, where PEFT computes some W_i from the base's weight."""
    slot, place = block.result.slot, block.result.place
    if not slot.is_linear:
        return _nonlinear(block, kept_rows, seed)
    assert block.base is not None
    base = decode(block.base.raw, block.base.tensor.dtype, place.shape)
    total: Delta | None = None
    with np.errstate(all="ignore"):  # what overflows is reported by `finite_bytes`
        weights = [
            (term.coefficient, _merged(term, tensors, base, slot))
            for term, tensors in zip(slot.opaque, block.opaque, strict=True)
        ]
        for term, part in zip(slot.whole, block.whole, strict=True):
            weights.append((term.coefficient, decode(part.raw, part.tensor.dtype, place.shape)))
        for term, parts in zip(slot.low_rank, block.factors, strict=True):
            delta = _factors(term, parts, kept_rows).rows()
            weights.append((term.coefficient, np.asarray(delta.T if term.low_rank.transposed else delta)))
        for coefficient, weight in weights:
            weighted = weight if coefficient == 1 else np.float32(coefficient) * weight
            total = weighted if total is None else total + weighted
        assert total is not None
        return finite_bytes(total + np.float32(slot.rest) * base if slot.rest else total, place.dtype, slot.name)


def _factors(term: Term, parts: tuple[Part, Part], kept_rows: Rows) -> Factors:
    """A low-rank term's factors of ΔW (out×in), with zeros in rows that are not kept."""
    a, b = (decode(part.raw, part.tensor.dtype, part.tensor.shape) for part in parts)
    factors = Factors.scaled(a, b, term.lora.scale, term.lora.name)
    rows = kept_rows.get((term.side, term.lora.name))
    return factors if rows is None else factors.masked(rows)


def _merged(term: Term, tensors: Mapping[str, Part], base: Delta, slot: Slot, *, as_delta: bool = False) -> Delta:
    """An opaque term's W_i, or its ΔW_i, as the model stores it."""
    assert term.opaque is not None
    decoded = {name: decode(part.raw, part.tensor.dtype, part.tensor.shape) for name, part in tensors.items()}
    compute = merged_delta if as_delta else merged_weight
    return compute(term.opaque, slot.name.rpartition(".")[2], base, decoded)


def _nonlinear(block: Block, kept_rows: Rows, seed: int) -> Bytes:
    """The whole tensor: W_base plus the method's combination of dense ΔW, or its combination of whole weights."""
    slot, place = block.result.slot, block.result.place
    rule = slot.rule
    assert rule is not None
    base = np.zeros(place.shape, np.float32)
    if block.base is not None:
        base = decode(block.base.raw, block.base.tensor.dtype, place.shape)
    on_weights = rule.acts_on_weights
    # If any term is stored in×out, all ΔW are transposed to out×in.
    across = any(isinstance(term.change, LowRank | Opaque) and term.change.transposed for term in slot.terms)
    by_side: dict[str, Delta] = {}
    factors_of: dict[str, list[tuple[float, Factors]]] = {}
    by_factors = rule.on_cores and not slot.whole and not slot.opaque
    name = slot.module if slot.name.endswith(".weight") else slot.name
    if on_weights:  # the share of a side that is not whole weights is the base's
        turned = base.T if across else base
        for side, share in slot.whole_shares.items():
            if share < 1:
                by_side[side] = turned if share == 0 else np.float32(1 - share) * turned

    def enter(term: Term, delta: Delta) -> None:
        share = rule.sides[term.side][term.expert]
        delta = delta if share == 1 else np.float32(share) * delta
        by_side[term.side] = by_side[term.side] + delta if term.side in by_side else delta

    with np.errstate(all="ignore"):  # what overflows is found by `finite_bytes`
        for whole, part in zip(slot.whole, block.whole, strict=True):
            delta = decode(part.raw, part.tensor.dtype, place.shape)
            delta = delta if on_weights else delta - base
            enter(whole, delta.T if across else delta)
        for term, tensors in zip(slot.opaque, block.opaque, strict=True):
            delta = _merged(term, tensors, base, slot, as_delta=not on_weights)
            enter(term, delta.T if across else delta)
        for term, parts in zip(slot.low_rank, block.factors, strict=True):
            factors = _factors(term, parts, kept_rows)
            if by_factors:
                factors_of.setdefault(term.side, []).append((rule.sides[term.side][term.expert], factors))
            else:
                enter(term, factors.rows())
        if by_factors:
            joined = {side: concatenate(parts) for side, parts in factors_of.items()}
            pairs = {side: (factors.b, factors.a) for side, factors in joined.items()}
            left, right = rule.combine_factors(pairs, seed=seed, module=name)
            product = np.asarray(left @ right, np.float32)
            return finite_bytes(base + (product.T if across else product), place.dtype, slot.name)
        # In the rule's order, on which some methods depend.
        deltas = {side: by_side[side] for side in slot.weights if side in by_side}
        merged = rule.combine(deltas, slot.weights, seed=seed, module=name)
        merged = merged.T if across else merged
        return finite_bytes(merged if on_weights else base + merged, place.dtype, slot.name)
