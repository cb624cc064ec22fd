"""Read an expert's change of a weight from its files: factors, or rows of the dense ΔW as the model stores it.

Arrays are numpy's, in float32, in blocks of rows. Errors for NaN, infinity and overflow name the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.kinds import Change, LowRank, Opaque
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.parts import LoraModule
from adapterswap.kit.errors import UnsupportedError
from adapterswap.kit.files.numbers import too_large
from adapterswap.kit.files.tensorfile import open_files

Matrix = npt.NDArray[np.floating]
Rows = npt.NDArray[np.float32]

_BLOCK = 2**22  # elements of ΔW per block: 16 MB in float32


class Factors(NamedTuple):
    """ΔW = b·a, with a (r×in) and b (out×r)."""

    a: Matrix
    b: Matrix

    @classmethod
    def scaled(cls, a: Matrix, b: Matrix, scale: float, name: str) -> Factors:
        """The factors of ΔW = s·B·A, with the scale in b."""
        with np.errstate(over="ignore"):
            return cls(a, finite(b * np.float32(scale), name))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of ΔW, (out, in)."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def T(self) -> Factors:  # named as in numpy
        """The factors of ΔWᵀ."""
        return Factors(self.b.T, self.a.T)

    def rows(self, start: int = 0, stop: int | None = None) -> Matrix:
        """Rows `start` to `stop` of ΔW, dense."""
        return np.asarray(self.b[start:stop] @ self.a)

    def row_magnitudes(self, name: str) -> npt.NDArray[np.float64]:
        """The mean absolute value of each row of ΔW (out values), in blocks; `name` is for messages."""
        means = []
        step = max(1, _BLOCK // self.a.shape[1])
        for start in range(0, len(self.b), step):
            with np.errstate(all="ignore"):  # what overflows is found by `finite`
                rows = self.rows(start, start + step)
            means.append(np.abs(finite(rows, name)).mean(axis=1, dtype=np.float64))
        return np.concatenate(means)

    def masked(self, kept: npt.NDArray[np.bool_]) -> Factors:
        """The factors of ΔW with zeros in the rows where `kept` (out values) is false."""
        return Factors(self.a, self.b * kept[:, None])

    @staticmethod
    def read(expert: str, file: int, module: LoraModule) -> Factors:
        """Read a module's factors from the open file `file`, in float32, with the scale in B."""
        if module.experts > 1:
            raise UnsupportedError(
                f"{module.name} is a fused parameter of {module.experts} experts in {expert}: its ΔW is not "
                "computed here",
                "Compose it with linear methods, into an adapter of the exact layout",
            )
        return _read_factors(expert, file, module)

    @staticmethod
    def read_matrices(expert: str, file: int, module: LoraModule) -> list[Factors]:
        """The factors of each matrix of a mixture's fused parameter, or of any other module's one weight."""
        joined = _read_factors(expert, file, module)
        if module.experts == 1:
            return [joined]
        a = joined.a.reshape(module.experts, module.rank, module.in_features)
        b = joined.b.reshape(module.out_features, module.rank, module.experts)
        return [Factors(a[i], np.ascontiguousarray(b[:, :, i])) for i in range(module.experts)]

    @staticmethod
    def concatenated(terms: list[tuple[float, Factors]]) -> Factors:
        """Σ c_i·B_i·A_i as one pair of factors: A = [A_1; A_2; …], B = [c_1·B_1, c_2·B_2, …]."""
        a_pieces, b_pieces = [], []
        for coefficient, factors in terms:
            a_pieces.append(factors.a)
            b_pieces.append(np.asarray(coefficient, factors.b.dtype) * factors.b)
        return Factors(np.concatenate(a_pieces, axis=0), np.concatenate(b_pieces, axis=1))


def finite(rows: Matrix, name: str) -> Matrix:
    """Return the rows unchanged if all numbers are finite."""
    if not np.isfinite(rows).all():
        raise too_large(name)
    return rows


RowReader = Callable[[Rows, int, int | None], Rows]  # (the base's own rows, start, stop) → the same rows of ΔW


class FactorReader(NamedTuple):
    """Reads experts' changes of modules from files that are open.

    Attributes:
        adapters: by expert.
        files: their open files.
    """

    adapters: Mapping[str, Adapter]
    files: Mapping[Path, int]

    @classmethod
    @contextmanager
    def open(cls, adapters: Mapping[str, Adapter]) -> Iterator[FactorReader]:
        """The files stay open until the block ends."""
        with open_files(adapter.file for adapter in adapters.values()) as files:
            yield cls(adapters, files)

    def __call__(self, expert: str, module: LoraModule) -> Factors:
        """ΔW = b·a of an expert's module in float32, with the scale in b."""
        return Factors.read(expert, self.files[self.adapters[expert].file.path], module)

    def rows_of(self, expert: str, change: Change) -> RowReader:
        """A function that reads rows of an expert's dense ΔW, in the orientation in which the model stores the weight.

        Call it with the base's own rows, which are subtracted if the expert has whole weights. Factors are read once,
        when the function is created.
        """
        assert not isinstance(change, Opaque)  # the planner refuses plans that need its rows
        if isinstance(change, LowRank):
            factors, name = Factors.read(expert, self.files[change.path], change.lora), change.lora.name
            stored = factors.T if change.transposed else factors

            def product(base_rows: Rows, start: int, stop: int | None) -> Rows:
                with np.errstate(all="ignore"):  # what overflows is found by `finite`
                    return finite(stored.rows(start, stop), name)

            return product

        return lambda base_rows, start, stop: change.difference(expert, base_rows, self.files, start, stop)


def _read_factors(expert: str, file: int, module: LoraModule) -> Factors:
    """All of A and B, with the scale in B."""
    b = module.b.read_numbers(expert, file)
    return Factors.scaled(module.a.read_numbers(expert, file), b, module.scale, module.name)
