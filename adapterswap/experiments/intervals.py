"""Intervals of means, from what was drawn at random.

A score is a mean over units (pairs of experts, seeds) and documents. Its interval depends on which of them were drawn
independently: documents of one template are one draw, and so is an expert that is in several pairs. `mean_interval`
finds that out from names, estimates the variance of the mean by analysis of variance, and takes Student's t with the
degrees of freedom of Satterthwaite (1946, Biometrics Bulletin 2(6)). At the edge, where a variance cannot be estimated,
it takes Wilson's interval of a share (1927) and the adjusted interval of a paired difference of shares (Bonett and
Price 2012, Journal of Educational and Behavioral Statistics 37(4)).

Satterthwaite's approximation takes too many degrees of freedom where three experts differ much and nothing else does:
their variance is most often underestimated just then. So an interval is never narrower than the interval over one kind
of draw alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_LEVELS = 3
"""The fewest draws of a kind for an interval: of two, t with one degree of freedom is 12.7 standard errors wide."""

SHARE = (0.0, 1.0)
"""The bounds of shares of right answers."""
DIFFERENCE = (-1.0, 1.0)
"""The bounds of differences of two shares."""

_FEW, _FEW_OF = 20, 1 / 3  # documents or groups that differ; with fewer, Student's t covers too little
_NOTHING = 1e-18  # a variance that is rounding


@dataclass(frozen=True)
class Interval:
    """A mean and its interval.

    Attributes:
        mean: of all values.
        low, high: the ends; None if there is no interval.
        over: what was drawn at random, in words: `("task experts", "language experts", "documents")`. Empty if there is
            no interval.
        design: `crossed` if experts of several kinds occur in all combinations, `paired` if each occurs with one other
            only, `incomplete` if they occur in some combinations; empty if at most one kind varies.
        method: `t`, `Wilson` or `adjusted` (Bonett and Price); empty if there is no interval.
        freedom: the degrees of freedom of `t`; None for a normal quantile.
        reason: why there is no interval, as a sentence without a full stop; empty if there is one.
    """

    mean: float
    low: float | None
    high: float | None
    over: tuple[str, ...] = ()
    design: str = ""
    method: str = ""
    freedom: float | None = None
    reason: str = ""

    @property
    def ends(self) -> tuple[float, float] | None:
        """(low, high), or None if there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low, self.high

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside; False if there is no interval."""
        return self.ends is not None and not self.ends[0] <= 0 <= self.ends[1]

    @property
    def half(self) -> float | None:
        """Half of its width; None if there is no interval."""
        if self.ends is None:
            return None
        low, high = self.ends
        return (high - low) / 2


@dataclass(frozen=True)
class Factor:
    """One kind of draws among the units.

    Attributes:
        name: in words.
        levels: the draw that each unit belongs to, as numbers from 0.
    """

    name: str
    levels: NDArray[np.intp]

    @property
    def number(self) -> int:
        """How many draws there are."""
        return int(self.levels.max()) + 1

    def follows(self, other: Factor) -> bool:
        """Whether a draw of `other` decides this one: each level of `other` occurs with one level of this."""
        together = set(zip(self.levels.tolist(), other.levels.tolist(), strict=True))
        return len(together) == other.number


def wilson(right: float, of: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson's (1927) interval of the share `right / of` of independent answers."""
    return _wilson(right / of, of, NormalDist().inv_cdf((1 + level) / 2))


def standard_error(values: ArrayLike, groups: Sequence[object] = ()) -> float | None:
    """The standard error of the mean over documents, whose groups are the draws; None for a single draw.

    Args:
        values: (documents,).
        groups: the group of each document, by default a group for each.
    """
    table = np.atleast_2d(np.asarray(values, float))
    by_group, _ = _over_groups(table, _codes(groups, table.shape[1]), equal_groups=False)
    number = by_group.shape[1]
    return float(by_group.std(ddof=1) / number**0.5) if number > 1 else None


