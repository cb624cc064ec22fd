"""Correlations, Friedman's test and the comparisons that follow it. Intervals are in `experiments.intervals`.

Takes and returns numbers. A result that the numbers cannot determine (the spread of one value, a correlation with a
constant) is None, never NaN.

Friedman's test is that of the second paper (Bandarkar & Peng 2025, section 5): settings are blocks, methods are
treatments. It is followed by Nemenyi's test, which compares mean ranks, and by Wilcoxon's signed-rank test with Holm's
correction, which also weighs the size of differences (Demšar 2006, Journal of Machine Learning Research 7). All three
assume independent settings, which settings that share an expert or documents are not. Effect sizes are Kendall's W for
Friedman's test, and the rank-biserial correlation of matched pairs (Kerby 2014, Comprehensive Psychology 3) for
Wilcoxon's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.05  # of significance
MIN_UNITS = 5  # for a p-value: with four, no order of them has a two-sided p below 0.08

_EXACT = 7  # the most points for which Spearman's p is computed over all orders, at most 5,040


@dataclass(frozen=True)
class Correlation:
    """The correlation of two measures of the same objects.

    Attributes:
        points: the number of objects that were measured.
        pearson, pearson_p: the linear correlation, and its two-sided p (exact for normal values).
        spearman, spearman_p: the correlation of ranks, and its two-sided p: over all orders up to 7 points, by
            Student's t beyond. All four are None below 3 points, or if one measure is constant. Both p are None below
            `MIN_UNITS` distinct points.
    """

    points: int
    pearson: float | None
    pearson_p: float | None
    spearman: float | None
    spearman_p: float | None


def correlate(one: ArrayLike, other: ArrayLike) -> Correlation:
    """Pearson's and Spearman's correlation of two measures (points,)."""
    from scipy import stats

    # Equal scores may differ in their last bits; without rounding they would get different ranks.
    x, y = np.round(np.asarray(one, float), 12), np.round(np.asarray(other, float), 12)
    points = len(x)
    if points < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(points, None, None, None, None)

    pearson = stats.pearsonr(x, y)
    ranks = stats.rankdata(x), stats.rankdata(y)
    spearman = stats.pearsonr(*ranks)
    if len(set(zip(x.tolist(), y.tolist(), strict=True))) < MIN_UNITS:
        return Correlation(points, float(pearson.statistic), None, float(spearman.statistic), None)

    spearman_p = _over_all_orders(*ranks) if points <= _EXACT else stats.spearmanr(x, y).pvalue
    return Correlation(
        points, float(pearson.statistic), float(pearson.pvalue), float(spearman.statistic), float(spearman_p)
    )


def _over_all_orders(x: NDArray[np.float64], y: NDArray[np.float64]) -> Any:
    """The share of the orders of `x` whose correlation with `y` is at least as strong: two-sided and exact.

    Orders are compared by |Σ (x - mean x)(y - mean y)|: the denominator of the correlation is the same for all of them.

    Args:
        x, y: ranks (points,).
    """
    from scipy import stats

    deviations = y - y.mean()

    def strength(order: NDArray[np.float64], axis: int = -1) -> Any:
        return np.abs(((order - x.mean()) * deviations).sum(axis))

    test = stats.permutation_test(
        (x,), strength, permutation_type="pairings", n_resamples=np.inf, alternative="greater", vectorized=True
    )
    return test.pvalue


@dataclass(frozen=True)
class RankComparison:
    """Two methods over all settings.

    Attributes:
        one, other: the methods.
        difference: the mean score of `one` minus that of `other`; higher scores are better.
        nemenyi: p for their mean ranks; None if there are only two methods, which need no correction, or too few
            settings.
        wilcoxon: p of the signed-rank test, zeros split between the signs, corrected by Holm's method over the
            comparisons with the reference, or over all comparisons if there is no reference; None for comparisons
            without the reference, and if no scores could make it small: see `Ranks.least`.
        effect: the rank-biserial correlation of the matched pairs: the share of the ranks of absolute differences where
            `one` is ahead minus the share where `other` is; from -1 to 1, and 0 if nothing differs.
    """

    one: str
    other: str
    difference: float
    nemenyi: float | None
    wilcoxon: float | None
    effect: float


@dataclass(frozen=True)
class Ranks:
    """Methods ranked within each setting.

    Attributes:
        settings: the number of settings.
        mean_ranks: method → its mean rank; 1 is best, ties share the mean of their ranks.
        statistic, p: Friedman's χ² and its p with k - 1 degrees of freedom. Both are None for fewer than three methods;
            p is None below `MIN_UNITS` settings, where χ² is a poor approximation and Wilcoxon's p is at least 0.125.
        critical_difference: mean ranks that are further apart differ at 0.05 by Nemenyi's test; None if `p` is None.
        agreement: Kendall's W = χ² / (settings · (k - 1)): 1 if all settings order the methods alike, 0 if all mean
            ranks are equal; None if χ² is None.
        comparisons: one for every pair of methods.
        reference: the method with which Wilcoxon's test compares the others; None if it compares every pair.
        tested: how many comparisons Holm's method corrects for.
        least: the smallest p that Wilcoxon's test and Holm's method can give with so many settings and comparisons:
            min(1, tested · 2 / 2^settings). Above `LEVEL`, no comparison has a p.
    """

    settings: int
    mean_ranks: dict[str, float]
    statistic: float | None
    p: float | None
    critical_difference: float | None
    agreement: float | None
    comparisons: tuple[RankComparison, ...]
    reference: str | None = None
    tested: int = 0
    least: float = 1.0

    def against(self, method: str, other: str) -> RankComparison | None:
        """The comparison of `method` with `other`, whichever of them was first."""
        for comparison in self.comparisons:
            if (comparison.one, comparison.other) == (method, other):
                return comparison
            if (comparison.other, comparison.one) == (method, other):
                return replace(
                    comparison,
                    one=method,
                    other=other,
                    difference=-comparison.difference,
                    effect=-comparison.effect,
                )
        return None


def rank(scores: ArrayLike, methods: Sequence[str], reference: str | None = None) -> Ranks | None:
    """Rank methods over settings and compare them; None for fewer than two settings or two methods.

    Args:
        scores: (settings, methods), higher is better.
        methods: their names.
        reference: the method with which Wilcoxon's test compares the others. With few settings, a correction over all
            comparisons would leave no test any power.
    """
    from scipy import stats

    # Equal scores may differ in their last bits; without rounding they would get different ranks.
    table = np.round(np.asarray(scores, float).reshape(-1, len(methods)), 12)
    settings, number = table.shape
    if settings < 2 or number < 2:
        return None
    mean_ranks = stats.rankdata(-table, axis=1).mean(0)

    # Friedman's test, Kendall's W = χ² / (N (k - 1)) for N settings and k methods, and Nemenyi's test: of two mean
    # ranks, q = difference / √(k (k + 1) / (6 N)) · √2 has the distribution of the studentized range (Demšar 2006,
    # section 3.2.2)
    statistic: float | None = None
    p: float | None = None
    agreement: float | None = None
    step: float | None = None
    critical_difference: float | None = None
    if number > 2:
        statistic, friedman_p = 0.0, 1.0
        if (np.ptp(table, axis=1) != 0).any():  # scipy would divide 0 by 0
            statistic, friedman_p = map(float, stats.friedmanchisquare(*table.T))
        agreement = statistic / (settings * (number - 1))
        if settings >= MIN_UNITS:
            p = friedman_p
            step = (number * (number + 1) / (6 * settings)) ** 0.5
            critical_difference = float(stats.studentized_range.ppf(0.95, number, np.inf) / 2**0.5 * step)

    # Wilcoxon's test, of the comparisons with the reference or of all. Its smallest p is that of N differences with one
    # sign, 2 / 2^N.
    methods = list(methods)
    pairs = list(combinations(range(number), 2))
    tested = pairs
    if reference in methods:
        tested = [(i, j) for i, j in pairs if reference in (methods[i], methods[j])]
    least = min(1.0, len(tested) * 2.0 ** (1 - settings))
    wilcoxon: dict[tuple[int, int], float] = {}
    if least <= LEVEL:
        p_values = [_signed_rank(table[:, i] - table[:, j]) for i, j in tested]
        wilcoxon = dict(zip(tested, holm(p_values), strict=True))

    comparisons = []
    for i, j in pairs:
        differences = table[:, i] - table[:, j]
        nemenyi = None
        if step is not None:
            nemenyi = _nemenyi(abs(mean_ranks[i] - mean_ranks[j]) / step, number)
        comparison = RankComparison(
            one=methods[i],
            other=methods[j],
            difference=float(differences.mean()),
            nemenyi=nemenyi,
            wilcoxon=wilcoxon.get((i, j)),
            effect=_rank_biserial(differences),
        )
        comparisons.append(comparison)
    return Ranks(
        settings=settings,
        mean_ranks=dict(zip(methods, map(float, mean_ranks), strict=True)),
        statistic=statistic,
        p=p,
        critical_difference=critical_difference,
        agreement=agreement,
        comparisons=tuple(comparisons),
        reference=reference if reference in methods else None,
        tested=len(tested),
        least=least,
    )


def cliques(mean_ranks: Mapping[str, float], critical_difference: float) -> list[tuple[str, ...]]:
    """The largest groups of methods whose mean ranks are no further apart than the critical difference, best first.

    A critical-difference diagram joins each group by a line (Demšar 2006, section 3.2.4). Single methods are left out.
    """
    ordered = sorted(mean_ranks, key=lambda method: (mean_ranks[method], method))
    groups: list[tuple[str, ...]] = []
    end = 0
    for start, first in enumerate(ordered):
        stop = start
        while stop < len(ordered) and mean_ranks[ordered[stop]] - mean_ranks[first] <= critical_difference:
            stop += 1

        # A group that ends where an earlier one ended is part of it
        if stop > end and stop - start > 1:
            groups.append(tuple(ordered[start:stop]))
        end = max(end, stop)
    return groups


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: the smallest of m times m, the next times m - 1, and so on, never falling, at most 1."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for place, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def _nemenyi(distance: float, number: int) -> float:
    """p for two mean ranks that are `distance` standard errors apart, by the studentized range of `number` means."""
    from scipy import stats

    return min(1.0, max(0.0, float(stats.studentized_range.sf(distance * 2**0.5, number, np.inf))))


def _rank_biserial(differences: NDArray[np.float64]) -> float:
    """Σ sign(d) rank(|d|) / Σ rank(|d|) over the differences d (settings,): Kerby's (2014) simple difference."""
    from scipy import stats

    differences = np.round(differences, 12)
    ranks = stats.rankdata(np.abs(differences))
    return float((np.sign(differences) * ranks).sum() / ranks.sum())


def _signed_rank(differences: NDArray[np.float64]) -> Any:
    """Wilcoxon's p, exact if there are neither ties nor zeros; 1 if nothing differs."""
    from scipy import stats

    if not differences.any():
        return 1.0
    return float(stats.wilcoxon(np.round(differences, 12), zero_method="zsplit").pvalue)
