"""The figures of a report, for print: scores, differences, landscapes, ranks, indicators, selections, truncations.

`plan_figures` lists a report's figures, each with its caption and its data; `draw` draws one. A figure shows its data
and nothing else, so tests can check them and readers can draw them differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from adapterswap.experiments.reporting.choices import Unit, unit_text
from adapterswap.experiments.reporting.headline import MethodRow, Target, resampled
from adapterswap.experiments.reporting.relations import Indicator, ZoneGrid
from adapterswap.experiments.reporting.report import Report
from adapterswap.experiments.reporting.statistics import MIN_UNITS, cliques
from adapterswap.kit.dependencies import require
from adapterswap.kit.style import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_FEWEST = 3  # points of a figure that shows a relation
_LINE = 0.125  # height of a line of text in inches
_EQUAL = 1e-9  # scores that differ by less differ by rounding only
_PARTS = {"selection documents": ":", "other documents": "-"}  # and their lines
_CHARACTER = 0.0585  # average width of a 7-point character in inches


@dataclass(frozen=True)
class PlannedFigure:
    """A figure that can be drawn.

    Attributes:
        name: the stem of its files: `scores`, `landscape-2`.
        kind: `scores`, `differences`, `landscape`, `critical-difference`, `indicators`, `selection` or `truncation`.
        place: the index of the target or landscape that it shows.
        caption: a caption for a paper.
        data: the numbers and names that it shows.
    """

    name: str
    kind: str
    place: int
    caption: str
    data: Mapping[str, Any]

    def draw(self, width: float) -> Figure:
        """Draw a figure `width` inches wide; its height depends on its content."""
        require("plots")
        with STYLE.applied():
            return _DRAW[self.kind](self.data, width)


def plan_figures(report: Report) -> tuple[list[PlannedFigure], dict[str, str]]:
    """The figures of a report, and for each kind that it lacks the reason: kind → reason."""
    of_targets = {
        "scores": (_scores, "no method has a score to report"),
        "differences": (_differences, "no method shares a unit with the reference"),
        "indicators": (_indicators, "fewer than three single experts were evaluated"),
        "selection": (_selection, "no configuration was selected on separate documents"),
        "truncation": (_truncation, f"fewer than {_FEWEST} compositions were reduced to a lower rank"),
    }
    contents: dict[str, list[_Content]] = {}
    reasons: dict[str, str] = {}
    for kind, (describe, reason) in of_targets.items():
        contents[kind] = [describe(report, target) for target in report.targets]
        reasons[kind] = reason

    contents["landscape"] = [_landscape(report, grid) for grid in report.grids]
    reasons["landscape"] = "no method has several values of b and u"

    contents["critical-difference"] = [_ranks(report)]
    reasons["critical-difference"] = (
        f"a critical difference needs three methods and {MIN_UNITS} settings that they share"
    )
    if report.ranking is not None and report.ranking.ranks.statistic is not None:
        reasons["critical-difference"] = f"{report.ranking.ranks.settings} settings are fewer than {MIN_UNITS}"

    figures: list[PlannedFigure] = []
    lacking: dict[str, str] = {}
    for kind in _DRAW:
        before = len(figures)
        for place, content in enumerate(contents[kind]):
            if content is None:
                continue
            caption, data = content
            name = kind if len(contents[kind]) == 1 else f"{kind}-{place + 1}"
            figures.append(PlannedFigure(name, kind, place, caption, data))
        if len(figures) == before:
            lacking[kind] = reasons[kind]
    return figures, lacking


# Captions and data.

_Content = tuple[str, dict[str, Any]] | None
"""The caption of a figure and its data; None if the report has none."""


def _scores(report: Report, target: Target) -> _Content:
    """The score of each method, with its interval and its units."""
    rows = []
    for row in target.rows:
        if row.spread is not None:
            units = [(chosen.unit, chosen.score) for chosen in row.chosen]
            rows.append(_row(report, row, row.spread.mean, row.interval, units))
    if not rows:
        return None

    # Beside others' intervals, a lead without one would look certain.
    if any(row["lead"] and row["interval"] is None for row in rows):
        for row_data in rows:
            row_data["interval"] = None

    mean = f"the mean over {_units(report, target)}"
    have_intervals = [row["interval"] is not None for row in rows]
    if any(have_intervals):
        mean += f", with {_interval_kind(target)}, not corrected for the number of methods"
        if not all(have_intervals):
            mean += "; no interval if there are too few experts or documents"
    caption = (
        f"{_task(report, target)} ({target.metric}): the score of each method, {_documents(target)}. "
        f"Filled: {mean}. Open: the individual {report.units}."
    )
    return caption, {"axis": _axis(report, target), "rows": rows}


def _differences(report: Report, target: Target) -> _Content:
    """The difference of each method from the reference, with its interval and its units."""
    rows = []
    for row in target.rows:
        if row.difference is not None:
            difference = row.difference
            rows.append(_row(report, row, difference.mean, difference.interval, difference.by_unit))
    if not rows:
        return None

    singular = report.units.removesuffix("s")
    caption = (
        f"{_task(report, target)} ({target.metric}): each method's score minus that of {report.reference}, "
        f"{_documents(target)}. "
        f"Filled: the mean over {_units(report, target)}; open: the difference in one {singular}, paired by document."
    )
    if any(row["interval"] for row in rows):
        caption += f" Lines: {_interval_kind(target)}, not corrected for the number of methods."
    return caption, {"axis": f"{_axis(report, target)}\nminus {report.reference}", "rows": rows}


def _row(
    report: Report,
    row: MethodRow,
    mean: float,
    interval: tuple[float, float] | None,
    units: Sequence[tuple[Unit, float | None]],
) -> dict[str, Any]:
    """A method's row as data of a figure: its mean, the interval, and the value of each unit."""
    shown = []
    for unit, value in units:
        if value is not None:
            shown.append({"unit": unit_text(unit), "value": value})
    return {"label": row.label, "lead": row.family == report.lead, "mean": mean, "interval": interval, "units": shown}


