"""One pass through several experts' matrices: what each changed, how pairs compare, what chance would give.

A shuffled ΔW keeps the norm, the rank and the entries of the real one, but has nothing to do with the other expert.
Numbers within the band of the shuffled ones are therefore chance.

Norms, cosines and overlaps of adapters come from their joint cores. Mean absolute values of rows and signs need the
dense ΔW, which is formed in blocks, once for all measurements. Memory holds a block and the factors of a few matrices,
or one dense ΔW of each full checkpoint.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core import Adapter, Checkpoint
from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.joint import Joint, cosine, mixed
from adapterswap.core.writing.outputs import map_in_threads
from adapterswap.experiments.analysis.matrices import Delta, Matrix, Reader, delta_reader, matrices
from adapterswap.kit.errors import ExpertError
from adapterswap.kit.files.numbers import Dtype, row_ranges, too_large
from adapterswap.kit.files.tensorfile import open_files

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
    mean, a, b, rest = _effects(one)
    mean_, a_, b_, rest_ = _effects(other)

    # A single row (or column) has no effects, so its divisor does not matter.
    degrees, degrees_ = max(1, n - 1), max(1, m - 1)
    variance = m**2 * a * a_ / degrees + n**2 * b * b_ / degrees_ + rest * rest_ / (degrees * degrees_)
    return Null(n * m * mean * mean_, variance)


def _effects(matrix: Marginals) -> tuple[float, float, float, float]:
    """μ, ‖a‖², ‖b‖² and ‖rest‖²."""
    n, m = len(matrix.rows), len(matrix.columns)
    row_means = np.asarray(matrix.rows, np.float64) / m
    column_means = np.asarray(matrix.columns, np.float64) / n

    mean = float(row_means.mean())
    a = float(np.sum((row_means - mean) ** 2))
    b = float(np.sum((column_means - mean) ** 2))
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
    left = np.ascontiguousarray(one.T, np.float32)
    right = np.ascontiguousarray(other, np.float32)
    shuffled = np.empty_like(right)
    squares = []
    for _ in range(shuffles):
        np.take(right, rng.permutation(n), axis=0, out=shuffled, mode="clip")  # unlike `raise`, copies nothing twice
        squares.append(float(np.sum(np.square(left @ shuffled, dtype=np.float64))))

    uniform = 2 * p * q * (n - p) * (n - q) / (n**2 * max(1, n - 1) * (n + 2))
    smaller = min(p, q)
    return Null(float(np.mean(squares)) / smaller, max(float(np.var(squares, ddof=1)), uniform) / smaller**2)


Expert = Adapter | Checkpoint
Core = npt.NDArray[np.float64]

# A dense ΔW has as many directions as rows. It is represented by at most this many, or by those that reach this error.
_DIRECTIONS, _ERROR = 16, 1e-3
_NOTHING = 1e-6  # directions below this share of the strongest are left out

_BLOCK, _WIDTH = 2**19, 4096  # elements and columns of ΔW that are formed at a time: the cache holds most of them
_COUNTED = 255  # rows at a time, so that a byte can count what is true in a column
_STORED = 2**20  # elements of a base's weight to read at a time
_LARGE = 1e30  # a norm below this has no entry that float32 cannot hold
_SHUFFLES = 24  # per matrix, divided among the pairs; each pair gets 2 to 8


@dataclass(frozen=True)
class ModuleChange:
    """How much one matrix changed.

    Attributes:
        matrix: the matrix.
        rows: the mean absolute value of each row of ΔW (out values); may be empty if only norms were wanted.
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
    progress: Callable[[], None] = lambda: None,
    *,
    norms_only: bool = False,
) -> Survey:
    """Measure experts one by one and in pairs.

    Args:
        base: their base. Required for full checkpoints; for adapters it adds the base's norms.
        norms_only: for a single expert, do not form ΔW = B·A if its norm is all that is needed.
    """
    matrices_by_expert = {name: matrices(expert, base) for name, expert in experts.items()}
    names: dict[str, None] = {}
    for own in matrices_by_expert.values():
        names |= dict.fromkeys(own)

    results: dict[str, _Measured] = {}
    with ExitStack() as stack:
        readers = {name: stack.enter_context(delta_reader(expert, base)) for name, expert in experts.items()}
        files: Mapping[Path, int] = {}
        if base is not None:
            files = stack.enter_context(open_files(base.shards))

        def measure(name: str) -> _Measured:
            held = {}
            for expert, own in matrices_by_expert.items():
                if name in own:
                    held[expert] = own[name]
            return _measure(held, readers, _base_norm(name, base, files), norms_only=norms_only)

        # Matrices of full checkpoints are large, so one at a time.
        measure_all: Callable[..., Iterable[_Measured]] = map_in_threads
        if any(isinstance(expert, Checkpoint) for expert in experts.values()):
            measure_all = map
        measured = measure_all(measure, names)
        for name, result in zip(names, measured, strict=True):
            results[name] = result
            progress()

    # By matrix → by expert and by pair of experts.
    changes: dict[str, list[ModuleChange]] = {}
    for expert, own in matrices_by_expert.items():
        changes[expert] = [results[name].changes[expert] for name in own]
    meetings: dict[tuple[str, str], list[ModuleInterference]] = {}
    for pair in combinations(experts, 2):
        meetings[pair] = []
        for name in matrices_by_expert[pair[0]]:
            if pair in results[name].meetings:
                meetings[pair].append(results[name].meetings[pair])
    return Survey(changes, meetings)