def mean_interval(
    values: ArrayLike,
    units: Sequence[Sequence[str | None]] = (),
    groups: Sequence[object] = (),
    *,
    names: Sequence[str] = (),
    documents: str = "documents",
    bounds: tuple[float, float] | None = None,
    equal_groups: bool = False,
    level: float = 0.95,
) -> Interval:
    """The interval of a mean over units and documents.

    What was drawn at random follows from names. A unit is described by what it was made of: (task expert, language
    expert) in a sweep, a seed in the lab. What all units share is not random, and the interval holds for it alone. If
    each expert occurs with one other only, the two are one draw, a pair. If all combinations occur, they are crossed.
    Documents of one group are one draw of a group.

    With F the factors (kinds of experts, groups of documents), crossed, the variance of the mean is
    Σ_S (-1)^(|S| + 1) MS_S / N over all sets S of factors, where MS_S is the mean square of the interaction S in the
    analysis of variance, and N the number of cells. For pairs × groups that is (MS_pairs + MS_groups - MS_rest) / N.
    The interval is never narrower than that over one factor alone. Where experts occur in some combinations only, the
    variances of the factors alone are added, which counts the rest several times and is too wide. With groups of
    different sizes, the mean over documents is a ratio, whose variance is that of its linearization.

    Values between `bounds` get an interval that stays between them: shares Wilson's, with the number of independent
    answers that has the same variance; a difference of shares of which few documents differ that of Bonett and Price,
    likewise. If few groups differ, their variance is not known well, and t has fewer degrees of freedom: see
    `_freedom_of_few`.

    Args:
        values: (units, documents), or (documents,) for one unit. For a paired interval, differences on the same
            documents.
        units: what each unit was made of; by default each unit is a draw of its own.
        groups: the group of each document, by default a group for each.
        names: what the entries of a unit are called, such as `("task experts", "language experts")`.
        documents: what documents, or their groups, are called: `documents`, `templates`.
        bounds: `SHARE` or `DIFFERENCE`, if all values are such; None for others.
        equal_groups: whether each group counts as much as another, whatever its number of documents. The mean is then
            over groups.
        level: the probability with which the interval should contain the true mean.
    """
    table = np.atleast_2d(np.asarray(values, float))
    group_of = _codes(groups, table.shape[1])
    if not units:
        units = [(str(row),) for row in range(len(table))]
    factors, design = _factors(units, names)

    by_group, mean = _over_groups(table, group_of, equal_groups)
    result = Interval(mean, None, None, design=design)

    # What was drawn, and how often
    draws = [(factor.name, factor.number) for factor in factors]
    draws.append((documents, by_group.shape[1]))
    for name, number in draws:
        if number < MIN_LEVELS:
            counted = name.removesuffix("s") if number == 1 else name
            return replace(result, reason=f"{number} {counted}, and an interval needs at least {MIN_LEVELS}")

    # The variance whose interval is the widest
    estimates = _variances(by_group, factors, mean)
    variance, freedom = max(estimates, key=lambda estimate: _half(estimate[0], estimate[1], level))
    independent = len(table) == 1 and not len(groups)
    ends = _ends(table, by_group, mean, variance, freedom, bounds, level, independent=independent)
    if ends is None:
        return replace(result, reason=f"all {documents} have the same value, so nothing shows how far they spread")
    method, used_freedom, (low, high) = ends
    return replace(
        result,
        low=round(low, 12),  # 0, not -1e-18
        high=round(high, 12),
        over=tuple(name for name, _ in draws),
        method=method,
        freedom=used_freedom,
    )


def _factors(units: Sequence[Sequence[str | None]], names: Sequence[str]) -> tuple[list[Factor], str]:
    """What was drawn independently among the units, and how its kinds are combined."""
    factors = []
    for place in range(len(units[0])):
        name = names[place] if names else "units"
        draws = [str(unit[place]) for unit in units]
        factors.append(Factor(name, np.unique(draws, return_inverse=True)[1]))

    # Two kinds whose experts occur with each other only are one kind of draw.
    kept: list[Factor] = []
    paired = False
    for factor in factors:
        if factor.number == 1:
            continue
        alike = [other for other in kept if factor.follows(other) and other.follows(factor)]
        if alike:
            paired = True
            kept[kept.index(alike[0])] = replace(alike[0], name="pairs")
        else:
            kept.append(factor)

    # An expert that occurs with one other only adds nothing to what that other's draw has decided.
    top = []
    for factor in kept:
        others = [other for other in kept if other is not factor]
        if not any(other.follows(factor) for other in others):
            top.append(factor)
    if len(top) < 2:
        return top, "paired" if paired else ""

    combined = np.stack([factor.levels for factor in top])  # (factors, units)
    present = np.unique(combined, axis=1).shape[1]
    if present == math.prod(factor.number for factor in top):
        return top, "crossed"
    return top, "incomplete"


