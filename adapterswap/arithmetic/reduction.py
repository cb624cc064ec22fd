"""Modules that must be cut to a rank: linear blends above `max_rank`, and every nonlinear blend.

Linear blends are low-rank already and are truncated by `lowrank` without forming ΔW. Nonlinear ones (TIES, DARE,
pruning) have full rank: their ΔW is formed, a module at a time, and approximated (`approximation`). Knows plans and
forms; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.approximation import approximate
from adapterswap.arithmetic.layout import blend_scale, total_rank, uses_rslora
from adapterswap.arithmetic.lowrank import Truncated, concatenate, inner, truncate
from adapterswap.arithmetic.outputs import Form, OutputTensor, Reduced
from adapterswap.arithmetic.peft_config import written_scale
from adapterswap.arithmetic.resolving import Resolved, side_factors
from adapterswap.changes.deltas import Factors
from adapterswap.changes.reading import FactorReader, factor_reader
from adapterswap.errors import UnsupportedError
from adapterswap.files.numbers import decode, finite_bytes, too_large
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot

__all__ = ["dense_delta", "must_reduce", "reduce"]


def must_reduce(module: Slot, form: Form) -> bool:
    """Whether a module cannot be written in the exact form: it is nonlinear, too high in rank, or to be made small."""
    if not module.terms:
        return False
    too_high = form.max_rank is not None and total_rank(module) > form.max_rank
    return not module.is_linear or too_high or (form.max_error is not None and not module.owner)


def check_form(plan: Plan, form: Form) -> None:
    """Raise an `UnsupportedError` where a nonlinear plan is to be written without a bound on its rank or error."""
    nonlinear = next((slot for slot in plan.modules.values() if slot.terms and not slot.has_low_rank), None)
    whole = next(
        (slot for slot in plan.modules.values() if slot.terms and slot.rule and slot.rule.acts_on_weights), None
    )
    if whole is not None:
        raise UnsupportedError(
            f"{whole.method} combines whole weights, the base's part included, and an adapter holds ΔW alone",
            "Write full weights with `adapterswap merge`, or use a method on ΔW (`adapterswap methods` lists them)",
            parameter="method",
        )
    if nonlinear is not None and form.max_rank is None and form.max_error is None:
        raise UnsupportedError(
            f"{nonlinear.method} gives {nonlinear.name} a ΔW of full rank, and an adapter has a low one",
            "Pass `max_rank` or `max_error`",
            parameter="max_rank",
        )


def reduce(
    resolved: Resolved, form: Form, progress: Callable[[str], None] = lambda name: None
) -> Mapping[str, Reduced]:
    """Truncate every module that must be; `progress` is called with each one's name when it is done.

    Raises:
        UnsupportedError: a nonlinear method without a rank or error, or overflow.
        ExpertError: NaN or infinity in a factor.
    """
    plan = resolved.plan
    check_form(plan, form)
    wanted = [module for module in plan.modules.values() if must_reduce(module, form)]
    if not wanted:
        return {}
    reduced = {}
    with factor_reader(plan.adapters) as read:
        for module in wanted:
            try:
                with np.errstate(all="ignore"):  # what overflows is told of below, and by `finite_bytes`
                    result = _truncated(module, resolved, form, read)
            except (np.linalg.LinAlgError, RuntimeError):  # numpy's and torch's SVD, given infinite numbers
                raise too_large(module.name) from None
            reduced[module.name] = _as_tensors(module, result, plan, form)
            progress(module.name)
    return reduced


def _truncated(module: Slot, resolved: Resolved, form: Form, read: FactorReader) -> Truncated:
    rule = module.rule
    if rule is not None and rule.on_cores:
        sides = side_factors(module, read, resolved.kept_rows)
        b, a = rule.combine_factors(
            {side: (factors.b, factors.a) for side, factors in sides.items()},
            seed=resolved.plan.composition.seed, module=module.name,
        )  # fmt: skip
        return truncate(Factors(a, b), rank=form.max_rank, error=form.max_error)
    if not module.is_linear:
        return approximate(dense_delta(module, resolved, read), rank=form.max_rank, error=form.max_error)
    terms = []
    for term in module.terms:
        factors = read(term.expert, term.lora)
        rows = resolved.kept_rows.get((term.side, module.name))
        terms.append((term.coefficient, factors if rows is None else factors.masked(rows)))
    return truncate(concatenate(terms), rank=form.max_rank, error=None if module.owner else form.max_error)


def dense_delta(module: Slot, resolved: Resolved, read: FactorReader) -> npt.NDArray[np.float32]:
    """The module's ΔW' (out×in) by its rule's nonlinear method."""
    rule = module.rule
    assert rule is not None
    deltas = {
        side: np.asarray(factors.rows(), np.float32)
        for side, factors in side_factors(module, read, resolved.kept_rows).items()
    }
    return rule.combine(deltas, module.weights, seed=resolved.plan.composition.seed, module=module.name)


def _as_tensors(module: Slot, result: Truncated, plan: Plan, form: Form) -> Reduced:
    """The factors in the output's scale and dtype, under the keys of the module's own tensors."""
    rank = len(result.singular_values)
    scale = blend_scale(plan, form)
    if form.layout == "exact":
        scale = written_scale(rank, uses_rslora(plan), scale)[1]
    dtypes = {term.lora.dtype for term in module.terms}
    dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    # The scale is shared between the factors too, so that neither leaves the range of a half-precision dtype.
    root = np.float32(np.sqrt(abs(scale)))
    first = module.terms[0].lora
    values = ((0, first.a_key, result.factors.a / root), (1, first.b_key, result.factors.b * np.sign(scale) / root))
    tensors = tuple(
        OutputTensor(key, dtype, part.shape, axis, data=finite_bytes(np.asarray(part, np.float32), dtype, key))
        for axis, key, part in values
    )
    a, b = (decode(tensor.data, dtype, tensor.shape) for tensor in tensors if tensor.data is not None)
    return Reduced(rank, tensors, result.error, _written_error(result, Factors(a * root, b * root * np.sign(scale))))


def _written_error(result: Truncated, written: Factors) -> float:
    """The relative error of factors that differ from the truncated ones by rounding.

    What was cut off is orthogonal to what rounding changes, up to products of two roundings.
    """
    kept = float(np.sum(np.square(result.singular_values, dtype=np.float64)))
    if kept == 0:
        return result.error
    exact = result.factors
    rounded = concatenate([(1, Factors(exact.a, exact.b - written.b)), (1, Factors(exact.a - written.a, written.b))])
    norm = math.sqrt(kept / (1 - result.error**2)) if result.error < 1 else math.sqrt(kept)
    return math.hypot(result.error, math.sqrt(max(0.0, inner(rounded, rounded))) / norm)
