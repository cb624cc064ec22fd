"""The course of a selection, and the cost of a lower rank: the data of two figures.

Knows the cells of a run; knows nothing of figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapterswap.reporting.choosing import Unit, has_split, score, unit_of
from adapterswap.sweeps import CellResult, Run, TaskInfo, best_of

__all__ = ["SelectionCurve", "Truncations", "selection_curves", "truncations"]


@dataclass(frozen=True)
class SelectionCurve:
    """The score of a family if its selection had ended after each number of configurations.

    Attributes:
        task: the target.
        family: the method.
        units: the number of units that have all of these configurations; each point is a mean over them.
        points: (configurations evaluated, the mean of the best of them on the selection documents, the mean of the same
            configurations on the others). Configurations are in each unit's order of evaluation.
    """

    task: str
    family: str
    units: int
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Truncations:
    """Cells of a family that were reduced to a lower rank, with the error of the reduction and the score.

    Attributes:
        task: the target.
        family: the method.
        points: (configuration, unit, largest relative error of a module's ΔW, score on the reported documents).
    """

    task: str
    family: str
    points: tuple[tuple[str, Unit, float, float], ...]


def selection_curves(run: Run, task: TaskInfo) -> list[SelectionCurve]:
    """A curve for each family with several configurations; none if there are no selection documents."""
    if not has_split(task):
        return []
    places = {cell.cell: place for place, cell in enumerate(run.cells)}
    families: dict[str, dict[Unit, list[CellResult]]] = {}
    for result in run.results:  # in the order of evaluation
        if score(result, task, "select") is not None and score(result, task) is not None:
            families.setdefault(result.cell.family, {}).setdefault(unit_of(result.cell), []).append(result)
    curves = []
    for family, units in families.items():
        most = max(map(len, units.values()))
        complete = [cells for cells in units.values() if len(cells) == most]
        if most > 1:
            points = tuple(_curve_point(number, complete, task, places) for number in range(1, most + 1))
            curves.append(SelectionCurve(task.name, family, len(complete), points))
    return curves


def _curve_point(
    number: int, units: Sequence[Sequence[CellResult]], task: TaskInfo, places: dict[str, int]
) -> tuple[int, float, float]:
    sign = 1 if task.higher_is_better else -1
    chosen: list[float] = []
    reported: list[float] = []
    for cells in units:
        evaluated = sorted(cells[:number], key=lambda cell: places.get(cell.cell.cell, len(places)))
        best = best_of(((score(cell, task, "select"), cell.cell.default, cell) for cell in evaluated), sign)
        for values, part in ((chosen, "select"), (reported, "report")):
            value = None if best is None else score(best, task, part)
            if value is not None:
                values.append(value)
    return number, sum(chosen) / len(chosen), sum(reported) / len(reported)


def truncations(run: Run, task: TaskInfo) -> list[Truncations]:
    """Each family's cells whose error is recorded."""
    families: dict[str, list[tuple[str, Unit, float, float]]] = {}
    for result in run.results:
        value = score(result, task)
        if result.relative_error is not None and value is not None:
            cell = result.cell
            point = cell.configuration, unit_of(cell), result.relative_error, value
            families.setdefault(cell.family, []).append(point)
    return [Truncations(task.name, family, tuple(points)) for family, points in families.items()]
