"""The results of all seeds together: means, spreads, paired differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapterswap import __version__
from adapterswap.experiments import intervals
from adapterswap.experiments.lab.scenes import Scene
from adapterswap.experiments.lab.seed import METHODS, SeedResult

if TYPE_CHECKING:
    from rich.table import Table

LAB_FORMAT = "adapterswap-lab/1"
CAVEAT = (
    "A constructed demonstration of a mechanism on models of 0.4 million parameters. It is not evidence for the "
    "numbers of the layer-swapping papers, or for any real language."
)
_COMPARED = tuple(method for method in METHODS if method not in ("base", "layer swap"))
_REPORTED_LIBRARIES = ("torch", "transformers", "peft", "trl")


@dataclass(frozen=True)
class Summary:
    """A score over seeds.

    Attributes:
        values: one per seed.
        mean: their mean.
        spread: their standard deviation (n - 1); None for one seed.
        interval: half of the 95 % t interval of the mean over seeds; None for fewer than three seeds, or if all have
            the same value.
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
        over_problems: per seed, half of the 95 % interval of the difference over problems; None for fewer than three.
        won, lost: numbers of seeds whose interval is above or below zero.
    """

    over_seeds: Summary
    over_problems: tuple[float | None, ...]
    won: int
    lost: int


def summarize(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and the interval over seeds."""
    array = np.asarray(values, float)
    spread = float(array.std(ddof=1)) if len(array) > 1 else None
    interval = intervals.mean_interval(array, documents="seeds")
    return Summary(tuple(values), interval.mean, spread, interval.half)


def difference(one: Sequence[NDArray[np.bool_]], other: Sequence[NDArray[np.bool_]]) -> PairedDifference:
    """Compare two methods' answers.

    Args:
        one, other: per seed, whether each problem was answered correctly (problems,); the same problems in both.
    """
    of_seeds = []
    won = lost = 0
    for a, b in zip(one, other, strict=True):
        minus = a.astype(float) - b.astype(float)
        interval = intervals.mean_interval(minus, documents="problems", bounds=intervals.DIFFERENCE)
        of_seeds.append(interval)
        if interval.excludes_zero:
            won += interval.mean > 0
            lost += interval.mean < 0

    over_seeds = summarize([interval.mean for interval in of_seeds])
    return PairedDifference(over_seeds, tuple(interval.half for interval in of_seeds), won=won, lost=lost)


