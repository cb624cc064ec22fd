"""Resolve the parts of a plan that depend on tensors: magnitude weights, angles, rows under a threshold.

Plans are made from headers alone and leave these open, so executors call `resolve` first. Reads the experts' files in
parts; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.lowrank import concatenate
from adapterswap.arithmetic.magnitudes import sides_magnitudes
from adapterswap.changes.deltas import Factors, row_magnitudes
from adapterswap.changes.joint import Joint
from adapterswap.changes.reading import FactorReader, factor_reader
from adapterswap.planning.allocation import Rule
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot, reweighted

__all__ = ["Resolved", "resolve", "side_factors"]


@dataclass(frozen=True)
class Resolved:
    """A plan whose linear coefficients are numbers.

    Attributes:
        plan: the plan; linear rules' coefficients are final, SLERP's included.
        magnitudes: by side (an expert, or an average of several): its mean absolute ΔW, if weights depend on it.
        kept_rows: by (side, module): which rows of the side's ΔW are kept, if the composition has a row threshold.
    """

    plan: Plan
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    kept_rows: Mapping[tuple[str, str], npt.NDArray[np.bool_]] = field(default_factory=dict)

    def kept_share(self) -> dict[str, float]:
        """The share of each side's rows that the threshold keeps, over the side's modules."""
        rows_of: dict[str, list[npt.NDArray[np.bool_]]] = {}
        for (side, _), mask in self.kept_rows.items():
            rows_of.setdefault(side, []).append(mask)
        return {
            side: float(sum(m.sum() for m in masks) / sum(m.size for m in masks)) for side, masks in rows_of.items()
        }


def resolve(plan: Plan) -> Resolved:
    """Compute what the plan leaves open. If nothing is open, no tensors are read.

    SLERP of stored tensors stays open: it is computed together with the tensors.

    Raises:
        ExpertError: a tensor holds NaN or infinity; a side whose weight is divided by its magnitude changes nothing.
        UnsupportedError: a product overflows.
    """
    by_magnitude = any(slot.rule is not None and slot.rule.weights for slot in plan)
    by_angle = any(_has_angle(slot) for slot in plan)
    threshold = plan.composition.row_threshold
    if not (by_magnitude or by_angle or threshold):
        return Resolved(plan)
    magnitudes = sides_magnitudes(plan)
    with factor_reader(plan.adapters) as read:
        slots = {slot.name: _settled(slot, magnitudes, read, apart=threshold is not None) for slot in plan}
        kept_rows = {}
        if threshold is not None:
            for slot in plan.modules.values():
                for side, factors in side_factors(slot, read).items():
                    kept_rows[side, slot.name] = row_magnitudes(factors, slot.name) >= threshold
    return Resolved(replace(plan, slots=slots), magnitudes, kept_rows)


def _has_angle(slot: Slot) -> bool:
    """Whether its coefficients come from inner products of factors; other changes are computed from whole tensors."""
    return slot.has_span and bool(slot.terms) and len(slot.low_rank) == len(slot.terms)


def side_factors(
    slot: Slot,
    read: FactorReader,
    kept_rows: Mapping[tuple[str, str], npt.NDArray[np.bool_]] | None = None,
) -> dict[str, Factors]:
    """The ΔW of each side of a slot, as factors: an expert's, or the average of several experts'."""
    sides = slot.rule.sides if slot.rule else {}
    parts_of: dict[str, list[tuple[float, Factors]]] = {}
    for term in slot.terms:
        share = sides[term.side][term.expert] if term.side in sides else 1.0
        parts_of.setdefault(term.side, []).append((share, read(term.expert, term.lora)))
    combined = {side: parts[0][1] if parts[0][0] == 1 else concatenate(parts) for side, parts in parts_of.items()}
    for side, factors in combined.items():
        rows = (kept_rows or {}).get((side, slot.name))
        if rows is not None:
            combined[side] = factors.masked(rows)
    return combined


def _magnitude_weights(rule: Rule, weights: Mapping[str, float], magnitudes: Mapping[str, float]) -> dict[str, float]:
    """The sides' weights divided by their magnitudes, then by their sum if the rule normalizes."""
    divided = {side: weight / magnitudes[side] for side, weight in weights.items()}
    total = math.fsum(divided.values()) if rule.normalizes else 1.0
    return {side: weight / total for side, weight in divided.items()}


def _settled(slot: Slot, magnitudes: Mapping[str, float], read: FactorReader, *, apart: bool) -> Slot:
    """The slot with its final coefficients."""
    rule = slot.rule
    if rule is None or slot.in_full or not (rule.weights or _has_angle(slot)):
        return slot
    if rule.weights:
        weights = _magnitude_weights(rule, slot.weights, magnitudes)
    else:
        weights = rule.coefficients_of(_gram(slot, rule, read))
        apart = apart or not any(weights.values())  # a module of zeros is written as one
    settled = replace(slot, terms=reweighted(slot.terms, rule, weights, apart=apart), weights=weights)
    # A stored tensor needs the base while its rule waits for magnitudes; from now on its coefficients decide.
    return replace(settled, rule=rule.model_copy(update={"weights": None})) if slot.is_stored else settled


def _gram(slot: Slot, rule: Rule, read: FactorReader) -> npt.NDArray[np.float64]:
    """⟨ΔW_i, ΔW_j⟩ of the blend's sides; zero if a side lacks the module."""
    sides = side_factors(slot, read)
    names = list(rule.blend or {})
    present = [place for place, name in enumerate(names) if name in sides]
    gram = np.zeros((len(names), len(names)))
    joint = Joint([sides[names[place]] for place in present])
    for i, row in enumerate(present):
        for j, column in enumerate(present):
            gram[row, column] = joint.inner(i, j)
    return gram
