"""Statistics against scipy and cases worked by hand, degenerate ones included."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adapterswap.experiments.reporting import statistics
from adapterswap.experiments.reporting.statistics import bootstrap, correlate, standard_error
from adapterswap.experiments.sweeps.results import Run

from .crafting import craft, recipe
from .reading import reported

PAIRS = [(f"m{i}", f"s{j}") for i in range(3) for j in range(3)]
SEEDS = [(str(i),) for i in range(5)]


def test_standard_error_matches_scipy() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert standard_error(values) == pytest.approx(stats.sem(values))
    assert standard_error([1.0]) is None
    assert standard_error([]) is None
    assert standard_error([2.0, 2.0]) == 0


def test_over_documents_alone_it_matches_scipys_percentile_bootstrap() -> None:
    values = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], 250, p=[0.1, 0.7, 0.2])
    ours = bootstrap(values, draws=20_000)
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours.mean == values.mean()
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.006)
    assert ours == bootstrap(values, draws=20_000)
    assert ours != bootstrap(values, draws=20_000, seed=1)


def test_pairs_and_documents_are_drawn_independently() -> None:
    """Against a loop that draws experts and documents by hand, on a grid with holes."""
    generator = np.random.default_rng(3)
    units = [("m1", "s1"), ("m1", "s2"), ("m2", "s1"), ("m3", "s3")]
    values = generator.normal(size=(4, 40)) + np.array([[0.0], [1.0], [3.0], [2.0]])
    place = {unit: index for index, unit in enumerate(units)}
    means = []
    while len(means) < 8000:
        tasks, languages = generator.choice(["m1", "m2", "m3"], 3), generator.choice(["s1", "s2", "s3"], 3)
        documents = generator.integers(0, 40, 40)
        drawn = [place[task, language] for task in tasks for language in languages if (task, language) in place]
        if drawn:
            means.append(np.mean([values[unit, documents].mean() for unit in drawn]))
    result = bootstrap(values, units, draws=8000)
    mean = values.mean()
    assert result.mean == pytest.approx(mean)
    tasks = [values[:2].mean(), values[2].mean(), values[3].mean()]
    languages = [values[[0, 2]].mean(), values[1].mean(), values[3].mean()]
    parts = [(np.var(each) / len(each), len(each)) for each in (tasks, languages, values.mean(0))]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / (n - 1) for part, n in parts)
    spread = math.sqrt(sum(part * n / (n - 1) for part, n in parts) / total)
    expected = mean + stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975) * spread * (
        np.quantile(means, [0.025, 0.975]) - mean
    )
    assert (result.low, result.high) == pytest.approx(tuple(expected), abs=0.04 * float(np.ptp(expected)))


def test_experts_widen_the_interval() -> None:
    values = np.repeat([[0.0], [1.0], [2.0]], 100, axis=1)  # documents are equal, pairs differ
    units = [("m", f"s{index}") for index in range(3)]
    apart = bootstrap(values, units)
    low, high = stats.t.interval(0.95, 2, loc=1, scale=stats.sem([0, 1, 2]))
    assert (apart.low, apart.high) == pytest.approx((low, high), rel=0.15)  # three levels have few percentiles
    together = bootstrap(values, [("m", "s")] * 3)
    assert (together.low, together.mean, together.high) == (1, 1, 1)


def test_many_documents_give_students_interval() -> None:
    values = np.random.default_rng(7).normal(size=400)
    result = bootstrap(values)
    low, high = stats.t.interval(0.95, 399, loc=values.mean(), scale=stats.sem(values))
    assert (result.low, result.high) == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize(("units", "spread"), [(PAIRS, 0.05), (SEEDS, 0.1)], ids=["pairs", "seeds"])
def test_the_interval_has_its_nominal_coverage(
    units: list[tuple[str, ...]], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up experts, and documents that are hard for all: about 0.95, where plain percentiles cover less."""
    hits = []
    for stretched in (True, False):
        if not stretched:
            monkeypatch.setattr(statistics, "_stretch", lambda *_: 1.0)
        hits.append(0)
        for seed in range(100):
            generator = np.random.default_rng(seed)
            effects = {name: generator.normal(0, spread) for unit in units for name in unit}
            values = np.array([[sum(effects[name] for name in unit)] for unit in units])
            values = values + generator.normal(0, 0.3, 125) + generator.normal(0, 0.3, (len(units), 125))
            result = bootstrap(values, units, draws=300, seed=seed)
            assert result.low is not None
            assert result.high is not None
            hits[-1] += result.low <= 0 <= result.high
    assert 89 <= hits[0] <= 99
    assert hits[1] < hits[0]


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=5),
    st.floats(-10, 10),
)
def test_intervals_move_with_the_values(values: list[list[float]], shift: float) -> None:
    here, there = bootstrap(values, draws=50), bootstrap(np.array(values) + shift, draws=50)
    if len(values) == 2:
        assert here.low is here.high is there.low is there.high is None
        return
    assert here.low is not None
    assert here.high is not None
    assert here.low <= here.high
    assert (there.low, there.mean, there.high) == pytest.approx(
        (here.low + shift, here.mean + shift, here.high + shift), abs=1e-6
    )


