"""What a plan can say only after a look at the tensors: magnitude weights, SLERP's angles, rows under a threshold.

A plan is made from headers alone and leaves these open; executors call `resolve` first. Reads the experts' files, a
module at a time; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.lowrank import inner, row_magnitudes
from adapterswap.arithmetic.nonlinear import slerp_weights
from adapterswap.arithmetic.tensors import FactorReader, factor_reader, too_large
from adapterswap.experts.adapters import LoraModule
from adapterswap.planning.modules import ModulePlan
from adapterswap.planning.plan import Plan

__all__ = ["Resolved", "resolve"]


@dataclass(frozen=True)
class Resolved:
    """A plan whose linear coefficients are numbers.

    Attributes:
        plan: the plan; linear rules' coefficients are final, SLERP's included.
        magnitudes: each expert's mean absolute ΔW, where weights depend on it.
        kept_rows: by (expert, module): which rows of ΔW stay, where the composition has a row threshold.
    """

    plan: Plan
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    kept_rows: Mapping[tuple[str, str], npt.NDArray[np.bool_]] = field(default_factory=dict)

    def kept_share(self) -> dict[str, float]:
        """The share of each expert's rows that the threshold keeps, over the modules that it enters."""
        shares = {}
        for name in self.plan.experts:
            masks = [mask for (expert, _), mask in self.kept_rows.items() if expert == name]
            if masks:
                shares[name] = float(sum(mask.sum() for mask in masks) / sum(mask.size for mask in masks))
        return shares


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
        magnitudes = {name: _magnitude(read, name, plan) for name in plan.experts} if by_magnitude else {}
        modules = {module.name: _settle(module, magnitudes, read) for module in plan}
        kept = {}
        if threshold:
            for module in plan:
                for term in module.terms:
                    kept[term.expert, module.name] = row_magnitudes(read(term.expert, term.module)) >= threshold
    return Resolved(replace(plan, modules=modules), magnitudes, kept)


def _magnitude(read: FactorReader, expert: str, plan: Plan) -> float:
    """The mean over all rows of all ΔW of the rows' mean absolute values (Bandarkar et al. 2025)."""
    total, rows = 0.0, 0
    for module in plan.experts[expert].modules.values():
        with np.errstate(all="ignore"):
            means = row_magnitudes(read(expert, module))
        if not np.isfinite(means).all():
            raise too_large(module.name)
        total, rows = total + float(means.sum()), rows + means.size
    return total / rows


def _settle(
    module: ModulePlan[LoraModule], magnitudes: Mapping[str, float], read: FactorReader
) -> ModulePlan[LoraModule]:
    """The module with its final coefficients."""
    rule = module.rule
    if not rule.weights and rule.method != "slerp":
        return module
    if rule.method == "slerp":
        weights = _slerp(module, read)
    else:
        # A ΔW of zero has no magnitude to divide by, and enters as zero whatever its weight.
        weights = {name: weight / (magnitudes[name] or 1.0) for name, weight in module.asked.items()}
        if rule.normalizes:
            weights = {name: weight / math.fsum(weights.values()) for name, weight in weights.items()}
    terms = tuple(replace(term, coefficient=weights[term.expert]) for term in module.terms)
    return replace(module, terms=terms, asked=weights)


def _slerp(module: ModulePlan[LoraModule], read: FactorReader) -> dict[str, float]:
    """SLERP's coefficients; t is the second expert's share of the weights.

    Where an expert lacks the module, the straight line between the two ΔW is taken.
    """
    blend = module.rule.blend or {}
    first, second = blend
    t = blend[second] / (blend[first] + blend[second])
    if len(module.terms) < 2:
        return {first: 1 - t, second: t}
    one, other = (read(term.expert, term.module) for term in module.terms)
    return dict(zip(blend, slerp_weights(t, inner(one, other), inner(one, one), inner(other, other)), strict=True))
