"""Combine sweeps that were evaluated under the same conditions, so that their scores can be compared, into one run.

Knows the description and the cells of sweeps; knows nothing of models, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from adapterswap.errors import DataError, Problems
from adapterswap.sweeps.cells import Cell
from adapterswap.sweeps.conditions import conditions_of, differing, shown_value
from adapterswap.sweeps.results import Run
from adapterswap.sweeps.values import CellResult

__all__ = ["combined"]


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
            f"the runs differ in {name}: {values_text}",
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