@pytest.mark.parametrize(
    "units",
    [
        [("a",), ("b",)],
        [("m", "a"), ("m", "b")],
        [(task, language) for task in "xy" for language in "ab"],
        [(task, language) for task in "xy" for language in "abc"],
    ],
    ids=["two seeds", "one and two experts", "two and two", "two and three"],
)
def test_there_is_no_interval_over_two_levels(units: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(len(units), 20))
    result = bootstrap(values, units, draws=50)
    assert (result.mean, result.low, result.high) == (pytest.approx(values.mean()), None, None)
    if len(units) > 2 or len(units[0]) > 1:
        return
    monkeypatch.setattr(statistics, "MIN_LEVELS", 2)  # what it would hold where seeds differ more than documents
    hits = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        values = generator.normal(0, 0.5, (2, 1)) + generator.normal(0, 0.5, (2, 125))
        wide = bootstrap(values, units, draws=200, seed=seed)
        assert wide.low is not None
        assert wide.high is not None
        hits += wide.low <= 0 <= wide.high
    assert hits < 92


def test_no_spread_no_width() -> None:
    for values in ([[0.25] * 3], [[0.25] * 7], [[0.25] * 7] * 3):
        result = bootstrap(values)
        assert (result.low, result.mean, result.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("pairs", [1, 3])
def test_there_is_no_interval_over_one_or_two_documents(documents: int, pairs: int) -> None:
    result = bootstrap(np.ones((pairs, documents)), draws=50)
    assert (result.low, result.mean, result.high) == (None, 1, None)


def test_correlations_match_scipy() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=12)
    y = x + generator.normal(size=12)
    y[3] = y[4]  # a tie
    result = correlate(x, y)
    assert (result.pearson, result.pearson_p) == pytest.approx(tuple(stats.pearsonr(x, y)))
    assert (result.spearman, result.spearman_p) == pytest.approx(tuple(stats.spearmanr(x, y)))


@pytest.mark.parametrize("y", [(4.0, 1.0, 3.0, 2.0, 9.0), (1.0, 2.0, 2.0, 3.0, 3.0), (2.0, 1.0, 3.0, 6.0, 5.0, 4.0)])
def test_few_points_are_tested_over_all_their_orders(y: tuple[float, ...]) -> None:
    x = tuple(range(len(y)))
    result = correlate(x, y)
    assert result.spearman == pytest.approx(stats.spearmanr(x, y).statistic)
    ranks = stats.rankdata(y)
    strengths = [abs(np.corrcoef(order, ranks)[0, 1]) for order in permutations(x)]
    expected = np.mean([strength >= abs(result.spearman or 0) - 1e-9 for strength in strengths])
    assert result.spearman_p == pytest.approx(expected)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2, 3], [10, 20, 40]),
        ([1, 1, 3], [10, 10, 40]),  # two points coincide, so that r is 1 whatever they are
        ([1, 2, 3, 4], [1, 3, 2, 4]),
        ([1, 1, 2, 3, 4], [1, 1, 3, 2, 4]),  # five points in four places
    ],
)
def test_few_different_points_have_no_p_value(x: list[float], y: list[float]) -> None:
    result = correlate(x, y)
    assert (result.pearson, result.spearman) == pytest.approx((stats.pearsonr(x, y)[0], stats.spearmanr(x, y)[0]))
    assert (result.points, result.pearson_p, result.spearman_p) == (len(x), None, None)


@pytest.mark.parametrize(
    ("x", "y"), [([], []), ([1], [2]), ([1, 2], [2, 1]), ([1, 1, 1], [1, 2, 3]), ([0.1 + 0.2, 0.3, 0.3], [1, 2, 3])]
)
def test_undefined_correlations_are_none(x: list[float], y: list[float]) -> None:
    result = correlate(x, y)
    assert (result.points, result.pearson, result.pearson_p, result.spearman, result.spearman_p) == (
        len(x),
        *[None] * 4,
    )


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.30000000000000004, 0.3]), st.floats(0, 1)), max_size=10))
def test_never_nan(points: list[tuple[float, float]]) -> None:
    result = correlate([x for x, _ in points], [y for _, y in points])
    for value in (result.pearson, result.pearson_p, result.spearman, result.spearman_p):
        assert value is None or math.isfinite(value)


def test_checkpoints_of_one_run_are_one_expert(tmp_path: Path) -> None:
    """Intervals, ranks and indicators do not take a ladder's checkpoints for independent experts."""
    rungs = {side: [f"{side}-{step}" for step in (1, 2, 3)] for side in ("math", "sw")}
    requested = recipe(task_experts={name: name for name in rungs["math"]},
                       language_experts={name: name for name in rungs["sw"]})  # fmt: skip
    sources = {name: {"source": f"checkpoint-{name[-1]}"} for names in rungs.values() for name in names}
    apart = reported(craft(tmp_path / "apart", requested))
    run = craft(tmp_path / "run", requested, changed={"experts": sources})
    report = reported(run)
    both = [target.rows for found in (apart, report) for target in found.targets]
    for other, own in zip(*both, strict=True):
        assert own.spread == other.spread
        if own.difference is not None and other.difference is not None:
            assert (own.difference.mean, own.difference.by_unit) == (other.difference.mean, other.difference.by_unit)
            assert (own.difference.over, "documents" in other.difference.over) == (("documents",), True)
    found = Run.read(run)
    task = next(iter(found.tasks.values()))
    soups = [result.results[task.name].docs for result in found.results if result.cell.family == "soup"]
    means = np.mean([[docs[doc] for doc in task.report] for docs in soups], axis=0)  # over pairs, then documents drawn
    expected = bootstrap(means, draws=200)
    (interval,) = [own.interval for own in both[1] if own.family == "soup"]
    assert interval == pytest.approx((expected.low, expected.high))
    assert apart.ranking is not None
    assert apart.ranking.ranks.p is not None
    assert report.ranking is None  # one setting
    values = [each.correlation for each in report.indicators]
    assert [each.spearman for each in values] == [each.correlation.spearman for each in apart.indicators]
    assert not any(each.pearson_p or each.spearman_p for each in values)
