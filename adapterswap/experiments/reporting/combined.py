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

from adapterswap.experiments.sweeps import CellResult, Run, TaskValue
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
    in_order = sorted(merged.results, key=lambda result: places[result.cell.cell])
    return replace(merged, results=tuple(in_order))


def _compare(first: Run, second: Run, problems: Problems) -> None:
    """Compare everything that scores depend on, and how documents are divided."""
    differences: list[tuple[str, Any, Any]] = []  # the name of a condition, and its values in both runs

    # Experts and tasks that only one of the two has are not compared.
    left, right = _conditions(first.described), _conditions(second.described)
    owners = {_owner_of(name) for name in left} & {_owner_of(name) for name in right}
    owners.add(None)
    for name in {**left, **right}:
        if left.get(name) != right.get(name) and _owner_of(name) in owners:
            differences.append((name, left.get(name), right.get(name)))

    for name, task in first.tasks.items():
        if name not in second.tasks:
            continue
        for field in ("role", "select", "report", "group", "groups"):
            own, other = getattr(task, field), getattr(second.tasks[name], field)
            if own != other:
                differences.append((f"tasks.{name}.{field}", own, other))

    for name, own, other in differences:
        problems.add(
            f"The runs differ in {name}: {_shown(own)} in {first.folder}, {_shown(other)} in {second.folder}",
            "Report each run separately, or run one of them again under the conditions of the other",
            parameter="run",
        )


def _joined(first: Run, second: Run, problems: Problems) -> Run:
    """The first run with what only the second has."""
    _compare_families(first, second, problems)

    # Cells that both have must have the same scores.
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

    first_cells = {cell.cell for cell in first.cells}
    new_cells = [cell for cell in second.cells if cell.cell not in first_cells]
    new_tasks = {name: task for name, task in second.tasks.items() if name not in first.tasks}
    elsewhere = dict(first.elsewhere)
    for result in added:
        elsewhere[result.cell.cell] = second.folder
    return replace(
        first,
        described=_described(first.described, second.described),
        tasks={**first.tasks, **new_tasks},
        cells=(*first.cells, *new_cells),
        results=(*first.results, *added),
        rungs=(*first.rungs, *second.rungs),
        elsewhere=elsewhere,
    )


def _compare_families(first: Run, second: Run, problems: Problems) -> None:
    """Refuse families that the runs define differently: one row would mix two methods."""
    left, right = _configurations(first), _configurations(second)
    for family, configurations in left.items():
        if family not in right:
            continue
        unshared = sorted(configurations ^ right[family])
        if unshared:
            place = first.folder if unshared[0] in configurations else second.folder
            problems.add(
                f"{family!r} has {unshared[0] or 'a configuration without settings'} only in {place}, so the runs use "
                "one name for two methods",
                "Rename the family in one recipe and run that sweep again, or report each run separately",
                parameter="run",
            )


def _configurations(run: Run) -> dict[str, set[str]]:
    """Each family's configurations, with what their cells are written as."""
    configurations: dict[str, set[str]] = {}
    for cell in run.cells:
        settings = [f"{key}={value}" for key, value in sorted(cell.output.items())]
        if cell.configuration:
            settings.insert(0, cell.configuration)
        configurations.setdefault(cell.family, set()).add(", ".join(settings))
    return configurations


def _score_difference(first: Run, second: Run, before: CellResult, after: CellResult) -> str:
    """In which score two results of one cell differ, for an error message."""
    for task, value in before.results.items():
        other = after.results.get(task)
        if value != other:
            old, new = _score_text(value), _score_text(other)
            return (
                f"{after.cell.short} has different scores on {task}, in the mean or for single documents: "
                f"{old} in {first.folder}, {new} in {second.folder}"
            )
    return f"{after.cell.short} has different relative errors in {first.folder} and {second.folder}"


def _score_text(value: TaskValue | None) -> str:
    if value is None or value.value is None:
        return "none"
    return f"{value.value:.4g}"


def _described(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What the joined run says of itself: the first's description with the second's experts, roles and search."""
    own, other = first.get("recipe", {}), second.get("recipe", {})
    recipe = dict(own)
    roles = {**other.get("roles", {}), **own.get("roles", {})}
    if roles:
        recipe["roles"] = roles
    search = own.get("search") or other.get("search")
    if search:
        recipe["search"] = search

    experts = {**second.get("experts", {}), **first.get("experts", {})}
    return {**first, "experts": experts, "recipe": recipe}


def _conditions(described: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions by name, from sweep.json: `settings.num_fewshot`, `experts.math1.sha256`, …."""
    conditions: dict[str, Any] = {}
    for name in ("adapterswap_version", "num_layers"):
        if name in described:
            conditions[name] = described[name]
    for part in ("base_model", "settings", "versions"):
        conditions |= _named(part, described.get(part, {}))
    for name, expert in described.get("experts", {}).items():
        conditions |= _named(f"experts.{name}", expert)
    for name, task in described.get("tasks", {}).items():
        compared = {key: task[key] for key in _OF_TASKS if key in task}
        conditions |= _named(f"tasks.{name}", compared)
    if described.get("task_files"):
        conditions["task_files"] = _digest(described["task_files"])
    return conditions


def _shown(value: Any) -> str:
    """A value for an error message."""
    if value is None:
        return "unset"
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return text


def _owner_of(name: str) -> str | None:
    """The expert or task that a condition belongs to; None for conditions of the whole sweep."""
    if not name.startswith(("experts.", "tasks.")):
        return None
    return name.rpartition(".")[0]


def _named(part: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a part, under the names `PART.KEY`."""
    named = {}
    for key, value in content.items():
        if key in _NOT_COMPARED:
            continue
        if key == "files" and value is not None:  # a hash of each file of a checkpoint
            value = _digest(value)
        named[f"{part}.{key}"] = value
    return named


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]