@dataclass(frozen=True)
class Study:
    """The results of all seeds. Accuracies are shares of the test problems, 0…1."""

    scene: Scene
    seeds: tuple[SeedResult, ...]

    def score(self, method: str, language: str) -> Summary:
        """A method's accuracy over seeds."""
        return summarize([float(seed.right[method][language].mean()) for seed in self.seeds])

    def against(self, method: str, *, language: str = "xx", than: str = "layer swap") -> PairedDifference:
        """How much better `than` is than `method`, paired by seed and by problem."""
        one = [seed.right[than][language] for seed in self.seeds]
        other = [seed.right[method][language] for seed in self.seeds]
        return difference(one, other)

    def by_unfamiliar(self, method: str) -> dict[str, Summary]:
        """A method's accuracy in xx on problems with 0, 1, and 2 or more unfamiliar words, if there are any."""
        counts = self.seeds[0].unfamiliar
        groups = {"0": counts == 0, "1": counts == 1, "2+": counts >= 2}
        summaries = {}
        for label, chosen in groups.items():
            if chosen.any():
                summaries[label] = summarize([float(seed.right[method]["xx"][chosen].mean()) for seed in self.seeds])
        return summaries

    def to_json(self) -> dict[str, Any]:
        """All results as plain data, except the single answers."""
        scores: dict[str, dict[str, Any]] = {}
        by_unfamiliar_words: dict[str, dict[str, Any]] = {}
        for method in METHODS:
            scores[method] = {language: asdict(self.score(method, language)) for language in ("xx", "en")}
            summaries = self.by_unfamiliar(method)
            by_unfamiliar_words[method] = {label: asdict(summary) for label, summary in summaries.items()}

        scene = self.scene
        return {
            "format": LAB_FORMAT,
            "caveat": CAVEAT,
            "scene": {"name": scene.name, "question": scene.question, "unfamiliar": sorted(scene.unfamiliar)},
            "methods": METHODS,
            "problems": len(self.seeds[0].unfamiliar),
            "seeds": [seed.to_json() for seed in self.seeds],
            "scores": scores,
            "layer_swap_minus": {method: asdict(self.against(method)) for method in _COMPARED},
            "by_unfamiliar_words": by_unfamiliar_words,
            "versions": {"adapterswap": __version__, **{name: version(name) for name in _REPORTED_LIBRARIES}},
        }

    def answers(self) -> Iterator[dict[str, Any]]:
        """A row per seed, method and language, with a character per test problem: 1 for right, 0 for wrong."""
        for seed in self.seeds:
            for method, by_language in seed.right.items():
                for language, right in by_language.items():
                    marks = "".join("01"[int(value)] for value in right)
                    yield {"seed": seed.seed, "method": method, "language": language, "right": marks}

    def tables(self) -> Iterator[Table]:
        """The scores, the paired differences, and the scores by number of unfamiliar words."""
        from rich.table import Table

        number = len(self.seeds)
        seeds, spread = "1 seed", ""
        if number > 1:
            seeds, spread = f"{number} seeds", " (mean ± standard deviation over seeds)"
        problems = f"{len(self.seeds[0].unfamiliar)} held-out problems"

        scores = Table(title=f"Exact match, {seeds} × {problems}{spread}", title_justify="left")
        scores.add_column("method", no_wrap=True)
        scores.add_column("xx math", justify="right", no_wrap=True)
        scores.add_column("English math", justify="right", no_wrap=True)
        scores.add_column("description")
        for method, description in METHODS.items():
            values = [_with_spread(self.score(method, language)) for language in ("xx", "en")]
            scores.add_row(method, *values, description, style="bold" if method == "layer swap" else "")
        yield scores

        differences = Table(
            title="Layer swap minus the other method, xx math, paired\n"
            "(clearly: a seed's 95 % interval over its problems excludes 0)",
            title_justify="left",
        )
        differences.add_column("than")
        differences.add_column("difference", justify="right")
        differences.add_column("95 % over seeds", justify="right")
        differences.add_column("clearly better : worse", justify="right")
        differences.add_column("seed by seed")
        for method in _COMPARED:
            paired = self.against(method)
            summary = paired.over_seeds
            interval = ""
            if summary.interval is not None:
                interval = _interval(summary.mean, summary.interval)
            differences.add_row(
                method,
                f"{summary.mean:+.3f}",
                interval,
                f"{paired.won} : {paired.lost} of {number}",
                " ".join(f"{value:+.3f}" for value in summary.values),
            )
        yield differences

        if self.scene.unfamiliar:
            words = Table(title="xx math by unfamiliar words", title_justify="left")
            words.add_column("method")
            for label in self.by_unfamiliar("base"):
                words.add_column(label, justify="right")
            for method in METHODS:
                summaries = self.by_unfamiliar(method).values()
                words.add_row(method, *(f"{summary.mean:.3f}" for summary in summaries))
            yield words


def _interval(mean: float, half: float) -> str:
    """The ends of the interval of a difference of shares, which is never beyond -1 and 1."""
    return f"[{max(mean - half, -1.0):+.3f}, {min(mean + half, 1.0):+.3f}]"


def _with_spread(summary: Summary) -> str:
    """The mean, and the standard deviation if there are several seeds."""
    if summary.spread is None:
        return f"{summary.mean:.3f}"
    return f"{summary.mean:.3f} ± {summary.spread:.3f}"
