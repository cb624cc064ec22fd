"""Methods that merge singular values and vectors, on joint cores: TSV-Merge, Iso-C, Iso-CTS, and KnOTS' alignment.

All commute with a change of orthonormal bases, so what they give for the dense ΔW_i = B_i·A_i (out×in) is computed from
the factors, in O((out+in)·R²) with R = Σ r_i, and comes back as factors of rank R or less. Scale, weights and λ are the
caller's: fold them into the factors, and multiply the result.

The papers' authors take dense matrices of full rank. Where theirs have low rank, singular vectors of the singular value
0 are arbitrary, and so is what the authors' code makes of them; here they are left out: each function says what of.

numpy arrays in, numpy arrays out, in float64 within. Knows nothing of adapters and plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adapterswap.arithmetic.joint import Core, Joint
from adapterswap.changes.deltas import Factors

__all__ = ["Aligned", "align", "iso_c", "iso_cts", "tsv"]

_NOTHING = 1e-10  # a singular value beside the largest that is left of directions that are not there: rounding


def tsv(changes: Sequence[Factors]) -> Factors:
    """TSV-Merge: each ΔW_i keeps its first singular triplets; their vectors are made orthonormal together; the sum.

    Gargiulo et al., CVPR 2025, arXiv:2412.00081. With U = [U_1 … U_K], V likewise and Σ the kept singular values of
    all: ΔW = U⊥·Σ·V⊥ᵀ, where X⊥ = P·Qᵀ for the singular value decomposition P·D·Qᵀ of X, the orthonormal matrix nearest
    to X.

    As in the authors' code each expert keeps ⌊min(out, in) / K⌋ triplets, which is all of them where the sum of the
    ranks is no more than the smaller side. Triplets with σ = 0 are left out of U and V: in the authors' code their
    arbitrary vectors enter the orthonormalization.

    Args:
        changes: K pairs of factors of one shape, A (r_i×in) and B (out×r_i).

    Returns:
        Factors of rank at most R, in float64.

    Raises:
        LinAlgError: a factor holds NaN or infinity.
    """
    joint = Joint(changes)
    share = max(1, min(joint.shape) // len(changes))
    parts = [_significant(*joint.spectrum_of(index), share) for index in range(len(changes))]
    u, sigma, v = (np.concatenate([part[place] for part in parts], axis=-1) for place in range(3))
    return joint.factors((_orthonormal(u) * sigma) @ _orthonormal(v).T)


def iso_c(changes: Sequence[Factors]) -> Factors:
    """Iso-C: the sum of all ΔW_i, with each singular value replaced by their mean.

    Marczak et al., ICML 2025, arXiv:2502.04959. With Σ ΔW_i = U·Σ·Vᵀ: ΔW = σ̄·U·Vᵀ.

    The mean is over the singular values that are not 0. The authors' code divides by min(out, in) and gives σ̄ to
    directions with σ = 0 too, whose vectors are arbitrary: over them all, σ̄ would be smaller by rank / min(out, in),
    which λ makes up for.

    Args, returns, raises: as for `tsv`.
    """
    joint = Joint(changes)
    u, sigma, vt = joint.spectrum([1.0] * len(changes))
    u, sigma, v = _significant(u, sigma, vt, len(sigma))
    return joint.factors(_isotropic(u, v, float(np.mean(sigma)) if len(sigma) else 0.0))


def iso_cts(changes: Sequence[Factors], common: float = 0.8) -> Factors:
    """Iso-CTS: Iso-C on the first directions of the sum, joined by the first directions of what each expert adds.

    Marczak et al., ICML 2025, arXiv:2502.04959. The first k singular triplets of Σ ΔW_i = U·Σ·Vᵀ are common. Each
    (I - U_k·U_kᵀ)·ΔW_i gives its first s triplets. The left vectors of all are made orthonormal together, the right
    ones likewise (see `tsv`), and every singular value becomes their mean.

    As in the authors' code, s is (m - ⌊common·m⌋)/K rounded to a whole number, and k = m - K·s; but m is the number of
    singular values of the sum that are not 0, where theirs is min(out, in).

    Args:
        changes: as for `tsv`.
        common: the share of directions that are common, from 0 to 1 (the paper: 0.8).

    Returns, raises: as for `tsv`.
    """
    joint = Joint(changes)
    u, sigma, vt = joint.spectrum([1.0] * len(changes))
    u, sigma, v = _significant(u, sigma, vt, len(sigma))
    own = round((len(sigma) - int(len(sigma) * common)) / len(changes))
    count = len(sigma) - own * len(changes)
    if count < 0:  # rounded up
        own, count = own - 1, len(sigma) - (own - 1) * len(changes)
    parts = []
    for index in range(len(changes)):
        core = joint.core_of(index)
        rest = core - u[:, :count] @ (u[:, :count].T @ core)
        parts.append(_significant(*np.linalg.svd(rest, full_matrices=False), own))
    parts.append((u[:, :count], sigma[:count], v[:, :count]))
    lefts, sigmas, rights = (np.concatenate([part[place] for part in parts], axis=-1) for place in range(3))
    mean = float(np.mean(sigmas)) if len(sigmas) else 0.0
    return joint.factors(_isotropic(_orthonormal(lefts), _orthonormal(rights), mean))


class Aligned(NamedTuple):
    """Several ΔW in one basis of their columns: ΔW_i = u·(σ ∘ parts_i), row by row.

    Attributes:
        u: out×k, orthonormal columns, float64.
        sigma: k, the singular values of [ΔW_1 … ΔW_K], falling, none of them 0.
        parts: V_iᵀ for each i, k×in; [V_1ᵀ … V_Kᵀ] side by side has orthonormal rows.
    """

    u: Core
    sigma: Core
    parts: tuple[Core, ...]


def align(changes: Sequence[Factors]) -> Aligned:
    """KnOTS' joint singular value decomposition [ΔW_1 … ΔW_K] = U·Σ·[V_1ᵀ … V_Kᵀ], side by side along `in`.

    Stoica et al., ICLR 2025, arXiv:2410.19735. What then merges the parts Σ·V_iᵀ (TIES, DARE) acts on k ≤ R rows; U
    times the merged rows is the merged ΔW.

    Args, raises: as for `tsv`.

    Returns:
        The decomposition; directions with σ = 0 are left out.
    """
    joint = Joint(changes)
    pairs = [joint.coordinates(index) for index in range(len(changes))]
    # ΔW_i = Q_B·S_Bi·A_i, and A_i = S_Aiᵀ·Q_Aᵀ with its own orthonormal rows: side by side they stay orthonormal.
    small = np.concatenate([left @ right.T for left, right in pairs], axis=1)
    u, sigma, wt = np.linalg.svd(small, full_matrices=False)
    kept = sigma > _NOTHING * sigma[:1].sum()
    u, sigma, wt = u[:, kept], sigma[kept], wt[kept]
    width = small.shape[1] // len(changes)
    parts = [wt[:, i * width : (i + 1) * width] for i in range(len(changes))]
    return Aligned(joint.left.expand(u), sigma, tuple(joint.right.expand(part.T).T for part in parts))


def _significant(u: Core, sigma: Core, vt: Core, count: int) -> tuple[Core, Core, Core]:
    """U, σ and V (as columns) of the first `count` triplets, without those that are rounding."""
    kept = np.flatnonzero(sigma > _NOTHING * sigma[:1].sum())[:count]
    return u[:, kept], sigma[kept], vt[kept].T


def _orthonormal(x: Core) -> Core:
    """The nearest matrix with orthonormal columns (the polar factor), or rows where there are more columns."""
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return np.asarray(u @ vt)


def _isotropic(u: Core, v: Core, sigma: float) -> Core:
    return np.asarray(sigma * u @ v.T)
