"""Statistics against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from adapterswap.experiments.lab.study import difference, summarize


def test_summary() -> None:
    values = [0.1, 0.4, 0.35, 0.2, 0.6]
    summary = summarize(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.spread == pytest.approx(np.std(values, ddof=1))
    assert summary.interval == pytest.approx((high - low) / 2)
    one = summarize([0.5])
    assert (one.mean, one.spread, one.interval) == (0.5, None, None)
    two = summarize([0.5, 0.7])
    assert (two.mean, two.spread, two.interval) == (0.6, pytest.approx(np.std([0.5, 0.7], ddof=1)), None)


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_of_few_seeds_has_its_nominal_coverage(seeds: int) -> None:
    drawn = np.random.default_rng(seeds).normal(0.3, 0.1, (400, seeds))
    found = [summarize(values) for values in drawn]
    hits = sum(abs(each.mean - 0.3) <= (each.interval or 0) for each in found)
    assert 0.92 <= hits / len(found) <= 0.98


def test_difference_is_paired() -> None:
    rng = np.random.default_rng(0)
    other = [rng.random(400) < 0.4 for _ in range(3)]
    better = other[0] | (rng.random(400) < 0.2)
    result = difference([better, other[1], other[2] & (rng.random(400) < 0.7)], other)
    pair = better.astype(float) - other[0].astype(float)
    half = stats.t.ppf(0.975, 399) * stats.sem(pair)
    assert result.over_seeds.values[0] == pytest.approx(pair.mean())
    assert result.over_problems[0] == pytest.approx(half, rel=1e-4)
    assert result.over_seeds.values[1] == 0
    assert result.over_problems[1] == pytest.approx(stats.norm.ppf(0.975) * (2 / 402 / 402) ** 0.5)
    assert (result.won, result.lost) == (1, 1)