def _codes(groups: Sequence[object], documents: int) -> NDArray[np.intp]:
    """The group of each document as a number from 0."""
    if not len(groups):
        return np.arange(documents)
    return np.unique([str(group) for group in groups], return_inverse=True)[1]


def _over_groups(
    table: NDArray[np.float64], group_of: NDArray[np.intp], equal_groups: bool
) -> tuple[NDArray[np.float64], float]:
    """Values by group (units, groups) whose mean is the mean, and the mean.

    Of groups with different numbers of documents they are linearized: mean + (mean of the group - mean) · size / mean
    size.

    Args:
        table: (units, documents).
        group_of: (documents,).
    """
    sizes = np.bincount(group_of)  # (groups,)
    sums = np.stack([np.bincount(group_of, row) for row in table])
    means = sums / sizes
    if equal_groups:
        return means, float(means.mean())
    mean = float(table.mean())
    return mean + (means - mean) * (sizes / sizes.mean()), mean


def _variances(by_group: NDArray[np.float64], factors: Sequence[Factor], mean: float) -> list[tuple[float, float]]:
    """Estimates of the variance of the mean, with their degrees of freedom: over all factors, and over each alone.

    Args:
        by_group: (units, groups).
    """
    # The combination of levels that each unit is, as a number, and how many units are the same one
    shape = tuple(factor.number for factor in factors)
    place = np.zeros(len(by_group), np.intp)
    if factors:
        place = np.ravel_multi_index([factor.levels for factor in factors], shape)
    counts = np.bincount(place, minlength=math.prod(shape))
    if not counts.all():
        return _added(by_group, factors, mean)

    # Units that are one combination, such as checkpoints of one training run, are one cell, linearized as groups are.
    sums = np.zeros((len(counts), by_group.shape[1]))
    np.add.at(sums, place, by_group)
    cells = mean + (sums / counts[:, None] - mean) * (counts / counts.mean())[:, None]
    cells = cells.reshape(*shape, by_group.shape[1])

    # Σ_S (-1)^(|S| + 1) MS_S / N; groups are the last of the axes
    parts = []
    alone = []
    for axes, square, freedom in _mean_squares(cells):
        part = square / cells.size
        parts.append(((-1) ** (len(axes) + 1) * part, freedom))
        if len(axes) == 1:
            alone.append((part, freedom))
    variance = sum(part for part, _ in parts)

    # Chance can make the sum smaller than one of its parts, even negative. Its degrees of freedom would be close to 0
    # then, and the interval endless.
    if variance < max(part for part, _ in alone):
        return alone
    return [(variance, _satterthwaite(variance, parts)), *alone]


def _mean_squares(cells: NDArray[np.float64]) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """(axes, mean square, degrees of freedom) of every main effect and interaction of a complete table.

    The effect of axes S is the mean over the others, less what the effects of parts of S have of it; its mean square is
    Σ effect² · (cells for each value of the effect) / Π_S (levels - 1).
    """
    axes = [axis for axis, number in enumerate(cells.shape) if number > 1]
    for size in range(1, len(axes) + 1):
        for chosen in combinations(axes, size):
            others = tuple(axis for axis in range(cells.ndim) if axis not in chosen)
            effect = cells.mean(others, keepdims=True)
            for axis in chosen:
                effect = effect - effect.mean(axis, keepdims=True)

            freedom = math.prod(cells.shape[axis] - 1 for axis in chosen)
            square = float((effect**2).sum()) * cells.size / effect.size / freedom
            yield chosen, square, float(freedom)


def _added(by_group: NDArray[np.float64], factors: Sequence[Factor], mean: float) -> list[tuple[float, float]]:
    """As `_variances`, for experts that occur in some combinations only: the variances of each factor, added.

    Of a factor with n levels it is n / (n - 1) · Σ (sum of a level's deviations)² / N² for N values.
    """
    deviations = by_group - mean  # (units, groups)
    sums_of_levels = [np.bincount(factor.levels, deviations.sum(1)) for factor in factors]
    sums_of_levels.append(deviations.sum(0))  # of the groups

    alone = []
    for sums in sums_of_levels:
        number = len(sums)
        part = number / (number - 1) * float((sums**2).sum()) / by_group.size**2
        alone.append((part, number - 1.0))

    variance = sum(part for part, _ in alone)
    return [(variance, _satterthwaite(variance, alone)), *alone]


