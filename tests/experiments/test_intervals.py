"""Intervals against scipy and formulas written out, their designs, their edges, and how often they contain the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import stats

from adapterswap.experiments.intervals import DIFFERENCE, SHARE, Interval, mean_interval, standard_error, wilson
from tests.tiers import ALL

# Of each pair of docs/lab.md and each template, problems that only the swap solved minus those that only math solved.
SWAP_MINUS_MATH = [
    [1, -2, 0, -1, 0, 0, 1, 1, 2, 2, 2, -1, 1, -1, 4, 0, 0, 0, 1, 1, -1, 0, 0, 1, 0, 1, 0, 0, 2, 2],
    [1, 0, 1, 0, 1, 1, 1, 3, -1, -4, -1, 0, 0, -5, 1, 0, 1, 0, 0, 0, 0, 0, -1, 1, -1, 0, -1, 0, 1, 2],
    [0, 1, 0, 0, 0, 0, 0, 2, 0, -3, -1, -1, 0, -4, 3, -1, 0, 0, 1, -1, 0, 0, -1, 2, 0, 0, 0, -1, 1, 0],
    [2, 1, 2, 0, 4, -1, 1, 3, 0, 0, -2, -1, 0, 1, 3, -2, 0, -2, 1, 0, -1, -1, -1, 1, 3, 0, 1, 1, 1, 2],
    [0, -1, 1, 0, 0, 0, 0, 1, 0, -2, -2, 2, 0, -5, 7, 0, 2, -1, 2, 4, 2, 0, 0, 2, -1, 0, 0, 1, 0, 1],
]
SIZES = [10] * 22 + [5, 10, 10, 5, 10, 5, 10, 10]
SIDES = ("task experts", "language experts")
PAIRED = [(f"math-{i}", f"french-{i}") for i in range(5)]
CROSSED = [(f"math-{i}", f"french-{j}") for i in range(3) for j in range(3)]


def ends(interval: Interval) -> tuple[float, float]:
    assert interval.ends is not None
    return interval.ends


def test_independent_values_have_students_interval() -> None:
    values = np.random.default_rng(1).normal(size=40)
    result = mean_interval(values)
    assert ends(result) == pytest.approx(stats.t.interval(0.95, 39, loc=values.mean(), scale=stats.sem(values)))
    assert (result.over, result.method, result.freedom) == (("documents",), "t", pytest.approx(39))
    wide = mean_interval(values, level=0.99)
    assert ends(wide) == pytest.approx(stats.t.interval(0.99, 39, loc=values.mean(), scale=stats.sem(values)))


def test_standard_errors() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert standard_error(values) == pytest.approx(stats.sem(values))
    assert standard_error([1.0]) is None
    assert standard_error([2.0, 2.0]) == 0
    assert standard_error([0.0, 1.0, 1.0, 1.0], ["a", "a", "b", "b"]) == pytest.approx(stats.sem([0.5, 1]))
    assert standard_error([0.0, 1.0], ["a", "a"]) is None


def test_groups_are_the_draws() -> None:
    values = np.random.default_rng(2).normal(size=60)
    names = [f"t{place // 6}" for place in range(60)]
    result = mean_interval(values, groups=names, documents="templates")
    means = values.reshape(10, 6).mean(1)
    assert ends(result) == pytest.approx(stats.t.interval(0.95, 9, loc=means.mean(), scale=stats.sem(means)))
    assert result.over == ("templates",)
    assert ends(mean_interval(values, groups=range(60))) == pytest.approx(ends(mean_interval(values)))


def test_groups_of_different_sizes() -> None:
    """The mean over documents is a ratio of sums, the mean over groups a mean of means."""
    generator = np.random.default_rng(3)
    sizes = generator.integers(1, 9, 12)
    names = np.repeat(np.arange(12), sizes)
    values = generator.normal(size=sizes.sum())
    ratio = mean_interval(values, groups=names.tolist())
    sums = np.bincount(names, values)
    residuals = sums - values.mean() * sizes  # Cochran 1977, Sampling Techniques, equation 2.46
    variance = 12 / 11 * (residuals**2).sum() / sizes.sum() ** 2
    assert ratio.mean == pytest.approx(values.mean())
    assert ratio.half == pytest.approx(stats.t.ppf(0.975, 11) * variance**0.5)
    equal = mean_interval(values, groups=names.tolist(), equal_groups=True)
    assert ends(equal) == pytest.approx(
        stats.t.interval(0.95, 11, loc=(sums / sizes).mean(), scale=stats.sem(sums / sizes))
    )


def test_pairs_and_templates_are_two_factors() -> None:
    """The variance of a mean over both, from the sums of squares of a table of 5 pairs and 8 templates."""
    table = np.random.default_rng(4).normal(size=(5, 8)) + np.arange(8) / 4 + np.arange(5)[:, None] / 3
    result = mean_interval(table, PAIRED, names=SIDES, documents="templates")
    of_pairs = 8 * ((table.mean(1) - table.mean()) ** 2).sum() / 4
    of_templates = 5 * ((table.mean(0) - table.mean()) ** 2).sum() / 7
    rest = ((table - table.mean(1)[:, None] - table.mean(0) + table.mean()) ** 2).sum() / 28
    parts = of_pairs / 40, of_templates / 40, -rest / 40
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 7 + parts[2] ** 2 / 28)
    half = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    assert ends(result) == pytest.approx((table.mean() - half, table.mean() + half))
    assert (result.over, result.design) == (("pairs", "templates"), "paired")
    assert result.freedom == pytest.approx(freedom)


def test_the_study_over_pairs_and_templates() -> None:
    """The layer swap minus the math expert: the interval over both is wider than over either alone."""
    options: Any = {"documents": "templates", "bounds": DIFFERENCE}
    table = np.array(SWAP_MINUS_MATH) / SIZES
    both = mean_interval(table, PAIRED, names=SIDES, **options)
    assert both.mean == pytest.approx(0.0273, abs=5e-5)
    assert ends(both) == pytest.approx((-0.0232, 0.0779), abs=5e-5)
    templates = mean_interval(table.mean(0), **options)
    assert ends(templates) == pytest.approx(stats.t.interval(0.95, 29, both.mean, stats.sem(table.mean(0))))
    assert ends(templates) == pytest.approx((-0.0151, 0.0698), abs=5e-5)
    pairs = mean_interval(table.mean(1), documents="pairs")
    assert ends(pairs) == pytest.approx(stats.t.interval(0.95, 4, both.mean, stats.sem(table.mean(1))))


@pytest.mark.parametrize(("spread", "widest"), [(0.0, "all"), (1.0, "a")])
def test_crossed_experts_have_their_interactions(spread: float, widest: str) -> None:
    """Against the expected mean squares of a balanced design, with their components estimated one by one.

    Where experts of one side differ much, the interval over them alone is wider than that over all.
    """
    experts = spread * np.arange(3)[:, None, None]
    table = np.random.default_rng(5).normal(size=(3, 3, 20)) + experts + np.arange(20) / 5
    result = mean_interval(table.reshape(9, 20), CROSSED, names=SIDES)
    grand = table.mean()
    a, b, c = table.mean((1, 2)) - grand, table.mean((0, 2)) - grand, table.mean((0, 1)) - grand
    ab = table.mean(2) - grand - a[:, None] - b
    ac = table.mean(1) - grand - a[:, None] - c
    bc = table.mean(0) - grand - b[:, None] - c
    abc = table - grand - a[:, None, None] - b[:, None] - c - ab[:, :, None] - ac[:, None] - bc
    squares = {
        "a": (60 * (a**2).sum(), 2), "b": (60 * (b**2).sum(), 2), "c": (9 * (c**2).sum(), 19),
        "ab": (20 * (ab**2).sum(), 4), "ac": (3 * (ac**2).sum(), 38), "bc": (3 * (bc**2).sum(), 38),
        "abc": ((abc**2).sum(), 76),
    }  # fmt: skip
    parts = {name: (-1) ** (len(name) + 1) * total / n / 180 for name, (total, n) in squares.items()}
    variance = sum(parts.values())
    freedom = variance**2 / sum(part**2 / squares[name][1] for name, part in parts.items())
    halves = {name: stats.t.ppf(0.975, squares[name][1]) * parts[name] ** 0.5 for name in ("a", "b", "c")}
    halves["all"] = stats.t.ppf(0.975, freedom) * variance**0.5
    assert max(halves, key=lambda name: halves[name]) == widest
    assert result.half == pytest.approx(halves[widest])
    assert (result.over, result.design) == ((*SIDES, "documents"), "crossed")


def test_the_design_follows_from_the_names_of_experts() -> None:
    values = np.random.default_rng(6).normal(size=(9, 30))

    def drawn(units: Sequence[tuple[str | None, ...]]) -> tuple[tuple[str, ...], str]:
        result = mean_interval(values[: len(units)], units, names=SIDES)
        return result.over, result.design

    assert drawn(PAIRED) == (("pairs", "documents"), "paired")
    assert drawn(CROSSED) == ((*SIDES, "documents"), "crossed")
    assert drawn([*CROSSED[:-1]]) == ((*SIDES, "documents"), "incomplete")
    assert drawn([("math", f"french-{i}") for i in range(4)]) == (("language experts", "documents"), "")
    assert drawn([(None, f"french-{i}") for i in range(4)]) == (("language experts", "documents"), "")
    assert drawn([("math", "french")]) == (("documents",), "")
    # Two French experts for each math expert: what was drawn are the math experts.
    assert drawn([(f"math-{i // 2}", f"french-{i}") for i in range(8)]) == (("task experts", "documents"), "")


def test_units_that_are_one_training_run_are_one_draw() -> None:
    values = np.random.default_rng(7).normal(size=(8, 30))
    units = [(f"math-{i // 2}",) for i in range(8)]
    expected = mean_interval(values.reshape(4, 2, 30).mean(1), [(f"math-{i}",) for i in range(4)])
    assert ends(mean_interval(values, units)) == pytest.approx(ends(expected))
    together = mean_interval(values, [("math",)] * 8)
    assert ends(together) == pytest.approx(ends(mean_interval(values.mean(0))))


def test_over_two_factors_it_is_never_surer_than_over_one() -> None:
    """Where the rest varies more than pairs do, the component of pairs is 0, and not below."""
    generator = np.random.default_rng(8)
    smaller = 0
    for _ in range(50):
        table = generator.normal(size=(4, 10))
        both = mean_interval(table, [(str(i),) for i in range(4)])
        alone = [stats.t.ppf(0.975, len(means) - 1) * stats.sem(means) for means in (table.mean(0), table.mean(1))]
        assert (both.half or 0) >= max(alone) * (1 - 1e-9)

        # If both together vary less than one alone, this one is all that there is: a variance close to 0 has no
        # degrees of freedom, and would have an endless interval.
        squares = [np.var(means, ddof=1) / len(means) for means in (table.mean(0), table.mean(1))]
        rest = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
        if sum(squares) - (rest**2).sum() / 27 / 40 < max(squares):
            smaller += 1
            assert both.half == pytest.approx(max(alone))
    assert smaller > 10


@pytest.mark.parametrize(("right", "of"), [(0, 50), (50, 50), (1, 50), (25, 50), (3, 4), (499, 500), (59, 100)])
def test_shares_have_wilsons_interval(right: int, of: int) -> None:
    expected = stats.binomtest(right, of).proportion_ci(method="wilson")
    assert wilson(right, of) == pytest.approx((expected.low, expected.high))
    result = mean_interval([1.0] * right + [0.0] * (of - right), bounds=SHARE)
    assert ends(result) == pytest.approx((expected.low, expected.high))
    assert (result.method, result.freedom) == ("Wilson", None)


def test_none_right_in_groups_is_as_many_answers_as_groups() -> None:
    names = [place // 10 for place in range(300)]
    nothing = mean_interval(np.zeros(300), groups=names, bounds=SHARE)
    assert ends(nothing) == pytest.approx(wilson(0, 30))
    assert ends(mean_interval(np.zeros((3, 50)), CROSSED[:3], bounds=SHARE)) == pytest.approx(wilson(0, 50))


def test_answers_that_are_equal_in_a_group_are_one_answer() -> None:
    answers = (np.random.default_rng(9).random(40) < 0.7).astype(float)
    repeated = mean_interval(np.repeat(answers, 5), groups=np.repeat(np.arange(40), 5).tolist(), bounds=SHARE)
    plain = mean_interval(answers, groups=range(40), bounds=SHARE)
    assert ends(repeated) == pytest.approx(ends(plain))
    assert ends(plain) == pytest.approx(ends(mean_interval(answers, bounds=SHARE)), abs=0.01)  # t for the normal


def test_a_difference_without_a_discordant_pair() -> None:
    result = mean_interval(np.zeros(50), bounds=DIFFERENCE)
    half = stats.norm.ppf(0.975) * (2 / 52 / 52) ** 0.5  # Bonett and Price 2012, equation 10
    assert (result.mean, *ends(result), result.method) == (0, pytest.approx(-half), pytest.approx(half), "adjusted")
    one, other = 4 / 52, 2 / 52
    few = mean_interval([1.0] * 3 + [-1.0] + [0.0] * 46, bounds=DIFFERENCE)
    half = stats.norm.ppf(0.975) * ((one + other - (one - other) ** 2) / 52) ** 0.5
    assert ends(few) == pytest.approx((one - other - half, one - other + half))


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        ([[1.0]], {}, "1 document,"),
        ([[1.0, 0.0]], {}, "2 documents,"),
        ([[1.0, 0.0, 1.0]], {"groups": "aaa", "documents": "templates"}, "1 template,"),
        (np.eye(2, 9), {"units": PAIRED[:2], "names": SIDES}, "2 pairs,"),
        (np.eye(4, 9), {"units": [("a", "b"), ("a", "c"), ("d", "b"), ("d", "c")], "names": SIDES}, "2 task experts,"),
        (np.ones((1, 9)) * 7.5, {}, "all documents have the same value"),
    ],
    ids=["one document", "two documents", "one group", "two pairs", "two and two", "no spread"],
)
def test_there_is_none_with_a_reason(values: Any, options: Any, reason: str) -> None:
    result = mean_interval(values, **options)
    assert (result.low, result.high, result.ends, result.half, result.over) == (None, None, None, None, ())
    assert result.mean == pytest.approx(np.mean(values))
    assert result.reason.startswith(reason)
    assert not result.excludes_zero


def test_intervals_of_shares_stay_between_their_bounds() -> None:
    generator = np.random.default_rng(10)
    for number in (3, 5, 9):
        for _ in range(20):
            values = generator.choice([0.0, 0.5, 1.0], (3, number), p=[0.05, 0.05, 0.9])
            low, high = ends(mean_interval(values, bounds=SHARE))
            assert 0 <= low <= values.mean() <= high <= 1
            low, high = ends(mean_interval(values, bounds=DIFFERENCE))
            assert -1 <= low <= high <= 1


# Coverage: (values, true mean, options) of one made-up experiment.
Draw = Callable[[Generator], tuple[NDArray[np.float64], float, dict[str, Any]]]


def _independent(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    return generator.exponential(size=(1, 125)), 1.0, {}


def _grouped(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    """300 answers of 30 templates, whose shares have a standard deviation of .2."""
    shares = generator.beta(3, 2, 30)
    right = generator.random((30, 10)) < shares[:, None]
    return right.reshape(1, 300).astype(float), 0.6, {"groups": np.repeat(np.arange(30), 10), "bounds": SHARE}


def _grouped_difference(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    better = generator.random((30, 10)) < generator.beta(1, 9, 30)[:, None]
    worse = ~better & (generator.random((30, 10)) < generator.beta(1, 9, 30)[:, None])
    values = better.astype(float) - worse
    return values.reshape(1, 300), 0.1 - 0.9 * 0.1, {"groups": np.repeat(np.arange(30), 10), "bounds": DIFFERENCE}


def _paired(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    """The spread of the study: pairs .0007, templates .0098, the rest .0159."""
    values = generator.normal(0, 0.0007**0.5, (5, 1)) + generator.normal(0, 0.0098**0.5, 30)
    return values + generator.normal(0, 0.0159**0.5, (5, 30)), 0.0, {"units": PAIRED}


def _crossed(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    experts = generator.normal(0, 0.05, (3, 1, 1)) + generator.normal(0, 0.05, (1, 3, 1))
    values = experts + generator.normal(0, 0.3, 125) + generator.normal(0, 0.3, (3, 3, 125))
    return values.reshape(9, 125), 0.0, {"units": CROSSED}


def _three_pairs(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    values = generator.normal(0, 0.003**0.5, (3, 1)) + generator.normal(0, 0.0098**0.5, 30)
    return values + generator.normal(0, 0.0159**0.5, (3, 30)), 0.0, {"units": PAIRED[:3]}


def _one_side(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    """Experts of one side differ much, those of the other do not."""
    values = generator.normal(0, 0.1, (3, 1, 1)) + generator.normal(0, 0.3, 60) + generator.normal(0, 0.3, (3, 3, 60))
    return values.reshape(9, 60), 0.0, {"units": CROSSED}


def _few_templates(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    """Differences that only one method has, on few of 60 templates."""
    better = generator.random((60, 10)) < generator.beta(0.18, 8.82, 60)[:, None]
    options = {"groups": np.repeat(np.arange(60), 10), "bounds": DIFFERENCE}
    return better.reshape(1, 600).astype(float), 0.02, options


def _edge(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    share = generator.uniform(0, 0.1)
    return (generator.random((1, 80)) < share).astype(float), share, {"bounds": SHARE}


def _edge_difference(generator: Generator) -> tuple[NDArray[np.float64], float, dict[str, Any]]:
    """Differences that only one method has, on few documents."""
    share = generator.uniform(0.03, 0.12)
    return (generator.random((1, 150)) < share).astype(float), share, {"bounds": DIFFERENCE}


@pytest.mark.parametrize(
    "draw",
    [
        _independent,
        _grouped,
        _grouped_difference,
        _paired,
        _three_pairs,
        _crossed,
        _one_side,
        _few_templates,
        _edge,
        _edge_difference,
    ],
)
def test_it_contains_the_true_mean_in_95_of_100_experiments(draw: Draw) -> None:
    number = 2000 if ALL else 200
    hits = 0
    for seed in range(number):
        values, mean, options = draw(np.random.default_rng(seed))
        low, high = ends(mean_interval(values, **options))
        hits += low <= mean <= high
    fewest, most = stats.binom.ppf(0.01, number, 0.93), stats.binom.ppf(0.99, number, 0.97)
    assert fewest <= hits <= most


def test_without_groups_it_would_contain_it_too_rarely() -> None:
    hits = 0
    for seed in range(200):
        values, mean, options = _grouped(np.random.default_rng(seed))
        low, high = ends(mean_interval(values, bounds=options["bounds"]))
        hits += low <= mean <= high
    assert hits < stats.binom.ppf(0.001, 200, 0.93)
