"""TSV-Merge, Iso-C, Iso-CTS and KnOTS' alignment from factors, against the papers' formulas on dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.linalg import polar
from tolerances import close

from adapterswap.arithmetic.spectral import align, iso_c, iso_cts, tsv
from adapterswap.changes.deltas import Factors

DOUBLE = torch.float64
Matrices = Sequence[np.ndarray]


def experts(*ranks: int, out: int = 40, width: int = 30, dtype: type = np.float64) -> list[Factors]:
    found = []
    for seed, rank in enumerate(ranks):
        random = np.random.default_rng(seed)
        a, b = random.standard_normal((rank, width)), random.standard_normal((out, rank)) * (seed + 1)
        found.append(Factors(a.astype(dtype), b.astype(dtype)))
    return found


def dense(changes: Sequence[Factors]) -> list[np.ndarray]:
    return [change.b.astype(np.float64) @ change.a.astype(np.float64) for change in changes]


def triplets(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u, sigma, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank], sigma[:rank], vt[:rank]


def nearest(matrix: np.ndarray) -> np.ndarray:
    return np.asarray(polar(matrix)[0])


def dense_tsv(deltas: Matrices, ranks: Sequence[int]) -> np.ndarray:
    share = min(deltas[0].shape) // len(deltas)
    kept = [triplets(delta, min(rank, share)) for delta, rank in zip(deltas, ranks, strict=True)]
    u, v = np.concatenate([u for u, _, _ in kept], axis=1), np.concatenate([vt.T for _, _, vt in kept], axis=1)
    return np.asarray((nearest(u) * np.concatenate([sigma for _, sigma, _ in kept])) @ nearest(v).T)


def dense_iso_c(deltas: Matrices, rank: int) -> np.ndarray:
    u, sigma, vt = triplets(np.sum(deltas, axis=0), rank)
    return np.asarray(sigma.mean() * u @ vt)


def dense_iso_cts(deltas: Matrices, rank: int, common: float) -> np.ndarray:
    u, sigma, vt = triplets(np.sum(deltas, axis=0), rank)
    own = round((rank - int(rank * common)) / len(deltas))
    count = rank - own * len(deltas)
    u, sigma, vt = u[:, :count], sigma[:count], vt[:count]
    parts = [triplets(delta - u @ u.T @ delta, own) for delta in deltas] + [(u, sigma, vt)]
    lefts = nearest(np.concatenate([part[0] for part in parts], axis=1))
    rights = nearest(np.concatenate([part[2].T for part in parts], axis=1))
    return np.asarray(np.concatenate([part[1] for part in parts]).mean() * lefts @ rights.T)


@pytest.mark.parametrize("ranks", [(4,), (4, 3), (5, 5, 2), (16, 16)], ids=str)
def test_tsv(ranks: tuple[int, ...]) -> None:
    """The last keeps 15 triplets of 16: as many as the smaller side has for each of two experts."""
    changes = experts(*ranks)
    found = tsv(changes)
    close(found.b @ found.a, dense_tsv(dense(changes), ranks), dtype=DOUBLE, scale=1e3)


@pytest.mark.parametrize("ranks", [(4,), (4, 3), (5, 5, 2)], ids=str)
def test_iso_c(ranks: tuple[int, ...]) -> None:
    changes = experts(*ranks)
    found = iso_c(changes)
    assert found.b.shape[1] == sum(ranks)
    close(found.b @ found.a, dense_iso_c(dense(changes), sum(ranks)), dtype=DOUBLE, scale=1e3)


@pytest.mark.parametrize("common", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("ranks", [(4, 4), (5, 5, 5)], ids=str)
def test_iso_cts(ranks: tuple[int, ...], common: float) -> None:
    changes = experts(*ranks)
    found = iso_cts(changes, common)
    close(found.b @ found.a, dense_iso_cts(dense(changes), sum(ranks), common), dtype=DOUBLE, scale=1e3)


@pytest.mark.parametrize("ranks", [(4,), (4, 3), (5, 5, 2)], ids=str)
def test_alignment(ranks: tuple[int, ...]) -> None:
    changes = experts(*ranks)
    u, sigma, parts = align(changes)
    deltas = dense(changes)
    close(sigma, np.linalg.svd(np.concatenate(deltas, axis=1), compute_uv=False)[: sum(ranks)], dtype=DOUBLE, scale=1e3)
    close(u.T @ u, np.eye(sum(ranks)), dtype=DOUBLE, scale=1e3)
    rows = np.concatenate(parts, axis=1)
    close(rows @ rows.T, np.eye(sum(ranks)), dtype=DOUBLE, scale=1e3)
    for part, delta in zip(parts, deltas, strict=True):
        close((u * sigma) @ part, delta, dtype=DOUBLE, scale=1e3)


@pytest.mark.parametrize("method", [tsv, iso_c, iso_cts])
def test_one_expert_keeps_its_directions(method: Callable[..., Factors]) -> None:
    """TSV of one expert is that expert; Iso's result has its directions, all of one size."""
    (change,) = experts(5)
    found = method([change])
    (delta,) = dense([change])
    u, sigma, vt = triplets(delta, 5)
    close(found.b @ found.a, delta if method is tsv else sigma.mean() * u @ vt, dtype=DOUBLE, scale=1e3)


@pytest.mark.parametrize("method", [tsv, iso_c, iso_cts])
def test_experts_of_zeros_give_zeros(method: Callable[..., Factors]) -> None:
    zeros = [Factors(a, 0 * b) for a, b in experts(3, 2)]
    assert not (method(zeros).b @ method(zeros).a).any()
    assert method(zeros).b.shape == (40, 1)
    assert align(zeros).sigma.size == 0
    # Beside an expert of zeros another one stands as if it were alone.
    change = experts(4)[0]
    alone, beside = method([change]), method([change, zeros[0]])
    if method is not iso_cts:  # which leaves each expert its share of the directions
        close(beside.b @ beside.a, alone.b @ alone.a, dtype=DOUBLE, scale=1e3)


def test_experts_that_share_directions() -> None:
    """The sum of the ranks is 8, and the rank of the sum 4."""
    first, other = experts(4, 4)
    changes = [first, Factors(other.a[:, :4] @ first.a, first.b @ other.b[:4])]
    found = iso_c(changes)
    assert found.b.shape[1] == 4
    close(found.b @ found.a, dense_iso_c(dense(changes), 4), dtype=DOUBLE, scale=1e3)
    u, sigma, parts = align(changes)
    assert len(sigma) == 4
    for part, delta in zip(parts, dense(changes), strict=True):
        close((u * sigma) @ part, delta, dtype=DOUBLE, scale=1e3)


def test_a_method_does_not_depend_on_the_size_of_the_factors() -> None:
    changes = experts(4, 3, dtype=np.float32)
    uneven = [Factors(a * np.float32(2.0**60), b * np.float32(2.0**-60)) for a, b in changes]
    for method in (tsv, iso_c, iso_cts):
        one, other = method(changes), method(uneven)
        close(one.b @ one.a, other.b @ other.a, dtype=DOUBLE, scale=1e3)
