"""The tasks of a sweep: which a recipe names, what is known of each, and which scores count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import Any

from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.experiments.sweeps.recipe import EngineByKind, SweepRecipe, SweepTasks
from adapterswap.experiments.sweeps.results import TaskInfo
from adapterswap.kit.errors import FieldError, Problems

_TEMPLATE = "template"  # the column of generated problems
_OURS = "normalized"  # the filter of our own MGSM tasks that compares numbers as numbers


def named_tasks(recipe: SweepRecipe) -> dict[str, None]:
    """The tasks, groups and patterns that a recipe names, once each."""
    named: dict[str, None] = {}
    if isinstance(recipe.tasks, list):
        named |= dict.fromkeys(recipe.tasks)
    else:
        for tasks in recipe.tasks.values():
            named |= dict.fromkeys(tasks)
    return named | dict.fromkeys(recipe.retention)


def find_tasks(recipe: SweepRecipe, settings: Settings) -> tuple[SweepTasks, dict[str, TaskInfo], LoadedTasks]:
    """The tasks of each language expert's pairs; all tasks that a recipe names; and the harness's own."""
    groups = recipe.target_groups()
    problems = Problems(FieldError)
    loaded: dict[str, dict[str, Any]] = {}  # the recipe's names, joined → tasks

    def load(names: list[str]) -> tuple[str, ...]:
        key = "\n".join(names)
        if key not in loaded:
            with problems.collect():
                loaded[key] = LoadedTasks.load(names, settings).tasks
        return tuple(loaded.get(key, ()))

    # The harness's tasks, by their full names
    target = {language: load(names) for language, names in groups.items()}
    retention = load(recipe.retention) if recipe.retention else ()
    problems.raise_if_any()
    by_name: dict[str, Any] = {}
    for tasks in loaded.values():
        by_name |= tasks
    known = LoadedTasks(by_name)
    known.check_own_settings(named_tasks(recipe), settings)
    if settings.language_fidelity:
        known.check_languages()

    # What the recipe says of single tasks
    targets = dict.fromkeys(chain.from_iterable(target.values()))
    for name in retention:
        if name in targets:
            problems.add(
                f"The task {name} is both in tasks and in retention", "Name it only once", parameter="retention"
            )
    for key, names in (("primary", recipe.primary), ("group", recipe.group)):
        for name in names:
            if name not in known.tasks:
                problems.add(
                    f"{key}: {name!r} is not among the tasks ({', '.join(known.tasks)})",
                    "Name one of them",
                    parameter=key,
                )
    infos = {}
    for name in (*targets, *retention):
        role = "target" if name in targets else "retention"
        with problems.collect():
            infos[name] = _describe_task(name, known, role, recipe, settings)
    problems.raise_if_any()

    # All tasks together
    generates = {known.tasks[name].OUTPUT_TYPE == "generate_until" for name in infos}
    engines = recipe.settings.engine
    if isinstance(engines, EngineByKind) and len(generates) == 1:
        engine = engines.generate if generates == {True} else engines.loglikelihood
        raise FieldError(
            "settings.engine names an engine for each kind of task, but all tasks are of one kind",
            f"Set `engine: {engine}`",
            parameter="settings.engine",
        )
    _check_directions([info for info in infos.values() if info.role == "target"])
    return SweepTasks(target, retention), infos, known.only(infos)


def _check_directions(targets: Sequence[TaskInfo]) -> None:
    """Refuse targets with opposite directions of better scores: configurations are chosen by the targets' mean."""
    higher, lower = [], []
    for task in targets:
        if task.higher_is_better:
            higher.append(task.name)
        else:
            lower.append(task.name)
    if higher and lower:
        raise FieldError(
            f"tasks: higher scores are better in {', '.join(higher)}, but lower ones in {', '.join(lower)}, so their "
            "mean is meaningless",
            "Move one kind to `retention`, or run a sweep for each",
            parameter="tasks",
        )


def _describe_task(name: str, loaded: LoadedTasks, role: str, recipe: SweepRecipe, settings: Settings) -> TaskInfo:
    """What the sweep records of a task: its score, its documents, and how they are divided."""
    from lm_eval.evaluator_utils import get_sample_size

    task = loaded.tasks[name]
    metric, filter_name = _primary(name, task, recipe.primary.get(name))
    directions = task.higher_is_better() or {}

    available = len(task.eval_docs)
    num_docs = min(get_sample_size(task, settings.limit) or available, available)
    group, groups = _groups(name, task, recipe.group.get(name), num_docs)
    select, report = recipe.selection.split(num_docs, groups)
    return TaskInfo(
        name=name,
        role=role,
        language=loaded.language(name),
        primary=(metric, filter_name),
        higher_is_better=directions.get(metric) is not False,
        num_docs=num_docs,
        select=select,
        report=report,
        sha256=loaded.fingerprint(name),
        group=group,
        groups=groups,
        averaged=_is_mean(task.aggregation()[metric]),
    )


def _groups(name: str, task: Any, column: str | None, num_docs: int) -> tuple[str | None, tuple[str, ...]]:
    """The column that names the groups of a task's documents, and the group of each; (None, ()) without groups."""
    rows = [task.eval_docs[place] for place in range(num_docs)]
    metadata = task.config.metadata
    own = None
    if isinstance(metadata, Mapping):
        own = metadata.get("group")
    chosen = column or own

    if chosen is None:
        if not all(isinstance(row, Mapping) and _TEMPLATE in row for row in rows):
            return None, ()
        # A column that says the same everywhere, or something else in each row, is the text of a prompt
        values = tuple(str(row[_TEMPLATE]) for row in rows)
        if not 1 < len(set(values)) < num_docs:
            return None, ()
        return _TEMPLATE, values

    for place, row in enumerate(rows):
        if row.get(chosen) is None:
            raise FieldError(
                f"group: row {place} of {name} has no value in the column {chosen!r}",
                f"Name a column that all rows have: {', '.join(map(str, row))}",
                parameter="group",
            )
    return str(chosen), tuple(str(row[chosen]) for row in rows)


def _is_mean(aggregate: Callable[[list[float]], float]) -> bool:
    """Whether a task's aggregation is the mean of its documents' numbers, whatever it is called."""
    numbers = [0.0, 0.25, 1.0]
    try:
        return math.isclose(aggregate(numbers), math.fsum(numbers) / len(numbers))
    except Exception:  # it takes something else than numbers, and may be the user's own
        return False


def _primary(name: str, task: Any, requested: str | None) -> tuple[str, str]:
    """(metric, filter) of the primary score: the recipe's, or the first; the filter `normalized` goes before others."""
    metrics = list(task.aggregation())
    if not metrics:
        raise FieldError(f"tasks: {name} has no score", "Run it with `adapterswap evaluate`", parameter="tasks")
    filters = [ensemble.name for ensemble in task._filters]
    usual = filters[0]
    if _OURS in filters:
        usual = _OURS
    if not requested:
        return metrics[0], usual

    metric, _, filter_name = requested.partition(",")
    filter_name = filter_name or usual
    if metric not in metrics or filter_name not in filters:
        scores = [f"{measure},{chosen}" for measure, chosen in product(metrics, filters)]
        remedy = f"Use one of {', '.join(scores)}"
        raise FieldError(f"primary: {name} has no score {requested!r}", remedy, parameter="primary")
    return metric, filter_name
