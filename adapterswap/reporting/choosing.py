"""The cells that represent a method: its default configuration, the selected one, or the papers' best.

Methods are averaged over units: pairs of experts, single experts or seeds. Knows the cells of a run; knows
nothing of intervals and tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapterswap.sweeps import Cell, CellResult, Run, TaskInfo, best_of

__all__ = [
    "Choice",
    "Unit",
    "choices",
    "has_split",
    "matching",
    "paired",
    "reported",
    "score",
    "table_choice",
    "unit_of",
]

Unit = tuple[str | None, str | None, str | None, str | None]
"""(task expert, language expert, variant, experts of other roles), each None if absent. The names of several experts
of a side are joined by +. A variant is a seed of the lab, or one of several adapters in a row of their own."""


@dataclass(frozen=True)
class Choice:
    """The cells, one per unit, that represent a family on a task.

    Attributes:
        family: the method.
        kind: `only` if each unit has one configuration; `default`; `selected`, the best on the selection documents; or
            `none` if there is neither a default nor a split, so only `best` can be reported.
        cells: unit → finished cell.
        best: unit → cell for the papers' protocol. For `selected` and `none` it is the best on all documents, including
            the reported ones; otherwise it is the same as in `cells`.
        expected: how many units the run asks for.
    """

    family: str
    kind: str
    cells: Mapping[Unit, CellResult]
    best: Mapping[Unit, CellResult]
    expected: int

    @property
    def label(self) -> str:
        return {"default": f"{self.family}, default", "selected": f"{self.family}, selected"}.get(
            self.kind, self.family
        )


def unit_of(cell: Cell) -> Unit:
    task, language, others = (
        "+".join(names) or None for names in (cell.task_expert, cell.language_expert, cell.other_experts)
    )
    alone = cell.composition and task is language is others is None
    return task, language, cell.short.partition("@")[0] if alone else None, others


def has_split(task: TaskInfo) -> bool:
    """Whether configurations can be selected on some documents and reported on others."""
    return bool(task.select and task.report)


def reported(task: TaskInfo) -> tuple[int, ...]:
    """The documents whose scores are reported: the report part, or all documents if there is no split."""
    return task.report if has_split(task) else tuple(range(task.num_docs))


def score(result: CellResult, task: TaskInfo, part: str = "report") -> float | None:
    """A cell's primary score on the documents of a part: `select`, `report` or `all`.

    Corpus-level scores (BLEU, chrF++) are the same for `report` and `all`, and None for `select`.
    """
    value = result.results.get(task.name)
    if value is None:
        return None
    if not value.docs:
        return None if part == "select" else value.value
    return value.mean_over({"select": task.select, "report": reported(task), "all": tuple(value.docs)}[part])


def choices(run: Run, task: TaskInfo) -> list[Choice]:
    """Every family's choices on a task, in the run's order of families."""
    finished = {result.cell.cell: result for result in run.results if score(result, task, "all") is not None}
    families: dict[str, dict[Unit, list[Cell]]] = {}
    for cell in run.cells:
        if task.name in cell.tasks:
            families.setdefault(cell.family, {}).setdefault(unit_of(cell), []).append(cell)
    all_choices = []
    for family, units in families.items():
        evaluated = {
            unit: [finished[cell.cell] for cell in cells if cell.cell in finished] for unit, cells in units.items()
        }
        evaluated = {unit: cells for unit, cells in evaluated.items() if cells}
        if not evaluated:
            continue
        if all(len(cells) == 1 for cells in units.values()):
            only = {unit: cells[0] for unit, cells in evaluated.items()}
            all_choices.append(Choice(family, "only", only, only, len(units)))
            continue
        best = _best(evaluated, task, "all")
        # Older sweeps mark several configurations of a family as default (partitions A and B); then none is.
        several = any(sum(cell.default for cell in cells) > 1 for cells in units.values())
        default = {
            unit: cell for unit, cells in evaluated.items() for cell in cells if cell.cell.default and not several
        }
        if default:
            all_choices.append(Choice(family, "default", default, default, len(units)))
        selected = _best(evaluated, task, "select") if has_split(task) else {}
        if selected:
            all_choices.append(Choice(family, "selected", selected, best, len(units)))
        if not default and not selected:
            all_choices.append(Choice(family, "none", {}, best, len(units)))
    return all_choices


def _best(units: Mapping[Unit, list[CellResult]], task: TaskInfo, part: str) -> dict[Unit, CellResult]:
    """Each unit's best cell on a part of the documents, see `best_of`; cells must be in the run's order."""
    sign = 1 if task.higher_is_better else -1
    best = {
        unit: best_of(((score(cell, task, part), cell.cell.default, cell) for cell in cells), sign)
        for unit, cells in units.items()
    }
    return {unit: cell for unit, cell in best.items() if cell is not None}


def table_choice(choices: list[Choice], family: str, kind: str = "selected") -> Choice | None:
    """A family's choice to compare with another family's choice of `kind`: of the same kind if the family has one."""
    own = {choice.kind: choice for choice in choices if choice.family == family and choice.cells}
    return own.get(kind) or own.get("only") or own.get("selected") or own.get("default")


def matching(one: Iterable[Unit], other: Collection[Unit]) -> Iterator[tuple[Unit, Unit, Unit]]:
    """(joint unit, its unit in `one`, its unit in `other`); a side without an expert matches every expert."""
    for left in one:
        for right in other:
            sides = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
            if all(a == b for a, b in sides):
                task, language, variant, others = (a or b for a, b in zip(left, right, strict=True))
                yield (task, language, variant, others), left, right


def paired(
    one: Mapping[Unit, CellResult], other: Mapping[Unit, CellResult], task: TaskInfo
) -> tuple[list[Unit], NDArray[np.float64]]:
    """`one` minus `other` for every joint unit, on the reported documents that all of their cells have scores for.

    Returns:
        The units, and the differences (units, documents); without documents for corpus-level scores.
    """
    pairs = [(unit, one[a].results[task.name].docs, other[b].results[task.name].docs)
             for unit, a, b in matching(one, other)]  # fmt: skip
    documents = [doc for doc in reported(task) if all(doc in a and doc in b for _, a, b in pairs)]
    differences = [[a[doc] - b[doc] for doc in documents] for _, a, b in pairs]
    return [unit for unit, _, _ in pairs], np.array(differences, float).reshape(len(pairs), len(documents))
