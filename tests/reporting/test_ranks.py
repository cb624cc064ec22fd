"""Friedman, Nemenyi, Wilcoxon and Holm against scipy, a published example and cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from adapterswap.reporting.ranks import holm, rank

NAMES = ("swap", "soup", "ties", "base")


def table() -> np.ndarray:
    """14 settings × 4 methods, with ties."""
    generator = np.random.default_rng(5)
    return np.round(generator.random((14, 1)) + generator.normal([0.1, 0.05, 0.0, 0.0], 0.08, (14, 4)), 2)


def test_friedman_is_scipys() -> None:
    found = rank(table(), NAMES)
    assert found is not None
    assert found.settings == 14
    assert (found.statistic, found.p) == pytest.approx(tuple(stats.friedmanchisquare(*table().T)))
    assert list(found.mean_ranks.values()) == pytest.approx(stats.rankdata(-table(), axis=1).mean(0))


# Demšar 2006, table 5(a): q at 0.05 for 3, 4, 5, 10 methods; and his example, four methods on 14 data sets: 1.25.
@pytest.mark.parametrize(("number", "q"), [(3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_differences_as_published(number: int, q: float) -> None:
    found = rank(np.random.default_rng(0).random((14, number)), [str(i) for i in range(number)])
    assert found is not None
    assert found.critical_difference == pytest.approx(q * math.sqrt(number * (number + 1) / (6 * 14)), abs=0.002)
    if number == 4:
        assert found.critical_difference == pytest.approx(1.25, abs=0.005)


def test_nemenyi_agrees_with_the_critical_difference() -> None:
    found = rank(table(), NAMES)
    assert found is not None
    assert found.critical_difference is not None
    for comparison in found.comparisons:
        apart = abs(found.mean_ranks[comparison.one] - found.mean_ranks[comparison.other])
        assert comparison.nemenyi is not None
        assert (comparison.nemenyi < 0.05) == (apart > found.critical_difference)
        step = math.sqrt(4 * 5 / (6 * 14))
        expected = stats.studentized_range.sf(apart / step * math.sqrt(2), 4, np.inf)
        assert comparison.nemenyi == pytest.approx(expected, abs=1e-9)


def test_wilcoxon_is_scipys_with_holm() -> None:
    found = rank(table(), NAMES)
    assert found is not None
    plain = [
        stats.wilcoxon(
            np.round(table()[:, NAMES.index(each.one)] - table()[:, NAMES.index(each.other)], 12), zero_method="zsplit"
        ).pvalue
        for each in found.comparisons
    ]
    assert [each.wilcoxon for each in found.comparisons] == pytest.approx(holm(plain))
    one = found.comparisons[0]
    assert one.difference == pytest.approx(table()[:, 0].mean() - table()[:, 1].mean())


def test_by_hand() -> None:
    # Five settings, all with the same order: χ² = 12/(5·3·4)·(15² + 10² + 5²) - 3·5·4 = 70 - 60 = 10.
    found = rank([[3 * k, 2 * k, k] for k in (1, 10, 0.1, 2, 5)], "abc")
    assert found is not None
    assert found.mean_ranks == {"a": 1, "b": 2, "c": 3}
    assert found.statistic == pytest.approx(10)
    assert found.p == pytest.approx(math.exp(-5))
    assert {each.wilcoxon for each in found.comparisons} == {0.1875}  # 2/2⁵ each, times three


@pytest.mark.parametrize("number", [2, 3])
def test_few_settings_have_no_p_values(number: int) -> None:
    scores = [[0.3, 0.2, 0.1][:number], [3, 2, 1][:number], [4, 1, 2][:number], [5, 3, 1][:number]]
    found = rank(scores, "abc"[:number], "a")
    assert found is not None
    assert found.mean_ranks["a"] == 1
    assert found.statistic == (None if number == 2 else pytest.approx(stats.friedmanchisquare(*np.array(scores).T)[0]))
    assert (found.p, found.critical_difference) == (None, None)
    assert {(each.nemenyi, each.wilcoxon) for each in found.comparisons} == {(None, None)}
    assert found.comparisons[0].difference == pytest.approx(np.mean([row[0] - row[1] for row in scores]))


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_two_methods_need_no_friedman() -> None:
    found = rank([[1, 0], [1, 0], [0.5, 0.7], [1, 0.2], [0.9, 0.1]], ("swap", "soup"))
    assert found is not None
    assert (found.statistic, found.p, found.critical_difference) == (None, None, None)
    (only,) = found.comparisons
    assert only.nemenyi is None
    assert 0 < only.wilcoxon < 1


def test_what_cannot_be_ranked() -> None:
    assert rank([[1, 2, 3]], "abc") is None
    assert rank([[1], [2]], "a") is None
    assert rank(np.empty((0, 3)), "abc") is None


def test_all_equal() -> None:
    found = rank([[0.1 + 0.2, 0.3, 0.3]] * 5, "abc")
    assert found is not None
    assert (found.statistic, found.p) == (0, 1)
    assert set(found.mean_ranks.values()) == {2}
    assert all((each.nemenyi, each.wilcoxon, each.difference) == (1, 1, 0) for each in found.comparisons)


@settings(deadline=None, max_examples=25)  # the studentized range takes its time
@given(
    st.integers(2, 4).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5]), min_size=k, max_size=k), min_size=2, max_size=7
        )
    )
)
def test_never_nan(scores: list[list[float]]) -> None:
    found = rank(scores, "abcd"[: len(scores[0])])
    assert found is not None
    numbers = [found.statistic, found.p, *found.mean_ranks.values()]
    numbers += [value for each in found.comparisons for value in (each.nemenyi, each.wilcoxon, each.difference)]
    assert all(value is None or math.isfinite(value) for value in numbers)
    assert sum(found.mean_ranks.values()) == pytest.approx(sum(range(1, len(scores[0]) + 1)))
