"""Combine sweeps that were judged under the same conditions, so that their scores can be compared, into one run.

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
    for one, other in combinations(runs, 2):
        _compare(one, other, problems)
    problems.raise_if_any()
    found, *others = runs
    for other in others:
        found = _with(found, other, problems)
    problems.raise_if_any()
    if found.described.get("recipe", {}).get("search"):  # a search's results keep their order
        return found
    places = {cell.cell: place for place, cell in enumerate(found.cells)}
    return replace(found, results=tuple(sorted(found.results, key=lambda result: places[result.cell.cell])))


def _compare(one: Run, other: Run, problems: Problems) -> None:
    """Compare everything that scores depend on, and how documents are divided."""
    described = conditions_of(one.described), conditions_of(other.described)
    differences = differing(*described)
    for name in one.tasks.keys() & other.tasks.keys():
        for field in ("role", "select", "report"):
            values = (getattr(run.tasks[name], field) for run in (one, other))
            left, right = (list(value) if isinstance(value, tuple) else value for value in values)
            if left != right:
                differences.append((f"tasks.{name}.{field}", left, right))
    for name, left, right in differences:
        problems.add(
            f"the runs differ in {name}: {shown_value(left)} in {one.folder}, {shown_value(right)} in {other.folder}",
            "Report each run separately, or run one of them again under the conditions of the other",
            parameter="run",
        )


def _with(one: Run, other: Run, problems: Problems) -> Run:
    _compare_families(one, other, problems)
    known = {cell.cell for cell in one.cells}
    finished = {result.cell.cell: result for result in one.results}
    added: list[CellResult] = []
    for result in other.results:
        before = finished.get(result.cell.cell)
        if before is None:
            added.append(result)
        elif before != result:
            problems.add(_other_score(one, other, before, result), "Report each run separately", parameter="run")
    return replace(
        one,
        described=_described(one.described, other.described),
        tasks={**one.tasks, **{name: task for name, task in other.tasks.items() if name not in one.tasks}},
        cells=(*one.cells, *(cell for cell in other.cells if cell.cell not in known)),
        results=(*one.results, *added),
        rungs=(*one.rungs, *other.rungs),
        elsewhere={**one.elsewhere, **{result.cell.cell: other.folder for result in added}},
    )


def _compare_families(one: Run, other: Run, problems: Problems) -> None:
    """Refuse families that the runs define differently: one row would mix two methods."""
    families = ({cell.family: set[str]() for cell in run.cells} for run in (one, other))
    left, right = families
    for found, run in ((left, one), (right, other)):
        for cell in run.cells:
            found[cell.family].add(_configuration(cell))
    for family in left.keys() & right.keys():
        if only_one := sorted(left[family] ^ right[family]):
            place = one.folder if only_one[0] in left[family] else other.folder
            problems.add(
                f"{family!r} has {only_one[0] or 'a configuration without settings'} only in {place}, so the runs use "
                "one name for two methods",
                "Rename the family in one recipe and run that sweep again, or report each run separately",
                parameter="run",
            )


def _configuration(cell: Cell) -> str:
    output = ", ".join(f"{key}={value}" for key, value in sorted(cell.output.items()))
    return ", ".join(part for part in (cell.configuration, output) if part)


def _other_score(one: Run, other: Run, before: CellResult, result: CellResult) -> str:
    for task, value in before.results.items():
        if value != result.results.get(task):
            values = (value.value, result.results[task].value if task in result.results else None)
            first, second = ("none" if number is None else f"{number:.4g}" for number in values)
            return (
                f"{result.cell.short} has different scores on {task}, in the mean or for single documents: "
                f"{first} in {one.folder}, {second} in {other.folder}"
            )
    return f"{result.cell.short} has different relative errors in {one.folder} and {other.folder}"


def _described(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found = {**one, "experts": {**other.get("experts", {}), **one.get("experts", {})}}
    recipes = one.get("recipe", {}), other.get("recipe", {})
    roles = {**recipes[1].get("roles", {}), **recipes[0].get("roles", {})}
    search = recipes[0].get("search") or recipes[1].get("search")
    found["recipe"] = {**recipes[0], **({"roles": roles} if roles else {}), **({"search": search} if search else {})}
    return found
