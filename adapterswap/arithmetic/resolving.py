"""What a plan can say only after a look at the tensors: magnitude weights, SLERP's angles, rows under a threshold.

A plan is made from headers alone and leaves these open; executors call `resolve` first. Reads the experts' files, a
module at a time; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.lowrank import Factors, concatenate, inner, row_magnitudes
from adapterswap.arithmetic.nonlinear import slerp_share, slerp_weights
from adapterswap.arithmetic.tensors import FactorReader, factor_reader, too_large
from adapterswap.errors import Problems
from adapterswap.experts.adapters import Adapter, LoraModule
from adapterswap.planning.allocation import Rule
from adapterswap.planning.modules import ModulePlan, reweighted
from adapterswap.planning.plan import Plan

__all__ = ["Resolved", "adapters_magnitude", "magnitude_weights", "resolve", "side_factors", "sides_magnitudes"]


class Ruled(Protocol):
    """What a rule is applied to: a module of adapters, or a stored tensor of a model."""

    @property
    def rule(self) -> Rule | None: ...
    @property
    def weights(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Resolved:
    """A plan whose linear coefficients are numbers.

    Attributes:
        plan: the plan; linear rules' coefficients are final, SLERP's included.
        magnitudes: by side (an expert, or an average of several): its mean absolute ΔW, where weights depend on it.
        kept_rows: by (side, module): which rows of the side's ΔW stay, where the composition has a row threshold.
    """

    plan: Plan
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    kept_rows: Mapping[tuple[str, str], npt.NDArray[np.bool_]] = field(default_factory=dict)

    def kept_share(self) -> dict[str, float]:
        """The share of each side's rows that the threshold keeps, over the modules that it enters."""
        kept: dict[str, list[npt.NDArray[np.bool_]]] = {}
        for (side, _), mask in self.kept_rows.items():
            kept.setdefault(side, []).append(mask)
        return {side: float(sum(m.sum() for m in masks) / sum(m.size for m in masks)) for side, masks in kept.items()}


def resolve(plan: Plan) -> Resolved:
    """Read what the plan leaves open; a plan that leaves nothing open costs nothing.

    Raises:
        AdapterswapError: a tensor that is read holds NaN or infinity, or a product of two overflows.
    """
    by_magnitude = any(module.rule.weights for module in plan)
    by_angle = any(module.rule.method == "slerp" for module in plan)
    threshold = plan.composition.row_threshold
    if not (by_magnitude or by_angle or threshold):
        return Resolved(plan)
    with factor_reader(plan) as read:
        magnitudes = sides_magnitudes(plan, lambda shares: adapters_magnitude(read, shares, plan.experts))
        apart = threshold is not None
        modules = {module.name: _settle(module, magnitudes, read, apart=apart) for module in plan}
        kept = {}
        if threshold is not None:
            for module in plan:
                for side, factors in side_factors(module, read).items():
                    kept[side, module.name] = row_magnitudes(factors) >= threshold
    return Resolved(replace(plan, modules=modules), magnitudes, kept)


def side_factors(
    module: ModulePlan[LoraModule],
    read: FactorReader,
    kept_rows: Mapping[tuple[str, str], npt.NDArray[np.bool_]] | None = None,
) -> dict[str, Factors]:
    """The ΔW of each side that enters a module, as factors: an expert's, or the average of several experts'."""
    sides = module.rule.sides
    found: dict[str, list[tuple[float, Factors]]] = {}
    for term in module.terms:
        share = sides[term.side][term.expert] if term.side in sides else 1.0
        found.setdefault(term.side, []).append((share, read(term.expert, term.module)))
    combined = {side: parts[0][1] if parts[0][0] == 1 else concatenate(parts) for side, parts in found.items()}
    for side, factors in combined.items():
        rows = (kept_rows or {}).get((side, module.name))
        if rows is not None:
            combined[side] = Factors(factors.a, factors.b * rows[:, None])
    return combined


def sides_magnitudes(plan: Iterable[Ruled], magnitude_of: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
    """The mean absolute ΔW of each side whose weight depends on it.

    Args:
        plan: what rules are applied to.
        magnitude_of: computes it, from the shares of the side's experts.

    Raises:
        AdapterswapError: a side changes nothing, so there is nothing to divide its weight by.
    """
    wanted: dict[str, Mapping[str, float]] = {}
    for planned in plan:
        if planned.rule is not None and planned.rule.weights:
            wanted |= {side: planned.rule.sides[side] for side in planned.weights}
    magnitudes = {side: magnitude_of(shares) for side, shares in wanted.items()}
    problems = Problems()
    for side in (side for side, magnitude in magnitudes.items() if magnitude == 0):
        problems.add(
            f"{side} changes nothing (its mean |ΔW| is 0, as in an untrained expert), and `weights: magnitude` divides "
            "by that",
            "Use a trained expert, or equal weights",
        )
    problems.raise_if_any()
    return magnitudes


def magnitude_weights(rule: Rule, weights: Mapping[str, float], magnitudes: Mapping[str, float]) -> dict[str, float]:
    """The sides' weights divided by their magnitudes, then by their sum where the rule normalizes."""
    found = {side: weight / magnitudes[side] for side, weight in weights.items()}
    total = math.fsum(found.values()) if rule.normalizes else 1.0
    return {side: weight / total for side, weight in found.items()}


def adapters_magnitude(read: FactorReader, shares: Mapping[str, float], adapters: Mapping[str, Adapter]) -> float:
    """The mean over all rows of all ΔW of the rows' mean absolute values (Bandarkar et al. 2025).

    Of several experts it is the magnitude of their average, over the modules that any of them adapts.

    Raises:
        AdapterswapError: see `FactorReader`; or a product of factors overflows.
    """
    total, rows = 0.0, 0
    held = {expert: adapters[expert].modules for expert in shares}
    for name in dict.fromkeys(name for modules in held.values() for name in modules):
        parts = [(share, read(expert, held[expert][name])) for expert, share in shares.items() if name in held[expert]]
        with np.errstate(all="ignore"):
            means = row_magnitudes(parts[0][1] if parts[0][0] == 1 else concatenate(parts))
        if not np.isfinite(means).all():
            raise too_large(name)
        total, rows = total + float(means.sum()), rows + means.size
    return total / rows


def _settle(
    module: ModulePlan[LoraModule], magnitudes: Mapping[str, float], read: FactorReader, *, apart: bool
) -> ModulePlan[LoraModule]:
    """The module with its final coefficients."""
    rule = module.rule
    if not rule.weights and rule.method != "slerp":
        return module
    if rule.method == "slerp":
        weights = dict(zip(rule.blend or {}, _slerp(module, read), strict=True))
    else:
        weights = magnitude_weights(rule, module.weights, magnitudes)
    return replace(module, terms=reweighted(module.terms, rule, weights, apart=apart), weights=weights)


def _slerp(module: ModulePlan[LoraModule], read: FactorReader) -> tuple[float, float]:
    """SLERP's weights; t is the second side's share of them.

    Where a side lacks the module, the straight line between the two ΔW is taken.
    """
    t = slerp_share(module.rule)
    sides = side_factors(module, read)
    if len(sides) < 2:
        return 1 - t, t
    one, other = (sides[side] for side in module.rule.blend or {})
    return slerp_weights(t, inner(one, other), inner(one, one), inner(other, other))