def _landscape(report: Report, grid: ZoneGrid) -> _Content:
    """The mean at each choice of bottom and top layers, or of two checkpoints."""
    (target,) = [target for target in report.targets if target.task == grid.task]

    # All landscapes of a task and a method have one scale; a shade is 0 for its worst score and 1 for its best.
    means = []
    for other in report.grids:
        if (other.task, other.family) == (grid.task, grid.family):
            means += [cell.mean for cell in other.cells]
    low, high = min(means), max(means)
    worst, best = low, high
    if not target.higher_is_better:
        worst, best = high, low

    cells = []
    for cell in sorted(grid.cells, key=lambda cell: (-cell.top, cell.bottom)):
        shade = 0.5
        if worst != best:
            shade = round((cell.mean - worst) / (best - worst), 3)
        content = {"bottom": cell.bottom, "top": cell.top, "mean": cell.mean, "units": cell.units}
        cells.append({**content, "chosen": cell.selected, "shade": shade})
    bottoms = sorted({cell.bottom for cell in grid.cells})
    tops = sorted({cell.top for cell in grid.cells})
    most = max(cell.units for cell in grid.cells)

    # What the two axes are, in words
    if grid.ladders:
        ladders = [report.labels.expert(name) for name in grid.ladders]
        axes = [f"{name}, steps" for name in ladders]
        choice = f"steps of the checkpoints of {' and '.join(ladders)}. One pair in each cell"
    else:
        axes = ["b, bottom layers", "u, top layers"]
        choice = (
            "number of bottom layers b and top layers u from the language expert. "
            f"Means over {most} {_counted(report.units, most)}"
        )

    # The documents: all, because a landscape is not where a configuration is chosen
    documents = f"all {target.select + target.report} documents"
    if report.kind == "lab":
        documents = "the development problems"
    elif target.select:
        documents += f", {target.select} of them used for selection"

    name = report.labels.task(grid.task)
    method = grid.family
    if grid.settings:
        method += f" ({grid.settings})"
    caption = f"{name}: {method} by the {choice}, on {documents}. Darker is better"

    # What else a reader needs to know
    caption += "." if target.higher_is_better else " (lower)."
    if any(cell.selected for cell in grid.cells):
        caption += f" ×n: selected for n of the {report.units}."
    if any(cell.units < most for cell in grid.cells):
        caption += f" *: a mean over fewer {report.units} than in the other cells."
    if len(cells) < len(tops) * len(bottoms):
        caption += " Hatched: not evaluated."

    data = {
        "bottoms": bottoms, "tops": tops, "cells": cells, "most": most, "scale": [low, high],
        "higher_is_better": target.higher_is_better, "axis": f"{name}: {method}", "axes": axes,
    }  # fmt: skip
    return caption, data


