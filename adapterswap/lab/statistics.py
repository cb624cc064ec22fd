"""Means, spreads and paired differences over seeds, and over problems.

Numbers in, numbers out. A seed is a base and its experts, so seeds are independent; they share their problems. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PairedDifference", "Summary", "difference", "summarize"]

_NORMAL = 1.959964


@dataclass(frozen=True)
class Summary:
    """A score over seeds.

    Attributes:
        values: one per seed.
        mean: their mean.
        spread: their standard deviation (n - 1); None for one seed.
        interval: half of the 95 % t interval of the mean over seeds; None for one seed.
    """

    values: tuple[float, ...]
    mean: float
    spread: float | None
    interval: float | None


@dataclass(frozen=True)
class PairedDifference:
    """One method's accuracy minus another's, paired.

    Attributes:
        over_seeds: the summary of the seeds' differences.
        over_problems: per seed, half of the 95 % interval of the difference over problems (paired, normal).
        won, lost: numbers of seeds whose difference is above or below zero by more than that.
    """

    over_seeds: Summary
    over_problems: tuple[float, ...]
    won: int
    lost: int


def summarize(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and the t interval t·s/√n."""
    from scipy import stats

    array = np.asarray(values, float)
    number = len(array)
    if number < 2:
        return Summary(tuple(values), float(array.mean()), None, None)
    spread = float(array.std(ddof=1))
    return Summary(
        tuple(values), float(array.mean()), spread, float(stats.t.ppf(0.975, number - 1)) * spread / number**0.5
    )


def difference(one: Sequence[NDArray[np.bool_]], other: Sequence[NDArray[np.bool_]]) -> PairedDifference:
    """Compare two methods' answers.

    Args:
        one, other: per seed, whether each problem was answered correctly (problems,); the same problems in both.
    """
    pairs = [a.astype(float) - b.astype(float) for a, b in zip(one, other, strict=True)]
    means = [float(pair.mean()) for pair in pairs]
    halves = tuple(_NORMAL * float(pair.std(ddof=1)) / len(pair) ** 0.5 for pair in pairs)
    return PairedDifference(
        summarize(means),
        halves,
        won=sum(mean > half for mean, half in zip(means, halves, strict=True)),
        lost=sum(mean < -half for mean, half in zip(means, halves, strict=True)),
    )