class _Measured(NamedTuple):
    """One matrix, by expert that changes it and by pair of these."""

    changes: dict[str, ModuleChange]
    meetings: dict[tuple[str, str], ModuleInterference]


def _measure(
    held: Mapping[str, Matrix], readers: Mapping[str, Reader], base_norm: float | None, *, norms_only: bool
) -> _Measured:
    """Measure one matrix of all experts that have it."""
    deltas = {expert: readers[expert](matrix) for expert, matrix in held.items()}
    couples = list(combinations(deltas, 2))
    for first, second in couples:
        if deltas[first].shape != deltas[second].shape:
            shape = "×".join(map(str, deltas[first].shape))
            other_shape = "×".join(map(str, deltas[second].shape))
            raise ExpertError(
                f"{held[first].name} is {shape} in one expert and {other_shape} in the other",
                "Compare experts of one base",
                parameter="experts",
            )

    # The norms of adapters, from the joint core of their factors.
    factors = {expert: delta for expert, delta in deltas.items() if isinstance(delta, Factors)}
    place = {expert: index for index, expert in enumerate(factors)}
    joint: Joint | None = None
    norms: dict[str, float] = {}
    if factors:
        joint = Joint(list(factors.values()))
        for expert, own in place.items():
            coefficients = [0.0] * len(place)
            coefficients[own] = 1.0
            norms[expert] = joint.norm(coefficients)

    # An entry that overflows or is not finite shows in the norm, and is named when ΔW is formed.
    changes: dict[str, ModuleChange] = {}
    if norms_only and norms.keys() == deltas.keys() and not couples and max(norms.values()) < _LARGE:
        for expert, matrix in held.items():
            changes[expert] = ModuleChange(matrix, np.empty(0), norms[expert], base_norm)
        return _Measured(changes, {})

    # What needs the dense ΔW.
    totals, dense_couples = _by_blocks(deltas, held, couples)
    for expert, matrix in held.items():
        if expert not in norms:
            norms[expert] = math.sqrt(totals[expert].squares)
        changes[expert] = ModuleChange(matrix, totals[expert].mean_of_rows(), norms[expert], base_norm)
    if not couples:
        return _Measured(changes, {})

    # The subspaces that each ΔW writes into and reads from, in coordinates of the matrix (`full`). Two adapters are
    # compared in the small coordinates that they share, unless another expert is dense.
    some_dense = len(factors) < len(deltas)
    spaces: dict[str, tuple[Vectors, Vectors]] = {}
    full: dict[str, tuple[Vectors, Vectors]] = {}
    sums: dict[str, Marginals] = {}
    for expert, delta in deltas.items():
        if joint is not None and isinstance(delta, Factors):
            spectrum = joint.spectrum_of(place[expert])
            kept = spectrum.sigma > spectrum.sigma[:1].sum() * _NOTHING
            space = spectrum.u[:, kept], spectrum.vt[kept].T
            full[expert] = _singular_vectors(joint, place[expert], delta, space, spectrum.sigma[kept])
            spaces[expert] = space
            if some_dense:
                spaces[expert] = full[expert]
            sums[expert] = _sums(delta, norms[expert])
        else:
            assert not isinstance(delta, Factors)
            spaces[expert] = full[expert] = _dense_space(delta)
            sums[expert] = totals[expert].sums()

    shuffles = max(2, min(8, _SHUFFLES // len(couples)))
    out, width = next(iter(deltas.values())).shape
    meetings: dict[tuple[str, str], ModuleInterference] = {}
    for first, second in couples:
        dense = dense_couples[first, second]
        columns, rows = spaces[first]
        other_columns, other_rows = spaces[second]
        rank = max(columns.shape[1], other_columns.shape[1])
        dot = dense.product
        if joint is not None and first in place and second in place:
            dot = joint.inner(place[first], place[second])

        name = held[first].name
        meetings[first, second] = ModuleInterference(
            matrix=held[first],
            product=dot,
            norms=(norms[first], norms[second]),
            written=_overlap(columns, other_columns),
            read=_overlap(rows, other_rows),
            by_chance=(min(1.0, rank / out), min(1.0, rank / width)),
            conflicts=dense.conflicts,
            elements=dense.elements,
            shuffled={
                "product": shuffled_product(sums[first], sums[second]),
                "written": shuffled_overlap(full[first][0], full[second][0], f"{name} written", shuffles),
                "read": shuffled_overlap(full[first][1], full[second][1], f"{name} read", shuffles),
                "conflict": _shuffled_conflict(totals[first].signs(), totals[second].signs()),
            },
            start=_start(deltas[first], deltas[second]),
        )
    return _Measured(changes, meetings)


class _Totals:
    """What the blocks of one dense ΔW (out×in) add up to.

    Attributes:
        absolute: Σ|x| of each row (out).
        squares: ‖ΔW‖², of a full checkpoint.
        rows, columns: the sum of each row (out) and column (in), of a full checkpoint, if pairs are compared.
        row_signs, column_signs: of each row and column, the number of positive entries minus that of negative ones, if
            pairs are compared.
        nonzero: the number of entries that are not zero, if pairs are compared.
    """

    def __init__(self, out: int, width: int) -> None:
        self.absolute = np.zeros(out)
        self.squares = 0.0
        self.rows, self.columns = np.zeros(out), np.zeros(width)
        self.row_signs, self.column_signs = np.zeros(out), np.zeros(width)
        self.nonzero = 0

    def mean_of_rows(self) -> npt.NDArray[np.float64]:
        """The mean absolute value of each row (out)."""
        means: npt.NDArray[np.float64] = self.absolute / np.float64(len(self.columns))
        return means

    def sums(self) -> Marginals:
        """The marginals of ΔW."""
        return Marginals(self.rows, self.columns, self.squares)

    def signs(self) -> Marginals:
        """The marginals of its signs (−1, 0 and 1)."""
        return Marginals(self.row_signs, self.column_signs, float(self.nonzero))


@dataclass
class _Couple:
    """What the blocks of two dense ΔW, X and Y, add up to; see `ModuleInterference`.

    Attributes:
        product: ⟨X, Y⟩, if one of them is a full checkpoint's.
    """

    product: float = 0.0
    conflicts: int = 0
    elements: int = 0


def _by_blocks(
    deltas: Mapping[str, Delta], held: Mapping[str, Matrix], couples: Sequence[tuple[str, str]]
) -> tuple[dict[str, _Totals], dict[tuple[str, str], _Couple]]:
    """Form all ΔW block by block, and measure each of them and each pair."""
    out, width = next(iter(deltas.values())).shape
    totals = {expert: _Totals(out, width) for expert in deltas}
    results = {pair: _Couple() for pair in couples}
    whole = {expert for expert, delta in deltas.items() if not isinstance(delta, Factors)}

    # A block has `step` rows, and columns in parts of one size.
    parts = max(1, -(-width // _WIDTH))
    wide = max(1, -(-width // parts))
    step = max(1, min(out, _BLOCK // wide, _COUNTED))

    # Only products with a full checkpoint need the blocks of two experts at once.
    scratch, shared = np.empty(step * wide, np.float32), np.empty(step * wide, np.float32)
    memory = dict.fromkeys(deltas, shared)
    if whole:
        memory = {expert: np.empty(step * wide, np.float32) for expert in deltas}
    true, ones = np.empty(step * wide, np.bool_), np.ones(wide, np.float32)

    for (start, stop), (first, last) in product(row_ranges(out, step), row_ranges(width, wide)):
        in_rows, in_columns = slice(start, stop), slice(first, last)
        shape = stop - start, last - first
        size = shape[0] * shape[1]
        magnitudes, matching = scratch[:size].reshape(shape), true[:size].reshape(shape)

        blocks, negative, zeros = {}, {}, {}
        for expert, delta in deltas.items():
            total = totals[expert]
            block = blocks[expert] = memory[expert][:size].reshape(shape)
            with np.errstate(all="ignore"):  # what overflows is found below
                if isinstance(delta, Factors):
                    np.matmul(delta.b[in_rows], delta.a[:, in_columns], out=block)
                else:
                    block[:] = delta[in_rows, in_columns]
                sums = np.abs(block, out=magnitudes) @ ones[: shape[1]]

            if not np.isfinite(sums).all():  # an entry is not finite, or only the sum overflows
                if not np.isfinite(block).all():
                    raise too_large(held[expert].name)
                sums = np.abs(block).sum(axis=1, dtype=np.float64)
            total.absolute[in_rows] += sums
            if expert in whole:
                total.squares += float(np.sum(np.square(block, dtype=np.float64)))
            if not couples:
                continue

            if expert in whole:
                total.rows[in_rows] += block.sum(axis=1, dtype=np.float64)
                total.columns[in_columns] += block.sum(axis=0, dtype=np.float64)

            # Signs: every entry counts as positive, a negative one takes 2 away, a zero 1.
            negative[expert], by_row, by_column = _counted(np.less(block, 0, out=matching))
            row_signs, column_signs = shape[1] - 2 * by_row, shape[0] - 2 * by_column
            total.nonzero += size
            if size and not magnitudes.min():
                zeros[expert], by_row, by_column = _counted(np.equal(block, 0, out=matching))
                row_signs, column_signs = row_signs - by_row, column_signs - by_column
                total.nonzero -= int(by_row.sum())
            total.row_signs[in_rows] += row_signs
            total.column_signs[in_columns] += column_signs

        for (left, right), result in results.items():
            differ = negative[left] ^ negative[right]
            result.elements += size
            with_zeros = [zeros[expert] for expert in (left, right) if expert in zeros]
            if with_zeros:
                either = np.bitwise_or.reduce(with_zeros)
                differ &= ~either
                result.elements -= _ones(either)
            result.conflicts += _ones(differ)
            if left in whole or right in whole:
                result.product += float(np.sum(np.multiply(blocks[left], blocks[right], dtype=np.float64)))

    return totals, results


def _counted(true: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """At most `_COUNTED` rows as bits, eight columns to a byte, and how many are true in each row and each column."""
    bits = np.packbits(true, axis=1)
    words: npt.NDArray[np.unsignedinteger] = bits
    if bits.shape[1] % 8 == 0:
        words = bits.view(np.uint64)  # eight bytes at a time
    in_rows = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    in_columns = np.add.reduce(true.view(np.uint8), axis=0, dtype=np.uint8).astype(np.int64)
    return bits, in_rows, in_columns


def _ones(bits: npt.NDArray[np.uint8]) -> int:
    """How many bits are set; eight bytes at a time where that is possible."""
    words: npt.NDArray[np.unsignedinteger] = bits
    if bits.size % 8 == 0:
        words = bits.reshape(-1).view(np.uint64)
    return int(np.bitwise_count(words).sum(dtype=np.int64))


def _sums(delta: Factors, norm: float) -> Marginals:
    """Of ΔW = B·A, without forming it: its row sums are B·(A·1), and its column sums (1ᵀ·B)·A."""
    a_rows = delta.a.sum(axis=1, dtype=np.float64)
    b_columns = delta.b.sum(axis=0, dtype=np.float64)
    rows = mixed([delta.b], a_rows[:, None], 1)
    columns = mixed([delta.a], b_columns[:, None], 0)
    return Marginals(rows[:, 0], columns[0], norm**2)


def _singular_vectors(
    joint: Joint, index: int, delta: Factors, space: tuple[Core, Core], sigma: Core
) -> tuple[Core, Core]:
    """U and V (as columns) in coordinates of the matrix. B·(A·V)/σ and Aᵀ·(Bᵀ·U)/σ cost less than a joint basis."""
    u, v = space
    left, right = joint.coordinates(index)
    if left.shape[1] < len(delta.a):  # without columns that are multiplied by zeros
        return joint.left.expand(u), joint.right.expand(v)
    return mixed([delta.b], right.T @ (v / sigma), 1), mixed([delta.a], left.T @ (u / sigma), 0).T


def _shuffled_conflict(first: Marginals, second: Marginals) -> Null:
    """Of elements where neither is zero, the share whose signs differ: (1 − ⟨signs, signs⟩ / elements) / 2."""
    elements = first.squares * second.squares / (len(first.rows) * len(first.columns))
    if not elements:
        return Null(0.5, 0.0)
    product = shuffled_product(first, second)
    return Null((1 - product.mean / elements) / 2, product.variance / elements**2 / 4)


def _base_norm(name: str, base: Checkpoint | None, files: Mapping[Path, int]) -> float | None:
    """‖W‖ of the base's own weight, read in parts; None if the base does not store it in floating point."""
    if base is None:
        return None
    own = base.parameters.get(f"{name}.weight")
    if own is None or own.tensor.dtype not in Dtype.FLOATS:
        return None

    total = 0.0
    for start, stop in row_ranges(math.prod(own.tensor.shape), _STORED):
        part = own.tensor.read_elements(base.name, files[own.path], start, stop).astype(np.float64)
        total += float(part @ part)
    return math.sqrt(total)


def _start(first: Delta, second: Delta) -> float | None:
    """The mean cosine of corresponding rows of two A; rows of zeros count as 0."""
    if not isinstance(first, Factors) or not isinstance(second, Factors) or first.a.shape != second.a.shape:
        return None
    x, y = first.a.astype(np.float64), second.a.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = np.sum(x * y, axis=1)
    return float(np.mean(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)))


def _dense_space(delta: npt.NDArray[np.float32]) -> tuple[Vectors, Vectors]:
    """Orthonormal bases (as columns) of the spaces that a full checkpoint's ΔW writes into and reads from."""
    from adapterswap.core.writing.reduction import approximate

    factors = approximate(np.ascontiguousarray(delta), rank=_DIRECTIONS, error=_ERROR).factors
    return _orthonormal(factors.b), _orthonormal(factors.a.T)


def _orthonormal(matrix: Vectors) -> Vectors:
    """An orthonormal basis of the columns' space, without directions that carry nothing."""
    u, sigma, _ = np.linalg.svd(matrix, full_matrices=False)
    basis: Vectors = u[:, sigma > sigma[0] * _NOTHING]
    return basis


def _overlap(first: Vectors, second: Vectors) -> float:
    """‖Q₁ᵀ·Q₂‖² / min(rank), between 0 and 1."""
    smaller = min(first.shape[1], second.shape[1])
    if not smaller:
        return 0.0
    return float(np.sum(np.square(first.T @ second, dtype=np.float64)) / smaller)
