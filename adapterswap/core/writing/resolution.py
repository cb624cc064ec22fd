"""Resolve the parts of a plan that depend on tensors: magnitude weights, angles, rows under a threshold.

Plans are made from headers alone and leave these open, so executors begin with `Resolved.of`. It reads the experts'
files a few rows at a time.

A magnitude is the mean |ΔW| over all rows of all ΔW. A full checkpoint's ΔW are those of its matrices; norms and biases
have no rows. A matrix has one row per output, as in adapters, and an embedding one per token. An average of adapters
and checkpoints is treated like a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import FactorReader, Factors
from adapterswap.core.changes.joint import Joint
from adapterswap.core.changes.kinds import Change, Whole
from adapterswap.core.changes.locations import locate_all
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slots import Slot
from adapterswap.kit.errors import BaseModelError, ExpertError, Problems
from adapterswap.kit.files.numbers import Dtype, row_ranges
from adapterswap.kit.files.tensorfile import open_files

KeptRows = Mapping[tuple[str, str], npt.NDArray[np.bool_]]
"""(side, module) → which rows of the side's ΔW are kept, of out; all rows of modules that it does not list."""

_ELEMENTS = 2**20  # elements to read at a time


def sides_magnitudes(plan: Plan) -> dict[str, float]:
    """The mean absolute ΔW of each side whose weight depends on it."""
    shares_of: dict[str, Mapping[str, float]] = {}
    for slot in plan:
        if slot.rule is not None and slot.rule.weights:
            shares_of |= {side: slot.rule.sides[side] for side in slot.weights}

    magnitudes = {side: _magnitude(shares, plan) for side, shares in shares_of.items()}
    problems = Problems(ExpertError)
    for side, magnitude in magnitudes.items():
        if magnitude != 0:
            continue
        problems.add(
            f"{side} changes nothing (its mean |ΔW| is 0, as in an untrained expert), and `weights: magnitude` divides "
            "by that",
            "Use a trained expert, or equal weights",
            parameter="weights",
        )
    problems.raise_if_any()
    return magnitudes


def _magnitude(shares: Mapping[str, float], plan: Plan) -> float:
    """The mean absolute ΔW of an expert, or of the average of several."""
    adapters = {name: adapter for name, adapter in plan.adapters.items() if name in shares}
    if len(adapters) == len(shares):
        with FactorReader.open(adapters) as read:
            return _adapters_magnitude(read, shares, adapters)
    return _dense_magnitude(shares, plan, adapters)


def _adapters_magnitude(read: FactorReader, shares: Mapping[str, float], adapters: Mapping[str, Adapter]) -> float:
    """The magnitude of adapters, from their factors.

    For several experts it is the magnitude of their average, over the modules that any of them adapts.
    """
    # Every module that any of them adapts, with the shares of those that do
    shares_of: dict[str, list[tuple[float, str, LoraModule]]] = {}
    for expert, share in shares.items():
        for name, module in adapters[expert].modules.items():
            shares_of.setdefault(name, []).append((share, expert, module))

    total, rows = 0.0, 0
    for name, entering in shares_of.items():
        joined = _joined([(share, read(expert, module)) for share, expert, module in entering])
        means = joined.row_magnitudes(name)
        total += float(means.sum())
        rows += means.size
    return total / rows


