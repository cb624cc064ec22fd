"""The tasks of a sweep: their full names, languages, primary scores, and the split of their documents.

Reads lm-evaluation-harness's tasks; knows nothing of experts and compositions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.errors import FieldError, Problems
from adapterswap.evaluation.fingerprints import task_fingerprint
from adapterswap.evaluation.languages import check_languages, language_of
from adapterswap.evaluation.settings import Settings
from adapterswap.evaluation.tasks import load_tasks
from adapterswap.sweeps.recipe import SweepRecipe
from adapterswap.sweeps.settings import DocumentSplit
from adapterswap.sweeps.sides import SweepTasks, target_groups
from adapterswap.sweeps.values import TaskInfo

__all__ = ["find_tasks"]

_OURS = "normalized"  # the filter of our own MGSM tasks that compares numbers as numbers


def find_tasks(recipe: SweepRecipe, settings: Settings) -> tuple[SweepTasks, dict[str, TaskInfo]]:
    """The tasks that a recipe names, and the tasks of each language expert's pairs.

    Raises:
        FieldError: a task is both a target and in `retention`; `primary` names an unknown task, or a score that its
            task does not have; higher scores are better in one target and lower ones in another; see also
            `target_groups`.
        AdapterswapError: see `load_tasks`.
    """
    groups = target_groups(recipe)
    problems = Problems(FieldError)
    loaded: dict[str, dict[str, Any]] = {}  # the recipe's names, joined → tasks

    def load(names: list[str]) -> tuple[str, ...]:
        key = "\n".join(names)
        if key not in loaded:
            with problems.collect():
                loaded[key] = load_tasks(names, settings)["tasks"]
        return tuple(loaded.get(key, ()))

    target = {language: load(names) for language, names in groups.items()}
    retention = load(recipe.retention) if recipe.retention else ()
    problems.raise_if_any()
    known = {name: task for tasks in loaded.values() for name, task in tasks.items()}
    if settings.language_fidelity:
        check_languages(known)
    targets = dict.fromkeys(task for tasks in target.values() for task in tasks)
    for name in retention:
        if name in targets:
            problems.add(
                f"the task {name} is both in tasks and in retention", "Name it only once", parameter="retention"
            )
    for name in recipe.primary:
        if name not in known:
            problems.add(
                f"primary: {name!r} is not among the tasks ({', '.join(known)})",
                "Name one of them",
                parameter="primary",
            )
    infos = {}
    for name in (*targets, *retention):
        role = "target" if name in targets else "retention"
        with problems.collect():
            infos[name] = _describe(name, known[name], role, recipe.primary.get(name), settings, recipe.selection)
    problems.raise_if_any()
    _check_directions([info for info in infos.values() if info.role == "target"])
    return SweepTasks(target, retention), infos


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


def _describe(
    name: str, task: Any, role: str, primary: str | None, settings: Settings, selection: DocumentSplit
) -> TaskInfo:
    from lm_eval.evaluator_utils import get_sample_size

    metric, filter_name = _primary(name, task, primary)
    available = len(task.eval_docs)
    num_docs = min(get_sample_size(task, settings.limit) or available, available)
    select, report = selection.split(num_docs)
    better = _better(task).get(metric) is not False
    return TaskInfo(
        name, role, language_of(name), (metric, filter_name), better, num_docs, select, report, task_fingerprint(task)
    )


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
