"""Several sweeps with the same conditions as one run.

Scores can be compared only if everything that they depend on is equal: base, experts, tasks, settings and versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from adapterswap.experiments.sweeps import Cell, CellResult, Run
from adapterswap.kit.errors import DataError, Problems

_OF_TASKS = ("sha256", "primary", "num_docs")
_NOT_COMPARED = ("source",)  # only a name; two experts are the same if their hashes are
_DIGITS = 12
_LONGEST = 60


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
    described = _conditions(first.described), _conditions(second.described)
    differences = _differing(*described)
    for name in first.tasks.keys() & second.tasks.keys():
        for field in ("role", "select", "report", "group", "groups"):
            values = (getattr(run.tasks[name], field) for run in (first, second))
            left, right = (list(value) if isinstance(value, tuple) else value for value in values)
            if left != right:
                differences.append((f"tasks.{name}.{field}", left, right))
    for name, left, right in differences:
        values_text = f"{_shown(left)} in {first.folder}, {_shown(right)} in {second.folder}"
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


def _conditions(described: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions by name, from sweep.json: `settings.num_fewshot`, `experts.math1.sha256`, …."""
    conditions = {name: described[name] for name in ("adapterswap_version", "num_layers") if name in described}
    for part in ("base_model", "settings", "versions"):
        conditions |= _named(part, described.get(part, {}))
    for name, expert in described.get("experts", {}).items():
        conditions |= _named(f"experts.{name}", expert)
    for name, task in described.get("tasks", {}).items():
        conditions |= _named(f"tasks.{name}", {key: task[key] for key in _OF_TASKS if key in task})
    if described.get("task_files"):
        conditions["task_files"] = _digest(described["task_files"])
    return conditions


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The conditions that differ: (name, value in `one`, value in `other`); None for a missing value.

    Experts and tasks that only one of the two contains are not compared.
    """
    things = {_thing(name) for name in one} & {_thing(name) for name in other}
    names = [*one, *(name for name in other if name not in one)]
    return [
        (name, one.get(name), other.get(name))
        for name in names
        if one.get(name) != other.get(name) and _thing(name) in {None, *things}
    ]


def _shown(value: Any) -> str:
    """A value for an error message."""
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _thing(name: str) -> str | None:
    """The expert or task that a condition belongs to; None for conditions of the whole sweep."""
    return name.rpartition(".")[0] if name.startswith(("experts.", "tasks.")) else None


def _named(part: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{part}.{key}": _digest(value) if key == "files" and value is not None else value
        for key, value in content.items()
        if key not in _NOT_COMPARED
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]
