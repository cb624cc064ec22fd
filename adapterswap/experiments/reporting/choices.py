"""The cells that represent a method, what enters the statistics, and the course of a selection.

Methods are averaged over units: pairs of experts, single experts or seeds. Single experts, the base and controls are
left out of tests over methods: they differ from compositions for other reasons than those under test, and every method
that is far from the others raises Friedman's χ².
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments.sweeps import Cell, CellResult, Run, TaskInfo, best_of
from adapterswap.kit.errors import ArgumentError, did_you_mean

Unit = tuple[str | None, str | None, str | None, str | None]
"""What a method is averaged over, see `Cell.unit`."""


@dataclass(frozen=True)
class Choice:
    """The cells, one per unit, that represent a family on a task.

    Attributes:
        family: the method.
        kind: `only` if each unit has one configuration; `default`; `selected`, the best on the selection documents; or
            `none` if there is neither a default nor a split, so only `best` can be reported.
        cells: unit → finished cell.
        best: unit → cell for the papers' protocol. For `selected` and `none` it is the best on all documents, including
            the reported ones; otherwise it is the same as in `cells`.
        expected: how many units the run asks for.
    """

    family: str
    kind: str
    cells: Mapping[Unit, CellResult]
    best: Mapping[Unit, CellResult]
    expected: int

    @property
    def label(self) -> str:
        if self.kind in ("default", "selected"):
            return f"{self.family}, {self.kind}"
        return self.family


def rungs_of(run: Run) -> dict[str, tuple[str, int]]:
    """Each expert that is a checkpoint of a ladder → the ladder and the step."""
    rungs = {}
    for name, described in run.described.get("experts", {}).items():
        ladder, _, step = name.rpartition("-")
        if step.isdecimal() and described.get("source") == f"checkpoint-{step}":
            rungs[name] = ladder, int(step)
    return rungs


def as_trained(units: Iterable[Unit], run: Run) -> list[Unit]:
    """The units by training runs: checkpoints of one run are not independent experts, so a ladder is one."""
    rungs = rungs_of(run)

    def run_of(side: str | None) -> str | None:
        """The experts of a side, with the ladder in place of a checkpoint."""
        if side is None:
            return None
        names = []
        for name in side.split("+"):
            ladder, _ = rungs.get(name, (name, 0))
            names.append(ladder)
        return "+".join(names)

    trained = []
    for task, language, variant, others in units:
        trained.append((run_of(task), run_of(language), variant, run_of(others)))
    return trained


def has_split(task: TaskInfo) -> bool:
    """Whether configurations can be selected on some documents and reported on others."""
    return bool(task.select and task.report)


def reported(task: TaskInfo) -> tuple[int, ...]:
    """The documents whose scores are reported: the report part, or all documents if there is no split."""
    return task.report if has_split(task) else tuple(range(task.num_docs))


def groups_of(task: TaskInfo, documents: Sequence[int]) -> tuple[str, ...]:
    """The group of each document; empty if the task has no groups."""
    if not task.groups:
        return ()
    return tuple(task.groups[doc] for doc in documents)


def group_name(task: TaskInfo) -> str | None:
    """What the groups of a task's documents are called, in the plural; None without groups."""
    if task.group is None:
        return None
    if task.group.endswith("y"):
        return f"{task.group[:-1]}ies"
    return f"{task.group.removesuffix('s')}s"


def score(result: CellResult, task: TaskInfo, part: str = "report") -> float | None:
    """A cell's primary score on the documents of a part: `select`, `report` or `all`.

    Corpus-level scores (BLEU, chrF++) are the same for `report` and `all`, and None for `select`.
    """
    value = result.results.get(task.name)
    if value is None:
        return None
    if not value.docs:
        return None if part == "select" else value.value
    documents = {"select": task.select, "report": reported(task), "all": tuple(value.docs)}
    return value.mean_over(documents[part])


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None if there is none."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return sum(present) / len(present)


