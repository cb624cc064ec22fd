"""What two experts' ΔW would have in common if the rows and columns of one were in random order.

A shuffled ΔW keeps the norm, the rank and the entries of the real one, but has nothing to do with the other expert.
Numbers within the band of the shuffled ones are therefore chance. Knows numbers; reads no expert.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Marginals", "Null", "shuffled_overlap", "shuffled_product"]

Vectors = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Null:
    """The mean and variance of a number over shuffles."""

    mean: float
    variance: float


@dataclass(frozen=True)
class Marginals:
    """What `shuffled_product` needs to know about a matrix (n×m).

    Attributes:
        rows: the sum of each row (n).
        columns: the sum of each column (m).
        squares: the sum of all squares.
    """

    rows: Vectors
    columns: Vectors
    squares: float


def shuffled_product(one: Marginals, other: Marginals) -> Null:
    """Mean and variance of ⟨X, P·Y·Q⟩ over all permutations P of the rows and Q of the columns, all equally likely.

    X splits into its mean μ, row effects a, column effects b and a rest, which are orthogonal (a two-way analysis of
    variance), and so does Y. With n rows and m columns the mean is n·m·μ·μ', and the variance is
    m²·‖a‖²·‖a'‖²/(n−1) + n²·‖b‖²·‖b'‖²/(m−1) + ‖rest‖²·‖rest'‖²/((n−1)(m−1)).
    """
    n, m = len(one.rows), len(one.columns)
    (mean, a, b, rest), (mean_, a_, b_, rest_) = _effects(one), _effects(other)
    fewer = max(1, n - 1), max(1, m - 1)  # a single row has no effects, so its divisor does not matter
    variance = m**2 * a * a_ / fewer[0] + n**2 * b * b_ / fewer[1] + rest * rest_ / (fewer[0] * fewer[1])
    return Null(n * m * mean * mean_, variance)


def _effects(matrix: Marginals) -> tuple[float, float, float, float]:
    """μ, ‖a‖², ‖b‖² and ‖rest‖²."""
    n, m = len(matrix.rows), len(matrix.columns)
    rows, columns = np.asarray(matrix.rows, np.float64) / m, np.asarray(matrix.columns, np.float64) / n
    mean = float(rows.mean())
    a, b = float(np.sum((rows - mean) ** 2)), float(np.sum((columns - mean) ** 2))
    return mean, a, b, max(0.0, matrix.squares - n * m * mean**2 - m * a - n * b)


def shuffled_overlap(one: Vectors, other: Vectors, name: str, shuffles: int) -> Null:
    """‖Q₁ᵀ·P·Q₂‖² / min(rank) for orthonormal columns Q₁ (n×p), Q₂ (n×q) and permutations P, drawn by `name`.

    The variance is that of the shuffles, but at least that of uniformly random subspaces, which is
    2·p·q·(n−p)·(n−q) / (n²·(n−1)·(n+2)) for ‖Q₁ᵀ·Q₂‖²: a few shuffles may be close together by chance.
    """
    n, p, q = len(one), one.shape[1], other.shape[1]
    if not min(p, q):
        return Null(0.0, 0.0)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    left, right = np.ascontiguousarray(one.T, np.float32), np.ascontiguousarray(other, np.float32)
    shuffled, found = np.empty_like(right), []
    for _ in range(shuffles):
        np.take(right, rng.permutation(n), axis=0, out=shuffled, mode="clip")  # unlike `raise`, copies nothing twice
        found.append(float(np.sum(np.square(left @ shuffled, dtype=np.float64))))
    uniform = 2 * p * q * (n - p) * (n - q) / (n**2 * max(1, n - 1) * (n + 2))
    smaller = min(p, q)
    return Null(float(np.mean(found)) / smaller, max(float(np.var(found, ddof=1)), uniform) / smaller**2)
