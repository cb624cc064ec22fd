"""Summarize a sweep: the best configuration of each family; and combine sweeps with the same conditions.

The best configuration is chosen on the documents set apart for choosing, and reported on the others. Only
configurations that are finished with all their pairs take part, because means over different pairs do not compare. Of
equal ones the papers' default is taken, then the first of the recipe (`best_of`, which reports use too). Min, mean and
max are over cells, on all documents. Intervals and tests are made in `reporting`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.experiments.sweeps.results import (
    CellResult,
    Run,
    RungResult,
    TaskInfo,
    conditions_of,
    differing,
    shown_value,
)
from adapterswap.kit.errors import DataError, Problems

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
    scored = [
        (sign * round(score, 12), default, candidate) for score, default, candidate in candidates if score is not None
    ]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def better(one: CellResult | None, other: CellResult, tasks: Mapping[str, TaskInfo]) -> CellResult | None:
    """The cell with the better value, see `best_of`; `one`, if neither has a value."""
    cells = [cell for cell in (one, other) if cell is not None]
    best = best_of(((cell_value(cell, tasks), cell.cell.default, cell) for cell in cells), sign_of([other], tasks))
    return one if best is None else best


def summarize(run: Run) -> list[Row]:
    """A row for each family that has a finished cell, in the order of their first cells."""
    families: dict[str, list[CellResult]] = {result.cell.family: [] for result in run.results}
    places = {cell.cell: place for place, cell in enumerate(run.cells)}
    for result in sorted(run.results, key=lambda result: places.get(result.cell.cell, len(places))):
        families[result.cell.family].append(result)
    cell_counts = Counter((cell.family, cell.configuration) for cell in run.cells)
    return [_row(family, results, run.tasks, cell_counts) for family, results in families.items()]


def _row(
    family: str, results: list[CellResult], tasks: Mapping[str, TaskInfo], cell_counts: Mapping[tuple[str, str], int]
) -> Row:
    values = [value for result in results if (value := cell_value(result, tasks)) is not None]
    configurations: dict[str, list[CellResult]] = {}
    for result in results:
        configurations.setdefault(result.cell.configuration, []).append(result)
    scores = {
        name: _mean(half_value(result, tasks, "select") for result in members)
        for name, members in configurations.items()
    }
    is_only = sum(other_family == family for other_family, _ in cell_counts) == 1
    candidates = [
        (scores[name], all(result.cell.default for result in members), name)
        for name, members in configurations.items()
        if is_only or len(members) == cell_counts[family, name]
    ]
    best = best_of(candidates, sign_of(results, tasks))
    return Row(
        family=family,
        n=len(values),
        minimum=min(values, default=None),
        mean=_mean(values),
        maximum=max(values, default=None),
        configurations=len(configurations),
        best=best if len(configurations) > 1 else None,
        chosen_at=scores[best] if best is not None else None,
        reported_at=_mean(half_value(r, tasks, "report") for r in configurations[best]) if best is not None else None,
        relative_error=max((r.relative_error for r in results if r.relative_error is not None), default=None),
    )


def remarks(run: Run) -> list[str]:
    """What a reader of a sweep's scores should know: scores that are missing, outputs that were cut, tasks all at 0."""
    lines = []
    for task in run.tasks.values():
        values = [result.results[task.name] for result in run.results if task.name in result.results]
        if unscored := sum(value.value is None for value in values):
            lines.append(
                f"{task.name}: {unscored:,} of {len(values):,} cells have no score: it is not a finite number, or "
                "beyond 1e50. They are left out, as if they were not finished. Check their outputs in samples/."
            )
        if cut := sum(value.cut or 0 for value in values):
            outputs = sum(task.num_docs for value in values if value.cut is not None)
            cells = sum(bool(value.cut) for value in values)
            lines.append(
                f"{task.name}: {cut:,} of {outputs:,} outputs were cut at the token limit, in {cells:,} of "
                f"{len(values):,} cells. Raise max_gen_toks if answers come late."
            )
        if values and task.higher_is_better and all(value.value == 0 for value in values):
            cells_text = f"all {len(values):,} cells" if len(values) > 1 else "the only cell"
            lines.append(
                f"{task.name}: {cells_text} scored 0, so their scores cannot tell compositions apart. Check the "
                "outputs in samples/, the primary score and the token limit."
            )
    return lines


def _targets(result: CellResult | RungResult, tasks: Mapping[str, TaskInfo]) -> list[TaskInfo]:
    return [tasks[name] for name in result.results if tasks[name].role == "target"]


def sign_of(results: Iterable[CellResult | RungResult], tasks: Mapping[str, TaskInfo]) -> int:
    """-1 if less is better, otherwise 1."""
    return 1 if all(task.higher_is_better for result in results for task in _targets(result, tasks)) else -1