def _ranks(report: Report) -> _Content:
    """The mean ranks, and which methods Nemenyi's test does not separate."""
    if report.ranking is None:
        return None
    ranks = report.ranking.ranks
    if ranks.critical_difference is None or ranks.p is None:
        return None

    step = ranks.critical_difference
    shared = "settings that share an expert or documents are not"
    if report.ranking.over_groups:
        shared = f"all {report.ranking.group} share the same experts"
    caption = (
        f"Mean ranks of {len(ranks.mean_ranks)} methods over {ranks.settings} settings (1 is best; Friedman χ² = "
        f"{ranks.statistic:.2f}, {_p(ranks.p)}, Kendall's W = {ranks.agreement:.2f}). Methods joined by a line do not "
        f"differ at the 0.05 level by Nemenyi's test, which corrects for all pairs of methods: their mean ranks differ "
        f"by no more than the critical difference (CD), {step:.2f}. {report.setting}. The tests assume independent "
        f"settings; {shared}."
    )
    data = {
        "mean_ranks": dict(ranks.mean_ranks),
        "critical_difference": step,
        "cliques": [list(clique) for clique in cliques(ranks.mean_ranks, step)],
        "lead": labels_of(report, report.lead),
    }
    return caption, data


def _indicators(report: Report, target: Target) -> _Content:
    """A panel for each indicator of the lead."""
    indicators = [indicator for indicator in lead_indicators(report) if indicator.target == target.task]
    if not indicators:
        return None

    # A figure has one row of compositions: the first
    merged = indicators[0].merged
    panels = []
    for indicator in indicators:
        if indicator.merged != merged:
            continue
        points = []
        for expert, own, mean in indicator.points:
            points.append([report.labels.expert(expert), own, mean])
        panel = {
            "experts": indicator.experts,
            "signal": report.labels.task(indicator.signal),
            "points": points,
            "pearson": indicator.correlation.pearson,
            "pearson_holm": indicator.pearson_holm,
        }
        panels.append(panel)

    tested = "one indicator" if len(panels) == 1 else f"{len(panels)} indicators"
    caption = (
        f"Merging indicators for {_task(report, target)}: an expert's own score on a task (horizontal) against the "
        f"mean of {merged} over the {report.units} that include it (vertical). Each point is an expert. r: Pearson's "
        f"correlation; p: two-sided, corrected by Holm's method over {tested}, and omitted with "
        f"fewer than {MIN_UNITS} distinct points."
    )
    return caption, {"panels": panels, "axis": f"{merged}\non {_task(report, target)}"}


def _selection(report: Report, target: Target) -> _Content:
    """The course of each selection."""
    curves = []
    for curve in report.curves:
        if curve.task == target.task:
            points = [list(point) for point in curve.points]
            curves.append({"family": curve.family, "units": curve.units, "points": points})
    if not curves:
        return None

    caption = (
        f"{_task(report, target)}: the course of the selection. Score of the best configuration so far on the "
        f"{target.select} selection documents (dotted), and of the same "
        f"configuration on the {target.report} other documents (solid); "
        f"means over {report.units}. The gap between the two is what selecting on the test documents would add."
    )
    return caption, {"curves": curves, "axis": _axis(report, target)}


