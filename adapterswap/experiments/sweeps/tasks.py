"""The tasks of a sweep: which a recipe names, what is known of each, and which scores count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    listed = [recipe.tasks] if isinstance(recipe.tasks, list) else list(recipe.tasks.values())
    return dict.fromkeys(name for names in [*listed, recipe.retention] for name in names)


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

    target = {language: load(names) for language, names in groups.items()}
    retention = load(recipe.retention) if recipe.retention else ()
    problems.raise_if_any()
    known = LoadedTasks({name: task for tasks in loaded.values() for name, task in tasks.items()})
    known.check_own_settings(named_tasks(recipe), settings)
    if settings.language_fidelity:
        known.check_languages()
    targets = dict.fromkeys(task for tasks in target.values() for task in tasks)
    for name in retention:
        if name in targets:
            problems.add(
                f"The task {name} is both in tasks and in retention", "Name it only once", parameter="retention"
            )
    for name in recipe.primary:
        if name not in known.tasks:
            problems.add(
                f"primary: {name!r} is not among the tasks ({', '.join(known.tasks)})",
                "Name one of them",
                parameter="primary",
            )
    for name in recipe.group:
        if name not in known.tasks:
            problems.add(
                f"group: {name!r} is not among the tasks ({', '.join(known.tasks)})",
                "Name one of them",
                parameter="group",
            )
    infos = {}
    for name in (*targets, *retention):
        role = "target" if name in targets else "retention"
        with problems.collect():
            infos[name] = _describe_task(name, known, role, recipe, settings)
    problems.raise_if_any()
    kinds = {known.tasks[name].OUTPUT_TYPE == "generate_until" for name in infos}
    if isinstance(recipe.settings.engine, EngineByKind) and len(kinds) == 1:
        engine = recipe.settings.engine.generate if kinds == {True} else recipe.settings.engine.loglikelihood
        raise FieldError(
            "settings.engine names an engine for each kind of task, but all tasks are of one kind",
            f"Set `engine: {engine}`",
            parameter="settings.engine",
        )
    _check_directions([info for info in infos.values() if info.role == "target"])
    return SweepTasks(target, retention), infos, known.only(infos)


def _check_directions(targets: Sequence[TaskInfo]) -> None:
    """Refuse targets with opposite directions of better scores: configurations are chosen by the targets' mean."""
    higher, lower = ([task.name for task in targets if task.higher_is_better is more] for more in (True, False))
    if higher and lower:
        raise FieldError(
            f"tasks: higher scores are better in {', '.join(higher)}, but lower ones in {', '.join(lower)}, so their "
            "mean is meaningless",
            "Move one kind to `retention`, or run a sweep for each",
            parameter="tasks",
        )


def _describe_task(name: str, loaded: LoadedTasks, role: str, recipe: SweepRecipe, settings: Settings) -> TaskInfo:
    from lm_eval.evaluator_utils import get_sample_size

    task = loaded.tasks[name]
    metric, filter_name = _primary(name, task, recipe.primary.get(name))
    available = len(task.eval_docs)
    num_docs = min(get_sample_size(task, settings.limit) or available, available)
    group, groups = _groups(name, task, recipe.group.get(name), num_docs)
    select, report = recipe.selection.split(num_docs, groups)
    better = _better(task).get(metric) is not False
    return TaskInfo(
        name, role, loaded.language(name), (metric, filter_name), better, num_docs, select, report,
        loaded.fingerprint(name), group, groups, averaged=_is_mean(task.aggregation()[metric]),
    )  # fmt: skip


def _groups(name: str, task: Any, column: str | None, num_docs: int) -> tuple[str | None, tuple[str, ...]]:
    """The column that names the groups of a task's documents, and the group of each; (None, ()) without groups."""
    rows = [task.eval_docs[place] for place in range(num_docs)]
    metadata = task.config.metadata
    own = metadata.get("group") if isinstance(metadata, Mapping) else None
    chosen = column or own
    if chosen is None:
        has_templates = all(isinstance(row, Mapping) and _TEMPLATE in row for row in rows)
        values = [str(row[_TEMPLATE]) for row in rows] if has_templates else []
        # A column that says the same everywhere, or something else in each row, is the text of a prompt.
        return (_TEMPLATE, tuple(values)) if 1 < len({*values}) < num_docs else (None, ())

    missing = next((place for place, row in enumerate(rows) if row.get(chosen) is None), None)
    if missing is not None:
        columns = ", ".join(map(str, rows[missing]))
        raise FieldError(
            f"group: row {missing} of {name} has no value in the column {chosen!r}",
            f"Name a column that all rows have: {columns}",
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


def _better(task: Any) -> Mapping[str, bool]:
    return task.higher_is_better() or {}


def _primary(name: str, task: Any, requested: str | None) -> tuple[str, str]:
    """(metric, filter) of the primary score: the recipe's, or the first; the filter `normalized` goes before others."""
    metrics = list(task.aggregation())
    if not metrics:
        raise FieldError(f"tasks: {name} has no score", "Run it with `adapterswap evaluate`", parameter="tasks")
    filters = [ensemble.name for ensemble in task._filters]
    if not requested:
        return metrics[0], _OURS if _OURS in filters else filters[0]
    metric, _, filter_name = requested.partition(",")
    filter_name = filter_name or (_OURS if _OURS in filters else filters[0])
    if metric not in metrics or filter_name not in filters:
        choices = ", ".join(f"{measure},{chosen}" for measure in metrics for chosen in filters)
        raise FieldError(f"primary: {name} has no score {requested!r}", f"Use one of {choices}", parameter="primary")
    return metric, filter_name
