"""The geometry of the charts on a report's page: bars, scatter plots and shades, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterswap.reporting.headline import Target
from adapterswap.reporting.relations import GridCell, Indicator, ZoneGrid
from adapterswap.reporting.report import Report

WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 300, 210, 46, 34, 12


@dataclass(frozen=True)
class Heatmap:
    """A landscape as a table.

    Attributes:
        grid: the landscape.
        bottoms: the values of b, one for each column.
        rows: (u, cells), from the highest u down. A cell is (its `GridCell`, its shade from 0 for the worst to 1 for
            the best), or None if it was not evaluated.
        most: the largest number of units in a cell's mean; means over fewer units do not quite compare.
    """

    grid: ZoneGrid
    bottoms: tuple[int, ...]
    rows: tuple[tuple[int, tuple[tuple[GridCell, float] | None, ...]], ...]
    most: int


def bars(target: Target) -> list[dict[str, Any]]:
    """The bars of every task in a target's table, the target first; tasks with scores below zero are left out.

    The bars of a task have one scale from 0, and `filled` and the ends of `error`, the standard error, are in percent
    of it.
    """
    charts = []
    for task in target.tasks:
        spreads = [(row, row.tasks[task]) for row in target.rows if task in row.tasks]
        if not spreads or min(spread.mean for _, spread in spreads) < 0:
            continue
        top = ticks(0, max(spread.mean + (spread.stderr or 0) for _, spread in spreads) or 1)[-1]
        shown = []
        for row, spread in spreads:
            error = None
            if (half := spread.stderr) is not None:
                error = _percent(max(0, spread.mean - half), top), _percent(min(top, spread.mean + half), top)
            filled = _percent(spread.mean, top)
            bar = {"family": row.family, "label": row.label, "value": spread.mean, "filled": filled, "error": error}
            shown.append(bar)
        charts.append({"task": task, "bars": shown})
    return charts


def heatmaps(grids: Sequence[ZoneGrid], higher_is_better: Mapping[str, bool]) -> list[Heatmap]:
    """The landscapes as tables, one scale for each task and family; `higher_is_better` has an entry for each task."""
    means: dict[tuple[str, str], list[float]] = {}
    for grid in grids:
        means.setdefault((grid.task, grid.family), []).extend(cell.mean for cell in grid.cells)
    maps = []
    for grid in grids:
        scores = means[grid.task, grid.family]
        low, high = min(scores), max(scores)
        worst, best = (low, high) if higher_is_better[grid.task] else (high, low)
        cells = {(cell.bottom, cell.top): cell for cell in grid.cells}
        bottoms = tuple(sorted({bottom for bottom, _ in cells}))
        rows = []
        for top in sorted({top for _, top in cells}, reverse=True):
            row = [cells.get((bottom, top)) for bottom in bottoms]
            rows.append((top, tuple(None if cell is None else (cell, _shade(cell.mean, worst, best)) for cell in row)))
        maps.append(Heatmap(grid, bottoms, tuple(rows), max(cell.units for cell in grid.cells)))
    return maps


def _shade(value: float, worst: float, best: float) -> float:
    return 0.5 if worst == best else round((value - worst) / (best - worst), 3)


def scatter(indicator: Indicator) -> dict[str, Any]:
    """An indicator's chart of `WIDTH` × `HEIGHT`: an expert's own score across, its compositions' score up.

    Points are (x, y, expert), where experts at the same point share a label, and the axes' ticks (value, place).
    """
    xs, ys = [x for _, x, _ in indicator.points], [y for _, _, y in indicator.points]
    across, up = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def place_x(value: float) -> float:
        return _between(value, across, LEFT + EDGE, WIDTH - EDGE)

    def place_y(value: float) -> float:
        return _between(value, up, HEIGHT - BOTTOM - EDGE, EDGE)

    names: dict[tuple[float, float], list[str]] = {}
    for name, x, y in indicator.points:
        names.setdefault((place_x(x), place_y(y)), []).append(name)
    return {
        "indicator": indicator,
        "points": [(x, y, ", ".join(experts)) for (x, y), experts in names.items()],
        "across": [(value, place_x(value)) for value in across],
        "up": [(value, place_y(value)) for value in up],
    }


def lead_indicators(report: Report) -> list[Indicator]:
    """The lead's indicators with three points or more; if it has none, those of all compositions."""
    shown = [indicator for indicator in report.indicators if indicator.correlation.points > 2]
    return [indicator for indicator in shown if indicator.merged in labels_of(report, report.lead)] or shown


def labels_of(report: Report, family: str) -> list[str]:
    """The labels of a family's rows."""
    return [row.label for target in report.targets for row in target.rows if row.family == family]


def ticks(low: float, high: float, number: int = 4) -> Sequence[float]:
    """At least two round values that span `low` to `high` in about `number` steps."""
    if high - low < 1e-9:
        low, high = low - 0.01, high + 0.01
    rough = (high - low) / number
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough - 1e-12)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 10) for place in range(first, max(last, first + 1) + 1)]


def number_text(value: float, *, signed: bool = False) -> str:
    """Shares with three decimals, scores on other scales with one; zero after rounding has no sign."""
    form = ".3f" if abs(value) <= 1 else ".1f"
    text = format(value, f"+{form}" if signed else form)
    return (text.lstrip("+-") if float(text) == 0 else text).replace("-", "−")


def _percent(value: float, top: float) -> float:
    return round(100 * value / top, 2)


def _between(value: float, marks: Sequence[float], first: float, last: float) -> float:
    return round(first + (value - marks[0]) / (marks[-1] - marks[0]) * (last - first), 1)