def _truncation(report: Report, target: Target) -> _Content:
    """The errors and scores of compositions that were reduced to a lower rank."""
    families = []
    number = 0
    for truncation in report.truncations:
        if truncation.task != target.task:
            continue
        points = []
        for configuration, unit, error, score in truncation.points:
            points.append({"configuration": configuration, "unit": unit_text(unit), "error": error, "score": score})
        families.append({"family": truncation.family, "points": points})
        number += len(points)
    if number < _FEWEST:
        return None

    caption = (
        f"{_task(report, target)}: compositions that were reduced to a lower rank before they were evaluated. "
        f"Horizontal: the largest relative error of a module's ΔW (Frobenius norm). Vertical: the score "
        f"{_documents(target)}. Each "
        f"point is one configuration with one of the {report.units} "
        f"(n = {number})."
    )
    return caption, {"families": families, "axis": _axis(report, target)}


def lead_indicators(report: Report) -> list[Indicator]:
    """The lead's indicators with three points or more; if it has none, those of all compositions."""
    shown = [indicator for indicator in report.indicators if indicator.correlation.points > 2]
    leads = labels_of(report, report.lead)
    of_lead = [indicator for indicator in shown if indicator.merged in leads]
    return of_lead or shown


def labels_of(report: Report, family: str) -> list[str]:
    """The labels of a family's rows."""
    labels = []
    for target in report.targets:
        for row in target.rows:
            if row.family == family:
                labels.append(row.label)
    return labels


def number_text(value: float, *, signed: bool = False) -> str:
    """Shares with three decimals, scores on other scales with one; zero after rounding has no sign."""
    form = ".3f" if abs(value) <= 1 else ".1f"
    if signed:
        form = f"+{form}"
    text = format(value, form)
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def _task(report: Report, target: Target) -> str:
    return report.labels.task(target.task)


def _axis(report: Report, target: Target) -> str:
    text = f"{_task(report, target)}: {target.metric}"
    if not target.higher_is_better:
        text += " (lower is better)"
    return text


def _documents(target: Target) -> str:
    """On which documents scores are reported, for a caption."""
    if target.of_corpus:
        return f"over the whole corpus of {target.report} documents"
    text = f"on {target.report} documents"
    if target.select:
        text += " not used for selection"
    return text


def _units(report: Report, target: Target) -> str:
    """`9 pairs`, or `up to 9 pairs` if methods have different numbers of them."""
    numbers = set()
    for row in target.rows:
        if row.spread is not None:
            numbers.add(row.spread.units)
    most = max(numbers, default=0)
    text = f"{most} {_counted(report.units, most)}"
    if len(numbers) > 1:
        text = f"up to {text}"
    return text


def _counted(units: str, number: int) -> str:
    return units.removesuffix("s") if number == 1 else units


def _interval_kind(target: Target) -> str:
    return f"95 % intervals over {resampled(target)}"


def p_value(value: float | None) -> str:
    """A p-value with three decimals; a dash without one."""
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _p(value: float) -> str:
    return f"p {p_value(value)}" if value < 0.001 else f"p = {p_value(value)}"


# Drawing.


