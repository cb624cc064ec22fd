"""Friedman, Nemenyi, Wilcoxon and Holm against scipy, a published example and cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from adapterswap.experiments.reporting.statistics import holm, rank

NAMES = ("swap", "soup", "ties", "base")


def table() -> np.ndarray:
    """14 settings × 4 methods, with ties."""
    generator = np.random.default_rng(5)
    return np.round(generator.random((14, 1)) + generator.normal([0.1, 0.05, 0.0, 0.0], 0.08, (14, 4)), 2)


def test_friedman_matches_scipy() -> None:
    result = rank(table(), NAMES)
    assert result is not None
    assert result.settings == 14
    assert (result.statistic, result.p) == pytest.approx(tuple(stats.friedmanchisquare(*table().T)))
    assert list(result.mean_ranks.values()) == pytest.approx(stats.rankdata(-table(), axis=1).mean(0))


# Demšar 2006, table 5(a): q at 0.05 for 3, 4, 5, 10 methods; and his example, four methods on 14 data sets: 1.25.
@pytest.mark.parametrize(("number", "q"), [(3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_differences_as_published(number: int, q: float) -> None:
    result = rank(np.random.default_rng(0).random((14, number)), [str(i) for i in range(number)])
    assert result is not None
    assert result.critical_difference == pytest.approx(q * math.sqrt(number * (number + 1) / (6 * 14)), abs=0.002)
    if number == 4:
        assert result.critical_difference == pytest.approx(1.25, abs=0.005)


def test_nemenyi_agrees_with_the_critical_difference() -> None:
    result = rank(table(), NAMES)
    assert result is not None
    assert result.critical_difference is not None
    for comparison in result.comparisons:
        apart = abs(result.mean_ranks[comparison.one] - result.mean_ranks[comparison.other])
        assert comparison.nemenyi is not None
        assert (comparison.nemenyi < 0.05) == (apart > result.critical_difference)
        step = math.sqrt(4 * 5 / (6 * 14))
        expected = stats.studentized_range.sf(apart / step * math.sqrt(2), 4, np.inf)
        assert comparison.nemenyi == pytest.approx(expected, abs=1e-9)


def test_wilcoxon_matches_scipy_with_holm() -> None:
    result = rank(table(), NAMES)
    assert result is not None
    plain = [
        stats.wilcoxon(
            np.round(table()[:, NAMES.index(each.one)] - table()[:, NAMES.index(each.other)], 12), zero_method="zsplit"
        ).pvalue
        for each in result.comparisons
    ]
    assert [each.wilcoxon for each in result.comparisons] == pytest.approx(holm(plain))
    one = result.comparisons[0]
    assert one.difference == pytest.approx(table()[:, 0].mean() - table()[:, 1].mean())


def test_by_hand() -> None:
    # Five settings, all with the same order: χ² = 12/(5·3·4)·(15² + 10² + 5²) - 3·5·4 = 70 - 60 = 10.
    result = rank([[3 * k, 2 * k, k] for k in (1, 10, 0.1, 2, 5)], "abc")
    assert result is not None
    assert result.mean_ranks == {"a": 1, "b": 2, "c": 3}
    assert result.statistic == pytest.approx(10)
    assert result.p == pytest.approx(math.exp(-5))
    # No scores could give less than 2/2⁵ each, times three.
    assert (result.tested, result.least) == (3, 0.1875)
    assert {each.wilcoxon for each in result.comparisons} == {None}
    (first, *_) = (each for each in rank([[2 * k, k] for k in range(1, 7)], "ab").comparisons)  # type: ignore[union-attr]
    assert first.wilcoxon == 2 / 2**6


@pytest.mark.parametrize("number", [2, 3])
def test_few_settings_have_no_p_values(number: int) -> None:
    scores = [[0.3, 0.2, 0.1][:number], [3, 2, 1][:number], [4, 1, 2][:number], [5, 3, 1][:number]]
    result = rank(scores, "abc"[:number], "a")
    assert result is not None
    assert result.mean_ranks["a"] == 1
    assert result.statistic == (None if number == 2 else pytest.approx(stats.friedmanchisquare(*np.array(scores).T)[0]))
    assert (result.p, result.critical_difference) == (None, None)
    assert {(each.nemenyi, each.wilcoxon) for each in result.comparisons} == {(None, None)}
    assert result.comparisons[0].difference == pytest.approx(np.mean([row[0] - row[1] for row in scores]))


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_two_methods_need_no_friedman() -> None:
    result = rank([[1, 0], [1, 0], [0.5, 0.7], [1, 0.2], [0.9, 0.1]], ("swap", "soup"))
    assert result is not None
    assert (result.statistic, result.p, result.critical_difference) == (None, None, None)
    (only,) = result.comparisons
    assert only.nemenyi is None
    assert (only.wilcoxon, result.least) == (None, 2 / 2**5)


def test_what_cannot_be_ranked() -> None:
    assert rank([[1, 2, 3]], "abc") is None
    assert rank([[1], [2]], "a") is None
    assert rank(np.empty((0, 3)), "abc") is None


def test_all_equal() -> None:
    result = rank([[0.1 + 0.2, 0.3, 0.3]] * 5, "abc")
    assert result is not None
    assert (result.statistic, result.p) == (0, 1)
    assert set(result.mean_ranks.values()) == {2}
    assert all((each.nemenyi, each.wilcoxon, each.difference) == (1, None, 0) for each in result.comparisons)


@settings(deadline=None, max_examples=25)  # the studentized range takes its time
@given(
    st.integers(2, 4).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5]), min_size=k, max_size=k), min_size=2, max_size=7
        )
    )
)
def test_never_nan(scores: list[list[float]]) -> None:
    result = rank(scores, "abcd"[: len(scores[0])])
    assert result is not None
    numbers = [result.statistic, result.p, *result.mean_ranks.values()]
    numbers += [value for each in result.comparisons for value in (each.nemenyi, each.wilcoxon, each.difference)]
    assert all(value is None or math.isfinite(value) for value in numbers)
    assert sum(result.mean_ranks.values()) == pytest.approx(sum(range(1, len(scores[0]) + 1)))
