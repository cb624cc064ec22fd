"""Low-rank approximation of a dense ΔW by torch: exact SVD of small matrices, randomized SVD of large ones.

If ΔW is given as low-rank factors, `lowrank.truncate` is exact and cheaper. The randomized SVD is torch's, after Halko,
Martinsson & Tropp 2011 (arXiv:0909.4061). Knows matrices, nothing of adapters or plans.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.lowrank import Truncated
from adapterswap.changes.deltas import Factors

__all__ = ["approximate"]

_SMALL = 256  # matrices with a side up to this are decomposed exactly,
_SHARE = 4  # and so are those that must keep more than a quarter of their singular values, where sampling saves nothing
_FIRST = 32  # singular values to sample first if an error is requested
_OVERSAMPLING = 32  # columns beyond the requested rank, and
_POWER_ITERATIONS = 6  # passes over the matrix: both make the randomized SVD more accurate


def approximate(
    delta: npt.NDArray[np.float32], *, rank: int | None, error: float | None, device: Any = "cpu"
) -> Truncated:
    """A low-rank approximation of a dense ΔW, with its relative error.

    The error is exact, not an estimate: it is computed from the residual of the sample and from the sampled singular
    values that are cut off. With `error`, the sample is doubled until the error is reached (or `rank`, or full rank),
    then cut to the smallest rank that reaches it.

    Args:
        delta: ΔW (out×in).
        rank: the maximum rank.
        error: the maximum relative error, reached with the smallest possible rank. If both are given, `rank` wins.
        device: the torch device to compute on.
    """
    import torch

    matrix = torch.from_numpy(delta).to(device)
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
    limit = min(*delta.shape, rank or min(delta.shape))
    size = limit if error is None else min(limit, _FIRST)
    while True:
        u, sigma, vt = _decompose(matrix, size)
        errors = _errors(matrix, u, sigma, vt, norm)
        size = min(limit, len(sigma))  # an exact decomposition returns all of them
        if error is None or errors[size - 1] <= error or size == limit:
            break
        size = min(2 * size, limit)
    keep = size if error is None else int(next((i + 1 for i, e in enumerate(errors[:size]) if e <= error), size))
    root = sigma[:keep].sqrt()
    factors = Factors((root[:, None] * vt[:keep]).cpu().numpy(), (u[:, :keep] * root).cpu().numpy())
    return Truncated(factors, sigma[:keep].cpu().numpy(), float(errors[keep - 1]))


def _decompose(matrix: Any, size: int) -> tuple[Any, Any, Any]:
    """U (out×k), σ (k) in descending order and Vᵀ (k×in), with k ≥ size."""
    import torch

    smaller = min(matrix.shape)
    if smaller <= _SMALL or size * _SHARE > smaller:
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        return u, sigma, vt
    with torch.random.fork_rng(devices=[matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(0)  # the same bytes every time
        u, sigma, v = torch.svd_lowrank(matrix, q=size + _OVERSAMPLING, niter=_POWER_ITERATIONS)
    return u, sigma, v.T


def _errors(matrix: Any, u: Any, sigma: Any, vt: Any, norm: float) -> npt.NDArray[np.float64]:
    """The relative error of keeping 1, 2, … of the singular values.

    The sample is an orthogonal projection of ΔW, so ‖ΔW - U_k Σ_k V_kᵀ‖² = ‖ΔW - U Σ Vᵀ‖² + Σ_{i>k} σ_i².
    """
    import torch

    values = sigma.cpu().numpy().astype(np.float64)
    if norm == 0:
        return np.zeros(len(values))
    rest = 0.0
    if len(values) < min(matrix.shape):
        rest = float(torch.linalg.vector_norm(torch.addmm(matrix, u * sigma, vt, alpha=-1), dtype=torch.float64))
    cut_off = np.append(np.cumsum(np.square(values[:0:-1]))[::-1], 0.0)
    return np.asarray(np.sqrt(rest**2 + cut_off) / norm)
