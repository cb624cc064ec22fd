"""The pairs, extra adapters and target tasks of a sweep's recipe.

Knows recipes; knows nothing of grids, of tasks beyond their names, or of experts on disk.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from adapterswap.errors import FieldError, Problems
from adapterswap.planning.allocation import BASE
from adapterswap.sweeps.families import EXTRA, Family
from adapterswap.sweeps.recipe import SweepRecipe

__all__ = ["SweepTasks", "extra_experts", "pairs_of", "target_groups"]

Tasks = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SweepTasks:
    """The tasks that a cell is evaluated on.

    Attributes:
        target: language expert → the target tasks of its pairs.
        retention: the tasks that every cell is evaluated on too.
    """

    target: Tasks
    retention: tuple[str, ...]

    def of(self, languages: Iterable[str]) -> tuple[str, ...]:
        """The target tasks of these language experts, each once, then retention."""
        target = (task for language in languages for task in self.target[language])
        return tuple(dict.fromkeys((*target, *self.retention)))


def target_groups(recipe: SweepRecipe) -> dict[str, list[str]]:
    """Language expert → the names of its target tasks, as in the recipe.

    Raises:
        FieldError: a pattern matches no language expert, or a language expert has no tasks.
    """
    if isinstance(recipe.tasks, list):
        return dict.fromkeys(recipe.language_experts, recipe.tasks)
    problems = Problems(FieldError)
    groups: dict[str, list[str]] = {}
    for pattern, tasks in recipe.tasks.items():
        matched = fnmatch.filter(recipe.language_experts, pattern)
        if not matched:
            problems.add(
                f"tasks: {pattern!r} does not match any language expert",
                f"Use their names ({', '.join(recipe.language_experts)}), or patterns that match them",
                parameter="tasks",
            )
        for name in matched:
            groups.setdefault(name, []).extend(tasks)
    for name in recipe.language_experts:
        if name not in groups:
            problems.add(
                f"tasks: the language expert {name!r} has no task", f"Add `{name}: [TASK, …]`", parameter="tasks"
            )
    problems.raise_if_any()
    return groups


def extra_experts(recipe: SweepRecipe) -> dict[str, dict[str, str]]:
    """Row of `extra` → its adapters, by the names under which they are loaded: extra-1, extra-2, …"""
    number = count(1)
    listed = {row: [places] if isinstance(places, str) else places for row, places in recipe.extra.items()}
    return {row: {f"{EXTRA}{next(number)}": place for place in places} for row, places in listed.items()}


def pairs_of(recipe: SweepRecipe, family: Family) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(task side, language side) for each pair. A reset has every task side once, and an empty language side."""
    if recipe.pairs is not None:
        pairs = [(pair.task, pair.language) for pair in recipe.pairs]
    else:
        pairs = [((task,), (language,)) for task in recipe.task_experts for language in recipe.language_experts]
    if recipe.soup_sides:
        by_tasks: dict[tuple[str, ...], list[str]] = {}
        for name, tasks in target_groups(recipe).items():
            by_tasks.setdefault(tuple(tasks), []).append(name)
        pairs += [(tuple(recipe.task_experts), tuple(names)) for names in by_tasks.values()]
    if family.language == BASE:
        pairs = [(task, ()) for task, _ in pairs]
    return list(dict.fromkeys(pairs))
