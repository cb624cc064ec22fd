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

from adapterswap.experiments.intervals import SHARE, mean_interval
from adapterswap.experiments.reporting.statistics import correlate
from adapterswap.experiments.sweeps.results import Run

from .crafting import craft, recipe
from .reading import reported


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
    (interval,) = [own.interval for own in both[1] if own.family == "soup"]
    assert interval == pytest.approx(mean_interval(means, bounds=SHARE).ends)
    assert apart.ranking is not None
    assert apart.ranking.ranks.p is not None
    assert report.ranking is None  # one setting
    values = [each.correlation for each in report.indicators]
    assert [each.spearman for each in values] == [each.correlation.spearman for each in apart.indicators]
    assert not any(each.pearson_p or each.spearman_p for each in values)
