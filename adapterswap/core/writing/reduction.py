"""Reduce modules to a rank: linear blends above `max_rank`, and every nonlinear blend.

Linear blends have low rank, and `Joint.cut` truncates them without forming ΔW: exact and cheaper. Nonlinear ones
(TIES, DARE, pruning) have full rank: their ΔW is formed, one module at a time, and approximated by torch's randomized
SVD, after Halko, Martinsson & Tropp 2011 (arXiv:0909.4061).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import FactorReader, Factors
from adapterswap.core.changes.joint import Joint, mixed
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.writing.layout import blend_scale, uses_rslora
from adapterswap.core.writing.outputs import Form, OutputTensor, Reduced, Spool, map_in_threads
from adapterswap.core.writing.peft_config import Shape
from adapterswap.core.writing.resolution import Resolved, side_factors
from adapterswap.kit.dependencies import require
from adapterswap.kit.files.numbers import Dtype, too_large

_SMALL = 256  # matrices with a side up to this are decomposed exactly,
_SHARE = 4  # and so are those that must keep more than a quarter of their singular values, where sampling saves nothing
_FIRST = 32  # singular values to sample first if an error is requested
_OVERSAMPLING = 32  # columns beyond the requested rank, and
_POWER_ITERATIONS = 6  # passes over the matrix: both make the randomized SVD more accurate
_ROWS = 1024  # of a factor, to compute and round at a time


class Truncated(NamedTuple):
    """A low-rank approximation of ΔW.

    Attributes:
        factors: the approximation's factors, with √σ on each side.
        singular_values: the kept singular values, in descending order.
        error: ‖ΔW - b·a‖ / ‖ΔW‖ in the Frobenius norm; 0 for ΔW = 0.
    """

    factors: Factors
    singular_values: npt.NDArray[np.floating]
    error: float


def approximate(
    delta: npt.NDArray[np.float32], *, rank: int | None, error: float | None, device: Any = "cpu"
) -> Truncated:
    """A low-rank approximation of a dense ΔW, with its relative error.

    The error is exact, not an estimate: it is computed from the residual of the sample and from the sampled singular
    values that are cut off. With `error`, the sample is doubled until the error is reached (or `rank`, or full rank),
    then cut to the smallest rank that reaches it.

    Args:
        delta: ΔW (out×in).
        rank: the maximum rank.
        error: the maximum relative error, reached with the smallest possible rank. If both are given, `rank` wins.
        device: the torch device to compute on.
    """
    require("models")
    import torch

    matrix = torch.from_numpy(delta).to(device)
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
    limit = min(*delta.shape, rank or min(delta.shape))

    # Sample more singular values until the error is reached
    size = limit if error is None else min(limit, _FIRST)
    while True:
        u, sigma, vt = _decompose(matrix, size)
        errors = _errors(matrix, u, sigma, vt, norm)
        size = min(limit, len(sigma))  # an exact decomposition returns all of them
        if error is None or errors[size - 1] <= error or size == limit:
            break
        size = min(2 * size, limit)

    # Keep as few of them as reach it
    keep = size
    if error is not None:
        reached = np.flatnonzero(errors[:size] <= error)
        if len(reached):
            keep = int(reached[0]) + 1

    root = sigma[:keep].sqrt()
    factors = Factors((root[:, None] * vt[:keep]).cpu().numpy(), (u[:, :keep] * root).cpu().numpy())
    return Truncated(factors, sigma[:keep].cpu().numpy(), float(errors[keep - 1]))


def _decompose(matrix: Any, size: int) -> tuple[Any, Any, Any]:
    """U (out×k), σ (k) in descending order and Vᵀ (k×in), with k ≥ size."""
    import torch

    smaller = min(matrix.shape)
    if smaller <= _SMALL or size * _SHARE > smaller:
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        return u, sigma, vt

    devices = [matrix.device] if matrix.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)  # the same bytes every time
        u, sigma, v = torch.svd_lowrank(matrix, q=size + _OVERSAMPLING, niter=_POWER_ITERATIONS)
    return u, sigma, v.T


def _errors(matrix: Any, u: Any, sigma: Any, vt: Any, norm: float) -> npt.NDArray[np.float64]:
    """The relative error of keeping 1, 2, … of the singular values.

    The sample is an orthogonal projection of ΔW, so ‖ΔW - U_k Σ_k V_kᵀ‖² = ‖ΔW - U Σ Vᵀ‖² + Σ_{i>k} σ_i².
    """
    import torch

    values = sigma.cpu().numpy().astype(np.float64)
    if norm == 0:
        return np.zeros(len(values))
    rest = 0.0
    if len(values) < min(matrix.shape):
        rest = float(torch.linalg.vector_norm(torch.addmm(matrix, u * sigma, vt, alpha=-1), dtype=torch.float64))
    cut_off = np.append(np.cumsum(np.square(values[:0:-1]))[::-1], 0.0)
    return np.asarray(np.sqrt(rest**2 + cut_off) / norm)


def reduce(
    resolved: Resolved, form: Form, progress: Callable[[str], None] = lambda name: None
) -> Mapping[str, Reduced]:
    """Reduce every module that needs it, and call `progress` with its name afterwards."""
    plan = resolved.plan
    to_reduce = [module for module in plan.modules.values() if form.reduces(module)]
    if not to_reduce:
        return {}

    reduced, spool = {}, Spool()
    with FactorReader.open(plan.adapters) as read:

        def reduce_one(module: Slot) -> Reduced:
            try:
                with np.errstate(all="ignore"):  # overflow is detected below, and by `finite_bytes`
                    has_factors = module.is_linear or (module.rule is not None and module.rule.on_cores)
                    if has_factors:
                        return _truncated(module, resolved, form, read, spool)
                    result = approximate(dense_delta(module, resolved, read), rank=form.max_rank, error=form.max_error)
                    return _as_tensors(module, result, plan, form, spool)
            except (np.linalg.LinAlgError, RuntimeError):  # from numpy's and torch's SVD of infinite numbers
                raise too_large(module.name) from None

        low_rank = [module for module in to_reduce if module.has_low_rank]
        for module, result in zip(low_rank, map_in_threads(reduce_one, low_rank), strict=True):
            reduced[module.name] = result
            progress(module.name)

        for module in to_reduce:
            if not module.has_low_rank:  # torch has its own threads
                reduced[module.name] = reduce_one(module)
                progress(module.name)
    return {module.name: reduced[module.name] for module in to_reduce}


def _truncated(module: Slot, resolved: Resolved, form: Form, read: FactorReader, spool: Spool) -> Reduced:
    """Truncate a linear blend, or a method's result in factors, in its joint core."""
    coefficients, factors = _blend(module, resolved, read)
    joint = Joint(factors)
    error = None if module.owner else form.max_error  # copies are cut only to a rank
    spectrum, rank, lost = joint.cut(coefficients, rank=form.max_rank, error=error)

    # The scale is split between the factors, so that both stay in the range of a half-precision dtype.
    scale, dtype, first = _written_form(module, rank, resolved.plan, form)
    mixture, root = joint.mixture(coefficients, spectrum, rank), math.sqrt(abs(scale))
    a_key, b_key = first.keys
    a = _rounded([pair.a for pair in factors], mixture.right.T / root, 0, dtype, a_key, spool)
    left = math.copysign(1 / root, scale) * mixture.left
    b = _rounded([pair.b for pair in factors], left, 1, dtype, b_key, spool)

    # What is cut off is orthogonal to what rounding changes.
    norm = float(np.linalg.norm(spectrum.sigma))
    rounding = abs(scale) * _distance(spectrum.sigma[:rank] / abs(scale), b, a)
    written_error = lost
    if norm:
        written_error = math.hypot(lost, rounding / norm)
    return Reduced(rank, (a.tensor, b.tensor), lost, written_error)


