"""Figures: their data come from the report, they draw that data, and all of it is readable in print."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import font_subsets
import numpy as np
import pytest
from pictures import check_figure, check_files, drawn_texts
from tiers import ALL

from adapterswap.experiments.reporting import Report
from adapterswap.experiments.reporting.figures import PlannedFigure, plan_figures
from adapterswap.experiments.reporting.statistics import cliques
from adapterswap.experiments.sweeps import Run
from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.kit.errors import ArgumentError
from adapterswap.kit.style import STYLE

from .conftest import Written
from .crafting import craft, recipe
from .reading import EN, SW, TE, reported, row

KINDS = {"scores", "differences", "landscape", "critical-difference", "indicators", "selection", "truncation"}


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two languages, TIES reduced to a rank, long names, and a landscape with holes."""

    def is_there(cell: Cell) -> bool:
        return (cell.composition.get("bottom"), cell.composition.get("top")) not in {(3, 2), (5, 0)}

    requested = recipe(
        language_experts={name: name for name in ("sw1", "sw2", "sw3", "te1", "te2", "te3")},
        compositions={
            "layer_swap": {"bottom": [3, 4, 5], "top": [0, 1, 2]},
            "TIES with a name that is much longer than a column of a paper can hold, $x_1^2$": {
                "method": "ties", "density": [0.2, 0.5], "max_rank": 8,
            },
        },
        tasks={"sw*": [SW], "te*": [TE]}, retention=[EN],
    )  # fmt: skip
    folder = craft(
        tmp_path_factory.mktemp("figures") / "run", requested, documents=30, finished=is_there,
        errors=lambda cell: 0.01 + cell.composition["density"] / 2,
    )  # fmt: skip
    return reported(folder)


def planned(report: Report, kind: str) -> PlannedFigure:
    return next(each for each in plan_figures(report)[0] if each.kind == kind)


@pytest.mark.sampled(2)  # the narrowest and the widest
@pytest.mark.parametrize("width", [2.5, 3.25, 6.75])
def test_every_figure_is_readable(written: Written, truncated: Report, width: float) -> None:
    made = [each for report in (written.report, truncated) for each in plan_figures(report)[0]]
    assert {each.kind for each in made} == KINDS
    for each in made:
        check_figure(each.draw(width), width)


def test_files_have_their_fonts_and_the_same_bytes(truncated: Report, tmp_path: Path) -> None:
    figures = plan_figures(truncated)[0]
    again = figures if ALL else figures[::3]
    for folder, drawn in ((tmp_path / "a", figures), (tmp_path / "b", again)):
        folder.mkdir()
        font_subsets.KEPT.clear()
        for each in drawn:
            STYLE.save(each.draw(3.25), folder, each.name)
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    for each in figures:
        check_files(tmp_path / "a", each.name, 3.25)


def test_one_figure_for_each_target_and_landscape(written: Written, truncated: Report) -> None:
    names = [each.name for each in plan_figures(written.report)[0]]
    assert names == [
        "scores", "differences", "landscape-1", "landscape-2", "critical-difference", "indicators", "selection"
    ]  # fmt: skip
    result, lacking = plan_figures(truncated)
    assert [each.name for each in result if each.kind == "scores"] == ["scores-1", "scores-2"]
    assert lacking == {}
    assert plan_figures(written.report)[1].keys() == {"truncation"}