def half_value(result: CellResult | RungResult, tasks: Mapping[str, TaskInfo], half: str) -> float | None:
    """The mean over target tasks of the mean score on one part of their documents, `select` or `report`."""
    return _mean(result.results[task.name].mean_over(getattr(task, half)) for task in _targets(result, tasks))


def _mean(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    numbers = [value for value in listed if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(listed) else None


def combined(runs: Sequence[Run]) -> Run:
    """One run with the cells, tasks and experts of all runs. Those that several runs share are included once.

    Raises:
        DataError: the runs differ in the base, an expert, a task, a setting or a version; a family has different
            configurations in them; or a cell has different scores.
    """
    problems = Problems(DataError)
    for first, second in combinations(runs, 2):
        _compare(first, second, problems)
    problems.raise_if_any()
    merged, *remaining = runs
    for second in remaining:
        merged = _joined(merged, second, problems)
    problems.raise_if_any()
    if merged.described.get("recipe", {}).get("search"):  # a search's results keep their order
        return merged
    places = {cell.cell: place for place, cell in enumerate(merged.cells)}
    return replace(merged, results=tuple(sorted(merged.results, key=lambda result: places[result.cell.cell])))


def _compare(first: Run, second: Run, problems: Problems) -> None:
    """Compare everything that scores depend on, and how documents are divided."""
    described = conditions_of(first.described), conditions_of(second.described)
    differences = differing(*described)
    for name in first.tasks.keys() & second.tasks.keys():
        for field in ("role", "select", "report"):
            values = (getattr(run.tasks[name], field) for run in (first, second))
            left, right = (list(value) if isinstance(value, tuple) else value for value in values)
            if left != right:
                differences.append((f"tasks.{name}.{field}", left, right))
    for name, left, right in differences:
        values_text = f"{shown_value(left)} in {first.folder}, {shown_value(right)} in {second.folder}"
        problems.add(
            f"The runs differ in {name}: {values_text}",
            "Report each run separately, or run one of them again under the conditions of the other",
            parameter="run",
        )


def _joined(first: Run, second: Run, problems: Problems) -> Run:
    _compare_families(first, second, problems)
    first_cells = {cell.cell for cell in first.cells}
    finished = {result.cell.cell: result for result in first.results}
    added: list[CellResult] = []
    for result in second.results:
        before = finished.get(result.cell.cell)
        if before is None:
            added.append(result)
        elif before != result:
            problems.add(
                _score_difference(first, second, before, result), "Report each run separately", parameter="run"
            )
    return replace(
        first,
        described=_described(first.described, second.described),
        tasks={**first.tasks, **{name: task for name, task in second.tasks.items() if name not in first.tasks}},
        cells=(*first.cells, *(cell for cell in second.cells if cell.cell not in first_cells)),
        results=(*first.results, *added),
        rungs=(*first.rungs, *second.rungs),
        elsewhere={**first.elsewhere, **{result.cell.cell: second.folder for result in added}},
    )


def _compare_families(first: Run, second: Run, problems: Problems) -> None:
    """Refuse families that the runs define differently: one row would mix two methods."""
    families = ({cell.family: set[str]() for cell in run.cells} for run in (first, second))
    left, right = families
    for configurations, run in ((left, first), (right, second)):
        for cell in run.cells:
            configurations[cell.family].add(_configuration(cell))
    for family in left.keys() & right.keys():
        if unshared := sorted(left[family] ^ right[family]):
            place = first.folder if unshared[0] in left[family] else second.folder
            problems.add(
                f"{family!r} has {unshared[0] or 'a configuration without settings'} only in {place}, so the runs use "
                "one name for two methods",
                "Rename the family in one recipe and run that sweep again, or report each run separately",
                parameter="run",
            )


def _configuration(cell: Cell) -> str:
    output = ", ".join(f"{key}={value}" for key, value in sorted(cell.output.items()))
    return ", ".join(part for part in (cell.configuration, output) if part)


def _score_difference(first: Run, second: Run, before: CellResult, after: CellResult) -> str:
    for task, value in before.results.items():
        if value != after.results.get(task):
            values = (value.value, after.results[task].value if task in after.results else None)
            old, new = ("none" if number is None else f"{number:.4g}" for number in values)
            return (
                f"{after.cell.short} has different scores on {task}, in the mean or for single documents: "
                f"{old} in {first.folder}, {new} in {second.folder}"
            )
    return f"{after.cell.short} has different relative errors in {first.folder} and {second.folder}"


def _described(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    described = {**first, "experts": {**second.get("experts", {}), **first.get("experts", {})}}
    recipes = first.get("recipe", {}), second.get("recipe", {})
    roles = {**recipes[1].get("roles", {}), **recipes[0].get("roles", {})}
    search = recipes[0].get("search") or recipes[1].get("search")
    described["recipe"] = {
        **recipes[0],
        **({"roles": roles} if roles else {}),
        **({"search": search} if search else {}),
    }
    return described
