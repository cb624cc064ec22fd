"""Arithmetic in joint cores against dense arithmetic in float64, for factors that are hard for Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import close, near, tolerance

from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.joint import Basis, Joint, mixed

DOUBLE = torch.float64
OUT, WIDTH, RANK = 40, 30, 6


def random_factors(seed: int, out: int = OUT, width: int = WIDTH, rank: int = RANK) -> Factors:
    random = np.random.default_rng(seed)
    return Factors(random.standard_normal((rank, width)), random.standard_normal((out, rank)))


def _plain() -> list[Factors]:
    return [random_factors(1), random_factors(2, rank=4)]


def _ill_conditioned() -> list[Factors]:
    """Nearly parallel columns of B: condition numbers of 1e5 and 1e9."""
    result = []
    for seed, apart in ((1, 1e-5), (2, 1e-9)):
        a, b = random_factors(seed)
        result.append(Factors(a, b[:, :1] + apart * b))
    return result


def _graded() -> list[Factors]:
    """Singular values of A over six orders of magnitude."""
    return [
        Factors(np.diag(np.logspace(0, -6, RANK)) @ np.linalg.qr(a.T)[0].T, b)
        for a, b in (random_factors(seed) for seed in (1, 2))
    ]


def _rank_deficient() -> list[Factors]:
    one, other = _plain()
    one.a[3] = one.a[1] - 2 * one.a[0]
    other.b[:, 1] = other.b[:, 0]
    return [one, other]


def _dependent() -> list[Factors]:
    """The second change lies in the column and row spaces of the first."""
    one = random_factors(1)
    mix = np.random.default_rng(5).standard_normal((RANK, RANK))
    return [one, Factors(mix @ one.a, one.b @ mix)]


def _one_start() -> list[Factors]:
    """One A for both, as in experts with frozen A."""
    one, other = random_factors(1), random_factors(2)
    return [one, Factors(one.a, other.b)]


def _repeated() -> list[Factors]:
    return [random_factors(1), random_factors(2), Factors(*(part.copy() for part in random_factors(1)))]


def _zeros() -> list[Factors]:
    """An untrained expert, and a zero column of B and a zero row of A."""
    one, other = _plain()
    one.b[:, 2] = 0
    other.a[0] = 0
    return [one, other, Factors(random_factors(3).a, np.zeros((OUT, RANK)))]


def _wild() -> list[Factors]:
    """Sizes from 1e-20 to 1e20, balanced by the other factor."""
    sizes = np.array([1e20, 1e-20, 1e10, 1, 1e-10, 1e-3])
    one, other = random_factors(1), random_factors(2)
    return [Factors(one.a / sizes[:, None], one.b * sizes), Factors(other.a * 1e20, other.b * 1e-20)]


def _tiny() -> list[Factors]:
    return [Factors(a * 1e-20, b * 1e-20) for a, b in (random_factors(seed) for seed in (1, 2))]


def _huge() -> list[Factors]:
    return [Factors(a * 1e20, b * 1e20) for a, b in (random_factors(seed) for seed in (1, 2))]


def _wide() -> list[Factors]:
    """The sum of the ranks is larger than both sides of ΔW."""
    return [random_factors(seed, out=7, width=9, rank=8) for seed in (1, 2)]


def _vector() -> list[Factors]:
    return [random_factors(seed, out=1, width=5, rank=2) for seed in (1, 2)]


def _long() -> list[Factors]:
    """More rows than one block holds."""
    return [random_factors(seed, out=5000, width=10, rank=3) for seed in (1, 2)]


KINDS = (
    _plain, _ill_conditioned, _graded, _rank_deficient, _dependent, _one_start, _repeated, _zeros, _wild, _tiny, _huge,
    _wide, _vector, _long,
)  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))


def dense(changes: Sequence[Factors], weights: Sequence[float]) -> np.ndarray:
    """Σ w_i·ΔW_i, product by product, so that opposite sizes of A and B cancel before the sum."""
    total = np.zeros((changes[0].b.shape[0], changes[0].a.shape[1]))
    for weight, (a, b) in zip(weights, changes, strict=True):
        for row, column in zip(a, b.T, strict=True):
            total += weight * (column[:, None] * row)
    return total


def size(changes: Sequence[Factors], weights: Sequence[float]) -> float:
    """Σ |w|·‖b‖‖a‖: the size of the terms, to which rounding is relative."""
    total = 0.0
    for weight, (a, b) in zip(weights, changes, strict=True):
        for row, column in zip(a, b.T, strict=True):
            total += abs(weight) * np.linalg.norm(column) * np.linalg.norm(row)
    return total


def mixtures(count: int) -> list[list[float]]:
    return [[1.0] * count, [1.0, -1.0, *[0.0] * (count - 2)], [0.3, 0.7, *[2.0] * (count - 2)]]


@kinds
def test_norms_match_dense_changes(kind) -> None:  # type: ignore[no-untyped-def]
    changes = kind()
    joint = Joint(changes)
    for weights in [*mixtures(len(changes)), *np.eye(len(changes)).tolist()]:
        expected = np.linalg.norm(dense(changes, weights))
        assert joint.norm(weights) == near(expected, dtype=DOUBLE, scale=size(changes, weights))
    for one in range(len(changes)):
        for other in range(len(changes)):
            x, y = dense(changes[one : one + 1], [1]), dense(changes[other : other + 1], [1])
            scale = size(changes[one : one + 1], [1]) * size(changes[other : other + 1], [1])
            assert joint.inner(one, other) == near(float(np.sum(x * y)), dtype=DOUBLE, scale=scale)


@kinds
def test_singular_values_and_truncations_match_the_dense_change(kind) -> None:  # type: ignore[no-untyped-def]
    changes = kind()
    joint = Joint(changes)
    for weights in mixtures(len(changes)):
        exact, scale = dense(changes, weights), size(changes, weights)
        sigma = np.linalg.svd(exact / scale, compute_uv=False) * scale
        for rank in (1, 3, 7):
            spectrum, keep, lost = joint.cut(weights, rank=rank, error=None)
            count = min(len(sigma), len(spectrum.sigma))
            close(spectrum.sigma[:count], sigma[:count], dtype=DOUBLE, scale=scale)
            mixture = joint.mixture(weights, spectrum, keep)
            b = mixed([each.b for each in changes], mixture.left, 1)
            a = mixed([each.a for each in changes], mixture.right.T, 0)
            assert (b.shape[1], a.shape[0]) == (keep, keep)
            assert np.isfinite(a).all()
            assert np.isfinite(b).all()
            assert np.linalg.norm((exact - b @ a) / scale) * scale == near(
                float(np.linalg.norm(sigma[keep:])), dtype=DOUBLE, scale=scale
            )
            # √σ to each side, in orthogonal directions; the direction of a small σ is less certain.
            kept = spectrum.sigma[:keep]
            spread = math.sqrt(kept[0] / kept[kept > 0][-1]) if kept.any() else 1
            for gram in (b.T @ b, a @ a.T):
                close(gram, np.diag(kept), dtype=DOUBLE, scale=scale * spread)
            norm = np.linalg.norm(exact / scale)
            if norm > 1e-6:
                assert lost == pytest.approx(np.linalg.norm(sigma[keep:]) / scale / norm, abs=1e-9)


@kinds
def test_the_smallest_rank_within_an_error_matches_the_dense_change(kind) -> None:  # type: ignore[no-untyped-def]
    changes = kind()
    weights = [1.0] * len(changes)
    exact = dense(changes, weights) / size(changes, weights)
    sigma = np.linalg.svd(exact, compute_uv=False)
    errors = np.array([np.linalg.norm(sigma[k:]) for k in range(len(sigma) + 1)]) / np.linalg.norm(sigma)
    for error in (0.5, 0.1, 1e-3, 1e-6, 1e-9):
        keep = Joint(changes).cut(weights, rank=None, error=error)[1]
        assert keep == max(1, int(np.argmax(errors <= error)))


@kinds
def test_bases_are_orthonormal_and_span_every_change(kind) -> None:  # type: ignore[no-untyped-def]
    changes = kind()
    joint = Joint(changes)
    q_b, q_a = (basis.expand(np.eye(len(basis.coordinates))) for basis in (joint.left, joint.right))
    for q in (q_b, q_a):
        # Cholesky is used while the squared condition number is at most 1e6.
        close(q.T @ q, np.eye(q.shape[1]), dtype=DOUBLE, scale=1e4)
    for index, change in enumerate(changes):
        scale = size([change], [1]) or 1.0
        close((q_b @ joint.core_of(index) @ q_a.T) / scale, dense([change], [1]) / scale, dtype=DOUBLE, scale=1e4)


def test_a_change_minus_itself_is_exactly_zero() -> None:
    one = random_factors(1)
    joint = Joint([one, Factors(one.a.copy(), one.b.copy()), Factors(one.a, -one.b)])
    assert joint.norm([1, -1, 0]) == joint.norm([1, 0, 1]) == 0
    assert not joint.spectrum([1, 0, 1]).sigma.any()
    assert joint.norm([1, 1, 0]) == near(2 * float(np.linalg.norm(dense([one], [1]))), dtype=DOUBLE)


@given(seed=st.integers(0, 2**31), apart=st.floats(-15, 0).map(lambda exponent: 10**exponent))
@settings(max_examples=50, deadline=None)
def test_small_distances_are_resolved(seed: int, apart: float) -> None:
    """A difference of squares would lose what lies below 1e-8."""
    one, noise = random_factors(seed), random_factors(seed + 1)
    other = Factors(one.a, one.b + apart * noise.b)
    expected = np.linalg.norm((one.b - other.b) @ one.a)
    # Ten digits, or as many as the subtraction leaves.
    allowed = max(1e-10 * expected, tolerance(1.0, dtype=DOUBLE, scale=size([one], [1])))
    assert Joint([one, other]).norm([1, -1]) == pytest.approx(expected, rel=0, abs=allowed)


def test_orthonormal_columns_of_dependent_columns() -> None:
    x = random_factors(1, out=50, rank=8).b
    for columns in (x, np.concatenate([x, x], axis=1), x * np.logspace(-20, 20, 8), x[:, :1] + 1e-8 * x):
        basis = Basis([columns.astype(np.float32)], 1)
        q = basis.expand(np.eye(len(basis.coordinates)))
        exact = columns.astype(np.float32).astype(np.float64)
        close(q.T @ q, np.eye(q.shape[1]), dtype=DOUBLE, scale=1e4)
        lengths = np.linalg.norm(exact, axis=0)
        close(q @ basis.coordinates / lengths, exact / lengths, dtype=DOUBLE, scale=1e4)


def test_non_finite_numbers_are_refused() -> None:
    factors = random_factors(1)
    for bad in (math.nan, math.inf):
        factors.b[0, 0] = bad
        with pytest.raises(np.linalg.LinAlgError):
            Joint([factors])