def _dense_magnitude(shares: Mapping[str, float], plan: Plan, adapters: Mapping[str, Adapter]) -> float:
    """The magnitude of an average that includes a full checkpoint, from dense ΔW."""
    base, full = plan.base.weights, plan.checkpoints
    assert base is not None  # a plan whose weights wait for magnitudes has one
    problems = Problems(BaseModelError)
    parameters, located, tied = locate_all(adapters, base, problems)
    problems.raise_if_any()

    checkpoints = [full[name] for name in shares if name in full]
    opened = [adapter.file for adapter in adapters.values()]
    for checkpoint in (*checkpoints, base):
        opened += checkpoint.shards

    total, rows = 0.0, 0
    with open_files(opened) as files:
        read = FactorReader(adapters, files)
        for key, original in parameters.items():
            # What each expert does to this weight
            changes: dict[str, Change] = {}
            dtypes = {original.tensor.dtype}
            for name in shares:
                if name in full:
                    own = full[name].parameters
                    stored = own[tied.source(key, own) if tied else key]
                    changes[name] = Whole.of(stored.path, stored.tensor)
                    dtypes.add(stored.tensor.dtype)
            for name, by_key in located.items():
                if key in by_key:
                    changes[name] = by_key[key].change
            if len(original.tensor.shape) < 2 or not dtypes <= set(Dtype.FLOATS):
                continue

            # The sum of |ΔW| over each row of W as stored, divided by the length of a row of ΔW
            readers = []
            for name, change in changes.items():
                readers.append((np.float32(shares[name]), read.rows_of(name, change)))
            base_weight = Whole.of(original.path, original.tensor)
            columns, count = original.tensor.shape[-1], math.prod(original.tensor.shape[:-1])
            outputs = columns if base.is_transposed(key) else count
            for start, stop in row_ranges(count, max(1, _ELEMENTS // columns)):
                rows_of_base = base_weight.read_rows(BASE, files, start, stop)
                delta = np.zeros_like(rows_of_base)
                for share, rows_of in readers:
                    delta += share * rows_of(rows_of_base, start, stop)
                total += float(np.abs(delta).sum(dtype=np.float64)) / (columns * count // outputs)
            rows += outputs
    return total / rows


class Resolved(NamedTuple):
    """A plan whose linear coefficients are numbers.

    Attributes:
        plan: the plan; linear rules' coefficients are final, SLERP's included.
        magnitudes: by side (an expert, or an average of several): its mean absolute ΔW, if weights depend on it.
        kept_rows: by (side, module): which rows of the side's ΔW are kept, if the composition has a row threshold.
    """

    plan: Plan
    magnitudes: Mapping[str, float]
    kept_rows: KeptRows

    def kept_share(self) -> dict[str, float]:
        """The share of each side's rows that the threshold keeps, over the side's modules."""
        kept: dict[str, int] = {}
        rows: dict[str, int] = {}
        for (side, _), mask in self.kept_rows.items():
            kept[side] = kept.get(side, 0) + int(mask.sum())
            rows[side] = rows.get(side, 0) + mask.size
        return {side: kept[side] / rows[side] for side in rows}

    @staticmethod
    def of(plan: Plan) -> Resolved:
        """Compute what the plan leaves open. If nothing is open, no tensors are read.

        SLERP of stored tensors stays open: it is computed together with the tensors.
        """
        by_magnitude = any(slot.rule is not None and slot.rule.weights for slot in plan)
        by_angle = any(slot.has_span and slot.is_low_rank for slot in plan)  # other angles are those of whole tensors
        threshold = plan.composition.row_threshold
        if not (by_magnitude or by_angle or threshold):
            return Resolved(plan, {}, {})

        magnitudes = sides_magnitudes(plan)
        with FactorReader.open(plan.adapters) as read:
            slots = {slot.name: _settled(slot, magnitudes, read, apart=threshold is not None) for slot in plan}
            kept_rows = {}
            if threshold is not None:
                for slot in plan.modules.values():
                    for side, factors in side_factors(slot, read, {}).items():
                        kept_rows[side, slot.name] = factors.row_magnitudes(slot.name) >= threshold
        return Resolved(replace(plan, slots=slots), magnitudes, kept_rows)


def side_factors(slot: Slot, read: FactorReader, kept_rows: KeptRows) -> dict[str, Factors]:
    """The ΔW of each side of a slot, as factors: an expert's, or the average of several experts'.

    Rows that are not kept are zeros.
    """
    sides: Mapping[str, Mapping[str, float]] = {}
    if slot.rule is not None:
        sides = slot.rule.sides

    parts_of: dict[str, list[tuple[float, Factors]]] = {}
    for term in slot.terms:
        share = 1.0
        if term.side in sides:
            share = sides[term.side][term.expert]
        parts_of.setdefault(term.side, []).append((share, read(term.expert, term.lora)))

    combined = {}
    for side, parts in parts_of.items():
        factors = _joined(parts)
        rows = kept_rows.get((side, slot.name))
        if rows is not None:
            factors = factors.masked(rows)
        combined[side] = factors
    return combined


def _joined(parts: list[tuple[float, Factors]]) -> Factors:
    """Σ share·ΔW as factors."""
    (share, factors), *more = parts
    if share == 1 and not more:
        return factors
    return Factors.concatenated(parts)


def _settled(slot: Slot, magnitudes: Mapping[str, float], read: FactorReader, *, apart: bool) -> Slot:
    """The slot with its final coefficients."""
    rule = slot.rule
    by_angle = slot.has_span and slot.is_low_rank
    if rule is None or slot.storage.in_full or not (rule.weights or by_angle):
        return slot

    if rule.weights:
        # Divided by the sides' magnitudes, then by their sum if the rule normalizes
        weights = {side: weight / magnitudes[side] for side, weight in slot.weights.items()}
        if rule.normalizes:
            total = math.fsum(weights.values())
            weights = {side: weight / total for side, weight in weights.items()}
    else:
        weights = rule.coefficients_of(_gram(slot, rule, read))
        apart = apart or not any(weights.values())  # a module of zeros is written as one

    settled = slot.reweighted(weights, apart=apart)
    if not slot.is_stored:
        return settled
    # A stored tensor needs the base while its rule waits for magnitudes; from now on its coefficients decide.
    return replace(settled, rule=rule.model_copy(update={"weights": None}))


def _gram(slot: Slot, rule: Rule, read: FactorReader) -> npt.NDArray[np.float64]:
    """⟨ΔW_i, ΔW_j⟩ of the blend's sides; zero if a side lacks the module."""
    sides = side_factors(slot, read, {})
    names = list(rule.blend or {})
    present = [place for place, name in enumerate(names) if name in sides]

    gram = np.zeros((len(names), len(names)))
    joint = Joint([sides[names[place]] for place in present])
    for i, row in enumerate(present):
        for j, column in enumerate(present):
            gram[row, column] = joint.inner(i, j)
    return gram
