"""ΔW of one weight, as factors or as an array: blocks of its rows, and the mean absolute value of each row.

numpy arrays in, numpy arrays out. Knows nothing of files, adapters or plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.files.numbers import too_large

__all__ = ["Delta", "Factors", "blocks", "finite", "mean_absolute", "row_magnitudes"]

Matrix = npt.NDArray[np.floating]
Rows = npt.NDArray[np.float32]

_BLOCK = 2**22  # elements of ΔW per block: 16 MB in float32


class Factors(NamedTuple):
    """ΔW = b·a, with a (r×in) and b (out×r)."""

    a: Matrix
    b: Matrix

    @classmethod
    def scaled(cls, a: Matrix, b: Matrix, scale: float, name: str) -> Factors:
        """The factors of ΔW = s·B·A, with the scale in b.

        Raises:
            UnsupportedError: b overflows float32 when it is scaled; the message calls the weight `name`.
        """
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

    def masked(self, kept: npt.NDArray[np.bool_]) -> Factors:
        """The factors of ΔW with zeros in the rows where `kept` (out values) is false."""
        return Factors(self.a, self.b * kept[:, None])


Delta = Factors | Rows  # ΔW as factors or dense; out×in


def blocks(delta: Delta, name: str) -> Iterator[Rows]:
    """ΔW in blocks of whole rows, in float32.

    Raises:
        UnsupportedError: a product overflows float32; the message calls the weight `name`.
    """
    out, width = delta.shape
    step = max(1, _BLOCK // width)
    for start in range(0, out, step):
        with np.errstate(all="ignore"):  # what overflows is found by `finite`
            rows = delta.rows(start, start + step) if isinstance(delta, Factors) else delta[start : start + step]
        yield finite(rows, name)


def finite(rows: Matrix, name: str) -> Matrix:
    """Return the rows unchanged if all numbers are finite.

    Raises:
        UnsupportedError: a number is not finite; the message calls the weight `name`.
    """
    if not np.isfinite(rows).all():
        raise too_large(name)
    return rows


def mean_absolute(rows: Matrix) -> npt.NDArray[np.float64]:
    """The mean absolute value of each row."""
    return np.asarray(np.abs(rows).mean(axis=1, dtype=np.float64))


def row_magnitudes(delta: Delta, name: str) -> npt.NDArray[np.float64]:
    """The mean absolute value of each row of ΔW (out values); errors as for `blocks`."""
    return np.concatenate([mean_absolute(block) for block in blocks(delta, name)])
