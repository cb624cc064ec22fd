"""One pass through the matrices of several experts: what each changed, and how each pair compares.

Norms, cosines and overlaps of adapters come from their joint cores. Mean absolute values of rows and signs need the
dense ΔW, which is formed in blocks, once for all measurements. Memory holds a block and the factors of a few matrices,
or one dense ΔW of each full checkpoint. Knows numbers; draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adapterswap.analysis.deltas import Matrix, Reader, delta_reader, matrices
from adapterswap.analysis.shuffling import Marginals, Null, shuffled_overlap, shuffled_product
from adapterswap.arithmetic.lowrank import cosine
from adapterswap.arithmetic.threads import map_in_threads
from adapterswap.changes.deltas import Delta, Factors, finite
from adapterswap.changes.joint import Joint, mixed
from adapterswap.errors import ExpertError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.files.dtypes import FLOATS
from adapterswap.files.numbers import open_files, read_elements, row_ranges

__all__ = ["ModuleChange", "ModuleInterference", "Survey", "survey"]

Expert = Adapter | Checkpoint
Vectors = npt.NDArray[np.floating]
Core = npt.NDArray[np.float64]

# A dense ΔW has as many directions as rows. It is represented by at most this many, or by those that reach this error.
_DIRECTIONS, _ERROR = 16, 1e-3
_NOTHING = 1e-6  # directions below this share of the strongest are left out

_BLOCK, _WIDTH = 2**19, 4096  # elements and columns of ΔW that are formed at a time: the cache holds most of them
_COUNTED = 255  # rows at a time, so that a byte can count what is true in a column
_STORED = 2**20  # elements of a base's weight to read at a time
_SHUFFLES = 24  # per matrix, divided among the pairs; each pair gets 2 to 8


@dataclass(frozen=True)
class ModuleChange:
    """How much one matrix changed.

    Attributes:
        matrix: the matrix.
        rows: the mean absolute value of each row of ΔW (out values); empty if only pairs were compared.
        norm: ‖ΔW‖ (Frobenius).
        base_norm: ‖W‖ of the base; None without a base.
    """

    matrix: Matrix
    rows: npt.NDArray[np.float64]
    norm: float
    base_norm: float | None


@dataclass(frozen=True)
class ModuleInterference:
    """Two ΔW of one matrix, X and Y (out×in).

    Attributes:
        matrix: the matrix.
        product, norms: ⟨X, Y⟩, and ‖X‖ and ‖Y‖ (Frobenius).
        written: ‖Qₓᵀ·Q_y‖² / min(rank) for orthonormal bases of the columns: 1 if one subspace contains the other.
        read: the same for the rows.
        by_chance: `written` and `read` of random subspaces: max(rank) / out, and max(rank) / in.
        conflicts: the number of elements where X and Y are not zero and have different signs.
        elements: the number of elements where neither X nor Y is zero.
        shuffled: `product`, `written`, `read` and the share of signs in `conflict` if Y is shuffled.
        start: the mean cosine of corresponding rows of A; None if ranks differ or an expert has no A. Near 0 unless
            both were trained from the same initial A.
    """

    matrix: Matrix
    product: float
    norms: tuple[float, float]
    written: float
    read: float
    by_chance: tuple[float, float]
    conflicts: int
    elements: int
    shuffled: Mapping[str, Null]
    start: float | None = None

    @property
    def cosine(self) -> float | None:
        return cosine(self.product, self.norms)


@dataclass(frozen=True)
class Survey:
    """The results of `survey`.

    Attributes:
        changes: by expert, its matrices in the order of layers.
        meetings: by pair of experts, the matrices that both have, in the first expert's order.
    """

    changes: Mapping[str, list[ModuleChange]]
    meetings: Mapping[tuple[str, str], list[ModuleInterference]]


def survey(
    experts: Mapping[str, Expert],
    base: Checkpoint | None,
    *,
    rows: bool = True,
    pairs: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> Survey:
    """Measure experts one by one and in pairs.

    Args:
        experts: by name.
        base: their base. Required for full checkpoints; for adapters it adds the base's norms.
        rows: measure the rows of each expert, including matrices that only one expert has.
        pairs: compare every pair.
        progress: called once per matrix, for all experts together.

    Raises:
        ExpertError: a matrix has different shapes in two experts; see also `matrices` and `delta_reader`.
    """
    found = {name: matrices(expert, base) for name, expert in experts.items()}
    names = list(dict.fromkeys(name for held in found.values() for name in held))
    if not rows:
        names = [name for name in names if sum(name in held for held in found.values()) > 1]
    changes: dict[str, dict[str, ModuleChange]] = {name: {} for name in experts}
    meetings: dict[tuple[str, str], dict[str, ModuleInterference]] = {
        pair: {} for pair in combinations(experts, 2) if pairs
    }
    with ExitStack() as stack:
        readers = {name: stack.enter_context(delta_reader(expert, base)) for name, expert in experts.items()}
        files = stack.enter_context(open_files(base.shards if base else []))

        def measure(name: str) -> _Found:
            held = {expert: found[expert][name] for expert in found if name in found[expert]}
            return _measure(held, readers, _base_norm(name, base, files) if rows else None, rows=rows, pairs=pairs)

        dense = any(isinstance(expert, Checkpoint) for expert in experts.values())  # one at a time: they are large
        for name, one in zip(names, map(measure, names) if dense else map_in_threads(measure, names), strict=True):
            for expert, change in one.changes.items():
                changes[expert][name] = change
            for pair, meeting in one.meetings.items():
                meetings[pair][name] = meeting
            progress()
    return Survey(
        {expert: [changes[expert][name] for name in held if name in changes[expert]] for expert, held in found.items()},
        {pair: [both[name] for name in found[pair[0]] if name in both] for pair, both in meetings.items()},
    )


@dataclass
class _Found:
    changes: dict[str, ModuleChange] = field(default_factory=dict)
    meetings: dict[tuple[str, str], ModuleInterference] = field(default_factory=dict)


def _measure(
    held: Mapping[str, Matrix], readers: Mapping[str, Reader], base_norm: float | None, *, rows: bool, pairs: bool
) -> _Found:
    """Measure one matrix of all experts that have it."""
    deltas = {expert: readers[expert](matrix) for expert, matrix in held.items()}
    for one, other in combinations(deltas, 2):
        if deltas[one].shape != deltas[other].shape:
            shapes = " in one expert and ".join("×".join(map(str, deltas[name].shape)) for name in (one, other))
            raise ExpertError(
                f"{held[one].name} is {shapes} in the other", "Compare experts of one base", parameter="experts"
            )
    factors = {expert: delta for expert, delta in deltas.items() if isinstance(delta, Factors)}
    joint = Joint(list(factors.values())) if factors else None
    place = {expert: index for index, expert in enumerate(factors)}
    couples = list(combinations(deltas, 2)) if pairs else []
    dense = _by_blocks(deltas, held, couples, rows=rows)
    norms = {
        expert: joint.norm([float(index == place[expert]) for index in range(len(place))])
        if joint is not None and expert in place
        else math.sqrt(dense.squares[expert])
        for expert in deltas
    }
    found = _Found()
    for expert, matrix in held.items():
        found.changes[expert] = ModuleChange(matrix, dense.means.get(expert, _NONE), norms[expert], base_norm)
    if not couples:
        return found
    some_dense = len(factors) < len(deltas)
    spaces: dict[str, tuple[Vectors, Vectors]] = {}  # where some are dense, in coordinates of the matrix itself
    full: dict[str, tuple[Vectors, Vectors]] = {}  # in coordinates of the matrix itself
    for expert, delta in deltas.items():
        if joint is not None and expert in place:
            spectrum = joint.spectrum_of(place[expert])
            kept = spectrum.sigma > spectrum.sigma[:1].sum() * _NOTHING
            space = spectrum.u[:, kept], spectrum.vt[kept].T
            full[expert] = _singular_vectors(joint, place[expert], factors[expert], space, spectrum.sigma[kept])
            spaces[expert] = full[expert] if some_dense else space
        else:
            assert not isinstance(delta, Factors)
            spaces[expert] = full[expert] = _dense_space(delta)
    sums = {
        expert: _sums(delta, norms[expert]) if isinstance(delta, Factors) else dense.sums[expert]
        for expert, delta in deltas.items()
    }
    shuffles = max(2, min(8, _SHUFFLES // len(couples)))
    for one, other in couples:
        (columns, rows_), (other_columns, other_rows) = spaces[one], spaces[other]
        rank = max(columns.shape[1], other_columns.shape[1])
        out, width = deltas[one].shape
        both = joint is not None and one in place and other in place
        found.meetings[one, other] = ModuleInterference(
            matrix=held[one],
            product=joint.inner(place[one], place[other]) if both and joint else dense.products[one, other],
            norms=(norms[one], norms[other]),
            written=_overlap(columns, other_columns),
            read=_overlap(rows_, other_rows),
            by_chance=(min(1.0, rank / out), min(1.0, rank / width)),
            conflicts=dense.conflicts[one, other],
            elements=dense.elements[one, other],
            shuffled={
                "product": shuffled_product(sums[one], sums[other]),
                "written": shuffled_overlap(full[one][0], full[other][0], f"{held[one].name} written", shuffles),
                "read": shuffled_overlap(full[one][1], full[other][1], f"{held[one].name} read", shuffles),
                "conflict": _shuffled_conflict(dense.signs[one], dense.signs[other]),
            },
            start=_start(deltas[one], deltas[other]),
        )
    return found


_NONE = np.zeros(0)


@dataclass
class _Dense:
    """Measurements on dense ΔW.

    Attributes:
        means: by expert, the mean absolute value of each row; empty if not requested.
        squares: by full checkpoint, ‖ΔW‖².
        products: by pair with a full checkpoint, ⟨X, Y⟩.
        conflicts, elements: by pair, see `ModuleInterference`.
        sums: by full checkpoint, the marginals of ΔW, if pairs are compared.
        signs: by expert, the marginals of its signs (−1, 0 and 1), if pairs are compared.
    """

    means: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)
    products: dict[tuple[str, str], float] = field(default_factory=dict)
    conflicts: dict[tuple[str, str], int] = field(default_factory=dict)
    elements: dict[tuple[str, str], int] = field(default_factory=dict)
    sums: dict[str, Marginals] = field(default_factory=dict)
    signs: dict[str, Marginals] = field(default_factory=dict)


def _by_blocks(
    deltas: Mapping[str, Delta], held: Mapping[str, Matrix], couples: list[tuple[str, str]], *, rows: bool
) -> _Dense:
    """Form all ΔW block by block, and measure them.

    Raises:
        UnsupportedError: a product of factors overflows float32.
    """
    out, width = next(iter(deltas.values())).shape
    wide = max(1, -(-width // max(1, -(-width // _WIDTH))))  # columns at a time, in parts of one size
    step = max(1, min(out, _BLOCK // max(1, wide), _COUNTED))
    found = _Dense()
    whole = {expert for expert, delta in deltas.items() if not isinstance(delta, Factors)}
    found.squares = dict.fromkeys(whole, 0.0)
    found.products = {pair: 0.0 for pair in couples if whole & {*pair}}
    found.conflicts, found.elements = dict.fromkeys(couples, 0), dict.fromkeys(couples, 0)
    absolute = {expert: np.zeros(out) for expert in deltas}
    rows_of = {(what, expert): np.zeros(out) for what in ("sum", "sign") for expert in deltas}
    columns_of = {key: np.zeros(width) for key in rows_of}
    nonzero = dict.fromkeys(deltas, 0)
    scratch, shared = np.empty(step * wide, np.float32), np.empty(step * wide, np.float32)
    # Only products with a full checkpoint need the blocks of two experts at once.
    memory = {expert: np.empty(step * wide, np.float32) if whole else shared for expert in deltas}
    true, ones = np.empty(step * wide, np.bool_), np.ones(wide, np.float32)
    for (start, stop), (first, last) in product(row_ranges(out, step), row_ranges(width, wide)):
        in_rows, in_columns = slice(start, stop), slice(first, last)
        shape = stop - start, last - first
        size = shape[0] * shape[1]
        magnitudes, matching = scratch[:size].reshape(shape), true[:size].reshape(shape)
        blocks, negative, zeros = {}, {}, {}
        for expert, delta in deltas.items():
            block = memory[expert][:size].reshape(shape)
            with np.errstate(all="ignore"):  # what overflows is found by `finite`
                if isinstance(delta, Factors):
                    np.matmul(delta.b[in_rows], delta.a[:, in_columns], out=block)
                else:
                    block[:] = delta[in_rows, in_columns]
                sums = np.abs(block, out=magnitudes) @ ones[: shape[1]]
            if not np.isfinite(sums).all():  # an entry is not finite, or only the sum overflows
                sums = np.abs(finite(block, held[expert].name)).sum(axis=1, dtype=np.float64)
            absolute[expert][in_rows] += sums
            if expert in whole:
                found.squares[expert] += float(np.sum(np.square(block, dtype=np.float64)))
            blocks[expert] = block
            if couples:
                if expert in whole:
                    rows_of["sum", expert][in_rows] += block.sum(axis=1, dtype=np.float64)
                    columns_of["sum", expert][in_columns] += block.sum(axis=0, dtype=np.float64)
                negative[expert], by_row, by_column = _counted(np.less(block, 0, out=matching))
                row_signs, column_signs = shape[1] - 2 * by_row, shape[0] - 2 * by_column
                nonzero[expert] += size
                if size and not magnitudes.min():
                    zeros[expert], by_row, by_column = _counted(np.equal(block, 0, out=matching))
                    row_signs, column_signs = row_signs - by_row, column_signs - by_column
                    nonzero[expert] -= int(by_row.sum())
                rows_of["sign", expert][in_rows] += row_signs
                columns_of["sign", expert][in_columns] += column_signs
        for one, other in couples:
            differ = negative[one] ^ negative[other]
            nothing = [zeros[expert] for expert in (one, other) if expert in zeros]
            if nothing:
                either = np.bitwise_or.reduce(nothing)
                differ &= ~either
            found.conflicts[one, other] += _ones(differ)
            found.elements[one, other] += size - (_ones(either) if nothing else 0)
            if (one, other) in found.products:
                both = np.sum(np.multiply(blocks[one], blocks[other], dtype=np.float64))
                found.products[one, other] += float(both)
    if couples:
        found.sums = {
            each: Marginals(rows_of["sum", each], columns_of["sum", each], found.squares[each]) for each in whole
        }
        found.signs = {
            each: Marginals(rows_of["sign", each], columns_of["sign", each], float(nonzero[each])) for each in deltas
        }
    if rows:
        found.means = {expert: sums / np.float64(width) for expert, sums in absolute.items()}
    return found


def _counted(true: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """At most `_COUNTED` rows as bits, eight columns to a byte, and how many are true in each row and each column."""
    bits = np.packbits(true, axis=1)
    words = bits.view(np.uint64) if bits.shape[1] % 8 == 0 else bits
    in_rows = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return bits, in_rows, np.add.reduce(true.view(np.uint8), axis=0, dtype=np.uint8).astype(np.int64)


def _ones(bits: npt.NDArray[np.uint8]) -> int:
    return int(np.bitwise_count(bits.reshape(-1).view(np.uint64) if bits.size % 8 == 0 else bits).sum(dtype=np.int64))


def _sums(delta: Factors, norm: float) -> Marginals:
    """Of ΔW = B·A, without forming it."""
    into, out_of = delta.a.sum(axis=1, dtype=np.float64), delta.b.sum(axis=0, dtype=np.float64)
    rows, columns = mixed([delta.b], into[:, None], 1), mixed([delta.a], out_of[:, None], 0)
    return Marginals(rows[:, 0], columns[0], norm**2)


def _singular_vectors(
    joint: Joint, index: int, delta: Factors, space: tuple[Core, Core], sigma: Core
) -> tuple[Core, Core]:
    """U and V (as columns) in coordinates of the matrix. B·(A·V)/σ and Aᵀ·(Bᵀ·U)/σ cost less than a joint basis."""
    left, right = joint.coordinates(index)
    if left.shape[1] < len(delta.a):  # without columns that are multiplied by zeros
        return joint.left.expand(space[0]), joint.right.expand(space[1])
    return mixed([delta.b], right.T @ (space[1] / sigma), 1), mixed([delta.a], left.T @ (space[0] / sigma), 0).T


def _shuffled_conflict(one: Marginals, other: Marginals) -> Null:
    """Of elements where neither is zero, the share whose signs differ: (1 − ⟨signs, signs⟩ / elements) / 2."""
    product = shuffled_product(one, other)
    elements = one.squares * other.squares / (len(one.rows) * len(one.columns))
    return Null((1 - product.mean / elements) / 2, product.variance / elements**2 / 4) if elements else Null(0.5, 0.0)


def _base_norm(name: str, base: Checkpoint | None, files: Mapping[Path, int]) -> float | None:
    """‖W‖ of the base's own weight, read in parts; None if the base does not store it in floating point."""
    own = base.parameters.get(f"{name}.weight") if base else None
    if base is None or own is None or own.tensor.dtype not in FLOATS:
        return None
    total = 0.0
    for start, stop in row_ranges(math.prod(own.tensor.shape), _STORED):
        part = read_elements(base.name, files[own.path], own.tensor, start, stop).astype(np.float64)
        total += float(part @ part)
    return math.sqrt(total)


