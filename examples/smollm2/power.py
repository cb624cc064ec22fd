"""What a design of so many templates, problems and pairs of experts can find, from the spread of the first studies.

    python examples/smollm2/power.py

The differences (layer swap minus math expert) of results.json are 1, 0 or -1 for 285 problems of 30 templates and five
pairs of experts. Their variance is split into five parts by the method of moments. A design's interval is the one of
two crossed factors, templates and pairs, with Satterthwaite's degrees of freedom; its power is that of a two-sided
test at 5 %, by the noncentral t distribution.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats
from table import SWAP, of_pairs, test_problems

RESULTS = Path(__file__).with_name("results.json")
POWER = 0.8


@dataclass(frozen=True)
class Spread:
    """Variances of a difference: between templates, pairs, templates in pairs, problems, and problems in pairs."""

    template: float
    pair: float
    template_in_pair: float
    problem: float
    problem_in_pair: float


def measured_spread() -> Spread:
    """The parts of the variance of swap minus math expert, over the problems and pairs of the first studies."""
    marks = json.loads(RESULTS.read_text(encoding="utf-8"))["marks"]
    swap, alone = of_pairs(marks, SWAP), of_pairs(marks, "task expert")
    apart = np.array([swap[pair] - alone[pair] for pair in swap])

    names = [problem["template"] for problem in test_problems()]
    groups = [apart[:, [name == template for name in names]] for template in dict.fromkeys(names)]

    return split(groups)


def split(groups: list[NDArray[np.float64]]) -> Spread:
    """The parts of the variance of differences (pairs, problems) of every template, by the method of moments."""
    means = np.array([group.mean(1) for group in groups])
    templates, pairs = means.shape

    # Two crossed factors without repetition: mean squares of templates, of pairs, and of what is left.
    rows, columns, middle = means.mean(1), means.mean(0), means.mean()
    left = means - rows[:, None] - columns + middle
    of_templates = pairs * ((rows - middle) ** 2).sum() / (templates - 1)
    of_pairs_ = templates * ((columns - middle) ** 2).sum() / (pairs - 1)
    of_left = (left**2).sum() / ((templates - 1) * (pairs - 1))

    # The same within a template, where problems take the place of templates.
    within, within_left, problems = 0.0, 0.0, 0

    for group in groups:
        by_problem = group.mean(0)
        within += pairs * ((by_problem - by_problem.mean()) ** 2).sum()
        within_left += ((group - by_problem - group.mean(1, keepdims=True) + group.mean()) ** 2).sum()
        problems += group.shape[1] - 1

    problem_in_pair = within_left / (problems * (pairs - 1))
    problem = (within / problems - problem_in_pair) / pairs
    size = len(groups) / sum(1 / group.shape[1] for group in groups)

    return Spread(
        template=max(0.0, (of_templates - of_left) / pairs - problem / size),
        pair=max(0.0, (of_pairs_ - of_left) / templates),
        template_in_pair=max(0.0, of_left - problem_in_pair / size),
        problem=problem,
        problem_in_pair=problem_in_pair,
    )


def interval_of(spread: Spread, templates: int, problems: int, pairs: int) -> tuple[float, float]:
    """The standard error of a design's mean difference, and Satterthwaite's degrees of freedom."""
    left = spread.template_in_pair + spread.problem_in_pair / problems
    of_templates = left + pairs * (spread.template + spread.problem / problems)
    of_pairs_ = left + templates * spread.pair

    total = of_templates + of_pairs_ - left
    freedom = total**2 / (
        of_templates**2 / (templates - 1)
        + of_pairs_**2 / (pairs - 1)
        + left**2 / ((templates - 1) * (pairs - 1))
    )  # fmt: skip

    return (total / (templates * pairs)) ** 0.5, freedom


def power(gain: float, error: float, freedom: float) -> float:
    """The probability that a true gain is found: that the 95 % interval is above zero."""
    return float(stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, gain / error))


def least_gain(error: float, freedom: float) -> float:
    """The gain that is found with a probability of `POWER`."""
    return float(optimize.brentq(lambda gain: power(gain, error, freedom) - POWER, 0, 50 * error))


def main() -> None:
    spread = measured_spread()
    print("variance of swap - math:", ", ".join(f"{name} {value:.4f}" for name, value in vars(spread).items()))
    print(f"\n{'templates':>9}{'problems':>9}{'pairs':>6}{'error':>8}{'freedom':>8}{'of .03':>8}{'found with .8':>15}")

    for templates, problems, pairs in [
        (30, 10, 5), (40, 15, 5), (100, 3, 5), (100, 4, 5), (100, 6, 5), (200, 6, 5), (1000, 6, 5), (100, 4, 10),
    ]:  # fmt: skip
        error, freedom = interval_of(spread, templates, problems, pairs)
        found, least = power(0.03, error, freedom), least_gain(error, freedom)
        print(f"{templates:9}{problems:9}{pairs:6}{error:8.4f}{freedom:8.1f}{found:8.2f}{least:15.3f}")


if __name__ == "__main__":
    main()