def _draw_rows(data: Mapping[str, Any], width: float, *, zero: bool) -> Figure:
    """A row for each method: its units, its mean with the interval, and the mean as a number on the right."""
    rows = data["rows"]

    # A row is as high as its label, which takes about a third of the width; its place is its middle.
    characters = max(12, int(width * 0.36 / _CHARACTER))
    labels = []
    places = []
    bottom = 0.0
    for row in rows:
        label = STYLE.wrapped(row["label"], characters)
        lines = label.count("\n") + 1
        height = max(1.35, 0.35 + lines) * _LINE
        labels.append(label)
        places.append(bottom + height / 2)
        bottom += height

    axis = _wrapped_lines(data["axis"], width * 0.62)
    figure = STYLE.figure(width, bottom + 0.34 + _LINE * (axis.count("\n") + 1))
    axes = figure.add_subplot()

    shown = []
    for row in rows:
        shown.append(row["mean"])
        if row["interval"] is not None:
            shown += row["interval"]
        shown += [unit["value"] for unit in row["units"]]
    low, high = _limits(shown, zero=zero)
    if zero:
        axes.axvline(0, color=STYLE.grey, linewidth=0.8, zorder=1)

    for row, place in zip(rows, places, strict=True):
        colour, marker, weight = STYLE.ink, "o", "normal"
        if row["lead"]:
            colour, marker, weight = STYLE.lead, "D", "bold"
        values = [unit["value"] for unit in row["units"]]
        axes.plot(
            values, [place] * len(values), linestyle="none", marker="o",
            markersize=2.8, markerfacecolor="none", markeredgecolor=STYLE.grey, markeredgewidth=0.5,
            clip_on=False, zorder=2,
        )  # fmt: skip
        if row["interval"] is not None:
            axes.plot(row["interval"], [place, place], color=colour, linewidth=1.4, solid_capstyle="butt", zorder=3)
        axes.plot(
            [row["mean"]], [place], marker=marker, markersize=4.6, color=colour,
            markeredgecolor="white", markeredgewidth=0.5, clip_on=False, zorder=4,
        )  # fmt: skip
        axes.text(
            1.03, place, number_text(row["mean"], signed=zero), transform=axes.get_yaxis_transform(), va="center",
            fontsize=STYLE.small, color=colour, fontweight=weight,
        )  # fmt: skip

    axes.set_yticks(places, labels)
    for text, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row["lead"]:
            text.set(color=STYLE.lead, fontweight="bold")
        else:
            text.set(color=STYLE.ink, fontweight="normal")
    axes.set_ylim(bottom, 0)  # downwards
    axes.set_xlim(low, high)
    _few_ticks(axes.xaxis, int(width * 0.45 / 0.42))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(axis)
    STYLE.grid(axes, "x")
    return figure


