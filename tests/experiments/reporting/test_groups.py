"""Documents that share a template are one draw; and where nothing is selected, all documents are reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from adapterswap.experiments.reporting.figures import plan_figures
from adapterswap.experiments.reporting.latex import latex_table
from adapterswap.experiments.reporting.output import render_page
from adapterswap.experiments.sweeps import Run, summarize
from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.experiments.sweeps.recipe import DocumentSplit

from .crafting import craft, recipe
from .reading import SW, reported, row

ONE_PAIR = {"task_experts": {"math1": "experts/math1"}, "language_experts": {"sw1": "experts/sw1"}}
TEMPLATES = [f"t{place // 5:02}" for place in range(60)]


def values(cell: Cell, task: str) -> list[float]:
    """Right answers, of which a template has many or few."""
    generator = np.random.default_rng(int(cell.cell, 16))
    shares = np.repeat(generator.beta(2, 2, 12), 5)
    return (generator.random(60) < shares).astype(float).tolist()


def test_intervals_are_over_the_groups_of_documents(tmp_path: Path) -> None:
    requested = recipe(**ONE_PAIR, compositions=[{"bottom": 5}], retention=[])
    run = craft(tmp_path / "run", requested, documents=60, values=values, groups=TEMPLATES)
    report = reported(run)
    found = {result.cell.family: np.array([*result.results[SW].docs.values()]) for result in Run.read(run).results}
    difference = found["layer_swap"] - found["task expert"]
    means = difference.reshape(12, 5).mean(1)
    own = row(report, "layer_swap").difference
    assert own is not None
    assert own.over == ("templates",)
    assert own.interval == pytest.approx(stats.t.interval(0.95, 11, loc=means.mean(), scale=stats.sem(means)))
    spread = row(report, "layer_swap").spread
    assert spread is not None
    assert spread.stderr == pytest.approx(stats.sem(found["layer_swap"].reshape(12, 5).mean(1)))
    page = render_page(report)
    assert "a mean over 60 documents of 12 templates" in page
    assert "Intervals are over templates.\n" in page
    assert "intervals over templates, " in latex_table(report)
    assert "standard error over templates." in latex_table(report)
    captions = [figure.caption for figure in plan_figures(report)[0] if figure.kind in ("scores", "differences")]
    assert ["intervals over templates" in caption for caption in captions] == [True, True]


def test_a_group_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    select, report = DocumentSplit().split(60, TEMPLATES)
    assert sorted([*select, *report]) == list(range(60))
    assert len(select) == len(report) == 30
    assert {TEMPLATES[doc] for doc in select}.isdisjoint({TEMPLATES[doc] for doc in report})
    assert DocumentSplit().split(5, ["a"] * 5) == ((), (0, 1, 2, 3, 4))
    assert DocumentSplit().split(40) == DocumentSplit().split(40, [str(doc) for doc in range(40)])
    run = craft(tmp_path / "run", recipe(**ONE_PAIR), documents=60, values=values, groups=TEMPLATES)
    target = reported(run).targets[0]
    assert (target.select, target.report, target.groups, target.group) == (30, 30, 6, "templates")


def test_nothing_selected_nothing_halved(tmp_path: Path) -> None:
    requested = recipe(**ONE_PAIR, compositions=[{"bottom": 5}])
    run = craft(tmp_path / "run", requested, documents=40)
    assert Run.read(run).tasks[SW].select
    report = reported(run)
    assert (report.targets[0].select, report.targets[0].report) == (0, 40)
    whole = {result.cell.family: result.results[SW].value for result in Run.read(run).results}
    for own in report.targets[0].rows:
        assert own.spread is not None
        assert own.spread.mean == pytest.approx(whole[own.family])
    assert "Configurations are selected on" not in render_page(report)
    for summary in summarize(Run.read(run)):
        assert (summary.chosen_at, summary.best) == (None, None)
        assert summary.reported_at == pytest.approx(whole[summary.family])

    several = reported(craft(tmp_path / "run", recipe(**ONE_PAIR), documents=40))
    assert (several.targets[0].select, several.targets[0].report) == (20, 20)


def test_pairs_whose_experts_appear_once_are_the_draws(tmp_path: Path) -> None:
    sides = {
        "task_experts": {f"m{i}": "m" for i in range(1, 6)},
        "language_experts": {f"s{i}": "s" for i in range(1, 6)},
    }
    pairs = [{"task": f"m{i}", "language": f"s{i}"} for i in range(1, 6)]
    requested = recipe(**sides, pairs=pairs, compositions=[{"bottom": 5}], retention=[])
    own = row(reported(craft(tmp_path / "run", requested, documents=30)), "layer_swap").difference
    assert own is not None
    assert (own.design, own.over, own.units) == ("paired", ("pairs", "documents"), 5)
    crossed = recipe(**sides, compositions=[{"bottom": 5}], retention=[])
    own = row(reported(craft(tmp_path / "run", crossed, documents=30)), "layer_swap").difference
    assert own is not None
    assert (own.design, own.units) == ("crossed", 25)
    assert own.over == ("task experts", "language experts", "documents")
