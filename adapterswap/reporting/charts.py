"""Where things stand in a report's pictures: bars, scatters and shades, as plain numbers for its page.

Knows scores; knows nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adapterswap.reporting.headline import Target
from adapterswap.reporting.relations import GridCell, Indicator, ZoneGrid
from adapterswap.reporting.report import Report

__all__ = ["Bar", "Bars", "Heatmap", "Scatter", "bars", "heatmaps", "labels_of", "lead_indicators", "scatter", "ticks"]

WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 300, 210, 46, 34, 12


@dataclass(frozen=True)
class Bar:
    """A row's mean on a task: percent of the scale that it fills, and where its standard error begins and ends."""

    family: str
    label: str
    value: float
    stderr: float | None
    filled: float
    error: tuple[float, float] | None


@dataclass(frozen=True)
class Bars:
    """One task's bars; `top` is the end of their scale, which begins at 0."""

    task: str
    top: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Heatmap:
    """A landscape as a table: `rows` from the highest u down, each with a cell or None for every b.

    `most` is over how many units a cell's mean is at most; a mean over fewer does not quite compare.

    A cell is (its `GridCell`, its shade from 0 for the worst to 1 for the best).
    """

    grid: ZoneGrid
    bottoms: tuple[int, ...]
    rows: tuple[tuple[int, tuple[tuple[GridCell, float] | None, ...]], ...]
    most: int


@dataclass(frozen=True)
class Scatter:
    """An indicator as a picture of `WIDTH` × `HEIGHT`: points as (x, y, expert), the axes' marks as (value, place).

    Experts that share a point share its label.
    """

    indicator: Indicator
    points: tuple[tuple[float, float, str], ...]
    across: tuple[tuple[float, float], ...]
    up: tuple[tuple[float, float], ...]


def bars(target: Target) -> list[Bars]:
    """Every task of a target's table, the target first; a task whose scores are below zero has none."""
    found = []
    for task in target.tasks:
        spreads = [(row, row.tasks[task]) for row in target.rows if task in row.tasks]
        if not spreads or min(spread.mean for _, spread in spreads) < 0:
            continue
        top = ticks(0, max(spread.mean + (spread.stderr or 0) for _, spread in spreads) or 1)[-1]
        shown = []
        for row, spread in spreads:
            half = spread.stderr
            error = (
                None
                if half is None
                else (_percent(max(0, spread.mean - half), top), _percent(min(top, spread.mean + half), top))
            )
            shown.append(Bar(row.family, row.label, spread.mean, half, _percent(spread.mean, top), error))
        found.append(Bars(task, top, tuple(shown)))
    return found


def heatmaps(grids: Sequence[ZoneGrid], higher_is_better: Mapping[str, bool]) -> list[Heatmap]:
    """The landscapes as tables, all of a task and family on one scale; `higher_is_better` is given for each task."""
    means: dict[tuple[str, str], list[float]] = {}
    for grid in grids:
        means.setdefault((grid.task, grid.family), []).extend(cell.mean for cell in grid.cells)
    found = []
    for grid in grids:
        seen = means[grid.task, grid.family]
        low, high = min(seen), max(seen)
        worst, best = (low, high) if higher_is_better[grid.task] else (high, low)
        cells = {(cell.bottom, cell.top): cell for cell in grid.cells}
        bottoms = tuple(sorted({bottom for bottom, _ in cells}))
        rows = []
        for top in sorted({top for _, top in cells}, reverse=True):
            row = [cells.get((bottom, top)) for bottom in bottoms]
            rows.append((top, tuple(None if cell is None else (cell, _shade(cell.mean, worst, best)) for cell in row)))
        found.append(Heatmap(grid, bottoms, tuple(rows), max(cell.units for cell in grid.cells)))
    return found


def _shade(value: float, worst: float, best: float) -> float:
    return 0.5 if worst == best else round((value - worst) / (best - worst), 3)


def scatter(indicator: Indicator) -> Scatter:
    """An indicator's points: the expert's own score across, its compositions' up."""
    xs, ys = [x for _, x, _ in indicator.points], [y for _, _, y in indicator.points]
    across, up = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def place_x(value: float) -> float:
        return _between(value, across, LEFT + EDGE, WIDTH - EDGE)

    def place_y(value: float) -> float:
        return _between(value, up, HEIGHT - BOTTOM - EDGE, EDGE)

    names: dict[tuple[float, float], list[str]] = {}
    for name, x, y in indicator.points:
        names.setdefault((place_x(x), place_y(y)), []).append(name)
    return Scatter(
        indicator,
        tuple((x, y, ", ".join(there)) for (x, y), there in names.items()),
        tuple((value, place_x(value)) for value in across),
        tuple((value, place_y(value)) for value in up),
    )


def lead_indicators(report: Report) -> list[Indicator]:
    """Those of the lead, or of all compositions if it has none; a picture of two points would say nothing."""
    shown = [each for each in report.indicators if each.correlation.points > 2]
    return [each for each in shown if each.merged in labels_of(report, report.lead)] or shown


def labels_of(report: Report, family: str) -> list[str]:
    """What a family's rows are called."""
    return [row.label for target in report.targets for row in target.rows if row.family == family]


def ticks(low: float, high: float, number: int = 4) -> Sequence[float]:
    """Round values from `low` or below to `high` or above, about `number` steps apart; two at least."""
    if high - low < 1e-9:
        low, high = low - 0.01, high + 0.01
    rough = (high - low) / number
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough - 1e-12)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 10) for place in range(first, max(last, first + 1) + 1)]


def _percent(value: float, top: float) -> float:
    return round(100 * value / top, 2)


def _between(value: float, marks: Sequence[float], first: float, last: float) -> float:
    return round(first + (value - marks[0]) / (marks[-1] - marks[0]) * (last - first), 1)
