"""Check anyone's merge: is a folder its base plus these experts, how much of each, and in which layers?

No record is needed. Every stored weight W' is compared with W + Σ c_i·ΔW_i, for the coefficients that are stated and,
if these do not fit, for those that do: the least squares over all numbers of the tensor, each weighted by how far
rounding can move it, tested again number by number. Full weights are compared with their base's, and an adapter's ΔW
with zero. Tensors are read in blocks of rows, so memory does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.kinds import Change, LowRank, Whole, of_kind
from adapterswap.core.changes.locations import locate_all
from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.model.checkpoints import OTHER_NAMES, Checkpoint, StoredTensor, open_checkpoint
from adapterswap.core.model.layers import format_layers
from adapterswap.core.model.sources import WEIGHTS
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.functions import compose
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.writing.outputs import map_in_threads
from adapterswap.core.writing.resolution import Resolved
from adapterswap.kit.errors import ArgumentError, BaseModelError, Problems, UnsupportedError, and_more
from adapterswap.kit.files.numbers import Dtype, row_ranges
from adapterswap.kit.files.tensorfile import open_files
from adapterswap.tools.beside import Beside, beside_adapter, beside_model
from adapterswap.tools.comparison import equal_bytes

Numbers = npt.NDArray[np.floating[Any]]  # float32; to check numbers in float32, float64
_Change = Callable[[int, int, Numbers], tuple[Numbers, Numbers]]  # (start, stop, W) → rows of ΔW, and their rounding

_BLOCK = 2**20  # elements at a time
_DIGITS = {"F32": 24, "F16": 11, "BF16": 8}  # of the significand
_LEAST = {"F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}  # the smallest number above zero
_NO_CHANGE = 1e-30  # a bound for numbers that nothing changes; its square is a float64
_SLACK = 1.01  # the bounds are of first order
_MISTAKES = (
    "α/r was applied, where the scale of a rank-stabilized LoRA is α/√r",
    "α/√r was applied, where the scale of a LoRA is α/r",
    "B·A was added without its scale",
)
_SURE, _CLOSE = 5.0, 0.01  # how far an estimate may be off, in standard errors and as a share
_DEPENDENT = 1e-6  # share of a direction's variance below which changes do not tell the coefficients apart
_EXACTLY = 1e-3  # a coefficient that is known this closely needs no note
_PERMUTED = 32  # tensors among which those in another's place are looked for
_SHOWN = 4  # names in a sentence


@dataclass(frozen=True)
class _Evidence:
    """What a tensor says about the coefficients of a whole merge.

    Attributes:
        gram: sums of products of the experts' changes, weighted by what rounding can change.
        drift: sums of products of each change with W' minus what was stated, rounded as W' is. Their expectation is
            zero if the coefficients are as stated, also where the changes are smaller than the rounding.
        digits: of the significand in which W' is stored.
    """

    gram: Numbers
    drift: Numbers
    digits: int


@dataclass(frozen=True)
class Finding:
    """What a tensor of a folder, or a module of an adapter, is made of.

    Attributes:
        name, layer: the stored tensor, or the module.
        stated: each expert's coefficient by the rules.
        found: the coefficients that fit, up to rounding; None if none do.
        within: how far each of the fitting coefficients may be off without being noticed.
        zero: experts whose change of it is zero, so that their coefficients are not known.
        unseen: whether the stated change is too small to be seen in the stored precision.
        mistake: what was probably done instead of what was stated; empty if that is not known.
        evidence: for an estimate over the whole merge; see `_Evidence`.
    """

    name: str
    layer: int | None
    stated: Mapping[str, float]
    found: Mapping[str, float] | None
    within: Mapping[str, float] = field(default_factory=dict)
    zero: tuple[str, ...] = ()
    unseen: bool = False
    mistake: str = ""
    evidence: _Evidence | None = None

    @property
    def fits(self) -> bool:
        return self.found == self.stated


@dataclass(frozen=True)
class Attribution:
    """Whether a folder is what was stated.

    Attributes:
        stated: the statement as a formula, such as `base + math`.
        answers: sentences that say what the folder is, the statement itself if it is true.
        findings: every tensor or module that could be compared.
        differing: names of tensors that are missing, added, or not what was stated.
        notes: what could not be decided.
        within: how far a coefficient may be off in all tensors alike without being noticed; None without coefficients.
    """

    stated: str
    answers: tuple[str, ...]
    findings: tuple[Finding, ...]
    differing: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    within: float | None = None

    @property
    def equal(self) -> bool:
        return not self.differing

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Sources that were not compared: none."""
        return ()

    def as_json(self) -> dict[str, Any]:
        """As plain data: what `adapterswap verify --json` prints."""
        found: dict[str, Any] = {}
        for finding in self.findings:
            if not finding.fits:
                found[finding.name] = finding.found and dict(finding.found)
        return {
            "equal": self.equal,
            "stated": self.stated,
            "answers": list(self.answers),
            "differing": list(self.differing),
            "found": found,
            "within": self.within,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Subject:
    """A tensor to explain: W' (rows×columns), the base's W, and the experts that change it.

    Attributes:
        read: (start, stop) → rows of W', and of W.
        rounding: (rows of W', rows of W, start, stop) → what rounding can change each number of W' by.
        changes: expert → (start, stop, W) → rows of its ΔW, and what rounding can change them by.
        dtype: in which W' is stored; `F32` for an adapter's.
        mistakes: expert → what is often done wrong with its scale, and the factor that this makes.
    """

    name: str
    layer: int | None
    shape: tuple[int, int]
    stated: Mapping[str, float]
    read: Callable[[int, int], tuple[Numbers, Numbers]]
    rounding: Callable[[Numbers, Numbers, int, int], Numbers]
    changes: Mapping[str, _Change]
    dtype: str
    mistakes: Mapping[str, Mapping[str, float]]


def _half_unit(values: Numbers, dtype: str) -> Numbers:
    """Half the distance between two numbers of `dtype` at `values`: the most by which rounding changes them."""
    powers = (values.astype(np.float32).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)  # 2^⌊log₂|x|⌋
    halves: Numbers = np.maximum(powers * np.float32(2.0 ** -_DIGITS[dtype]), np.float32(_LEAST[dtype] / 2))
    return halves


def _rounded(values: Numbers, dtype: str) -> Numbers:
    """The numbers as a file in `dtype` holds them; those of float32 as they are."""
    if dtype == "F32":
        return values
    return Dtype(dtype).unpack(Dtype(dtype).pack(values.astype(np.float32)), values.shape)


def _wide(numbers: Numbers, dtype: str) -> Numbers:
    """The numbers in the precision in which those of `dtype` can be checked."""
    if dtype == "F32":
        return numbers.astype(np.float64)
    return numbers


@dataclass
class _Sums:
    """Sums over a tensor: of squares and products, weighted by what rounding can change; and the worst misfit.

    `sharpest` has each change's largest number, in units of what rounding can change it by; for `drift` see
    `_Evidence`.
    """

    gram: Numbers
    products: Numbers
    sharpest: Numbers
    drift: Numbers
    worst: float = 0.0
    moved: bool = False
    visible: bool = False


def _compare(subject: _Subject, coefficients: Mapping[str, float], *, most: int | None = None) -> _Sums:
    """Compare a tensor, or its first rows, with its base plus the experts' changes with these coefficients."""
    count = len(subject.changes)
    sums = _Sums(np.zeros((count, count)), np.zeros(count), np.zeros(count), np.zeros(count))
    rows, columns = subject.shape
    if most is not None:
        rows = min(rows, most)

    for start, stop in row_ranges(rows, max(1, _BLOCK // max(columns, 1))):
        target, own = subject.read(start, stop)
        difference, bound = target - own, subject.rounding(target, own, start, stop)
        sums.moved |= bool(difference.any())

        # W' - W beside Σ c·ΔW, number by number
        expected = np.zeros_like(difference)
        deltas = []
        for name, read_change in subject.changes.items():
            delta, inexact = read_change(start, stop, own)
            expected += coefficients.get(name, 0.0) * delta
            bound = bound + max(1.0, abs(coefficients.get(name, 0.0))) * inexact
            deltas.append(delta)
        bound = np.maximum(bound, _NO_CHANGE)
        sums.visible |= bool((np.abs(expected) > bound).any())
        sums.worst = max(sums.worst, float((np.abs(difference - expected) / bound).max(initial=0.0)))
        if not deltas:
            continue

        # Sums for the least squares
        weighted = [(delta / bound).ravel() for delta in deltas]
        weighted_difference = (difference / bound).ravel()
        rest = ((target - _rounded(own + expected, subject.dtype)) / bound).ravel()
        for i, one in enumerate(weighted):
            sums.drift[i] += float(one @ rest)
            sums.sharpest[i] = max(sums.sharpest[i], float(np.abs(one).max(initial=0.0)))
            sums.products[i] += float(one @ weighted_difference)
            for j in range(i + 1):
                sums.gram[i, j] = sums.gram[j, i] = sums.gram[i, j] + float(one @ weighted[j])
    return sums


def _solved(gram: Numbers, products: Numbers) -> tuple[Numbers, Numbers] | None:
    """The solution of gram·x = products and its standard errors, with zero for what the numbers leave open: the
    coefficient of a change of zero, and how two equal changes share their sum. None if all of them are zero."""
    lengths = np.sqrt(np.diag(gram))
    if not lengths.any():
        return None
    unit = np.where(lengths > 0, lengths, 1.0)
    values, vectors = np.linalg.eigh(gram / np.outer(unit, unit))
    known = values > _DEPENDENT
    inverse = (vectors[:, known] / values[known]) @ vectors[:, known].T
    return inverse @ (products / unit) / unit, np.sqrt(np.diag(inverse)) / unit


def _estimate(sums: _Sums, stated: Numbers) -> tuple[Numbers, Numbers] | None:
    """The coefficients that fit best, and how far off they may be; None if the numbers say nothing about them.

    What they leave open is as stated.
    """
    solved = _solved(sums.gram, sums.products - sums.gram @ stated)
    if solved is None:
        return None
    estimate: Numbers = stated + solved[0]
    return estimate, np.maximum(_SURE * solved[1], _CLOSE * np.maximum(1.0, np.abs(estimate)))


def _vector(subject: _Subject, coefficients: Mapping[str, float]) -> Numbers:
    return np.array([coefficients.get(name, 0.0) for name in subject.changes])


def _fits(subject: _Subject, coefficients: Mapping[str, float], sums: _Sums) -> bool:
    """Whether each number fits, and all of them together: a bound for one leaves room for a wrong coefficient."""
    if sums.worst > _SLACK:
        return False

    stated = _vector(subject, coefficients)
    estimated = _estimate(sums, stated)
    if estimated is None:
        return True
    estimate, room = estimated
    return bool((np.abs(stated - estimate) <= room).all())


def _within(subject: _Subject, coefficients: Mapping[str, float], sums: _Sums) -> dict[str, float]:
    """How far each coefficient that fits may be off: until a single number, or the estimate, would not fit."""
    estimated = _estimate(sums, _vector(subject, coefficients))
    if estimated is None:
        return {}

    within = {}
    for name, room, sharpest in zip(subject.changes, estimated[1], sums.sharpest, strict=True):
        if sharpest > 0:
            within[name] = float(min(room, (1 + _SLACK) / sharpest))
    return within


def _explain(subject: _Subject) -> tuple[Finding, bool]:
    """What a tensor is made of, and whether it equals the base's in every number."""
    stated = subject.stated
    sums = _compare(subject, stated)
    zero = tuple(name for name, seen in zip(subject.changes, sums.sharpest, strict=True) if not seen)

    def finding(found: Mapping[str, float] | None, compared: _Sums, *, unseen: bool = False) -> Finding:
        within, mistake = {}, ""
        if found is not None:
            within = _within(subject, found, compared)
            if found != stated:
                mistake = _mistake(subject, found)
        evidence = _Evidence(sums.gram, sums.drift, _DIGITS[subject.dtype])
        return Finding(subject.name, subject.layer, stated, found, within, zero, unseen, mistake, evidence)

    if _fits(subject, stated, sums):
        return finding(stated, sums, unseen=any(stated.values()) and not sums.visible), not sums.moved
    if not sums.moved:
        return replace(finding(dict.fromkeys(stated, 0.0), sums), mistake=""), True

    for coefficients in _candidates(subject, sums):
        compared = _compare(subject, coefficients)
        if _fits(subject, coefficients, compared):
            return finding(coefficients, compared), False
    return finding(None, sums), False


def _explain_all(subject: Callable[[str], _Subject], names: Iterable[str]) -> tuple[tuple[Finding, ...], set[str]]:
    """What each of the named tensors is made of, and which of them differ from the base's in some number."""
    findings = []
    moved = set()
    for finding, is_same in map_in_threads(lambda name: _explain(subject(name)), names):
        findings.append(finding)
        if not is_same:
            moved.add(finding.name)
    return _as_a_whole(findings), moved


def _as_a_whole(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, with those that fit one by one tested together: all tensors know a coefficient more closely.

    Tensors with the same stated coefficients of the same experts count as one. A scale that was rounded to the dtype of
    the result is no other coefficient, so one unit in its last place is left as room.
    """
    groups: dict[tuple[tuple[str, float], ...], list[Finding]] = {}
    for finding in findings:
        if finding.fits and finding.evidence is not None and any(finding.stated.values()):
            groups.setdefault(tuple(finding.stated.items()), []).append(finding)

    settled = {finding.name: finding for finding in findings}
    for stated, group in groups.items():
        # How far all tensors together move the coefficients from the stated ones
        evidence = [finding.evidence for finding in group if finding.evidence is not None]
        gram = np.sum([one.gram for one in evidence], axis=0)
        drift = np.sum([one.drift for one in evidence], axis=0)
        estimated = _solved(gram, drift)
        if estimated is None:
            continue
        moved, errors = estimated

        # How far they may be moved by chance and by rounding
        names = [name for name, _ in stated]
        values = np.array([value for _, value in stated])
        unit = max(_EXACTLY, 2.0 ** -min(one.digits for one in evidence))
        room = np.maximum(_SURE * errors, unit * np.maximum(1.0, np.abs(values)))
        room_of = dict(zip(names, room.tolist(), strict=True))

        found: dict[str, float] | None = None
        if (np.abs(moved) > room).any():
            estimates = (values + moved).tolist()
            found = {name: round(value, 4) for name, value in zip(names, estimates, strict=True)}
        for finding in group:
            closer = {}
            for name, within in finding.within.items():
                closer[name] = min(within, room_of.get(name, within))
            settled[finding.name] = replace(finding, found=found or finding.found, within=closer)
    return tuple(settled[finding.name] for finding in findings)


def _mistake(subject: _Subject, coefficients: Mapping[str, float]) -> str:
    """The usual mistake that makes these coefficients of the stated ones, with the experts' names; else empty."""
    for text in _MISTAKES:
        made = {name: subject.stated[name] * subject.mistakes[name][text] for name in coefficients}
        if all(math.isclose(value, made[name]) for name, value in coefficients.items()):
            return text
    return ""


def _candidates(subject: _Subject, sums: _Sums) -> Iterator[dict[str, float]]:
    """Coefficients that may fit, the plainest first: usual mistakes near the estimate, and the estimate itself."""
    estimated = _estimate(sums, _vector(subject, subject.stated))
    if estimated is None:
        return

    plain: dict[str, float] = {}
    exact: dict[str, float] = {}
    for name, value, room in zip(subject.changes, *estimated, strict=True):
        exact[name] = float(value)

        # Nothing, what was stated, what a mistake makes of it, and the estimate in few digits
        stated = subject.stated.get(name, 0.0)
        usual = [0.0, stated]
        usual += [factor * stated for factor in subject.mistakes[name].values()]
        usual += [round(exact[name], digits) for digits in (1, 2, 3)]
        plain[name] = next((choice for choice in usual if abs(choice - value) <= room), exact[name])
    yield plain
    yield exact


def _low_rank(expert: str, change: LowRank, file: int, dtype: str) -> _Change:
    """ΔW of LoRA by rows. Its factors, and their product, may have been rounded to the precision of the result."""
    stored = Factors.read(expert, file, change.lora)
    if change.transposed:
        stored = stored.T

    # A, B, B·A and s·B·A are rounded; sums, in float32.
    unit = 2.0 ** -min(_DIGITS[dtype], _DIGITS[change.lora.dtype])
    error = 4 * unit + (change.lora.rank + 2) * 2.0**-24
    rows, columns = _lengths(stored)
    rows *= np.float32(error)

    def read(start: int, stop: int, own: Numbers) -> tuple[Numbers, Numbers]:
        return _wide(stored.rows(start, stop), dtype), np.outer(rows[start:stop], columns)

    return read


def _lengths(factors: Factors) -> tuple[Numbers, Numbers]:
    """The lengths of the rows of B and of the columns of A: their products bound ΔW, and so its errors."""
    return np.linalg.norm(factors.b, axis=1), np.linalg.norm(factors.a, axis=0)


def _replaced(expert: str, change: Whole, files: Mapping[Path, int], dtype: str) -> _Change:
    """ΔW of a weight that replaces the base's, by rows."""

    def read(start: int, stop: int, own: Numbers) -> tuple[Numbers, Numbers]:
        theirs = _wide(change.read_rows(expert, files, start, stop), dtype)
        return theirs - own, _half_unit(theirs, dtype)

    return read


def _attribute_model(folder: Checkpoint, base: Checkpoint, plan: Plan | None) -> Attribution:
    """Check whether a folder of full weights is what the plan states; None states the base alone."""
    stated, located = _stated(plan, base)
    pairs, remarks, differing = _pairs(folder, base, stated)

    headers = [*folder.shards, *base.shards]
    if plan is not None:
        for expert in plan.experts.values():
            if isinstance(expert, Checkpoint):
                headers += expert.shards
            else:
                headers.append(expert.file)
    with open_files(headers) as files:

        def subject(name: str, place: str | None = None) -> _Subject:
            """A tensor; `place` is another one whose numbers it may hold."""
            ours, theirs = pairs[place or name][0], pairs[name][1]
            kept = Whole.of(theirs.path, theirs.tensor)
            dtype = ours.tensor.dtype
            columns = 1
            if ours.tensor.shape:
                columns = ours.tensor.shape[-1]
            own_changes: dict[str, Change] = {}
            for expert, changes_of_expert in located.items():
                if name in changes_of_expert:
                    own_changes[expert] = changes_of_expert[name]

            def read(start: int, stop: int) -> tuple[Numbers, Numbers]:
                target = Whole.of(ours.path, ours.tensor).read_rows(folder.name, files, start, stop)
                own = kept.read_rows(base.name, files, start, stop)
                return _wide(target, dtype), _wide(own, dtype)

            def rounding(target: Numbers, own: Numbers, start: int, stop: int) -> Numbers:
                is_cast = theirs.tensor.dtype != dtype
                if not own_changes and not is_cast:
                    return np.full_like(own, _NO_CHANGE)  # nothing was computed
                room = _half_unit(np.maximum(np.abs(target), np.abs(own)), dtype)
                if is_cast:
                    room = room + _half_unit(own, dtype)
                return room

            changes: dict[str, _Change] = {}  # `_stated` refuses other kinds
            for expert, low_rank in of_kind(LowRank, own_changes).items():
                changes[expert] = _low_rank(expert, low_rank, files[low_rank.path], dtype)
            for expert, whole in of_kind(Whole, own_changes).items():
                changes[expert] = _replaced(expert, whole, files, dtype)
            return _Subject(
                name=name,
                layer=ours.layer,
                shape=(math.prod(ours.tensor.shape) // max(columns, 1), columns),
                stated=stated.get(name, {}),
                read=read,
                rounding=rounding,
                changes=changes,
                dtype=dtype,
                mistakes={expert: _mistakes(change.lora) for expert, change in own_changes.items()},
            )

        findings, moved = _explain_all(subject, pairs)

        # What nothing explains may be in another tensor's place, or be tied to one that changes
        lost = sorted(finding.name for finding in findings if finding.found is None)
        swapped = {}
        for name, place in permutations(lost[:_PERMUTED], 2):
            if pairs[name][0].tensor.shape == pairs[place][0].tensor.shape:
                compared = _compare(subject(name, place), stated.get(name, {}), most=64)
                if compared.worst <= _SLACK:
                    swapped[place] = name
    for name in lost:
        tied = pairs[name][0].name
        if tied != name and not stated.get(name):
            remarks.append(f"{name} is tied to {tied}, and changes with it, but the experts leave it as it is")
            findings = tuple(finding for finding in findings if finding.name != name)
            differing = [*differing, name]
    return _answers(_formula(plan), findings, moved, remarks, differing, swapped, base)


def _mistakes(lora: LoraModule | None) -> dict[str, float]:
    """The factors that usual mistakes make in a module's scale; 1 if it cannot be mistaken in this way."""
    if lora is None:
        return dict.fromkeys(_MISTAKES, 1.0)
    root = math.sqrt(lora.rank)
    factors = [1.0, root, 1 / lora.scale]
    if lora.rslora:
        factors[:2] = [1 / root, 1.0]
    return dict(zip(_MISTAKES, factors, strict=True))


def _stated(plan: Plan | None, base: Checkpoint) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Change]]]:
    """The experts' coefficients by tensor, and every expert's change of every tensor."""
    if plan is None:
        return {}, {}

    # The changes
    problems = Problems(BaseModelError)
    located: dict[str, dict[str, Change]] = {}
    for name, places in locate_all(plan.adapters, base, problems).located.items():
        located[name] = {key: place.change for key, place in places.items()}
    problems.raise_if_any()
    for name, expert in plan.experts.items():
        if isinstance(expert, Checkpoint):
            located[name] = {key: Whole.of(part.path, part.tensor) for key, part in expert.parameters.items()}

    # Their coefficients
    merged = plan
    if not plan.is_model:
        merged = plan.merged_into(base)
    stated: dict[str, dict[str, float]] = {}
    for slot in merged:
        has_rows = any(term.change.rows for term in slot.whole)
        if slot.opaque or slot.spans or not slot.is_linear or has_rows:
            raise UnsupportedError(
                f"{slot.name} is more than a weighted sum of LoRA and whole weights, which cannot be taken apart",
                "Merge it with `merge`, and compare the files",
                parameter="rules",
            )
        present = sorted(name for name, changes in located.items() if slot.name in changes)
        stated[slot.name] = {name: slot.summed.get(name, 0.0) for name in present}
    return stated, located


_Pair = tuple[StoredTensor, StoredTensor]


def _pairs(
    folder: Checkpoint, base: Checkpoint, stated: Iterable[str]
) -> tuple[dict[str, _Pair], list[str], list[str]]:
    """The tensors of the folder and of the base to compare, by name; sentences about the others, and their names.

    A head that only one of the two stores is compared with the embedding to which the other ties it, and so is a head
    that has to be stored, because an expert changes the embedding alone.
    """
    ours, theirs = dict(folder.parameters), dict(base.parameters)
    if not ours.keys() & theirs.keys():
        raise ArgumentError(
            f"{folder.name} and {base.name} have no tensor in common",
            f"Pass the base of the same model class as `base_model`{OTHER_NAMES}",
            parameter="base_model",
        )
    if ours.keys() != theirs.keys() or not set(stated) <= ours.keys():
        for stored, tied in ((ours, folder.tied_keys), (theirs, base.tied_keys)):
            if not tied:
                continue
            one, other = tied
            for name, twin in ((one, other), (other, one)):
                if name not in stored and twin in stored and name in {*ours, *theirs, *stated}:
                    stored[name] = stored[twin]

    # Tensors of integers, such as buffers of indices, are compared byte by byte
    compared: dict[str, _Pair] = {}
    added = []
    odd = []
    for name in ours:
        if name not in theirs:
            added.append(name)
            continue
        our, their = ours[name], theirs[name]
        if not {our.tensor.dtype, their.tensor.dtype} <= {*Dtype.FLOATS}:
            with open_files([], {our.path, their.path}) as files:
                if not equal_bytes(our.tensor, files[our.path], their.tensor, files[their.path]):
                    odd.append(name)
        elif our.tensor.shape != their.tensor.shape:
            odd.append(name)
        else:
            compared[name] = our, their

    missing = [name for name in theirs if name not in ours]
    remarks = []
    for names, what in (
        (added, "that the base lacks"),
        (missing, "that only the base has"),
        (odd, "of another shape, or changed and not in float32, bfloat16 or float16"),
    ):
        if names:
            remarks.append(f"{_counted(names, 'tensor')} {what}: {and_more(names, _SHOWN)}")
    return compared, remarks, [*added, *missing, *odd]


def _attribute_adapter(adapter: Adapter, plan: Plan) -> Attribution:
    """Check whether an adapter is the sum of others that is stated."""
    plan = Resolved.of(plan).plan
    experts = plan.adapters
    for name, expert in {"the adapter": adapter, **experts}.items():
        if expert.opaque or expert.saved or any(module.parameter for module in expert.modules.values()):
            raise UnsupportedError(
                f"{name} is more than LoRA on modules, which cannot be taken apart",
                "Merge both into full weights, and compare these",
                parameter="path",
            )

    everything = dict.fromkeys(adapter.modules)
    headers = [adapter.file]
    for expert in experts.values():
        everything |= dict.fromkeys(expert.modules)
        headers.append(expert.file)
    with open_files(headers) as files:

        def subject(name: str) -> _Subject:
            theirs: dict[str, LoraModule] = {}
            for expert, its_adapter in experts.items():
                if name in its_adapter.modules:
                    theirs[expert] = its_adapter.modules[name]
            ours = adapter.modules.get(name)
            like = ours or next(iter(theirs.values()))

            stated: dict[str, float] = dict.fromkeys(sorted(theirs), 0.0)
            if name in plan.slots:
                summed = plan.slots[name].summed
                stated = {expert: summed.get(expert, 0.0) for expert in stated}
            changes: dict[str, _Change] = {}
            for expert, module in theirs.items():
                path = experts[expert].file.path
                changes[expert] = _low_rank(expert, LowRank(module, path), files[path], "F32")

            factors = None
            if ours is not None:
                factors = Factors.read("the adapter", files[adapter.file.path], ours)
                rows_of_b, columns_of_a = _lengths(factors)
                unit = 4.0 * 2.0 ** -_DIGITS[ours.dtype]

            def read(start: int, stop: int) -> tuple[Numbers, Numbers]:
                own = np.zeros((stop - start, like.in_features))
                if factors is None:
                    return own, own
                return _wide(factors.rows(start, stop), "F32"), own

            def rounding(target: Numbers, own: Numbers, start: int, stop: int) -> Numbers:
                least: Numbers = np.full_like(own, _NO_CHANGE)
                if factors is None:
                    return least
                return least + unit * np.outer(rows_of_b[start:stop], columns_of_a)

            return _Subject(
                name=name,
                layer=like.layer,
                shape=(like.out_features, like.in_features),
                stated=stated,
                read=read,
                rounding=rounding,
                changes=changes,
                dtype="F32",
                mistakes={expert: _mistakes(module) for expert, module in theirs.items()},
            )

        findings, moved = _explain_all(subject, everything)
    return _answers(_formula(plan), findings, moved, [], [], {}, None)


def _formula(plan: Plan | None) -> str:
    """What the rules state, such as `base + 0.5 × math`; rules that differ between layers are not written out."""
    if plan is None:
        return BASE
    if len(plan.rules) > 1:
        return f"{BASE} + {', '.join(plan.experts)} by {len(plan.rules)} rules"
    return _sum({name: value for name, value in plan.rules[0].coefficients().items() if name != BASE})


def _sum(coefficients: Mapping[str, float]) -> str:
    parts = [BASE]
    for name, value in coefficients.items():
        if not value:
            continue
        sign, factor = "+", ""
        if value < 0:
            sign = "-"
        if abs(value) != 1:
            factor = f"{abs(value):.4g} × "
        parts.append(f"{sign} {factor}{name}")
    return " ".join(parts)


def _counted(names: Sequence[str], what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    if len(names) == 1:
        return f"1 {what}"
    return f"{len(names)} {what}s"


def _where(findings: Sequence[Finding], everything: Sequence[Finding]) -> str:
    """The layers of findings if these are whole layers, else the names."""
    layers = {finding.layer for finding in findings}
    all_of_them = [finding for finding in everything if finding.layer in layers]
    if None in layers or len(all_of_them) != len(findings):
        return and_more([finding.name for finding in findings], _SHOWN)
    text = format_layers(layer for layer in layers if layer is not None)
    if len(layers) > 1:
        return f"layers {text}"
    return f"layer {text}"


def _answers(
    stated: str, findings: tuple[Finding, ...], moved: Iterable[str], remarks: Sequence[str],
    differing: Sequence[str], swapped: Mapping[str, str], base: Checkpoint | None,
) -> Attribution:  # fmt: skip
    """The sentences for what was found."""
    moved = set(moved)
    changed = [finding for finding in findings if any(finding.stated.values())]
    odd = [finding for finding in findings if not finding.fits]
    lost = [finding for finding in odd if finding.found is None]
    seen = [finding for finding in changed if not finding.unseen]
    kept = [finding for finding in findings if not finding.stated]
    untouched = [finding.name for finding in lost if not finding.stated]

    # What the folder is as a whole, or else each group of tensors that is not as stated
    answers: list[str] = []
    if changed and not moved and len(odd) == len(seen):
        what_it_is = "Equals the base in every number"
        if base is None:
            what_it_is = "Adds nothing to the base"
        answers.append(f"{what_it_is}: nothing was merged")
    elif base is not None and len(untouched) > len(kept) / 2:
        answers.append(
            f"Not made from {base.name}: {_counted(untouched, 'tensor')} that no expert changes, such as "
            f"{untouched[0]}, differ from the base's"
        )
    else:
        answers += [_scaled(group, changed, stated) for group in _grouped(odd)]
        answers += _on_lost([finding.name for finding in lost], swapped, base)
    answers += remarks
    names = dict.fromkeys(differing)
    for finding in odd:
        names[finding.name] = None
    if not names:
        answers = [stated]

    # What could not be decided
    notes = []
    unseen = [finding.name for finding in findings if finding.unseen]
    if unseen:
        notes.append(f"In {_counted(unseen, 'tensor')} the change is smaller than the rounding: {and_more(unseen, 1)}")
    zero: dict[str, list[str]] = {}
    for finding in changed:
        for name in finding.zero:
            zero.setdefault(name, []).append(finding.name)
    for name, among in zero.items():
        notes.append(f"{name} changes nothing in {_counted(among, 'tensor')}, so its coefficient there is not known")
    within, sentence = _resolution(changed)
    return Attribution(stated, tuple(answers), findings, tuple(names), (*notes, *sentence), within)


def _on_lost(names: Sequence[str], swapped: Mapping[str, str], base: Checkpoint | None) -> Iterator[str]:
    """Sentences on tensors that no coefficients explain.

    Args:
        swapped: tensor → the one that it holds instead.
    """
    held = sorted(name for name in names if name in swapped)
    if held:
        pairs = [f"{name} holds what belongs in {swapped[name]}" for name in held]
        yield f"{_counted(held, 'tensor')} in another's place: {and_more(pairs, _SHOWN)}"

    rest = [name for name in names if name not in swapped]
    if rest:
        what, whose = "tensor", "the base's"
        if base is None:
            what, whose = "module", "zero"
        yield f"{_counted(rest, what)} neither {whose} nor a weighted sum with the experts: {and_more(rest, _SHOWN)}"


def _resolution(changed: Iterable[Finding]) -> tuple[float | None, tuple[str, ...]]:
    """How far coefficients may be off in all tensors alike, and a note if that is more than a rounding."""
    rooms = [max(finding.within.values()) for finding in changed if finding.within]
    if not rooms:
        return None, ()
    alike = min(rooms)
    if alike < _EXACTLY:
        return alike, ()

    note = f"In this precision, a coefficient may be off by {alike:.2g} without being noticed"
    if max(rooms) > 1.5 * alike:
        note += f", in single tensors up to {max(rooms):.2g}"
    return alike, (note,)


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings whose coefficients agree within their errors, the largest group first; the surest leads its group."""
    groups: list[list[Finding]] = []
    fitting = [finding for finding in findings if finding.found is not None]
    for finding in sorted(fitting, key=lambda one: max(one.within.values(), default=math.inf)):
        for group in groups:
            if _agree(group[0], finding):
                group.append(finding)
                break
        else:
            groups.append([finding])
    return sorted(groups, key=len, reverse=True)


def _agree(one: Finding, other: Finding) -> bool:
    """Whether the coefficients of two tensors may be the same."""
    ours, theirs = one.found or {}, other.found or {}
    if ours == theirs:
        return True
    if ours.keys() != theirs.keys():
        return False

    for name in ours:
        room = one.within.get(name, 0.0) + other.within.get(name, 0.0)
        if not abs(ours[name] - theirs[name]) <= room:
            return False
    return True


def _scaled(group: Sequence[Finding], changed: Sequence[Finding], stated: str) -> str:
    """The sentence for tensors whose coefficients are others than the stated ones."""
    first = group[0]
    found = dict(first.found or {})
    mistake = ""
    if first.mistake and all(finding.mistake == first.mistake for finding in group):
        mistake = f": {first.mistake}"
    if len(group) == len(changed) and all(any(finding.stated.values()) for finding in group):
        return f"{_sum(found)}, and not {stated}{mistake}"

    where = _where(group, changed)
    missing = [name for name, value in first.stated.items() if value and not found.get(name)]
    others = [name for name, value in found.items() if value and value != first.stated.get(name)]
    if missing and not others:
        verb = "lack"
        if where.startswith("layer ") or len(group) == 1:
            verb = "lacks"
        return f"{where} {verb} {' and '.join(missing)}"
    return f"{where}: {_sum(found)}{mistake}"


def attribute(
    folder: Path, experts: Mapping[str, str | Path], base_model: str | None, rules: Sequence[Rule | str] | None
) -> Attribution:
    """Check a folder without a record against what is stated; see `verify`."""
    if not experts and rules:
        raise ArgumentError("`rules` name experts, but there are none", "Pass `experts`", parameter="experts")
    if len(experts) > 1 and not rules:
        raise ArgumentError(
            f"{len(experts)} experts can be combined in many ways, and {folder} has no record",
            "Pass `rules`, such as `rules=['math + swahili']`",
            parameter="rules",
        )
    plan: Plan | None = None
    places: dict[str, Path] = {}
    if experts:
        allocation = tuple(rules or [Rule(expert=next(iter(experts)))])
        content = {"allocation": allocation, "base_model": base_model}
        plan = compose(Composition(**content), dict(experts))
        places = {name: expert.source.folder for name, expert in plan.experts.items()}

    # An adapter
    if (folder / WEIGHTS).exists():
        if plan is None:
            raise ArgumentError(
                f"{folder} is an adapter without a record", "Pass `experts` to compare it with", parameter="experts"
            )
        return _with_companions(_attribute_adapter(open_adapter(folder), plan), beside_adapter(folder, places))

    # Full weights
    base = None
    if plan is not None:
        base = plan.base.open(base_model)
        plan = Resolved.of(plan).plan
    elif base_model:
        base = open_checkpoint(base_model)
    if base is None:
        raise ArgumentError(f"{folder} has no record", "Pass its `base_model`", parameter="base_model")
    model = open_checkpoint(folder, what="model")
    beside = beside_model(model, base, places)
    if base.quantization is not None and model.quantization is None:  # then it was made from dequantized weights
        base = base.dequantized()

    changed: set[str] = set()
    if plan is not None:
        merged = plan
        if not plan.is_model:
            merged = plan.merged_into(base)
        changed = {slot.name for slot in merged if slot.terms}
    check_precision(model, base, changed)
    return _with_companions(_attribute_model(model, base, plan), beside)


def check_precision(model: Checkpoint, base: Checkpoint, changed: Container[str]) -> None:
    """Raise if a base is the one that a model was made from, in a less precise dtype: then every tensor would differ.

    Args:
        model: the full weights.
        base: the base.
        changed: tensors that experts change.
    """
    dtype = base.rounded_from(model, without=changed)
    if dtype is not None:
        raise BaseModelError(
            f"The base {base.name} is the model that {model.name} was made from, but rounded to {dtype}",
            "Pass the base in the dtype in which it was merged",
            parameter="base_model",
        )


def _with_companions(result: Attribution, beside: Beside) -> Attribution:
    """The same with the files beside the weights."""
    answers = result.answers
    if result.equal and beside.differing:
        answers = (f"{result.stated}, in its weights",)
    return replace(
        result,
        answers=(*answers, *beside.answers),
        differing=(*result.differing, *beside.differing),
        notes=(*result.notes, *beside.notes),
    )