def _blend(module: Slot, resolved: Resolved, read: FactorReader) -> tuple[list[float], list[Factors]]:
    """A linear blend's coefficients, and its terms' factors without the rows that a threshold drops.

    The result of a method on factors is a single term.
    """
    rule = module.rule
    if rule is not None and rule.on_cores:
        pairs = {}
        for side, factors in side_factors(module, read, resolved.kept_rows).items():
            pairs[side] = (factors.b, factors.a)
        b, a = rule.combine_factors(pairs, seed=resolved.plan.composition.seed, module=module.name)
        return [1.0], [Factors(a, b)]

    coefficients, terms = [], []
    for term in module.terms:
        factors = read(term.expert, term.lora)
        rows = resolved.kept_rows.get((term.side, module.name))
        if rows is not None:
            factors = factors.masked(rows)
        coefficients.append(term.coefficient)
        terms.append(factors)
    return coefficients, terms


class _Rounded(NamedTuple):
    """A factor x that was rounded to x̂: Eᵀ·x̂ and Eᵀ·E for E = x - x̂ (n×k; of A the transposes), in float64."""

    tensor: OutputTensor
    across: npt.NDArray[np.float64]
    within: npt.NDArray[np.float64]


def _rounded(
    parts: Sequence[npt.NDArray[np.floating]],
    mix: npt.NDArray[np.float64],
    axis: int,
    dtype: str,
    key: str,
    spool: Spool,
) -> _Rounded:
    """A factor, rounded to the dtype, a few rows of B or columns of A at a time.

    Args:
        parts: the terms' A (axis 0, rank_i×in) or B (axis 1, out×rank_i).
        mix: how the factor follows from them; see `mixed`.
        axis: the axis of the rank.
        dtype, key: the tensor's.
        spool: keeps its bytes.
    """
    rank, long = mix.shape[1], parts[0].shape[1 - axis]
    shape = (rank, long) if axis == 0 else (long, rank)  # A is rank×in, B is out×rank
    data = np.empty((*shape, Dtype.BYTES[dtype]), np.uint8)
    across, within = np.zeros((rank, rank)), np.zeros((rank, rank))
    for start in range(0, long, _ROWS):
        block = slice(start, min(start + _ROWS, long))
        place = (slice(None), block) if axis == 0 else (block, slice(None))
        exact = mixed([part[place] for part in parts], mix, axis)
        raw = Dtype(dtype).finite_bytes(exact.astype(np.float32), key)
        rounded = Dtype(dtype).unpack(raw, exact.shape).astype(np.float64)
        data[place] = raw.reshape(*exact.shape, -1)

        exact -= rounded
        if axis == 0:
            across += exact @ rounded.T
            within += exact @ exact.T
        else:
            across += exact.T @ rounded
            within += exact.T @ exact
    stored = spool.add(data.reshape(-1), shape)
    return _Rounded(OutputTensor(key, dtype, shape, axis, data=stored), across, within)


