"""Exact arithmetic on low-rank matrices ΔW = B·A, without forming ΔW: norms, inner products, truncation.

numpy arrays in, numpy arrays out. B is out×r with the scale folded in, A is r×in. Knows nothing of adapters or plans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.changes.deltas import Factors

__all__ = ["Truncated", "concatenate", "cosine", "inner", "smallest_rank", "truncate"]

Matrix = npt.NDArray[np.floating]


class Truncated(NamedTuple):
    """A low-rank approximation of ΔW.

    Attributes:
        factors: of the approximation; the singular values are shared evenly, √σ to each side.
        singular_values: those kept, in falling order.
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


def inner(one: Factors, other: Factors) -> float:
    """The Frobenius inner product ⟨B_1·A_1, B_2·A_2⟩ = Σ (B_1ᵀB_2) ∘ (A_1A_2ᵀ), in float64: O((out+in)·r²)."""
    left = one.b.astype(np.float64).T @ other.b.astype(np.float64)
    right = one.a.astype(np.float64) @ other.a.astype(np.float64).T
    return float(np.sum(left * right))


def cosine(product: float, norms: tuple[float, float]) -> float | None:
    """⟨X, Y⟩ / (‖X‖·‖Y‖), kept within ±1 against rounding; None where one of the norms is zero."""
    one, other = norms
    return max(-1.0, min(1.0, product / (one * other))) if one and other else None


def truncate(factors: Factors, *, rank: int | None = None, error: float | None = None) -> Truncated:
    """The best approximation of ΔW of a given rank, or of the smallest rank within a relative error.

    QR of B and of Aᵀ, then an SVD of the r×r core R_B·R_Aᵀ: the singular values of ΔW itself, in O((out+in)·r²), where
    a dense SVD costs O(out·in·min(out, in)) (Eckart & Young 1936 for the optimum).

    Args:
        factors: of ΔW.
        rank: at most this rank.
        error: at most this relative error; the smallest rank that reaches it. Both may be given: rank wins.
    """
    q_b, r_b = np.linalg.qr(factors.b)
    q_a, r_a = np.linalg.qr(factors.a.T)
    u, sigma, vt = np.linalg.svd(r_b.astype(np.float64) @ r_a.astype(np.float64).T)
    keep = smallest_rank(sigma, error) if error is not None else len(sigma)
    keep = max(1, min(keep, rank or keep, len(sigma)))
    root = np.sqrt(sigma[:keep])
    dtype = factors.a.dtype
    b = q_b @ (u[:, :keep] * root).astype(dtype)
    a = (root[:, None] * vt[:keep]).astype(dtype) @ q_a.T
    return Truncated(Factors(a, b), sigma[:keep], _tail(sigma, keep))


def smallest_rank(sigma: Matrix, error: float) -> int:
    """The smallest rank whose truncation has at most this relative error, for the falling singular values `sigma`."""
    return next((rank for rank in range(1, len(sigma)) if _tail(sigma, rank) <= error), len(sigma))


def _tail(sigma: Matrix, keep: int) -> float:
    """√(Σ_{i>keep} σ_i²) / √(Σ σ_i²): the relative error of keeping `keep` singular values."""
    total = float(np.sum(np.square(sigma)))
    return float(np.sqrt(np.sum(np.square(sigma[keep:])) / total)) if total else 0.0
