"""Low-rank changes of one weight in joint orthonormal bases: the engine for everything that commutes with such bases.

K changes ΔW_i = B_i·A_i (out×in) share Q_B (out×p), a basis of the columns of all B_i, and Q_A (in×q), a basis of the
rows of all A_i. Then ΔW_i = Q_B·C_i·Q_Aᵀ with a small core C_i = S_Bi·S_Aiᵀ. Norms, cosines, singular values and sums
of the ΔW are those of the cores. ΔW is never formed, and Q_B and Q_A only if they are needed.

S_B comes from the Gram matrix BᵀB in float64, of columns scaled to length 1, by Cholesky: O(out·R²) in one pass through
B, where R is the sum of the ranks. This squares B's condition number. If the inverse shows that it is large, S_B comes
from a Householder QR instead. Norms of sums that almost cancel come from the cores, others from the Gram matrices.
Results that are only rounding, relative to the terms of the sum, count as zero.

numpy arrays in, numpy arrays out: float32, or float64 within the range of float32.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors

Matrix = npt.NDArray[np.floating]
Core = npt.NDArray[np.float64]

_SCRATCH = threading.local()
_ROWS = 1024  # rows of B, or columns of A, to convert to float64 at a time
# Cholesky is used up to this Σ 1/λ_i of the scaled Gram matrix. Relative errors of singular values are then at most
# about 1e-16 times this.
_ILL_CONDITIONED = 1e6
_CANCELLED = 1e-2  # below this ratio of ‖Σ w_i·ΔW_i‖² to the size of its terms, the norm comes from the core
_ROUNDING = 4 * float(np.finfo(np.float64).eps)


class Mixture(NamedTuple):
    """Factors as combinations of the factors of a `Joint`: b = [B_1 … B_K]·left, a = right·[A_1; …; A_K].

    Attributes:
        left: R×k, and
        right: k×R, in float64.
    """

    left: Core
    right: Core


class Spectrum(NamedTuple):
    """The singular value decomposition of a core.

    Attributes:
        u: p×m, orthonormal columns, in coordinates of Q_B.
        sigma: m singular values in descending order; those that are only rounding are 0.
        vt: m×q, orthonormal rows, in coordinates of Q_A.
    """

    u: Core
    sigma: Core
    vt: Core


class Basis:
    """An orthonormal basis Q of the columns of X (n×R), which is given as parts side by side.

    Attributes:
        coordinates: S (p×R), with X = Q·S.
    """

    def __init__(self, parts: Sequence[Matrix], axis: int, gram: Core | None = None) -> None:
        """Of the columns of `parts` (n×r_i, axis 1), or of the rows of `parts` (r_i×n, axis 0).

        Args:
            parts: at least one.
            axis: the axis along which they are concatenated.
            gram: XᵀX in float64, if it is known.
        """
        self._parts, self._axis = tuple(parts), axis
        self._inverse: Core | None = None  # of S, where it is square and well-conditioned
        self._q: Core | None = None
        if gram is None:
            gram = self_products(parts, axis)
        lengths = np.sqrt(np.diagonal(gram))

        # By Cholesky, if there are not more columns than rows and they are far from dependent
        triangle = None
        columns = sum(part.shape[axis] for part in parts)
        if parts[0].shape[1 - axis] >= columns:
            triangle = _triangle(gram, lengths)

        if triangle is None:
            self.coordinates: Core = self._by_qr("r")[1]
        else:
            lower, inverse = triangle
            self.coordinates = lower.T * lengths
            self._inverse = inverse.T / lengths[:, None]

    def expand(self, vectors: Core) -> Core:
        """Q·vectors (n×k), for vectors (p×k) in coordinates of Q."""
        if self._inverse is not None:
            expanded = mixed(self._parts, self._inverse @ vectors, self._axis)
            if self._axis == 0:
                return expanded.T
            return expanded

        if self._q is None:
            self._q = self._by_qr("reduced")[0]
        return self._q @ vectors

    def _by_qr(self, mode: str) -> tuple[Core, Core]:
        """Q (empty in the mode `r`) and S, after scaling the columns to similar sizes by powers of two."""
        x = np.concatenate(self._parts, axis=self._axis, dtype=np.float64)
        if self._axis == 0:
            x = x.T
        largest = np.abs(x).max(axis=0, initial=0)
        scale = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1))))
        if mode == "r":
            return np.empty((0, 0)), np.asarray(np.linalg.qr(x / scale, mode="r") * scale)
        q, r = np.linalg.qr(x / scale)
        return np.asarray(q), np.asarray(r * scale)


class Joint:
    """K low-rank changes of one weight, ready for arithmetic between them.

    Attributes:
        shape: (out, in).
        ranks: the rank of each change.
    """

    def __init__(self, changes: Sequence[Factors]) -> None:
        """From one or more pairs of factors with the same shape; equal pairs count once."""
        self._changes = tuple(changes)
        self.shape = changes[0].shape
        self.ranks = tuple(change.a.shape[0] for change in changes)

        # For each change, the first one that is equal to it
        self._twins: list[int] = []
        for i, change in enumerate(changes):
            twin = next((j for j in range(i) if _equal(changes[j], change)), i)
            self._twins.append(twin)
        self._distinct = sorted(set(self._twins))

        # BᵀB and A·Aᵀ of all distinct changes side by side, and each one's place in them
        distinct = [changes[i] for i in self._distinct]
        left_gram = self_products([change.b for change in distinct], 1)
        right_gram = self_products([change.a for change in distinct], 0)
        if not (np.isfinite(left_gram).all() and np.isfinite(right_gram).all()):
            raise np.linalg.LinAlgError("NaN or infinity in a factor")
        self._places: dict[int, slice] = {}
        start = 0
        for i in self._distinct:
            self._places[i] = slice(start, start + self.ranks[i])
            start += self.ranks[i]
        self._left_gram, self._right_gram = left_gram, right_gram

        # ΔW_i is a sum of products b·aᵀ of these lengths, relative to which rounding is measured
        self._lengths = np.sqrt(np.diagonal(left_gram)) * np.sqrt(np.diagonal(right_gram))
        self._used = np.flatnonzero(self._lengths)  # products with a zero factor are left out

    def inner(self, one: int, other: int) -> float:
        """⟨ΔW_one, ΔW_other⟩, the Frobenius inner product: Σ (B_1ᵀB_2) ∘ (A_1A_2ᵀ)."""
        rows, columns = self._place(one), self._place(other)
        return float(np.sum(self._left_gram[rows, columns] * self._right_gram[rows, columns]))

    def norm(self, weights: Sequence[float]) -> float:
        """‖Σ w_i·ΔW_i‖ (Frobenius), to at least ten digits, or to the rounding of terms that cancel."""
        mix = self._weighted(weights)
        terms = mix[:, None] * (self._left_gram * self._right_gram) * mix
        square, added = float(np.sum(terms)), float(np.sum(np.abs(terms)))
        if added == 0:
            return 0.0
        if square > _CANCELLED * added:
            return math.sqrt(square)

        # The terms almost cancel: from the core, whose largest entry is divided out so that no square underflows
        core, size = self.core(weights), float(np.sum(np.abs(mix) * self._lengths))
        largest = float(np.abs(core).max(initial=0))
        if not largest:
            return 0.0
        norm = largest * float(np.linalg.norm(core / largest))
        if norm > _ROUNDING * size:
            return norm
        return 0.0

    @cached_property
    def left(self) -> Basis:
        """Q_B, and the coordinates of those columns of the B_i whose row of A_i is not zero."""
        return self._basis(1)

    @cached_property
    def right(self) -> Basis:
        """Q_A, and the coordinates of those rows of the A_i whose column of B_i is not zero."""
        return self._basis(0)

    def core(self, weights: Sequence[float]) -> Core:
        """Q_Bᵀ·(Σ w_i·ΔW_i)·Q_A = Σ w_i·C_i (p×q)."""
        mix = self._weighted(weights)[self._used]
        return np.asarray((self.left.coordinates * mix) @ self.right.coordinates.T)

    def core_of(self, index: int) -> Core:
        """C_i (p×q)."""
        return self.core([float(i == index) for i in range(len(self._changes))])

    def spectrum(self, weights: Sequence[float]) -> Spectrum:
        """The singular values of Σ w_i·ΔW_i, and its singular vectors in coordinates."""
        u, sigma, vt = np.linalg.svd(self.core(weights), full_matrices=False)
        size = float(np.sum(np.abs(self._weighted(weights)) * self._lengths))
        return Spectrum(u, np.where(sigma > _ROUNDING * size, sigma, 0.0), vt)

    def spectrum_of(self, index: int) -> Spectrum:
        """The singular values of ΔW_i, at most r_i, by way of the smaller core between the bases of its own factors."""
        left, right = self.coordinates(index)
        q_left, r_left = np.linalg.qr(left)
        q_right, r_right = np.linalg.qr(right)
        u, sigma, vt = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
        size = float(np.sum(self._lengths[self._place(index)]))
        return Spectrum(q_left @ u, np.where(sigma > _ROUNDING * size, sigma, 0.0), vt @ q_right.T)

    def mixture(self, weights: Sequence[float], spectrum: Spectrum, keep: int) -> Mixture:
        """The first `keep` singular values of Σ w_i·ΔW_i as factors b·a with √σ on each side, from the given factors.

        b = ΔW·V/√σ and a = Uᵀ·ΔW/√σ, so no basis is formed. Columns for σ = 0, or beyond the spectrum, are zero. The
        largest entry of each column of `left` is positive, so the signs do not depend on the basis.
        """
        sigma = spectrum.sigma[: min(keep, spectrum.u.shape[1])]
        root = np.sqrt(np.divide(1, sigma, out=np.zeros_like(sigma), where=sigma > 0))
        mix = self._weighted(weights)[self._used]
        left, right = np.zeros((len(self._lengths), keep)), np.zeros((keep, len(self._lengths)))
        count = len(sigma)
        left[self._used, :count] = mix[:, None] * (self.right.coordinates.T @ spectrum.vt[:count].T) * root
        right[:count, self._used] = root[:, None] * (spectrum.u[:, :count].T @ self.left.coordinates) * mix

        largest = np.take_along_axis(left, np.abs(left).argmax(axis=0)[None, :], axis=0)[0]
        signs = np.where(largest < 0, -1.0, 1.0)
        return self._for_all(Mixture(left * signs, signs[:, None] * right))

    def factors(self, core: Core) -> Factors:
        """A core's ΔW as factors: Q_B·U·√Σ and √Σ·Vᵀ·Q_Aᵀ in float64, without directions that are only rounding."""
        u, sigma, vt = np.linalg.svd(core, full_matrices=False)
        if not sigma.any():
            return Factors(np.zeros((1, self.shape[1])), np.zeros((self.shape[0], 1)))
        nonzero = sigma > _ROUNDING * sigma[0] * max(core.shape)
        root = np.sqrt(sigma[nonzero])
        return Factors(self.right.expand(vt[nonzero].T * root).T, self.left.expand(u[:, nonzero] * root))

    def coordinates(self, index: int) -> tuple[Core, Core]:
        """S_Bi (p×r_i) and S_Ai (q×r_i), with C_i = S_Bi·S_Aiᵀ; without columns whose product is zero."""
        place = self._place(index)
        within = (self._used >= place.start) & (self._used < place.stop)
        return self.left.coordinates[:, within], self.right.coordinates[:, within]

    def _place(self, index: int) -> slice:
        return self._places[self._twins[index]]

    def _weighted(self, weights: Sequence[float]) -> Core:
        """The weight of each product b·aᵀ of the distinct changes."""
        mix = np.zeros(len(self._lengths))
        for index, weight in enumerate(weights):
            mix[self._place(index)] += weight
        return mix

    def _basis(self, axis: int) -> Basis:
        """Of the B_i (axis 1) or the A_i (axis 0), without those columns or rows whose product is zero."""
        gram = self._left_gram if axis == 1 else self._right_gram
        parts = []
        for index in self._distinct:
            place = self._places[index]
            columns = self._used[(self._used >= place.start) & (self._used < place.stop)] - place.start
            part = self._changes[index].b if axis == 1 else self._changes[index].a
            if len(columns) < part.shape[axis]:
                part = np.take(part, columns, axis=axis)
            parts.append(part)
        return Basis(parts, axis, gram[np.ix_(self._used, self._used)])

    def _for_all(self, mixture: Mixture) -> Mixture:
        """Extend a mixture of the distinct changes to all: of equal changes the first is used."""
        if len(self._distinct) == len(self._changes):
            return mixture
        left, right = [], []
        for index, rank in enumerate(self.ranks):
            if self._twins[index] == index:
                place = self._place(index)
                left.append(mixture.left[place])
                right.append(mixture.right[:, place])
            else:
                left.append(np.zeros((rank, mixture.left.shape[1])))
                right.append(np.zeros((mixture.right.shape[0], rank)))
        return Mixture(np.concatenate(left), np.concatenate(right, axis=1))

    def cut(self, weights: Sequence[float], *, rank: int | None, error: float | None) -> tuple[Spectrum, int, float]:
        """The spectrum of Σ w_i·ΔW_i, the rank to keep (at least 1), and the relative error of that truncation.

        It takes O((out+in)·r²), while a dense SVD takes O(out·in·min(out, in)), and truncation is optimal by Eckart &
        Young 1936. The spectrum has min(out, in, Σ r_i) singular values, zeros included.

        Args:
            weights: w_i.
            rank: the maximum rank.
            error: the maximum relative error, reached with the smallest possible rank. If both are given, `rank` wins.
        """
        spectrum = self.spectrum(weights)
        count = min(*self.shape, sum(self.ranks))
        sigma = np.pad(spectrum.sigma, (0, max(0, count - len(spectrum.sigma))))[:count]

        keep = len(sigma)
        if error is not None:
            keep = next((size for size in range(1, len(sigma)) if _tail(sigma, size) <= error), len(sigma))
        keep = max(1, min(keep, rank or keep, len(sigma)))
        return spectrum._replace(sigma=sigma), keep, _tail(sigma, keep)


