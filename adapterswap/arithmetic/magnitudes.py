"""The magnitude of an expert for `weights: magnitude`: its mean absolute ΔW (Bandarkar et al. 2025).

The mean is over all rows of all ΔW. A full checkpoint's ΔW are those of its matrices; norms and biases have no rows. A
matrix has one row per output, as in adapters, and an embedding one per token. An average of adapters and checkpoints
is treated like a checkpoint. Reads a few rows at a time; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from adapterswap.arithmetic.lowrank import concatenate
from adapterswap.changes.deltas import row_magnitudes
from adapterswap.changes.kinds import Change, Whole
from adapterswap.changes.locating import find_tied_head, locate_all, with_head
from adapterswap.changes.reading import FactorReader, factor_reader, read_rows, row_reader
from adapterswap.errors import BaseModelError, ExpertError, Problems
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.orientation import Orientation
from adapterswap.files.dtypes import FLOATS
from adapterswap.files.numbers import open_files, row_ranges
from adapterswap.planning.allocation import BASE
from adapterswap.planning.plan import Plan

__all__ = ["sides_magnitudes"]

_ELEMENTS = 2**20  # elements to read at a time


def sides_magnitudes(plan: Plan) -> dict[str, float]:
    """The mean absolute ΔW of each side whose weight depends on it.

    Raises:
        ExpertError: a side changes nothing, so its weight would be divided by zero; a tensor holds NaN or infinity.
        UnsupportedError: a product overflows.
        BaseModelError: the base lacks a weight that an adapter changes.
    """
    shares_of: dict[str, Mapping[str, float]] = {}
    for slot in plan:
        if slot.rule is not None and slot.rule.weights:
            shares_of |= {side: slot.rule.sides[side] for side in slot.weights}
    magnitudes = {side: _magnitude(shares, plan) for side, shares in shares_of.items()}
    problems = Problems(ExpertError)
    for side in (side for side, magnitude in magnitudes.items() if magnitude == 0):
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
        with factor_reader(adapters) as read:
            return _adapters_magnitude(read, shares, adapters)
    return _dense_magnitude(shares, plan, adapters)


def _adapters_magnitude(read: FactorReader, shares: Mapping[str, float], adapters: Mapping[str, Adapter]) -> float:
    """The magnitude of adapters, from their factors.

    For several experts it is the magnitude of their average, over the modules that any of them adapts.

    Raises:
        ExpertError, UnsupportedError: see `read_factors`; or a product of factors overflows.
    """
    total, rows = 0.0, 0
    modules_of = {expert: adapters[expert].modules for expert in shares}
    for name in dict.fromkeys(name for modules in modules_of.values() for name in modules):
        parts = [
            (share, read(expert, modules_of[expert][name]))
            for expert, share in shares.items()
            if name in modules_of[expert]
        ]
        means = row_magnitudes(parts[0][1] if parts[0][0] == 1 else concatenate(parts), name)
        total, rows = total + float(means.sum()), rows + means.size
    return total / rows


def _dense_magnitude(shares: Mapping[str, float], plan: Plan, adapters: Mapping[str, Adapter]) -> float:
    """The magnitude of an average that includes a full checkpoint, from dense ΔW."""
    base, full = plan.base, plan.checkpoints
    assert base is not None  # a plan whose weights wait for magnitudes has one
    orientation = Orientation(base)
    tied = find_tied_head(base, adapters)
    parameters = with_head(base.parameters, tied)
    problems = Problems(BaseModelError)
    located = locate_all(adapters, parameters, "the base", base, problems)
    problems.raise_if_any()
    total, rows = 0.0, 0
    shards = [shard for name in shares if name in full for shard in full[name].shards]
    with open_files([*shards, *base.shards, *(adapter.file for adapter in adapters.values())]) as files:
        for key, original in parameters.items():
            base_weight = Whole.of(original.path, original.tensor)
            stored = {name: full[name].parameters for name in shares if name in full}
            tensors = {name: own[tied.source(key, own) if tied else key] for name, own in stored.items()}
            dtypes = {original.tensor.dtype, *(parameter.tensor.dtype for parameter in tensors.values())}
            if len(original.tensor.shape) < 2 or not dtypes <= set(FLOATS):
                continue
            changes: dict[str, Change] = {
                name: Whole.of(tensor.path, tensor.tensor) for name, tensor in tensors.items()
            }
            changes |= {name: by_key[key].change for name, by_key in located.items() if key in by_key}
            readers = [(np.float32(shares[name]), row_reader(name, change, files)) for name, change in changes.items()]
            columns, count = original.tensor.shape[-1], math.prod(original.tensor.shape[:-1])
            outputs = columns if orientation.is_transposed(key) else count
            for start, stop in row_ranges(count, max(1, _ELEMENTS // columns)):
                rows_of_base = read_rows(BASE, base_weight, files, start, stop)
                delta = np.zeros_like(rows_of_base)
                for share, read in readers:
                    delta += share * read(rows_of_base, start, stop)
                total += float(np.abs(delta).sum(dtype=np.float64)) / (columns * count // outputs)
            rows += outputs
    return total / rows