def choices(run: Run, task: TaskInfo) -> list[Choice]:
    """Every family's choices on a task, in the run's order of families."""
    finished: dict[str, CellResult] = {}
    for result in run.results:
        if score(result, task, "all") is not None:
            finished[result.cell.cell] = result

    # Family → unit → its cells, one for each configuration
    requested: dict[str, dict[Unit, list[Cell]]] = {}
    for cell in run.cells:
        if task.name in cell.tasks:
            requested.setdefault(cell.family, {}).setdefault(cell.unit, []).append(cell)

    all_choices = []
    for family, units in requested.items():
        evaluated: dict[Unit, list[CellResult]] = {}
        for unit, cells in units.items():
            results = []
            for cell in cells:
                if cell.cell in finished:
                    results.append(finished[cell.cell])
            if results:
                evaluated[unit] = results
        if not evaluated:
            continue

        # One configuration of each unit leaves nothing to choose.
        expected = len(units)
        if max(map(len, units.values())) == 1:
            only = {unit: results[0] for unit, results in evaluated.items()}
            all_choices.append(Choice(family, "only", only, only, expected))
            continue

        best = _best(evaluated, task, "all")
        default: dict[Unit, CellResult] = {}
        for unit, results in evaluated.items():
            for result in results:
                if result.cell.default:
                    default[unit] = result
        if default:
            all_choices.append(Choice(family, "default", default, default, expected))
        selected: dict[Unit, CellResult] = {}
        if has_split(task):
            selected = _best(evaluated, task, "select")
        if selected:
            all_choices.append(Choice(family, "selected", selected, best, expected))
        if not default and not selected:
            all_choices.append(Choice(family, "none", {}, best, expected))
    return all_choices


def _best(units: Mapping[Unit, Sequence[CellResult]], task: TaskInfo, part: str) -> dict[Unit, CellResult]:
    """Each unit's best cell on a part of the documents, see `best_of`; cells must be in the run's order."""
    best = {}
    for unit, cells in units.items():
        cell = _best_cell(cells, task, part)
        if cell is not None:
            best[unit] = cell
    return best


def _best_cell(cells: Sequence[CellResult], task: TaskInfo, part: str) -> CellResult | None:
    """The cell with the best score on a part of the documents; of equal ones the default, or else the first."""
    sign = 1 if task.higher_is_better else -1
    return best_of([(score(cell, task, part), cell.cell.default, cell) for cell in cells], sign)


def table_choice(choices: list[Choice], family: str, kind: str = "selected") -> Choice | None:
    """A family's choice to compare with another family's choice of `kind`: of the same kind if the family has one."""
    own = {choice.kind: choice for choice in choices if choice.family == family and choice.cells}
    return own.get(kind) or own.get("only") or own.get("selected") or own.get("default")


def matching(one: Iterable[Unit], other: Collection[Unit]) -> Iterator[tuple[Unit, Unit, Unit]]:
    """(joint unit, its unit in `one`, its unit in `other`); a side without an expert matches every expert."""
    for left in one:
        for right in other:
            sides = list(zip(left, right, strict=True))
            if all(a == b or a is None or b is None for a, b in sides):
                task, language, variant, others = [a or b for a, b in sides]
                yield (task, language, variant, others), left, right


def paired(
    one: Mapping[Unit, CellResult], other: Mapping[Unit, CellResult], task: TaskInfo
) -> tuple[list[Unit], list[int], NDArray[np.float64]]:
    """`one` minus `other` for every joint unit, on the reported documents that all of their cells have scores for.

    Returns:
        The units, the documents, and the differences (units, documents); without documents for corpus-level scores.
    """
    units = []
    scores = []  # of each joint unit: document → score in `one`, and in `other`
    common = set(reported(task))
    for unit, a, b in matching(one, other):
        of_one, of_other = one[a].results[task.name].docs, other[b].results[task.name].docs
        units.append(unit)
        scores.append((of_one, of_other))
        common &= of_one.keys() & of_other.keys()

    documents = [doc for doc in reported(task) if doc in common]
    differences = np.zeros((len(units), len(documents)))
    for row, (of_one, of_other) in enumerate(scores):
        differences[row] = [of_one[doc] - of_other[doc] for doc in documents]
    return units, documents, differences


COMPOSITIONS = "compositions"
"""The name that selects every method that composes something."""


def is_single(cell: Cell) -> bool:
    """Whether a cell composes nothing: the base, an expert, another adapter."""
    if cell.family == "base" or cell.family.endswith(" expert"):
        return True
    rules = cell.composition.get("allocation", ())
    return len(rules) == 1 and list(rules[0]) == ["expert"]


def families_of(run: Run) -> list[str]:
    """The families with a finished cell, in the run's order."""
    return list(dict.fromkeys(result.cell.family for result in run.results))


def single_families(run: Run) -> set[str]:
    """The families with a finished cell that composes nothing."""
    single = set()
    for result in run.results:
        if is_single(result.cell):
            single.add(result.cell.family)
    return single


def unit_text(unit: Unit) -> str:
    """A unit as text: `math1+sw1`, `seed 3`."""
    return "+".join(part for part in unit if part is not None)


