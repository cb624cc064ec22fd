"""Magnitude weights of plans with full checkpoints, which are known only after a look at the tensors.

A full expert's ΔW is W - W_base. Reads a few rows at a time; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from adapterswap.arithmetic.lowrank import row_magnitudes
from adapterswap.arithmetic.tensors import (
    check_finite,
    decode,
    not_finite,
    open_files,
    read_bytes,
    read_factors,
    row_ranges,
    too_large,
)
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.orientation import Orientation
from adapterswap.files.tensorfile import DTYPE_BYTES, FLOATS, Tensor
from adapterswap.planning.allocation import BASE
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.parameters import ParameterPlan

__all__ = ["resolve_model"]

_ELEMENTS = 2**20  # read and compared at a time


def resolve_model(plan: ModelPlan) -> tuple[ModelPlan, dict[str, float]]:
    """The plan with its final coefficients, and each expert's mean absolute ΔW where they depend on it.

    The mean is over all rows of all ΔW, as for adapters; a full checkpoint's ΔW are its matrices (norms and biases have
    no rows). A matrix has one row per output, as adapters count, and an embedding one per token.

    Raises:
        AdapterswapError: a tensor that is read holds NaN or infinity.
    """
    if not any(parameter.rule is not None and parameter.rule.weights for parameter in plan):
        return plan, {}
    magnitudes = {
        name: _of_adapter(name, expert) if isinstance(expert, Adapter) else _of_checkpoint(name, expert, plan)
        for name, expert in plan.experts.items()
    }
    return replace(plan, parameters={p.name: _settled(p, magnitudes) for p in plan}), magnitudes


def _settled(parameter: ParameterPlan, magnitudes: Mapping[str, float]) -> ParameterPlan:
    rule = parameter.rule
    if rule is None or not rule.weights:
        return parameter
    # A ΔW of zero has no magnitude to divide by, and enters as zero whatever its weight.
    weights = {name: weight / (magnitudes[name] or 1.0) for name, weight in parameter.asked.items()}
    if rule.normalizes:
        weights = {name: weight / math.fsum(weights.values()) for name, weight in weights.items()}
    terms = tuple(replace(term, coefficient=weights[term.expert]) for term in parameter.terms)
    return replace(parameter, terms=terms, asked=weights, rule=rule.model_copy(update={"weights": None}))


def _of_adapter(name: str, adapter: Adapter) -> float:
    total, rows = 0.0, 0
    with open_files([adapter.file]) as files, np.errstate(all="ignore"):
        for module in adapter.modules.values():
            means = row_magnitudes(read_factors(name, files[adapter.file.path], module))
            if not np.isfinite(means).all():
                raise too_large(module.name)
            total, rows = total + float(means.sum()), rows + means.size
    return total / rows


def _of_checkpoint(name: str, checkpoint: Checkpoint, plan: ModelPlan) -> float:
    assert plan.base is not None  # a plan whose weights wait for magnitudes has one
    total, rows = 0.0, 0
    orientation = Orientation(checkpoint)
    with open_files([*checkpoint.shards, *plan.base.shards]) as files:
        for key, parameter in checkpoint.parameters.items():
            tensor, base = parameter.tensor, plan.base.parameters[key]
            if len(tensor.shape) < 2 or not {tensor.dtype, base.tensor.dtype} <= set(FLOATS):
                continue
            columns, count = tensor.shape[-1], math.prod(tensor.shape[:-1])
            outputs = columns if orientation.is_transposed(key) else count
            for start, stop in row_ranges(count, max(1, _ELEMENTS // columns)):
                ours = _numbers(name, files, parameter.path, tensor, start, stop)
                theirs = _numbers(BASE, files, base.path, base.tensor, start, stop)
                total += float(np.abs(ours - theirs).sum(dtype=np.float64)) / (columns * count // outputs)
            rows += outputs
    return total / rows


def _numbers(
    name: str, files: Mapping[Path, int], path: Path, tensor: Tensor, start: int, stop: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    columns = tensor.shape[-1]
    size = DTYPE_BYTES[tensor.dtype] * columns
    raw = read_bytes(files[path], tensor, start * size, stop * size)
    if not check_finite(raw, tensor.dtype):
        raise not_finite(name, tensor.name)
    return decode(raw, tensor.dtype, (stop - start, columns))