def _distance(sigma: npt.NDArray[np.float64], b: _Rounded, a: _Rounded) -> float:
    """‖b·a - b̂·â‖ for factors with bᵀb = a·aᵀ = Σ: that of E_b·a + b̂·E_a, from k×k products."""
    # ‖E_b·a‖², of E_bᵀ·E_b and a·aᵀ
    of_b = float(np.sum(np.diagonal(b.within) * sigma))
    # ⟨E_b·a, b̂·E_a⟩, of E_bᵀ·b̂ and E_a·aᵀ = E_a·âᵀ + E_a·E_aᵀ
    between = float(np.sum(b.across * (a.across + a.within).T))
    # ‖b̂·E_a‖², of b̂ᵀ·b̂ = bᵀ·b - E_bᵀ·b̂ - b̂ᵀ·E_b - E_bᵀ·E_b and E_a·E_aᵀ
    rounded_gram = np.diag(sigma) - b.across - b.across.T - b.within
    of_a = float(np.sum(rounded_gram * a.within))
    return math.sqrt(max(0.0, of_b + 2 * between + of_a))


def dense_delta(module: Slot, resolved: Resolved, read: FactorReader) -> npt.NDArray[np.float32]:
    """The module's ΔW' (out×in) by its rule's nonlinear method."""
    rule = module.rule
    assert rule is not None
    deltas = {}
    for side, factors in side_factors(module, read, resolved.kept_rows).items():
        deltas[side] = np.asarray(factors.rows(), np.float32)
    return rule.combine(deltas, module.weights, seed=resolved.plan.composition.seed, module=module.name)


def _as_tensors(module: Slot, result: Truncated, plan: Plan, form: Form, spool: Spool) -> Reduced:
    """The factors in the output's scale and dtype, under the module's keys."""
    rank = len(result.singular_values)
    scale, dtype, first = _written_form(module, rank, plan, form)
    root = np.float32(np.sqrt(abs(scale)))  # split between the factors, as in `_truncated`
    factors = (result.factors.a / root, result.factors.b * np.sign(scale) / root)
    tensors, rounded = [], []
    for axis, (key, part) in enumerate(zip(first.keys, factors, strict=True)):
        raw = Dtype(dtype).finite_bytes(np.asarray(part, np.float32), key)
        tensors.append(OutputTensor(key, dtype, part.shape, axis, data=spool.add(raw, part.shape)))
        rounded.append(Dtype(dtype).unpack(raw, part.shape))

    a, b = rounded
    written = Factors(a * root, b * root * np.sign(scale))
    return Reduced(rank, tuple(tensors), result.error, _written_error(result, written))


def _written_form(module: Slot, rank: int, plan: Plan, form: Form) -> tuple[float, str, LoraModule]:
    """The output's scale and dtype, and the expert's module whose keys it uses."""
    scale = blend_scale(plan, form)
    if form.layout == "exact":
        scale = Shape.of_scale(rank, uses_rslora(plan), scale).scale

    dtype = form.dtype
    if dtype is None:
        dtypes = {term.lora.dtype for term in module.terms}
        dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    return scale, dtype, module.terms[0].lora


def _written_error(result: Truncated, written: Factors) -> float:
    """The relative error of factors that differ from the truncated ones by rounding.

    The truncated part is orthogonal to the change by rounding, up to products of two roundings.
    """
    energy = float(np.sum(np.square(result.singular_values, dtype=np.float64)))
    if energy == 0:
        return result.error

    # b·a - b̂·â = (b - b̂)·a + b̂·(a - â)
    exact = result.factors
    of_b = Factors(exact.a, exact.b - written.b)
    of_a = Factors(exact.a - written.a, written.b)
    rounded = Factors.concatenated([(1, of_b), (1, of_a)])

    # ‖ΔW‖, of which `energy` is the share that was kept
    norm = math.sqrt(energy)
    if result.error < 1:
        norm = math.sqrt(energy / (1 - result.error**2))
    return math.hypot(result.error, Joint([rounded]).norm([1]) / norm)
