"""Where two experts' task vectors meet: cosine, overlap of their subspaces, and signs that disagree.

For each matrix that both change: the cosine of the two ΔW; how far the subspaces overlap that they write into (columns)
and read from (rows); the share of elements whose signs differ. Knows numbers; draws nothing and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adapterswap.analysis.deltas import Matrix, delta_reader, matrices
from adapterswap.arithmetic.lowrank import cosine
from adapterswap.changes.deltas import Delta, Factors, blocks
from adapterswap.errors import ExpertError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint

__all__ = ["Interference", "ModuleInterference", "interfere"]

# The same seed gives two LoRA experts the same initial A, and training changes A little. So many of a shared start's
# rows agree that any threshold between chance (about 0) and 1 tells it; .92 was measured after ordinary training.
_SHARED_START = 0.5

# A dense ΔW has as many directions as rows; so many of the largest, or those that reach this error, stand for it.
_DIRECTIONS, _ERROR = 16, 1e-3
_NOTHING = 1e-6  # what a direction carries that is left out, beside the strongest


@dataclass(frozen=True)
class ModuleInterference:
    """Two ΔW of one matrix, X and Y (out×in).

    Attributes:
        matrix: which.
        product, norms: ⟨X, Y⟩, and ‖X‖ and ‖Y‖ (Frobenius).
        written: ‖Qₓᵀ·Q_y‖² / min(rank) for orthonormal bases of the columns: 1 where one subspace holds the other.
        read: the same for the rows.
        by_chance: what `written` and `read` would be for random subspaces: max(rank) / out, and max(rank) / in.
        conflicts: elements where X and Y have different signs, both not zero.
        elements: elements where both are not zero.
        start: the mean cosine of A's rows at equal places; None where ranks differ or an expert has no A. Near 0 unless
            both were trained from one initial A.
    """

    matrix: Matrix
    product: float
    norms: tuple[float, float]
    written: float
    read: float
    by_chance: tuple[float, float]
    conflicts: int
    elements: int
    start: float | None = None

    @property
    def cosine(self) -> float | None:
        return cosine(self.product, self.norms)


@dataclass(frozen=True)
class Interference:
    """Two experts, matrix by matrix, for the matrices that both change."""

    experts: tuple[str, str]
    modules: tuple[ModuleInterference, ...]

    @property
    def shared_start(self) -> float | None:
        """The mean cosine of A's rows where it shows that both experts started from the same A; else None.

        Their `read` is then an artefact of the seed, and not of what they learned.
        """
        starts = [module.start for module in self.modules if module.start is not None]
        mean = float(np.mean(starts)) if starts else 0.0
        return mean if mean > _SHARED_START else None

    def by_layer(self) -> dict[int, dict[str, float | None]]:
        """Cosine (of the layer's matrices side by side), mean overlaps, and the share of signs in conflict."""
        layers: dict[int, list[ModuleInterference]] = {}
        for module in self.modules:
            if module.matrix.layer is not None:
                layers.setdefault(module.matrix.layer, []).append(module)
        return {layer: _together(modules) for layer, modules in sorted(layers.items())}


def interfere(
    experts: dict[str, Adapter | Checkpoint],
    base: Checkpoint | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Interference:
    """Compare two experts.

    Args:
        experts: the two, by name.
        base: their base, needed where one of them is a full checkpoint.
        progress: called after every matrix.

    Raises:
        ExpertError: they share no matrix, or hold one in different shapes; see also `delta_reader`.
    """
    (first_name, first), (second_name, second) = experts.items()
    ours, theirs = matrices(first, base), matrices(second, base)
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise ExpertError(
            f"{first_name} and {second_name} have no matrix in common that both change",
            "Compare experts of one base that adapt the same modules",
            parameter="experts",
        )
    found = []
    with delta_reader(first, base) as read, delta_reader(second, base) as read_other:
        for name in shared:
            found.append(_meet(ours[name], read(ours[name]), read_other(theirs[name])))
            progress()
    return Interference((first_name, second_name), tuple(found))


def _meet(matrix: Matrix, one: Delta, other: Delta) -> ModuleInterference:
    if one.shape != other.shape:
        shapes = " in one expert and ".join("×".join(map(str, delta.shape)) for delta in (one, other))
        raise ExpertError(f"{matrix.name} is {shapes} in the other", "Compare experts of one base", parameter="experts")
    product, squares, conflicts, elements = 0.0, [0.0, 0.0], 0, 0
    for x, y in zip(blocks(one, matrix.name), blocks(other, matrix.name), strict=True):
        product += float(np.sum(np.multiply(x, y, dtype=np.float64)))
        both = np.sign(x) * np.sign(y)  # products of small numbers would vanish
        for side, block in enumerate((x, y)):
            squares[side] += float(np.sum(np.square(block, dtype=np.float64)))
        conflicts += int(np.count_nonzero(both < 0))
        elements += int(np.count_nonzero(both))
    (columns, rows), (other_columns, other_rows) = _bases(one), _bases(other)
    rank = max(columns.shape[1], other_columns.shape[1])
    out, width = one.shape
    return ModuleInterference(
        matrix=matrix,
        product=product,
        norms=(math.sqrt(squares[0]), math.sqrt(squares[1])),
        written=_overlap(columns, other_columns),
        read=_overlap(rows, other_rows),
        by_chance=(min(1.0, rank / out), min(1.0, rank / width)),
        conflicts=conflicts,
        elements=elements,
        start=_start(one, other),
    )


def _start(one: Delta, other: Delta) -> float | None:
    """The mean cosine of two A's rows at equal places; rows of zeros count as 0."""
    if not isinstance(one, Factors) or not isinstance(other, Factors) or one.a.shape != other.a.shape:
        return None
    lengths = np.linalg.norm(one.a, axis=1) * np.linalg.norm(other.a, axis=1)
    products = np.sum(one.a * other.a, axis=1, dtype=np.float64)
    return float(np.mean(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)))


def _bases(delta: Delta) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """Orthonormal bases (as columns) of the space that ΔW writes into, and of the one that it reads from."""
    if isinstance(delta, Factors):
        q_b, r_b = np.linalg.qr(delta.b)
        q_a, r_a = np.linalg.qr(delta.a.T)
        # Of ΔW itself: where one factor lacks a rank, the other has directions that ΔW does not use.
        u, sigma, vt = np.linalg.svd(r_b.astype(np.float64) @ r_a.astype(np.float64).T)
        kept = sigma > sigma[0] * _NOTHING
        return q_b @ u[:, : len(sigma)][:, kept], q_a @ vt[: len(sigma)][kept].T
    from adapterswap.arithmetic.approximation import approximate

    factors = approximate(np.ascontiguousarray(delta), rank=_DIRECTIONS, error=_ERROR).factors
    return _orthonormal(factors.b), _orthonormal(factors.a.T)


def _orthonormal(matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """A basis of the columns' space: directions that carry nothing are left out."""
    u, sigma, _ = np.linalg.svd(matrix, full_matrices=False)
    basis: npt.NDArray[np.floating] = u[:, sigma > sigma[0] * _NOTHING]
    return basis


def _overlap(one: npt.NDArray[np.floating], other: npt.NDArray[np.floating]) -> float:
    smaller = min(one.shape[1], other.shape[1])
    return float(np.sum(np.square(one.T @ other, dtype=np.float64)) / smaller) if smaller else 0.0


def _together(modules: list[ModuleInterference]) -> dict[str, float | None]:
    norms = [math.sqrt(math.fsum(module.norms[side] ** 2 for module in modules)) for side in (0, 1)]
    elements = sum(module.elements for module in modules)
    return {
        "cosine": cosine(math.fsum(module.product for module in modules), (norms[0], norms[1])),
        "written": float(np.mean([module.written for module in modules])),
        "read": float(np.mean([module.read for module in modules])),
        "sign_conflicts": sum(module.conflicts for module in modules) / elements if elements else None,
    }
