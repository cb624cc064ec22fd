"""Documents that share a template are one draw; and where nothing is selected, all documents are reported."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from tiers import ALL

from adapterswap.cli.report import _table
from adapterswap.experiments.reporting.figures import plan_figures
from adapterswap.experiments.reporting.latex import latex_table
from adapterswap.experiments.reporting.output import render_page
from adapterswap.experiments.reporting.relations import Ranking, ranking
from adapterswap.experiments.sweeps import CellResult, Run, TaskInfo, TaskValue, summarize
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
    assert str(_table(report, report.targets[0], 140)[0].title).endswith("60 documents of 12 templates")


def test_one_group_is_counted_as_one(tmp_path: Path) -> None:
    requested = recipe(**ONE_PAIR, compositions=[{"bottom": 5}], retention=[])
    report = reported(craft(tmp_path / "run", requested, documents=60, values=values, groups=["t00"] * 60))
    assert re.search(r"a mean over 60 documents of 1 template\b", render_page(report))
    assert str(_table(report, report.targets[0], 140)[0].title).endswith("60 documents of 1 template")


def test_settings_of_one_pair_are_the_groups(tmp_path: Path) -> None:
    requested = recipe(**ONE_PAIR, compositions=[{"bottom": 5}], retention=[])
    run = craft(tmp_path / "run", requested, documents=60, values=values, groups=TEMPLATES)
    report = reported(run)
    found = {result.cell.family: np.array([*result.results[SW].docs.values()]) for result in Run.read(run).results}
    table = np.stack([scores.reshape(12, 5).mean(1) for scores in found.values()], 1)
    assert report.ranking is not None
    ranked = report.ranking
    assert (ranked.group, ranked.over_groups, ranked.has_both, ranked.ranks.settings) == ("templates", True, False, 12)
    assert (ranked.ranks.statistic, ranked.ranks.p) == pytest.approx(tuple(stats.friedmanchisquare(*table.T)))
    assert [ranked.ranks.mean_ranks[name] for name in found] == pytest.approx(stats.rankdata(-table, axis=1).mean(0))
    assert "12 settings. A setting is one of the templates" in render_page(report)
    captions = [figure.caption for figure in plan_figures(report)[0] if figure.kind == "critical-difference"]
    assert ["A setting is one of the templates" in caption for caption in captions] == [True]

    plain = reported(craft(tmp_path / "run", requested, documents=60, values=values))
    assert plain.ranking is None  # one task and one pair


def drawn(scores: NDArray[np.float64]) -> Ranking | None:
    """The ranking of scores (methods, pairs, templates) on two documents of each template."""
    methods, pairs, templates = scores.shape
    names = tuple(f"t{place // 2}" for place in range(2 * templates))
    everything = tuple(range(len(names)))
    task = TaskInfo(
        "own", "target", "sw", ("acc", "none"), True, len(names), (), everything, group="template", groups=names
    )
    results = []
    for method in range(methods):
        for pair in range(pairs):
            cell = Cell(
                f"{method}-{pair}",
                f"method {method}",
                (f"m{pair}",),
                (f"s{pair}",),
                {"bottom": method},
                "",
                True,
                ("own",),
            )
            docs = dict(enumerate(np.repeat(scores[method, pair], 2).tolist()))
            value = TaskValue(sum(docs.values()) / len(docs), None, {}, docs)
            results.append(CellResult(cell, {"own": value}, {}))
    run = Run(Path(), {}, {"own": task}, tuple(result.cell for result in results), tuple(results))
    return ranking(run, [task], "method 0", [f"method {method}" for method in range(methods)])


def test_settings_are_the_kind_that_shows_less(tmp_path: Path) -> None:
    """Pairs share templates, and templates share pairs: of the two, settings are those with the larger p."""
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 0.01, (3, 8, 20))
    lead = np.array([0.1, 0.0, 0.0])[:, None, None]
    for shape, over_groups in (((3, 1, 20), True), ((3, 8, 1), False)):
        found = drawn(noise + lead + generator.normal(0, 0.3, shape))
        assert found is not None
        assert (found.over_groups, found.has_both, found.group) == (over_groups, True, "templates")
        assert found.ranks.settings == (20 if over_groups else 8)


def test_equal_methods_differ_in_5_of_100_experiments() -> None:
    """Two methods that are equal on average, whose differences depend on templates and on pairs."""
    number = 2000 if ALL else 200
    found, over_pairs = 0, 0
    for seed in range(number):
        generator = np.random.default_rng(seed)
        scores = generator.normal(0, 0.05, (2, 1, 20)) + generator.normal(0, 0.02, (2, 8, 1))
        scores = scores + generator.normal(0, 0.05, (2, 8, 20))
        result = drawn(scores)
        assert result is not None
        p = result.ranks.comparisons[0].wilcoxon
        found += p is not None and p < 0.05
        means = scores.mean(2)
        over_pairs += stats.wilcoxon(means[0] - means[1]).pvalue < 0.05
    assert found <= stats.binom.ppf(0.99, number, 0.07)
    assert over_pairs > stats.binom.ppf(0.999, number, 0.07)  # as if pairs did not share the templates


def test_the_papers_protocol_needs_a_selection(tmp_path: Path) -> None:
    """Where nothing is selected, its columns would repeat the mean."""
    for compositions, is_shown in (([{"bottom": 5}], False), ([{"bottom": [4, 5]}], True)):
        requested = recipe(**ONE_PAIR, compositions=compositions, retention=[])
        report = reported(craft(tmp_path / "run", requested, documents=40))
        heads = [str(column.header) for column in _table(report, report.targets[0], 200)[0].columns]
        assert ("papers' mean" in heads) == is_shown
        assert ("papers' protocol" in latex_table(report)) == is_shown
        assert ("columns “papers’ protocol”" in render_page(report)) == is_shown
        assert all(own.papers is not None for own in report.targets[0].rows)


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
