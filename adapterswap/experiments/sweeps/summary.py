"""Summarize a sweep: the best configuration of each family.

The best configuration is chosen on the documents set apart for choosing, and reported on the others; if no method has
several, all documents are reported. Only configurations that are finished with all their pairs take part, because means
over different pairs cannot be compared. Of equal ones the papers' default is taken, then the first of the recipe
(`best_of`, which reports use too). Min, mean and max are over cells, on all documents. `reporting` computes intervals
and tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from adapterswap.experiments.sweeps.results import CellResult, Run, RungResult, TaskInfo

_Candidate = TypeVar("_Candidate")


@dataclass(frozen=True)
class Row:
    """A family.

    Attributes:
        family: its name.
        n: how many of its finished cells have a value, see `cell_value`.
        minimum, mean, maximum: of these values; None if there are none.
        configurations: how many of its configurations have a finished cell.
        best: the configuration with the best mean over its pairs on the documents to choose on, see `best_of`. Only
            configurations without a missing pair take part; None if there is nothing to choose.
        chosen_at: the mean of `best` on the documents to choose on.
        reported_at: the mean of `best`, or of the only configuration, on the other documents.
        relative_error: the largest of its cells, see `CellResult`; None if all of them are exact.
    """

    family: str
    n: int
    minimum: float | None
    mean: float | None
    maximum: float | None
    configurations: int
    best: str | None
    chosen_at: float | None
    reported_at: float | None
    relative_error: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cell_value(result: CellResult, tasks: Mapping[str, TaskInfo]) -> float | None:
    """The mean of a cell's primary scores over its target tasks, on all documents; None if one is not a number."""
    return _mean(result.results[task.name].value for task in _targets(result, tasks))


def best_of(candidates: Iterable[tuple[float | None, bool, _Candidate]], sign: int) -> _Candidate | None:
    """The candidate with the best score; of equals the papers' default, then the first. None if none has a score.

    Scores are equal if they agree to 12 decimals: means of the same numbers in another order differ in their last bits.

    Args:
        candidates: (score, whether it is the default, candidate), in the order of the recipe.
        sign: -1 where less is better.
    """
    best: tuple[tuple[float, bool], _Candidate] | None = None
    for score, is_default, candidate in candidates:
        if score is None:
            continue
        place = sign * round(score, 12), is_default
        if best is None or place > best[0]:
            best = place, candidate
    return None if best is None else best[1]


def better(one: CellResult | None, other: CellResult, tasks: Mapping[str, TaskInfo]) -> CellResult | None:
    """The cell with the better value, see `best_of`; `one`, if neither has a value."""
    candidates = []
    for cell in (one, other):
        if cell is not None:
            candidates.append((cell_value(cell, tasks), cell.cell.default, cell))
    return best_of(candidates, sign_of([other], tasks)) or one


def summarize(run: Run) -> list[Row]:
    """A row for each family that has a finished cell, in the order of their first cells."""
    run = run.as_reported
    families: dict[str, list[CellResult]] = {result.cell.family: [] for result in run.results}
    places = {cell.cell: place for place, cell in enumerate(run.cells)}
    in_order = sorted(run.results, key=lambda result: places.get(result.cell.cell, len(places)))
    for result in in_order:
        families[result.cell.family].append(result)

    requested = Counter((cell.family, cell.configuration) for cell in run.cells)
    return [_row(family, results, run.tasks, requested) for family, results in families.items()]


def _row(
    family: str, results: list[CellResult], tasks: Mapping[str, TaskInfo], requested: Mapping[tuple[str, str], int]
) -> Row:
    """A family's row.

    Args:
        requested: (family, configuration) → how many cells the run has of it.
    """
    configurations: dict[str, list[CellResult]] = {}
    for result in results:
        configurations.setdefault(result.cell.configuration, []).append(result)

    # Each configuration's mean over its pairs; those without a missing pair can be the best.
    scores: dict[str, float | None] = {}
    candidates = []
    for name, members in configurations.items():
        scores[name] = _mean(half_value(result, tasks, "select") for result in members)
        if len(members) == requested[family, name]:
            is_default = all(result.cell.default for result in members)
            candidates.append((scores[name], is_default, name))
    best = best_of(candidates, sign_of(results, tasks))
    requested_of_family = [configuration for other, configuration in requested if other == family]
    if len(requested_of_family) == 1:  # nothing to choose, even if a pair is missing
        best = next(iter(configurations))

    chosen_at, reported_at = None, None
    if best is not None:
        chosen_at = scores[best]
        reported_at = _mean(half_value(result, tasks, "report") for result in configurations[best])

    values, errors = [], []
    for result in results:
        value = cell_value(result, tasks)
        if value is not None:
            values.append(value)
        if result.relative_error is not None:
            errors.append(result.relative_error)
    return Row(
        family=family,
        n=len(values),
        minimum=min(values, default=None),
        mean=_mean(values),
        maximum=max(values, default=None),
        configurations=len(configurations),
        best=best if len(configurations) > 1 else None,
        chosen_at=chosen_at,
        reported_at=reported_at,
        relative_error=max(errors, default=None),
    )


def _targets(result: CellResult | RungResult, tasks: Mapping[str, TaskInfo]) -> list[TaskInfo]:
    of_result = [tasks[name] for name in result.results]
    return [task for task in of_result if task.role == "target"]


def sign_of(results: Iterable[CellResult | RungResult], tasks: Mapping[str, TaskInfo]) -> int:
    """-1 if less is better, otherwise 1."""
    for result in results:
        if not all(task.higher_is_better for task in _targets(result, tasks)):
            return -1
    return 1


def half_value(result: CellResult | RungResult, tasks: Mapping[str, TaskInfo], half: str) -> float | None:
    """The mean over target tasks of the mean score on one part of their documents, `select` or `report`."""
    return _mean(result.results[task.name].mean_over(getattr(task, half)) for task in _targets(result, tasks))


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if there is no value, or if one is None."""
    numbers = []
    for value in values:
        if value is None:
            return None
        numbers.append(value)
    if not numbers:
        return None
    return sum(numbers) / len(numbers)
