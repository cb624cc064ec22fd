"""Magnitude weights of plans with full checkpoints, which are known only after a look at the tensors.

A full expert's ΔW is W - W_base. Reads a few rows at a time; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.lowrank import Factors
from adapterswap.arithmetic.resolving import adapters_magnitude, magnitude_weights, sides_magnitudes
from adapterswap.arithmetic.tensors import (
    open_files,
    read_elements,
    read_factors,
    row_ranges,
    too_large,
)
from adapterswap.errors import Problems
from adapterswap.experts.adapters import LoraModule
from adapterswap.experts.orientation import Orientation
from adapterswap.files.tensorfile import FLOATS, Tensor
from adapterswap.planning.allocation import BASE
from adapterswap.planning.locating import Located, find_tied_head, locate, with_head
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.modules import reweighted
from adapterswap.planning.parameters import ParameterPlan

__all__ = ["resolve_model"]

_ELEMENTS = 2**20  # read and compared at a time

Delta = npt.NDArray[np.float32]


def resolve_model(plan: ModelPlan) -> tuple[ModelPlan, dict[str, float]]:
    """The plan with its final coefficients, and each side's mean absolute ΔW where they depend on it.

    The mean is over all rows of all ΔW, as for adapters; a full checkpoint's ΔW are its matrices (norms and biases have
    no rows). A matrix has one row per output, as adapters count, and an embedding one per token. An average of adapters
    and checkpoints counts like a checkpoint.

    Raises:
        AdapterswapError: a tensor that is read holds NaN or infinity, or a side's ΔW is zero.
    """
    magnitudes = sides_magnitudes(plan, lambda shares: _magnitude(shares, plan))
    return replace(plan, parameters={p.name: _settled(p, magnitudes) for p in plan}) if magnitudes else plan, magnitudes


def _settled(parameter: ParameterPlan, magnitudes: Mapping[str, float]) -> ParameterPlan:
    rule = parameter.rule
    if rule is None or not rule.weights:
        return parameter
    weights = magnitude_weights(rule, parameter.weights, magnitudes)
    terms = reweighted(parameter.terms, rule, weights, apart=False)
    return replace(parameter, terms=terms, weights=weights, rule=rule.model_copy(update={"weights": None}))


def _magnitude(shares: Mapping[str, float], plan: ModelPlan) -> float:
    """The mean absolute ΔW of an expert, or of the average of several."""
    adapters = {name: plan.adapters[name] for name in shares if name in plan.adapters}
    if len(adapters) == len(shares):
        with open_files(adapter.file for adapter in adapters.values()) as files:

            def read(expert: str, module: LoraModule) -> Factors:
                return read_factors(expert, files[adapters[expert].file.path], module)

            return adapters_magnitude(read, shares, adapters)
    base, full = plan.base, plan.full
    assert base is not None  # a plan whose weights wait for magnitudes has one
    orientation = Orientation(base)
    tied = find_tied_head(base, adapters)
    parameters = with_head(base.parameters, tied)
    problems = Problems()
    located = {
        name: locate(name, adapter, parameters, "the base", orientation, problems) for name, adapter in adapters.items()
    }
    problems.raise_if_any()
    total, rows = 0.0, 0
    shards = [shard for name in shares if name in full for shard in full[name].shards]
    with open_files([*shards, *base.shards, *(adapter.file for adapter in adapters.values())]) as files:
        for key, original in parameters.items():
            stored = tied.embedding if tied and key == tied.head and key not in base.parameters else key
            tensors = {name: full[name].parameters[stored] for name in shares if name in full}
            dtypes = {original.tensor.dtype, *(parameter.tensor.dtype for parameter in tensors.values())}
            if len(original.tensor.shape) < 2 or not dtypes <= set(FLOATS):
                continue
            parts = {name: found[key] for name, found in located.items() if key in found}
            columns, count = original.tensor.shape[-1], math.prod(original.tensor.shape[:-1])
            outputs = columns if orientation.is_transposed(stored) else count
            for start, stop in row_ranges(count, max(1, _ELEMENTS // columns)):
                theirs = _numbers(BASE, files[original.path], original.tensor, start, stop)
                delta = np.zeros_like(theirs)
                for name, parameter in tensors.items():
                    ours = _numbers(name, files[parameter.path], parameter.tensor, start, stop)
                    delta += np.float32(shares[name]) * (ours - theirs)
                for name, part in parts.items():
                    file = files[adapters[name].file.path]
                    delta += np.float32(shares[name]) * _adapted(name, part, file, theirs, start, stop)
                total += float(np.abs(delta).sum(dtype=np.float64)) / (columns * count // outputs)
            rows += outputs
    return total / rows


def _adapted(name: str, found: Located, file: int, base: Delta, start: int, stop: int) -> Delta:
    """Rows of an adapter's ΔW, as the model stores the weight."""
    if isinstance(found.part, Tensor):
        return _numbers(name, file, found.part, start, stop) - base
    with np.errstate(all="ignore"):
        a, b = read_factors(name, file, found.part)
        delta = np.asarray(a.T[start:stop] @ b.T if found.transposed else b[start:stop] @ a, np.float32)
    if not np.isfinite(delta).all():
        raise too_large(found.module)
    return delta


def _numbers(name: str, file: int, tensor: Tensor, start: int, stop: int) -> Delta:
    """Rows `start` to `stop`."""
    columns = tensor.shape[-1]
    return read_elements(name, file, tensor, start * columns, stop * columns).reshape(stop - start, columns)