def _satterthwaite(variance: float, parts: Sequence[tuple[float, float]]) -> float:
    """variance² / Σ part² / f, the degrees of freedom of a variance that is a sum of (part, f), with signs."""
    squares = sum(part**2 / freedom for part, freedom in parts)
    if squares <= 0:
        return math.inf
    return variance**2 / squares


def _freedom_of_few(by_group: NDArray[np.float64]) -> float:
    """The degrees of freedom of the variance of groups' means, if most of them are equal.

    The variance s² of n values with an excess kurtosis κ has itself the variance σ⁴ (2 / (n - 1) + κ / n), and s² with
    f degrees of freedom has σ⁴ · 2 / f.
    """
    means = by_group.mean(0)
    number = len(means)
    deviations = means - means.mean()
    square = float((deviations**2).mean())
    if square <= _NOTHING:
        return number - 1.0
    kurtosis = float((deviations**4).mean()) / square**2 - 3
    return 2 / (2 / (number - 1) + max(kurtosis, 0.0) / number)


def _half(variance: float, freedom: float, level: float) -> float:
    """Half of the width of Student's interval: t · √variance."""
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(variance)


def _ends(
    table: NDArray[np.float64],
    by_group: NDArray[np.float64],
    mean: float,
    variance: float,
    freedom: float,
    bounds: tuple[float, float] | None,
    level: float,
    *,
    independent: bool,
) -> tuple[str, float | None, tuple[float, float]] | None:
    """(method, degrees of freedom, ends); None if nothing varies and values have no bounds."""
    is_still = variance <= _NOTHING
    if is_still and bounds is None:
        return None

    groups = by_group.shape[1]
    differing = int((np.abs(by_group).max(0) > _NOTHING).sum())
    if bounds is None or (bounds == DIFFERENCE and differing >= min(_FEW, groups * _FEW_OF)):
        half = _half(variance, freedom, level)
        low, high = mean - half, mean + half
        if bounds is not None:
            low, high = max(low, bounds[0]), min(high, bounds[1])
        return "t", freedom, (low, high)

    # One answer's variance follows from the mean: p (1 - p) for a share. For a difference of shares, of which `ahead`
    # are 1 and `behind` are -1, it is the mean square less the square of the mean.
    ahead, behind = float(np.maximum(table, 0).mean()), float(np.maximum(-table, 0).mean())
    single = mean * (1 - mean) if bounds == SHARE else ahead + behind - mean**2

    # So does that of all, unless answers depend on each other or are not right or wrong.
    if is_still or (independent and bool(np.isin(table, (-1.0, 0.0, 1.0)).all())):
        number, used_freedom = float(groups), None
        quantile = NormalDist().inv_cdf((1 + level) / 2)
    else:
        number = 1 + single / variance
        used_freedom = freedom if bounds == SHARE else min(freedom, _freedom_of_few(by_group))
        quantile = _half(1.0, used_freedom, level)

    if bounds == SHARE:
        return "Wilson", used_freedom, _wilson(mean, number, quantile)
    return "adjusted", used_freedom, _adjusted(ahead, behind, number, quantile)


def _wilson(share: float, number: float, quantile: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `number` documents, within 0 and 1; `quantile` is that of the level.

    (p + z² / 2n ± z √(p (1 - p) / n + z² / 4n²)) / (1 + z² / n).
    """
    square = quantile**2
    middle = share + square / (2 * number)
    half = quantile * math.sqrt(max(0.0, share * (1 - share)) / number + square / (4 * number**2))
    scale = 1 + square / number
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _adjusted(ahead: float, behind: float, number: float, quantile: float) -> tuple[float, float]:
    """Bonett and Price's interval of a paired difference: of each kind of document that differs, one is added."""
    one, other = (ahead * number + 1) / (number + 2), (behind * number + 1) / (number + 2)
    difference = one - other
    half = quantile * math.sqrt((one + other - difference**2) / (number + 2))
    return max(-1.0, difference - half), min(1.0, difference + half)
