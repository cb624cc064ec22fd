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
        odd = {finding.name: finding for finding in self.findings if not finding.fits}
        return {
            "equal": self.equal,
            "stated": self.stated,
            "answers": list(self.answers),
            "differing": list(self.differing),
            "found": {name: finding.found and dict(finding.found) for name, finding in odd.items()},
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
    changes: Mapping[str, Callable[[int, int, Numbers], tuple[Numbers, Numbers]]]
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
    return numbers.astype(np.float64) if dtype == "F32" else numbers


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
    names = list(subject.changes)
    count = len(names)
    sums = _Sums(np.zeros((count, count)), np.zeros(count), np.zeros(count), np.zeros(count))
    rows, columns = subject.shape
    rows = rows if most is None else min(rows, most)
    for start, stop in row_ranges(rows, max(1, _BLOCK // max(columns, 1))):
        target, own = subject.read(start, stop)
        difference, bound = target - own, subject.rounding(target, own, start, stop)
        sums.moved |= bool(difference.any())
        expected = np.zeros_like(difference)
        deltas = []
        for name in names:
            delta, inexact = subject.changes[name](start, stop, own)
            expected += coefficients.get(name, 0.0) * delta
            bound = bound + max(1.0, abs(coefficients.get(name, 0.0))) * inexact
            deltas.append(delta)
        bound = np.maximum(bound, _NO_CHANGE)
        sums.visible |= bool((np.abs(expected) > bound).any())
        sums.worst = max(sums.worst, float((np.abs(difference - expected) / bound).max(initial=0.0)))
        weighted = [(delta / bound).ravel() for delta in (*deltas, difference)] if deltas else []
        rest = ((target - _rounded(own + expected, subject.dtype)) / bound).ravel()
        for i, one in enumerate(weighted[:-1]):
            sums.drift[i] += float(one @ rest)
            sums.sharpest[i] = max(sums.sharpest[i], float(np.abs(one).max(initial=0.0)))
            sums.products[i] += float(one @ weighted[-1])
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
    if (estimated := _estimate(sums, stated)) is None:
        return True
    return bool((np.abs(stated - estimated[0]) <= estimated[1]).all())


def _within(subject: _Subject, coefficients: Mapping[str, float], sums: _Sums) -> dict[str, float]:
    """How far each coefficient that fits may be off: until a single number, or the estimate, would not fit."""
    if (estimated := _estimate(sums, _vector(subject, coefficients))) is None:
        return {}
    by_number = (1 + _SLACK) / np.where(sums.sharpest > 0, sums.sharpest, np.inf)
    return {
        name: float(min(room, single))
        for name, room, single, seen in zip(subject.changes, estimated[1], by_number, sums.sharpest, strict=True)
        if seen > 0
    }


def _explain(subject: _Subject) -> tuple[Finding, bool]:
    """What a tensor is made of, and whether it equals the base's in every number."""
    stated = subject.stated
    sums = _compare(subject, stated)
    zero = tuple(name for name, seen in zip(subject.changes, sums.sharpest, strict=True) if not seen)

    def finding(found: Mapping[str, float] | None, compared: _Sums, *, unseen: bool = False) -> Finding:
        within = {} if found is None else _within(subject, found, compared)
        mistake = "" if found in (None, stated) else _mistake(subject, found or {})
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
        evidence = [finding.evidence for finding in group if finding.evidence is not None]
        gram = np.sum([one.gram for one in evidence], axis=0)
        drift = np.sum([one.drift for one in evidence], axis=0)
        values = np.array([value for _, value in stated])
        estimated = _solved(gram, drift)
        if estimated is None:
            continue
        moved, errors = estimated
        unit = max(_EXACTLY, 2.0 ** -min(one.digits for one in evidence))
        room = np.maximum(_SURE * errors, unit * np.maximum(1.0, np.abs(values)))
        within = {name: float(one) for (name, _), one in zip(stated, room, strict=True)}
        found = None
        if (np.abs(moved) > room).any():
            found = {name: round(float(value + by), 4) for (name, value), by in zip(stated, moved, strict=True)}
        for finding in group:
            closer = {name: min(one, within.get(name, one)) for name, one in finding.within.items()}
            settled[finding.name] = replace(finding, found=found or finding.found, within=closer)
    return tuple(settled[finding.name] for finding in findings)


def _mistake(subject: _Subject, coefficients: Mapping[str, float]) -> str:
    """The usual mistake that makes these coefficients of the stated ones, with the experts' names; else empty."""
    for text in _MISTAKES:
        factors = {name: subject.mistakes[name][text] for name in subject.mistakes}
        if all(math.isclose(coefficients[name], subject.stated[name] * factors[name]) for name in coefficients):
            return text
    return ""


def _candidates(subject: _Subject, sums: _Sums) -> Iterator[dict[str, float]]:
    """Coefficients that may fit, the plainest first: usual mistakes near the estimate, and the estimate itself."""
    if (estimated := _estimate(sums, _vector(subject, subject.stated))) is None:
        return
    names, plain = list(subject.changes), dict[str, float]()
    for name, value, room in zip(names, *estimated, strict=True):
        stated = subject.stated.get(name, 0.0)
        usual = [0.0, stated, *(factor * stated for factor in subject.mistakes[name].values())]
        usual += [round(float(value), digits) for digits in (1, 2, 3)]
        plain[name] = next((choice for choice in usual if abs(choice - value) <= room), float(value))
    yield plain
    yield {name: float(value) for name, value in zip(names, estimated[0], strict=True)}


def _low_rank(
    expert: str, change: LowRank, file: int, dtype: str
) -> Callable[[int, int, Numbers], tuple[Numbers, Numbers]]:
    """ΔW of LoRA by rows. Its factors, and their product, may have been rounded to the precision of the result."""
    factors = Factors.read(expert, file, change.lora)
    stored = factors.T if change.transposed else factors
    unit = max(2.0 ** -_DIGITS[one] for one in (dtype, change.lora.dtype))
    error = 4 * unit + (change.lora.rank + 2) * 2.0**-24  # A, B, B·A and s·B·A are rounded; sums, in float32
    rows, columns = _lengths(stored)
    rows *= np.float32(error)

    def read(start: int, stop: int, own: Numbers) -> tuple[Numbers, Numbers]:
        return _wide(stored.rows(start, stop), dtype), np.outer(rows[start:stop], columns)

    return read


def _lengths(factors: Factors) -> tuple[Numbers, Numbers]:
    """The lengths of the rows of B and of the columns of A: their products bound ΔW, and so its errors."""
    return np.linalg.norm(factors.b, axis=1), np.linalg.norm(factors.a, axis=0)


def _replaced(
    expert: str, change: Whole, files: Mapping[Path, int], dtype: str
) -> Callable[[int, int, Numbers], tuple[Numbers, Numbers]]:
    """ΔW of a weight that replaces the base's, by rows."""

    def read(start: int, stop: int, own: Numbers) -> tuple[Numbers, Numbers]:
        theirs = _wide(change.read_rows(expert, files, start, stop), dtype)
        return theirs - own, _half_unit(theirs, dtype)

    return read


def _attribute_model(folder: Checkpoint, base: Checkpoint, plan: Plan | None) -> Attribution:
    """Check whether a folder of full weights is what the plan states; None states the base alone."""
    stated, located = _stated(plan, base)
    pairs, remarks, differing = _pairs(folder, base, stated)
    experts = [] if plan is None else [*plan.experts.values()]
    shards = [shard for expert in experts if isinstance(expert, Checkpoint) for shard in expert.shards]
    adapters = [expert.file for expert in experts if isinstance(expert, Adapter)]
    with open_files([*folder.shards, *base.shards, *shards, *adapters]) as files:

        def subject(name: str, place: str | None = None) -> _Subject:
            """A tensor; `place` is another one whose numbers it may hold."""
            ours, theirs = pairs[place or name][0], pairs[name][1]
            kept = Whole.of(theirs.path, theirs.tensor)
            dtype, columns = ours.tensor.dtype, (ours.tensor.shape or (1,))[-1]
            given = {expert: changes[name] for expert, changes in located.items() if name in changes}

            def read(start: int, stop: int) -> tuple[Numbers, Numbers]:
                target = Whole.of(ours.path, ours.tensor).read_rows(folder.name, files, start, stop)
                own = kept.read_rows(base.name, files, start, stop)
                return _wide(target, dtype), _wide(own, dtype)

            def rounding(target: Numbers, own: Numbers, start: int, stop: int) -> Numbers:
                if not given and theirs.tensor.dtype == dtype:
                    return np.full_like(own, _NO_CHANGE)  # nothing was computed
                cast = _half_unit(own, dtype) if theirs.tensor.dtype != dtype else 0.0
                return _half_unit(np.maximum(np.abs(target), np.abs(own)), dtype) + cast

            low_rank, whole = of_kind(LowRank, given), of_kind(Whole, given)  # `_stated` refuses others
            changes = {
                **{expert: _low_rank(expert, one, files[one.path], dtype) for expert, one in low_rank.items()},
                **{expert: _replaced(expert, one, files, dtype) for expert, one in whole.items()},
            }
            return _Subject(
                name, ours.layer, (math.prod(ours.tensor.shape) // max(columns, 1), columns), stated.get(name, {}),
                read, rounding, changes, dtype, {expert: _mistakes(change.lora) for expert, change in given.items()},
            )  # fmt: skip

        found = list(map_in_threads(lambda name: _explain(subject(name)), pairs))
        moved = {finding.name for finding, same in found if not same}
        findings = _as_a_whole([finding for finding, _ in found])
        lost = sorted(finding.name for finding in findings if finding.found is None)
        swapped = {
            place: name
            for name, place in permutations(lost[:_PERMUTED], 2)
            if pairs[name][0].tensor.shape == pairs[place][0].tensor.shape
            and _compare(subject(name, place), stated.get(name, {}), most=64).worst <= _SLACK
        }
    for name in lost:
        if (tied := pairs[name][0].name) != name and not stated.get(name):
            remarks.append(f"{name} is tied to {tied}, and changes with it, but the experts leave it as it is")
            findings, differing = tuple(f for f in findings if f.name != name), [*differing, name]
    return _answers(_formula(plan), findings, moved, remarks, differing, swapped, base)


def _mistakes(lora: LoraModule | None) -> dict[str, float]:
    """The factors that usual mistakes make in a module's scale; 1 if it cannot be mistaken in this way."""
    if lora is None:
        return dict.fromkeys(_MISTAKES, 1.0)
    root = math.sqrt(lora.rank)
    factors = (1 / root, 1.0) if lora.rslora else (1.0, root)
    return dict(zip(_MISTAKES, (*factors, 1 / lora.scale), strict=True))


def _stated(plan: Plan | None, base: Checkpoint) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Change]]]:
    """The experts' coefficients by tensor, and every expert's change of every tensor."""
    if plan is None:
        return {}, {}
    problems = Problems(BaseModelError)
    adapters = {name: expert for name, expert in plan.experts.items() if isinstance(expert, Adapter)}
    located: dict[str, dict[str, Change]] = {
        name: {key: place.change for key, place in places.items()}
        for name, places in locate_all(adapters, base, problems).located.items()
    }
    problems.raise_if_any()
    for name, expert in plan.experts.items():
        if isinstance(expert, Checkpoint):
            located[name] = {key: Whole.of(part.path, part.tensor) for key, part in expert.parameters.items()}
    stated: dict[str, dict[str, float]] = {}
    for slot in plan if plan.is_model else plan.merged_into(base):
        odd = slot.opaque or slot.spans or not slot.is_linear or any(term.change.rows for term in slot.whole)
        if odd:
            raise UnsupportedError(
                f"{slot.name} is more than a weighted sum of LoRA and whole weights, which cannot be taken apart",
                "Merge it with `merge`, and compare the files",
                parameter="rules",
            )
        present = {name for name, changes in located.items() if slot.name in changes}
        stated[slot.name] = {name: slot.summed.get(name, 0.0) for name in sorted(present)}
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
            for name, other in (tied, tied[::-1]) if tied else ():
                if name not in stored and other in stored and name in {*ours, *theirs, *stated}:
                    stored[name] = stored[other]
    added, missing = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    both = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
    plain = {name for name, pair in both.items() if not {part.tensor.dtype for part in pair} <= {*Dtype.FLOATS}}
    odd = [
        name
        for name, (our, their) in both.items()
        if (not _have_equal_bytes(our, their) if name in plain else our.tensor.shape != their.tensor.shape)
    ]
    remarks = [
        f"{_counted(names, 'tensor')} {what}: {and_more(names, _SHOWN)}"
        for names, what in (
            (added, "that the base lacks"),
            (missing, "that only the base has"),
            (odd, "of another shape, or changed and not in float32, bfloat16 or float16"),
        )
        if names
    ]
    compared = {name: pair for name, pair in both.items() if name not in plain and name not in odd}
    return compared, remarks, [*added, *missing, *odd]


def _have_equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of any dtype, such as buffers of indices, are the same."""
    with open_files([], {one.path, other.path}) as files:
        return equal_bytes(one.tensor, files[one.path], other.tensor, files[other.path])


def _attribute_adapter(adapter: Adapter, plan: Plan) -> Attribution:
    """Check whether an adapter is the sum of others that is stated."""
    plan = Resolved.of(plan).plan
    experts = {name: expert for name, expert in plan.experts.items() if isinstance(expert, Adapter)}
    for name, expert in {"the adapter": adapter, **experts}.items():
        if expert.opaque or expert.saved or any(module.parameter for module in expert.modules.values()):
            raise UnsupportedError(
                f"{name} is more than LoRA on modules, which cannot be taken apart",
                "Merge both into full weights, and compare these",
                parameter="path",
            )
    everything = dict.fromkeys([*adapter.modules, *(name for one in experts.values() for name in one.modules)])
    with open_files([adapter.file, *(expert.file for expert in experts.values())]) as files:

        def subject(name: str) -> _Subject:
            given = {expert: one.modules[name] for expert, one in experts.items() if name in one.modules}
            ours = adapter.modules.get(name)
            like = ours or next(iter(given.values()))
            slot = plan.slots.get(name)
            changes = {
                expert: _low_rank(
                    expert, LowRank(module, experts[expert].file.path), files[experts[expert].file.path], "F32"
                )
                for expert, module in given.items()
            }
            factors = None if ours is None else Factors.read("the adapter", files[adapter.file.path], ours)
            lengths = factors and _lengths(factors)
            unit = 0.0 if ours is None else 4.0 * 2.0 ** -_DIGITS[ours.dtype]

            def read(start: int, stop: int) -> tuple[Numbers, Numbers]:
                own = np.zeros((stop - start, like.in_features))
                return own if factors is None else _wide(factors.rows(start, stop), "F32"), own

            def rounding(target: Numbers, own: Numbers, start: int, stop: int) -> Numbers:
                least: Numbers = np.full_like(own, _NO_CHANGE)
                return least if lengths is None else least + unit * np.outer(lengths[0][start:stop], lengths[1])

            stated = {expert: 0.0 if slot is None else slot.summed.get(expert, 0.0) for expert in sorted(given)}
            return _Subject(
                name, like.layer, (like.out_features, like.in_features), stated, read, rounding, changes,
                "F32", {expert: _mistakes(module) for expert, module in given.items()},
            )  # fmt: skip

        found = list(map_in_threads(lambda name: _explain(subject(name)), everything))
    findings = _as_a_whole([finding for finding, _ in found])
    moved = {finding.name for finding, same in found if not same}
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
        if value:
            factor = "" if abs(value) == 1 else f"{abs(value):.4g} × "
            parts.append(f"{'-' if value < 0 else '+'} {factor}{name}")
    return " ".join(parts)


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'s' * (len(names) != 1)}"


def _where(findings: Sequence[Finding], everything: Sequence[Finding]) -> str:
    """The layers of findings if these are whole layers, else the names."""
    layers = {finding.layer for finding in findings}
    all_of_them = [finding for finding in everything if finding.layer in layers]
    if None in layers or len(all_of_them) != len(findings):
        return and_more([finding.name for finding in findings], _SHOWN)
    text = format_layers(layer for layer in layers if layer is not None)
    return f"layer{'s' * (len(layers) > 1)} {text}"


def _answers(
    stated: str, findings: tuple[Finding, ...], moved: Iterable[str], remarks: Sequence[str],
    differing: Sequence[str], swapped: Mapping[str, str], base: Checkpoint | None,
) -> Attribution:  # fmt: skip
    """The sentences for what was found."""
    moved, changed = set(moved), [finding for finding in findings if any(finding.stated.values())]
    odd = [finding for finding in findings if not finding.fits]
    answers: list[str] = []
    lost = [finding for finding in odd if finding.found is None]
    untouched = [finding.name for finding in lost if not finding.stated]
    whose = "zero" if base is None else "the base's"
    if changed and not moved and len(odd) == len([f for f in changed if not f.unseen]):
        where = "Adds nothing to the base" if base is None else "Equals the base in every number"
        answers.append(f"{where}: nothing was merged")
    elif base is not None and len(untouched) > len([f for f in findings if not f.stated]) / 2:
        answers.append(
            f"Not made from {base.name}: {_counted(untouched, 'tensor')} that no expert changes, such as "
            f"{untouched[0]}, differ from the base's"
        )
    else:
        answers += [_scaled(group, changed, stated) for group in _grouped(odd)]
        if lost:
            held = [name for name in sorted(swapped) if name in {finding.name for finding in lost}]
            rest = [finding.name for finding in lost if finding.name not in swapped]
            if held:
                pairs = [f"{name} holds what belongs in {swapped[name]}" for name in held]
                answers.append(f"{_counted(held, 'tensor')} in another's place: {and_more(pairs, _SHOWN)}")
            if rest:
                what = "tensor" if base else "module"
                answers.append(
                    f"{_counted(rest, what)} neither {whose} nor a weighted sum with the experts: "
                    f"{and_more(rest, _SHOWN)}"
                )
    answers += remarks
    names = tuple(dict.fromkeys([*differing, *(finding.name for finding in odd)]))
    notes = []
    if unseen := [finding.name for finding in findings if finding.unseen]:
        notes.append(f"In {_counted(unseen, 'tensor')} the change is smaller than the rounding: {and_more(unseen, 1)}")
    for name in dict.fromkeys(name for finding in changed for name in finding.zero):
        among = [finding.name for finding in changed if name in finding.zero]
        notes.append(f"{name} changes nothing in {_counted(among, 'tensor')}, so its coefficient there is not known")
    within, sentence = _resolution(changed)
    return Attribution(stated, tuple(answers) if names else (stated,), findings, names, (*notes, *sentence), within)


def _resolution(changed: Iterable[Finding]) -> tuple[float | None, tuple[str, ...]]:
    """How far coefficients may be off in all tensors alike, and a note if that is more than a rounding."""
    rooms = [max(finding.within.values()) for finding in changed if finding.within]
    if not rooms:
        return None, ()
    if (alike := min(rooms)) < _EXACTLY:
        return alike, ()
    single = f", in single tensors up to {max(rooms):.2g}" if max(rooms) > 1.5 * alike else ""
    return alike, (f"In this precision, a coefficient may be off by {alike:.2g} without being noticed{single}",)


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings whose coefficients agree within their errors, the largest group first; the surest leads its group."""
    groups: list[list[Finding]] = []
    fitting = [finding for finding in findings if finding.found is not None]
    for finding in sorted(fitting, key=lambda one: max(one.within.values(), default=math.inf)):
        group = next((group for group in groups if _agree(group[0], finding)), None)
        if group is None:
            groups.append([finding])
        else:
            group.append(finding)
    return sorted(groups, key=len, reverse=True)


def _agree(one: Finding, other: Finding) -> bool:
    """Whether the coefficients of two tensors may be the same."""
    ours, theirs = one.found or {}, other.found or {}
    if ours == theirs:
        return True
    return ours.keys() == theirs.keys() and all(
        abs(ours[name] - theirs[name]) <= one.within.get(name, 0.0) + other.within.get(name, 0.0) for name in ours
    )


def _scaled(group: Sequence[Finding], changed: Sequence[Finding], stated: str) -> str:
    """The sentence for tensors whose coefficients are others than the stated ones."""
    first = group[0]
    found = dict(first.found or {})
    missing = [name for name, value in first.stated.items() if value and not found.get(name)]
    others = {name: value for name, value in found.items() if value and value != first.stated.get(name)}
    alone = len(group) == len(changed) and all(any(finding.stated.values()) for finding in group)
    mistakes = {finding.mistake for finding in group}
    mistake = f": {mistakes.pop()}" if len(mistakes) == 1 and "" not in mistakes else ""
    if alone:
        return f"{_sum(found)}, and not {stated}{mistake}"
    where = _where(group, changed)
    if missing and not others:
        verb = "lacks" if where.startswith("layer ") or len(group) == 1 else "lack"
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
    plan = None
    if experts:
        allocation = tuple(rules or [Rule(expert=next(iter(experts)))])
        content = {"allocation": allocation, "base_model": base_model}
        plan = compose(Composition(**content), dict(experts))
    if (folder / WEIGHTS).exists():
        if plan is None:
            raise ArgumentError(
                f"{folder} is an adapter without a record", "Pass `experts` to compare it with", parameter="experts"
            )
        places = {name: expert.source.folder for name, expert in plan.experts.items()}
        return _with_companions(_attribute_adapter(open_adapter(folder), plan), beside_adapter(folder, places))
    base = plan.base.open(base_model) if plan else open_checkpoint(base_model) if base_model else None
    if base is None:
        raise ArgumentError(f"{folder} has no record", "Pass its `base_model`", parameter="base_model")
    plan = plan and Resolved.of(plan).plan
    model = open_checkpoint(folder, what="model")
    places = {name: expert.source.folder for name, expert in plan.experts.items()} if plan else {}
    beside = beside_model(model, base, places)
    if base.quantization is not None and model.quantization is None:  # then it was made from dequantized weights
        base = base.dequantized()
    merged = None if plan is None else plan if plan.is_model else plan.merged_into(base)
    check_precision(model, base, {slot.name for slot in merged or () if slot.terms})
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
    answers = (f"{result.stated}, in its weights",) if result.equal and beside.differing else result.answers
    return replace(
        result,
        answers=(*answers, *beside.answers),
        differing=(*result.differing, *beside.differing),
        notes=(*result.notes, *beside.notes),
    )