def _limits(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    """The limits of an axis: not below 0 if no value is, and not above 1 for shares."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)

    room = 0.05 * (high - low)
    if high - low <= _EQUAL:
        room = 0.05 * max(abs(high), 0.2)
    first, last = low - room, high + room

    if not zero and low >= 0:
        first = max(first, 0.0)
        if high <= 1:
            last = min(last, 1.0)
    return first, last


def _few_ticks(axis: Any, number: int, *, whole: bool = False) -> None:
    """About `number` ticks at round values, and two at least, as an axis needs to show its scale."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(max(2, min(5, number)), steps=[1, 2, 2.5, 5, 10], integer=whole))


def _wrapped_lines(text: str, inches: float) -> str:
    """`text` with each line wrapped to a width of `inches`."""
    characters = int(inches / _CHARACTER)
    return "\n".join(STYLE.wrapped(line, characters) for line in text.split("\n"))


def _draw_landscape(data: Mapping[str, Any], width: float) -> Figure:
    """A cell for each choice of bottom and top layers, darker for a better score, with the number on it."""
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Rectangle

    # From 8 to 92 % of the blues: white text is readable on the darkest, and the lightest is darker than paper, so no
    # cell looks missing.
    blues = mpl.colormaps["Blues"]
    colours = ListedColormap([blues(0.08 + 0.84 * i / 255) for i in range(256)])

    bottoms, tops = data["bottoms"], data["tops"]
    side = (width - 0.95) / len(bottoms)
    height = min(max(0.24, side * 0.62), 0.42)
    figure = STYLE.figure(width, height * len(tops) + 0.45 + _LINE)
    axes = figure.add_subplot()
    evaluated = {(cell["bottom"], cell["top"]) for cell in data["cells"]}
    for x, bottom in enumerate(bottoms):
        for y, top in enumerate(tops):
            if (bottom, top) not in evaluated:
                STYLE.hatch_cell(axes, x, y)

    # Each cell has its score, and how often it was chosen if that fits.
    size = min(STYLE.small, 72 * side / 3.3)
    for cell in data["cells"]:
        x, y = bottoms.index(cell["bottom"]), tops.index(cell["top"])
        colour = colours(cell["shade"])
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
        if size < STYLE.note - 0.01:
            continue
        number = number_text(cell["mean"]).removeprefix("0")
        if cell["units"] < data["most"]:
            number += "*"
        text = number
        if cell["chosen"]:
            text += "\n" if height > 0.3 else " "
            text += f"×{cell['chosen']}"
        if len(text.split("\n")[0]) * _CHARACTER > side:
            text = number
        axes.text(
            x, y, text, ha="center", va="center", fontsize=size, color=STYLE.readable_on(colour), linespacing=1.05
        )

    axes.set_xlim(-0.5, len(bottoms) - 0.5)
    axes.set_ylim(-0.5, len(tops) - 0.5)
    every = max(1, math.ceil(0.16 / side))
    axes.set_xticks(range(0, len(bottoms), every), [str(bottom) for bottom in bottoms[::every]])
    axes.set_yticks(range(len(tops)), [str(top) for top in tops])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(data["axes"][0])
    axes.set_ylabel(data["axes"][1])

    low, high = data["scale"]
    if high - low > 1e-12:
        ordered = colours if data["higher_is_better"] else colours.reversed()
        scale = ScalarMappable(Normalize(low, high), ordered)
        bar = figure.colorbar(scale, ax=axes, pad=0.02, aspect=14, fraction=0.08)
        bar.outline.set_visible(False)
        _few_ticks(bar.ax.yaxis, 3)
        bar.ax.tick_params(labelsize=STYLE.note + 0.5, length=1.5)
    axes.set_title(_wrapped_lines(data["axis"], width * 0.8), loc="left", fontsize=STYLE.small)
    return figure


def _draw_ranks(data: Mapping[str, Any], width: float) -> Figure:
    """Mean ranks on an axis, names on both sides, lines under methods that do not differ (Demšar 2006, figure 1)."""
    ranks: Mapping[str, float] = data["mean_ranks"]
    ordered = sorted(ranks, key=lambda method: (ranks[method], method))
    left = ordered[: (len(ordered) + 1) // 2]
    right = ordered[len(left) :][::-1]

    # The height depends on the lines of names, one below the other, under those that join methods.
    characters = max(10, int(width * 0.3 / _CHARACTER))
    labels = {method: STYLE.wrapped(method, characters) for method in ordered}
    most_lines = max(label.count("\n") + 1 for label in labels.values())
    step = most_lines * 1.05 + 0.45
    joined = 0.75 * len(data["cliques"]) + 0.6
    depth = joined + step * len(left)
    figure = STYLE.figure(width, (depth + 4.2) * _LINE)
    axes = figure.add_subplot()
    number = len(ordered)
    axes.set_xlim(1, number)
    axes.set_ylim(-depth - 0.6, 3.6)
    axes.axis("off")

    # The axis. A number takes 0.17 inches; the shortest axis is a quarter of the width.
    line: dict[str, Any] = {"clip_on": False, "solid_capstyle": "butt"}
    axes.plot([1, number], [0, 0], color=STYLE.ink, linewidth=0.8, **line)
    every = max(1, math.ceil(0.17 * (number - 1) / (width * 0.25)))
    for place in range(1, number + 1):
        axes.plot([place, place], [0, 0.4], color=STYLE.ink, linewidth=0.8, **line)
        if (place - 1) % every == 0:
            axes.text(place, 0.55, str(place), ha="center", va="bottom", fontsize=STYLE.small)

    # The critical difference, and the methods that it does not separate
    distance = data["critical_difference"]
    end = min(1 + distance, number)
    axes.plot([1, end], [2.1, 2.1], color=STYLE.ink, linewidth=1.2, **line)
    for place in (1, end):
        axes.plot([place, place], [1.9, 2.3], color=STYLE.ink, linewidth=0.8, **line)
    text = f"CD = {distance:.2f}"
    if end < 1 + distance:
        text += " (longer than the axis)"
    axes.text(1, 2.5, text, ha="left", va="bottom", fontsize=STYLE.small)
    for place, clique in enumerate(data["cliques"]):
        y = -0.55 - 0.75 * place
        first, last = ranks[clique[0]], ranks[clique[-1]]
        axes.plot([first - 0.04, last + 0.04], [y, y], color=STYLE.grey, linewidth=2.6, **line)

    pad = 0.035 * (number - 1)
    for names, x, side, align in ((left, 1 - pad, -1, "right"), (right, number + pad, 1, "left")):
        for place, method in enumerate(names):
            y = -joined - step * (place + 0.5)
            colour, thickness, weight = STYLE.ink, 0.7, "normal"
            if method in data["lead"]:
                colour, thickness, weight = STYLE.lead, 1.2, "bold"
            axes.plot([ranks[method], ranks[method], x], [0, y, y], color=colour, linewidth=thickness, clip_on=False)
            axes.text(
                x + side * pad * 0.6, y, f"{labels[method]} {ranks[method]:.2f}", ha=align, va="center",
                fontsize=STYLE.small, color=colour, fontweight=weight, linespacing=1.05,
            )  # fmt: skip
    return figure


def _draw_indicators(data: Mapping[str, Any], width: float) -> Figure:
    """A panel for each indicator, in which a point is an expert."""
    panels = data["panels"]
    across = min(len(panels), max(1, int(width / 1.45)))
    down = -(-len(panels) // across)

    # One look for each expert, in all panels
    experts: dict[str, None] = {}
    for panel in panels:
        for name, _, _ in panel["points"]:
            experts[name] = None
    look = dict(zip(experts, STYLE.looks(len(experts)), strict=True))
    legend_columns, legend_lines = _legend_shape(list(experts), width)

    titles = []
    for panel in panels:
        correlation = "no r (constant)"
        if panel["pearson"] is not None:
            correlation = f"r = {panel['pearson']:.2f}".replace("-", "−")
        if panel["pearson_holm"] is not None:
            correlation += f", {_p(panel['pearson_holm'])}"
        where = _wrapped_lines(f"{panel['experts']} on\n{panel['signal']}", width / across * 0.8)
        titles.append(f"{where}\n{correlation}")
    tallest = max(title.count("\n") + 1 for title in titles)
    figure = STYLE.figure(width, down * (1.08 + _LINE * tallest) + 0.1 + legend_lines * _LINE * 1.35)
    grid = figure.subplots(down, across, squeeze=False)

    for axes, panel, title in zip(grid.flat, panels, titles, strict=False):
        for name, x, y in panel["points"]:
            axes.plot(
                x, y, marker=look[name].marker, color=look[name].colour, linestyle="none", markersize=4.5, clip_on=False
            )
        _, xs, ys = zip(*panel["points"], strict=True)
        for values, axis, set_limits in ((xs, axes.xaxis, axes.set_xlim), (ys, axes.yaxis, axes.set_ylim)):
            low, high = min(values), max(values)
            space = 0.01
            if high - low > _EQUAL:
                space = 0.12 * (high - low)
            set_limits(low - space, high + space)
            _few_ticks(axis, 3)
        axes.set_title(title, loc="left", fontsize=STYLE.note + 0.5, linespacing=1.05)
        axes.tick_params(labelsize=STYLE.note)
        STYLE.grid(axes, "both")
    for axes in grid.flat[len(panels) :]:
        axes.remove()

    label = _wrapped_lines(data["axis"], down * (0.85 + _LINE * tallest) * 0.95)
    figure.supylabel(label, fontsize=STYLE.small)
    handles = [_handle(name, color=look[name].colour, marker=look[name].marker) for name in experts]
    _legend(figure, handles, legend_columns)
    return figure


def _draw_selection(data: Mapping[str, Any], width: float) -> Figure:
    """Two lines for each family: the scores on the selection documents and on the others."""
    curves = data["curves"]
    names = [curve["family"] for curve in curves]
    figure, axes, columns = _panel([*names, *_PARTS], width)

    handles = []
    for curve, look in zip(curves, STYLE.looks(len(curves)), strict=True):
        steps, selected, others = zip(*curve["points"], strict=True)
        axes.plot(steps, selected, color=look.colour, linestyle=":", linewidth=1.0)
        every = max(1, len(steps) // 8)
        axes.plot(steps, others, color=look.colour, marker=look.marker, markevery=every)
        handles.append(_handle(curve["family"], color=look.colour, marker=look.marker))
    for name, line in _PARTS.items():
        handles.append(_handle(name, color=STYLE.ink, linestyle=line))

    # Whole numbers, the first and none beyond the last
    last = max(len(curve["points"]) for curve in curves)
    _few_ticks(axes.xaxis, 5, whole=True)
    ticks = [place for place in axes.get_xticks() if 1 < place <= last]
    axes.set_xticks([1, *ticks])
    return _finished(figure, axes, handles, columns, "configurations evaluated", data["axis"], width)


def _draw_truncation(data: Mapping[str, Any], width: float) -> Figure:
    """A point for each composition: the error of its reduction, and its score."""
    families = data["families"]
    figure, axes, columns = _panel([family["family"] for family in families], width)

    handles = []
    errors: list[float] = []
    for family, look in zip(families, STYLE.looks(len(families)), strict=True):
        xs = [point["error"] for point in family["points"]]
        ys = [point["score"] for point in family["points"]]
        marker: dict[str, Any] = {"marker": look.marker, "color": look.colour, "markerfacecolor": "none"}
        axes.plot(xs, ys, linestyle="none", markersize=3.6, clip_on=False, **marker)
        handles.append(_handle(family["family"], **marker))
        errors += xs

    if min(errors) > 0 and max(errors) > 30 * min(errors):
        axes.set_xscale("log")
    else:
        low, high = _limits(errors, zero=False)
        if max(errors) > 1:
            high = max(errors) * 1.05
        axes.set_xlim(low, high)
        _few_ticks(axes.xaxis, 5)
    return _finished(figure, axes, handles, columns, "largest relative error of a module's ΔW", data["axis"], width)


def _panel(names: Sequence[str], width: float) -> tuple[Figure, Axes, int]:
    """A figure with one panel, its axes, and the columns of the legend below it, with an entry for each name."""
    columns, lines = _legend_shape(names, width)
    figure = STYLE.figure(width, 1.75 + lines * _LINE * 1.35)
    return figure, figure.add_subplot(), columns


def _finished(
    figure: Figure, axes: Axes, handles: list[Any], columns: int, across: str, title: str, width: float
) -> Figure:
    """Label the panel of `_panel`, set the ticks of its scores, and draw its legend."""
    axes.set_xlabel(_wrapped_lines(across, width * 0.8))
    axes.set_title(_wrapped_lines(title, width * 0.85), loc="left", fontsize=STYLE.small)
    _few_ticks(axes.yaxis, 4)
    STYLE.grid(axes, "both")
    _legend(figure, handles, columns)
    return figure


def _legend(figure: Figure, handles: list[Any], columns: int) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.0, handletextpad=0.4)


def _legend_shape(names: Sequence[str], width: float) -> tuple[int, int]:
    return STYLE.legend_shape(names, width, cut=30, inches=_CHARACTER * 1.12, room=0.45)


def _handle(name: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"linestyle": "none", "label": STYLE.wrapped(name, 30), **look})


_DRAW: Mapping[str, Callable[[Mapping[str, Any], float], Figure]] = {
    "scores": partial(_draw_rows, zero=False),
    "differences": partial(_draw_rows, zero=True),
    "landscape": _draw_landscape,
    "critical-difference": _draw_ranks,
    "indicators": _draw_indicators,
    "selection": _draw_selection,
    "truncation": _draw_truncation,
}
"""How each kind is drawn, in the order of kinds."""