def _blocks(parts: Sequence[Matrix], axis: int) -> list[slice]:
    """The blocks of the long axis for computing block by block."""
    total = parts[0].shape[1 - axis]
    return [slice(start, min(start + _ROWS, total)) for start in range(0, total, _ROWS)]


def self_products(parts: Sequence[Matrix], axis: int) -> Core:
    """XᵀX in float64 for X = [parts side by side] (axis 1), or X·Xᵀ for stacked parts (axis 0)."""
    rank = sum(part.shape[axis] for part in parts)
    total = np.zeros((rank, rank))
    for block in _blocks(parts, axis):
        piece = _block(parts, axis, block)
        if axis == 1:
            total += piece.T @ piece
        else:
            total += piece @ piece.T
    return total


def mixed(parts: Sequence[Matrix], mix: Core, axis: int) -> Core:
    """In float64, columns of B mixed: [B_1 … B_K]·mix (n×k, axis 1); or rows of A: mixᵀ·[A_1; …; A_K] (k×n, axis 0)."""
    long, count = parts[0].shape[1 - axis], mix.shape[1]
    shape = (long, count) if axis == 1 else (count, long)
    result = np.empty(shape)
    for block in _blocks(parts, axis):
        piece = _block(parts, axis, block)
        if axis == 1:
            np.matmul(piece, mix, out=result[block])
        else:
            np.matmul(mix.T, piece, out=result[:, block])
    return result