def _start(one: Delta, other: Delta) -> float | None:
    """The mean cosine of corresponding rows of two A; rows of zeros count as 0."""
    if not isinstance(one, Factors) or not isinstance(other, Factors) or one.a.shape != other.a.shape:
        return None
    x, y = one.a.astype(np.float64), other.a.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = np.sum(x * y, axis=1)
    return float(np.mean(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)))


def _dense_space(delta: npt.NDArray[np.float32]) -> tuple[Vectors, Vectors]:
    """Orthonormal bases (as columns) of the spaces that a full checkpoint's ΔW writes into and reads from."""
    from adapterswap.arithmetic.approximation import approximate

    factors = approximate(np.ascontiguousarray(delta), rank=_DIRECTIONS, error=_ERROR).factors
    return _orthonormal(factors.b), _orthonormal(factors.a.T)


def _orthonormal(matrix: Vectors) -> Vectors:
    """An orthonormal basis of the columns' space, without directions that carry nothing."""
    u, sigma, _ = np.linalg.svd(matrix, full_matrices=False)
    basis: Vectors = u[:, sigma > sigma[0] * _NOTHING]
    return basis


def _overlap(one: Vectors, other: Vectors) -> float:
    smaller = min(one.shape[1], other.shape[1])
    return float(np.sum(np.square(one.T @ other, dtype=np.float64)) / smaller) if smaller else 0.0