def included_methods(run: Run, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The families to rank and test, in the run's order; all if `methods` is None."""
    families = families_of(run)
    if methods is None:
        return tuple(families)

    wanted: set[str] = set()
    for name in methods:
        if name in families:
            wanted.add(name)
        elif name == COMPOSITIONS:
            wanted |= set(families) - single_families(run)
        else:
            remedy = did_you_mean(name, families, f"Use some of: {', '.join(families)}; or {COMPOSITIONS}")
            raise ArgumentError(f"The run has no method {name!r}", remedy, parameter="methods")
    if len(wanted) < 2:
        raise ArgumentError(
            f"`methods` leaves {len(wanted)} of the run's methods, but a comparison needs at least two",
            f"Use two or more of: {', '.join(families)}",
            parameter="methods",
        )
    return tuple(family for family in families if family in wanted)


def with_units(run: Run, units: Sequence[str] | None) -> Run:
    """The run with the cells of some units only; a cell without an expert on a side matches every unit.

    Args:
        units: pairs (`math1+sw1`), experts (`sw1`, for all pairs that include them), or seeds of a lab run (`seed 3`);
            None for all.
    """
    if units is None:
        return run

    listed = full_units({result.cell.unit: None for result in run.results})
    selected: dict[Unit, None] = {}
    for name in units:
        matches = [unit for unit in listed if name in (unit_text(unit), *unit)]
        if not matches:
            known = {unit_text(unit): None for unit in listed}
            for unit in listed:
                for side in unit:
                    if side is not None:
                        known[side] = None
            remedy = did_you_mean(name, list(known), f"Use some of: {', '.join(known)}")
            raise ArgumentError(f"The run has no finished unit {name!r}", remedy, parameter="units")
        selected |= dict.fromkeys(matches)
    if not selected:
        raise ArgumentError("`units` is empty", "Name a pair, an expert or a seed, or leave it out", parameter="units")

    def stays(cell: Cell) -> bool:
        return any(matching([cell.unit], selected))

    cells = tuple(cell for cell in run.cells if stays(cell))
    results = tuple(result for result in run.results if stays(result.cell))
    return replace(run, cells=cells, results=results)


def full_units(units: Iterable[Unit]) -> list[Unit]:
    """The units with the most sides; the other units match them."""
    sides = {unit: len(unit) - unit.count(None) for unit in units}
    most = max(sides.values(), default=0)
    return [unit for unit, number in sides.items() if number == most]


@dataclass(frozen=True)
class SelectionCurve:
    """The score of a family if its selection had ended after each number of configurations.

    Attributes:
        task: the target.
        family: the method.
        units: the number of units that have all of these configurations; each point is a mean over them.
        points: (configurations evaluated, the mean of the best of them on the selection documents, the mean of the same
            configurations on the others). Configurations are in each unit's order of evaluation.
    """

    task: str
    family: str
    units: int
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Truncations:
    """Cells of a family that were reduced to a lower rank, with the error of the reduction and the score.

    Attributes:
        task: the target.
        family: the method.
        points: (configuration, unit, largest relative error of a module's ΔW, score on the reported documents).
    """

    task: str
    family: str
    points: tuple[tuple[str, Unit, float, float], ...]


def selection_curves(run: Run, task: TaskInfo) -> list[SelectionCurve]:
    """A curve for each family with several configurations; none if there are no selection documents."""
    if not has_split(task):
        return []

    # Family → unit → its configurations that have both scores, in the order of evaluation
    families: dict[str, dict[Unit, list[CellResult]]] = {}
    for result in run.results:
        if score(result, task, "select") is not None and score(result, task) is not None:
            families.setdefault(result.cell.family, {}).setdefault(result.cell.unit, []).append(result)

    # Of equally good configurations, a selection takes the first in the run's order.
    places = {cell.cell: place for place, cell in enumerate(run.cells)}

    def place_of(result: CellResult) -> int:
        return places.get(result.cell.cell, len(places))

    curves = []
    for family, units in families.items():
        most = max(map(len, units.values()))
        if most == 1:
            continue
        complete = [results for results in units.values() if len(results) == most]

        points = []
        for number in range(1, most + 1):
            best = []
            for results in complete:
                cell = _best_cell(sorted(results[:number], key=place_of), task, "select")
                if cell is not None:
                    best.append(cell)
            on_selection = mean_of(score(cell, task, "select") for cell in best)
            on_others = mean_of(score(cell, task, "report") for cell in best)
            assert on_selection is not None  # every cell has both scores
            assert on_others is not None
            points.append((number, on_selection, on_others))
        curves.append(SelectionCurve(task.name, family, len(complete), tuple(points)))
    return curves


def truncations(run: Run, task: TaskInfo) -> list[Truncations]:
    """Each family's cells whose error is recorded."""
    families: dict[str, list[tuple[str, Unit, float, float]]] = {}
    for result in run.results:
        value = score(result, task)
        if result.relative_error is not None and value is not None:
            cell = result.cell
            point = cell.configuration, cell.unit, result.relative_error, value
            families.setdefault(cell.family, []).append(point)
    return [Truncations(task.name, family, tuple(points)) for family, points in families.items()]