def _block(parts: Sequence[Matrix], axis: int, block: slice) -> Core:
    """A block of the parts side by side in float64, in memory of this thread that the next block reuses."""
    place = (block, slice(None)) if axis == 1 else (slice(None), block)
    pieces = [part[place] for part in parts]
    rank, long = sum(piece.shape[axis] for piece in pieces), pieces[0].shape[1 - axis]

    scratch = getattr(_SCRATCH, "block", None)
    if scratch is None or scratch.size < rank * long:
        scratch = _SCRATCH.block = np.empty(rank * max(long, _ROWS))
    shape = (long, rank) if axis == 1 else (rank, long)
    joined: Core = scratch[: rank * long].reshape(shape)
    return np.concatenate(pieces, axis=axis, out=joined)


def _triangle(gram: Core, lengths: Core) -> tuple[Core, Core] | None:
    """Cholesky's L of the Gram matrix of columns scaled to length 1, and its inverse; None if it is ill-conditioned."""
    try:
        lower = np.linalg.cholesky(gram / lengths / lengths[:, None])
    except np.linalg.LinAlgError:
        return None
    if not np.diagonal(lower).all():
        return None
    inverse = np.linalg.inv(lower)
    if float(np.sum(np.square(inverse))) <= _ILL_CONDITIONED:  # not so with NaN, from columns of zeros
        return np.asarray(lower), np.asarray(inverse)
    return None


def _equal(first: Factors, second: Factors) -> bool:
    if first.a is second.a and first.b is second.b:
        return True
    if first.a.shape != second.a.shape or first.b.shape != second.b.shape:
        return False

    # Most differ in the first row.
    if not np.array_equal(first.a[0], second.a[0]) or not np.array_equal(first.b[:1], second.b[:1]):
        return False
    return np.array_equal(first.a, second.a) and np.array_equal(first.b, second.b)


def cosine(product: float, norms: tuple[float, float]) -> float | None:
    """⟨X, Y⟩ / (‖X‖·‖Y‖), clipped to ±1; None if one of the norms is zero."""
    first, second = norms
    if not first or not second:
        return None
    return max(-1.0, min(1.0, product / (first * second)))


def _tail(sigma: Matrix, keep: int) -> float:
    """√(Σ_{i>keep} σ_i²) / √(Σ σ_i²): the relative error of keeping `keep` singular values."""
    if not len(sigma) or not sigma[0]:
        return 0.0
    largest = float(sigma[0])
    shares = np.square(sigma / largest)  # avoids overflow and underflow of the squares
    return float(np.sqrt(np.sum(shares[keep:]) / np.sum(shares)))
