"""ΔW = W_full - W_base of one weight, and the low-rank factors cut out of it.

A weight at a time: memory holds a few copies of the largest one. Knows two stored tensors and a form; knows
nothing of models and folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.approximation import approximate
from adapterswap.arithmetic.outputs import OutputTensor
from adapterswap.arithmetic.spooling import Spool
from adapterswap.changes.deltas import Factors
from adapterswap.changes.reading import read_difference
from adapterswap.errors import ArgumentError, Problems
from adapterswap.experts.adapter_keys import factor_key
from adapterswap.experts.anatomy import AdaptableWeight
from adapterswap.extracting.pairing import LeftOutWeight, WeightMatrix
from adapterswap.files.numbers import decode, encode, finite_bytes, read_elements

__all__ = ["Cut", "CutForm", "cut", "measure", "name_tensors", "norm_of_change"]


_BLOCK = 2**22  # elements of a weight that is left out, read at a time
_MAX_RANK = 2**16  # what `open_adapter` reads

_Array = TypeVar("_Array", npt.NDArray[np.floating], Any)  # numpy's, or torch's


@dataclass(frozen=True)
class CutForm:
    """How the factors are cut.

    Attributes:
        rank: the rank of every module; with `max_error`, the highest allowed.
        max_error: the smallest rank with at most this relative error of ΔW.
        dtype: the dtype of the factors, by its name in files; None for the dtype of the fine-tune's weight.
        device: the torch device that computes.
    """

    rank: int | None = None
    max_error: float | None = None
    dtype: str | None = None
    device: Any = "cpu"

    def __post_init__(self) -> None:
        problems = Problems(ArgumentError)
        if self.rank is None and self.max_error is None:
            problems.add("neither `rank` nor `max_error` was passed", "Pass one of them, or both", parameter="rank")
        if self.rank is not None and not 1 <= self.rank <= _MAX_RANK:
            problems.add(
                f"`rank` is {self.rank}, but must be between 1 and {_MAX_RANK}", "Pass `rank=64`", parameter="rank"
            )
        if self.max_error is not None and not 0 < self.max_error < 1:
            problems.add(
                f"`max_error` is {self.max_error}, but must be between 0 and 1",
                "Pass `max_error=0.1`",
                parameter="max_error",
            )
        problems.raise_if_any()


@dataclass(frozen=True)
class Cut:
    """The factors of one weight's ΔW ≈ B·A, as they are written.

    Attributes:
        matrix: the weight.
        rank: of the factors.
        norm: ‖ΔW‖, the Frobenius norm.
        error: ‖ΔW - B·A‖ / ‖ΔW‖ with the factors as they are written, rounding included.
        dtype: of both factors, by its name in files.
        factors: A (rank×in) and B (out×rank), with numbers that `dtype` holds.
    """

    matrix: WeightMatrix
    rank: int
    norm: float
    error: float
    dtype: str
    factors: Factors

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.floating]]]:
        """See `name_tensors`."""
        return name_tensors(self.matrix.weight, *self.factors)

    def stored(self, spool: Spool) -> Iterator[OutputTensor]:
        """The tensors as they are written, kept in `spool` until then."""
        for key, values in self.tensors():
            rows, columns = values.shape
            data = spool.add(encode(np.asarray(values, np.float32), self.dtype), (rows, columns))
            yield OutputTensor(key, self.dtype, (rows, columns), None, data=data)


def name_tensors(weight: AdaptableWeight, a: _Array, b: _Array) -> Iterator[tuple[str, _Array]]:
    """A (rank×in) and B (out×rank) under PEFT's names; a tied head has the embedding's, transposed."""
    yield factor_key(weight.name, "A", embedding=weight.embedding), a
    yield factor_key(weight.name, "B", embedding=weight.embedding), b
    for head in weight.tied:
        yield factor_key(head, "A", embedding=False), b.T
        yield factor_key(head, "B", embedding=False), a.T


def cut(matrix: WeightMatrix, form: CutForm, files: Mapping[Path, int], names: tuple[str, str]) -> Cut | None:
    """Cut a weight's ΔW; None if the fine-tune did not change it.

    Args:
        matrix: the weight.
        form: how to cut.
        files: the open shards.
        names: the names of the fine-tune and the base in messages.

    Raises:
        ExpertError: a weight holds NaN or infinity, or a factor overflows its dtype.
    """
    delta = _change(matrix, files, names)
    norm = math.sqrt(_sum_of_squares(delta))
    if norm == 0:
        return None
    result = approximate(delta, rank=form.rank, error=form.max_error, device=form.device)
    dtype = form.dtype or matrix.full.tensor.dtype
    a, b = (finite_bytes(values, dtype, matrix.weight.name) for values in (result.factors.a, result.factors.b))
    written = Factors(decode(a, dtype, result.factors.a.shape), decode(b, dtype, result.factors.b.shape))
    error = _distance(delta, written, form.device) / norm
    return Cut(matrix, len(result.singular_values), norm, error, dtype, written)


def measure(
    matrix: WeightMatrix, factors: Factors | None, files: Mapping[Path, int], names: tuple[str, str]
) -> tuple[float, float]:
    """‖ΔW‖ of a weight, and ‖ΔW - B·A‖ of the factors that approximate it; None counts as B·A = 0.

    Raises:
        ExpertError: the weight holds NaN or infinity.
    """
    delta = _change(matrix, files, names)
    norm = math.sqrt(_sum_of_squares(delta))
    return norm, norm if factors is None else _distance(delta, factors, "cpu")


def norm_of_change(left_out: LeftOutWeight, files: Mapping[Path, int], names: tuple[str, str]) -> float:
    """‖W_full - W_base‖ of a parameter that is left out; a part that only one of the two has counts in full.

    Raises:
        ExpertError: it holds NaN or infinity.
    """
    both = [left_out.full, *([left_out.base] if left_out.base else [])]
    sizes = [math.prod(stored.tensor.shape) for stored in both]
    total = 0.0
    for start in range(0, max(sizes), _BLOCK):
        blocks = [
            read_elements(name, files[stored.path], stored.tensor, start, min(start + _BLOCK, size))
            for name, stored, size in zip(names, both, sizes, strict=False)
            if start < size
        ]
        total += sum(_sum_of_squares(part) for part in _subtract(blocks))
    return math.sqrt(total)


def _subtract(blocks: list[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
    """The difference of one or two vectors: of their common part, and the rest of the longer one."""
    if len(blocks) == 1:
        return blocks
    common = min(len(block) for block in blocks)
    longer = max(blocks, key=len)
    return [blocks[0][:common] - blocks[1][:common], longer[common:]]


def _change(matrix: WeightMatrix, files: Mapping[Path, int], names: tuple[str, str]) -> npt.NDArray[np.float32]:
    """ΔW, out×in."""
    delta = read_difference(names, matrix.full, matrix.base, files)
    return np.ascontiguousarray(delta.T) if matrix.weight.transposed else delta


def _sum_of_squares(values: npt.NDArray[np.float32]) -> float:
    flat = values.reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))  # cast in small blocks, without a copy


def _distance(delta: npt.NDArray[np.float32], factors: Factors, device: Any) -> float:
    """‖ΔW - B·A‖."""
    import torch

    matrix, a, b = (torch.from_numpy(values).to(device) for values in (delta, *factors))
    return float(torch.linalg.vector_norm(torch.addmm(matrix, b, a, alpha=-1), dtype=torch.float64))