def test_scores_are_drawn_as_they_are(written: Written) -> None:
    each = planned(written.report, "scores")
    (axes,) = each.draw(3.25).axes
    means = [line for line in axes.lines if line.get_marker() in ("D", "o") and line.get_markerfacecolor() != "none"]
    rows = [row for row in written.report.targets[0].rows if row.spread is not None]
    assert [line.get_xdata()[0] for line in means] == [row.spread.mean for row in rows if row.spread]
    intervals = [tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == "None"]
    assert intervals == [row.interval for row in rows if row.interval is not None]
    units = [sorted(line.get_xdata()) for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert units == [sorted(chosen.score for chosen in row.chosen if chosen.score is not None) for row in rows]
    assert [text.get_text().replace("\n", " ") for text in axes.get_yticklabels()] == [row.label for row in rows]
    places = [line.get_ydata()[0] for line in means]
    assert places == pytest.approx(list(axes.get_yticks()))
    assert places == sorted(places)
    low, high = axes.get_xlim()
    drawn = [value for line in axes.lines for value in line.get_xdata()]
    assert low <= min(drawn) <= max(drawn) <= high
    assert max(drawn) - min(drawn) > 0.85 * (high - low)


def test_intervals_do_not_leave_the_scale(tmp_path: Path) -> None:
    """Scores near 0 and near 1: neither the interval nor the axis exceeds them."""
    good = {"base": 0.0, "soup": 0.03, "layer_swap": 0.97}
    folder = craft(
        tmp_path / "run", recipe(baselines=["base", "soup"], retention=[]), documents=30,
        values=lambda cell, task: [
            float(np.random.default_rng([int(cell.cell, 16), doc]).random() < good[cell.family]) for doc in range(30)
        ],
    )  # fmt: skip
    report = reported(folder)
    swap = row(report, "layer_swap, default")
    assert swap.interval is not None
    assert 0.7 < swap.interval[0] < swap.interval[1] <= 1
    soup = row(report, "soup")
    assert soup.interval is not None
    assert soup.interval[0] >= 0
    (axes,) = planned(report, "scores").draw(3.25).axes
    assert axes.get_xlim()[0] >= 0
    assert axes.get_xlim()[1] <= 1


def test_differences_are_those_of_units(written: Written) -> None:
    task = Run.read(written.run).tasks[SW]
    outcome = row(written.report, "partition B").difference
    assert outcome is not None
    scores: dict[str, dict[Any, float]] = {"task expert": {}, "partition B": {}}
    for result in Run.read(written.run).results:
        if result.cell.family in scores:
            pair = result.cell.task_expert + result.cell.language_expert  # of a task expert alone: (it,)
            docs = result.results[SW].docs
            scores[result.cell.family][pair] = float(np.mean([docs[doc] for doc in task.report]))
    for unit, value in outcome.by_unit:
        assert value == pytest.approx(scores["partition B"][unit[:2]] - scores["task expert"][unit[:1]])
    assert np.mean([value for _, value in outcome.by_unit]) == pytest.approx(outcome.mean)
    each = planned(written.report, "differences")
    (drawn,) = (one for one in each.data["rows"] if one["label"] == "partition B")
    assert [unit["value"] for unit in drawn["units"]] == [value for _, value in outcome.by_unit]
    (axes,) = each.draw(3.25).axes
    low, high = axes.get_xlim()
    assert low <= 0 <= high


def test_missing_cells_are_hatched_and_not_zero(truncated: Report) -> None:
    each = planned(truncated, "landscape")
    axes = each.draw(3.25).axes[0]
    hatched = [patch for patch in axes.patches if patch.get_hatch() == STYLE.hatch]
    bottoms, tops = each.data["bottoms"], each.data["tops"]
    places = {(bottoms[round(p.get_x() + 0.5)], tops[round(p.get_y() + 0.5)]) for p in hatched}
    assert places == {(3, 2), (5, 0)}
    assert "Hatched" in each.caption
    shown = [text.get_text().split("\n")[0].rstrip("*") for text in axes.texts]
    (grid,) = (grid for grid in truncated.grids if grid.task == SW)
    assert sorted(shown) == sorted(f"{cell.mean:.3f}".removeprefix("0") for cell in grid.cells)
    full = [patch for patch in axes.patches if not patch.get_hatch()]
    assert len(full) == 7
    mesh = next(one for one in each.draw(3.25).axes[1].collections if one.get_array() is not None)
    for cell, patch in zip(each.data["cells"], full, strict=True):  # the bar says what the colours mean
        assert patch.get_facecolor() == pytest.approx(mesh.cmap(mesh.norm(cell["mean"])), abs=0.01)
    darkest = min(full, key=lambda patch: sum(patch.get_facecolor()[:3]))
    best = max(grid.cells, key=lambda cell: cell.mean)
    assert (round(darkest.get_x() + 0.5), round(darkest.get_y() + 0.5)) == (best.bottom - 3, best.top)


def test_lightness_alone_orders_a_landscape(written: Written) -> None:
    """In grayscale, the better cell is darker, and its number is readable."""
    axes = planned(written.report, "landscape").draw(3.25).axes[0]
    full = [patch for patch in axes.patches if not patch.get_hatch()]
    cells = [
        (float(text.get_text().split("\n")[0]), patch.get_facecolor(), text.get_color())
        for patch, text in zip(full, axes.texts, strict=True)
    ]
    assert len(cells) == 9
    grey = [(score, 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) for score, colour, _ in cells]
    ordered = sorted(grey)
    assert all(a[1] >= b[1] for a, b in pairwise(ordered) if a[0] < b[0])
    assert all(text == STYLE.readable_on(colour) for _, colour, text in cells)


def test_the_diagram_joins_what_does_not_differ(written: Written) -> None:
    ranking = written.report.ranking
    assert ranking is not None
    each = planned(written.report, "critical-difference")
    step = ranking.ranks.critical_difference
    assert step is not None
    joined = {frozenset(pair) for clique in each.data["cliques"] for pair in _pairs(clique)}
    for comparison in ranking.ranks.comparisons:
        assert comparison.nemenyi is not None
        assert (frozenset((comparison.one, comparison.other)) in joined) == (comparison.nemenyi >= 0.05)
    figure = each.draw(6.75)
    bars = [tuple(line.get_xdata()) for line in figure.axes[0].lines if line.get_linewidth() == 2.6]
    means = ranking.ranks.mean_ranks
    assert each.data["cliques"]
    for clique, (low, high) in zip(each.data["cliques"], bars, strict=True):
        assert low == pytest.approx(min(means[method] for method in clique), abs=0.1)
        assert high == pytest.approx(max(means[method] for method in clique), abs=0.1)

    texts = drawn_texts(figure)
    for method, mean in means.items():
        assert f"{method} {mean:.2f}" in {text.replace("\n", " ") for text in texts}


def _pairs(clique: list[str]) -> list[tuple[str, str]]:
    return [(one, other) for place, one in enumerate(clique) for other in clique[place + 1 :]]


def test_cliques() -> None:
    assert cliques({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, 1.0) == [("a", "b"), ("b", "c"), ("c", "d")]
    assert cliques({"a": 1.0, "b": 1.5, "c": 2.0, "d": 4.0}, 1.0) == [("a", "b", "c")]
    assert cliques({"a": 1.0, "b": 3.0}, 1.0) == []
    assert cliques({"b": 1.5, "a": 1.5}, 0.1) == [("a", "b")]


def test_no_diagram_without_tests(tmp_path: Path) -> None:
    pairs = [{"task": "math1", "language": f"sw{i}"} for i in (1, 2, 3)]
    report = reported(craft(tmp_path / "run", recipe(pairs=pairs, retention=[]), documents=12))
    result, lacking = plan_figures(report)
    assert "critical-difference" not in {each.kind for each in result}
    assert lacking["critical-difference"] == "3 settings are fewer than 5"
    one = craft(tmp_path / "one", recipe(pairs=pairs[:1], retention=[]), documents=12)
    _, lacking = plan_figures(reported(one))
    assert "5 settings" in lacking["critical-difference"]  # there are enough methods


def test_the_selection_is_followed(written: Written) -> None:
    run = Run.read(written.run)
    task = run.tasks[SW]
    (curve,) = written.report.curves
    by_pair: dict[Any, list[Any]] = {}
    for result in run.results:
        if result.cell.family == "layer_swap":
            pair = result.cell.task_expert + result.cell.language_expert
            by_pair.setdefault(pair, []).append(result.results[SW].docs)
    assert curve.units == 9
    assert [number for number, _, _ in curve.points] == list(range(1, 19))
    for number, chosen, _ in curve.points:
        best = [
            max(np.mean([docs[doc] for doc in task.select]) for docs in tried[:number]) for tried in by_pair.values()
        ]
        assert chosen == pytest.approx(np.mean(best))
    selected = row(written.report, "layer_swap, selected").spread
    assert selected is not None
    assert curve.points[-1][2] == pytest.approx(selected.mean)
    (axes,) = planned(written.report, "selection").draw(3.25).axes
    dotted, solid = axes.lines
    assert list(dotted.get_ydata()) == [point[1] for point in curve.points]
    assert list(solid.get_ydata()) == [point[2] for point in curve.points]


@pytest.mark.parametrize("last", [2, 3, 8, 12, 13, 76])
def test_the_ticks_of_a_selection_are_whole_and_evenly_spaced(last: int) -> None:
    points = [[number, 0.5, 0.5] for number in range(1, last + 1)]
    data = {"axis": "a task", "curves": [{"family": "layer swap", "points": points}]}
    (axes,) = PlannedFigure("selection", "selection", 0, "", data).draw(3.25).axes
    first, *others = axes.get_xticks()
    assert first == 1
    assert others
    assert max(others) <= last
    assert all(place == round(place) for place in others)
    assert len({after - before for before, after in pairwise(others)}) <= 1


def test_truncation_is_every_cell(truncated: Report) -> None:
    each = planned(truncated, "truncation")
    (family,) = each.data["families"]
    assert len(family["points"]) == 9 * 2
    assert {point["error"] for point in family["points"]} == {0.11, 0.26}
    (line,) = each.draw(3.25).axes[0].lines
    assert sorted(line.get_ydata()) == sorted(point["score"] for point in family["points"])


def test_one_of_everything(tmp_path: Path) -> None:
    """One pair, one document to report on, equal scores: figures have no intervals and no NaN."""
    requested = recipe(task_experts={"math1": "m"}, language_experts={"sw1": "s"}, retention=[])
    folder = craft(tmp_path / "run", requested, documents=2, values=lambda cell, task: [0.0, 0.0])
    for each in plan_figures(reported(folder))[0]:
        check_figure(each.draw(3.25), 3.25)
        assert "nan" not in repr(each.data)


@pytest.mark.parametrize(
    ("text", "inches"),
    [("3.25in", 3.25), ("8.255cm", 3.25), ("82.55mm", 3.25), ("219pt", 219 / 72.27), ("4", 4.0), (6, 6.0)],
)
def test_widths(text: str, inches: float) -> None:
    assert STYLE.inches(text) == pytest.approx(inches)


@pytest.mark.parametrize("text", ["", "wide", "3.25 inches", "-3in", "1in", "nan", "300in", "0x10in"])
def test_invalid_widths(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        STYLE.inches(text)
    assert caught.value.parameter == "column_width"


def test_series_are_distinguishable_without_colour() -> None:
    number = 36
    assert len({(look.marker, look.line) for look in STYLE.looks(number)}) == number
    assert STYLE.wrapped("swahili " * 20, 12).count("\n") == 2
    assert "U+0B95" in STYLE.wrapped("க", 20)


def test_scores_that_differ_only_by_rounding_have_a_scale(written: Written) -> None:
    each = planned(written.report, "indicators")
    panels = [{**panel, "points": [[name, x, 0.1 + 0.2 + place * 1e-17] for place, (name, x, _) in
                                   enumerate(panel["points"])]} for panel in each.data["panels"]]  # fmt: skip
    for axes in replace(each, data={**each.data, "panels": panels}).draw(3.25).axes:
        low, high = axes.get_ylim()
        assert 0.01 < high - low < 0.1
        assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) > 1
