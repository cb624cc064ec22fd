"""Exact arithmetic on low-rank matrices ΔW = B·A, without forming ΔW: concatenation, cosines, truncation.

numpy arrays in, numpy arrays out. B is out×r with the scale folded in, A is r×in. Knows nothing of adapters or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.changes.deltas import Factors
from adapterswap.changes.joint import Joint, Spectrum, mixed

__all__ = ["Truncated", "concatenate", "cosine", "cut", "kept", "smallest_rank", "truncate"]

Matrix = npt.NDArray[np.floating]


class Truncated(NamedTuple):
    """A low-rank approximation of ΔW.

    Attributes:
        factors: the approximation's factors, with √σ on each side.
        singular_values: the kept singular values, in descending order.
        error: ‖ΔW - b·a‖ / ‖ΔW‖ in the Frobenius norm; 0 for ΔW = 0.
    """

    factors: Factors
    singular_values: Matrix
    error: float


def concatenate(terms: list[tuple[float, Factors]]) -> Factors:
    """Σ c_i·B_i·A_i as one pair of factors: A = [A_1; A_2; …], B = [c_1·B_1, c_2·B_2, …]."""
    return Factors(
        np.concatenate([factors.a for _, factors in terms], axis=0),
        np.concatenate([np.asarray(c, factors.b.dtype) * factors.b for c, factors in terms], axis=1),
    )


def cosine(product: float, norms: tuple[float, float]) -> float | None:
    """⟨X, Y⟩ / (‖X‖·‖Y‖), clipped to ±1; None if one of the norms is zero."""
    first, second = norms
    return max(-1.0, min(1.0, product / (first * second))) if first and second else None


def truncate(factors: Factors, *, rank: int | None = None, error: float | None = None) -> Truncated:
    """The best approximation of ΔW of a given rank, or of the smallest rank within a relative error.

    `Joint` computes the singular values of ΔW in float64 in O((out+in)·r²), while a dense SVD costs
    O(out·in·min(out, in)). Truncation is optimal by Eckart & Young 1936.

    Args:
        factors: the factors of ΔW.
        rank: the maximum rank.
        error: the maximum relative error, reached with the smallest possible rank. If both are given, `rank` wins.

    Returns:
        Factors in the dtype of `factors`.

    Raises:
        LinAlgError: a factor holds NaN or infinity.
    """
    joint = Joint([factors])
    spectrum, keep, lost = cut(joint, [1.0], rank=rank, error=error)
    left, right = joint.mixture([1.0], spectrum, keep)
    dtype = factors.a.dtype
    a, b = mixed([factors.a], right.T, 0).astype(dtype), mixed([factors.b], left, 1).astype(dtype)
    return Truncated(Factors(a, b), spectrum.sigma[:keep], lost)


def cut(
    joint: Joint, weights: Sequence[float], *, rank: int | None, error: float | None
) -> tuple[Spectrum, int, float]:
    """The spectrum of Σ w_i·ΔW_i, the rank to keep (at least 1), and the relative error of that truncation.

    Arguments and errors are those of `truncate`. The spectrum has min(out, in, Σ r_i) singular values, including zeros.
    """
    spectrum = joint.spectrum(weights)
    count = min(*joint.shape, sum(joint.ranks))
    sigma = np.pad(spectrum.sigma, (0, max(0, count - len(spectrum.sigma))))[:count]
    return spectrum._replace(sigma=sigma), *kept(sigma, rank=rank, error=error)


def kept(sigma: Matrix, *, rank: int | None, error: float | None) -> tuple[int, float]:
    """The rank to keep of descending singular values, and its relative error. Arguments are those of `truncate`."""
    keep = smallest_rank(sigma, error) if error is not None else len(sigma)
    keep = max(1, min(keep, rank or keep, len(sigma)))
    return keep, _tail(sigma, keep)


def smallest_rank(sigma: Matrix, error: float) -> int:
    """The smallest rank whose truncation has at most this relative error, for descending singular values."""
    return next((rank for rank in range(1, len(sigma)) if _tail(sigma, rank) <= error), len(sigma))


def _tail(sigma: Matrix, keep: int) -> float:
    """√(Σ_{i>keep} σ_i²) / √(Σ σ_i²): the relative error of keeping `keep` singular values."""
    largest = float(sigma[0]) if len(sigma) else 0.0
    if not largest:
        return 0.0
    shares = np.square(sigma / largest)  # avoids overflow and underflow of the squares
    return float(np.sqrt(np.sum(shares[keep:]) / np.sum(shares)))
