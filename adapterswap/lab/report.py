"""The lab's results as tables for the terminal and as data for results.json.

Knows the study's numbers and rich; knows nothing of pictures, training or the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from adapterswap import __version__
from adapterswap.lab.seed import METHODS
from adapterswap.lab.statistics import Summary
from adapterswap.lab.study import Study

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CAVEAT", "LAB_FORMAT", "answers", "results", "tables"]

LAB_FORMAT = "adapterswap-lab/1"
CAVEAT = (
    "A constructed demonstration of a mechanism on models of 0.3 million parameters. It is not evidence for the "
    "numbers of the layer-swapping papers, or for any real language."
)
_COMPARED = tuple(method for method in METHODS if method not in ("base", "layer swap"))
_LIBRARIES = ("torch", "transformers", "peft", "trl")


def tables(study: Study) -> Iterator[Table]:
    """The scores, the paired differences, and the scores by number of unfamiliar words."""
    from rich.table import Table

    number = len(study.seeds)
    problems = len(study.seeds[0].unfamiliar)
    over = f"{number} seed{'s' if number > 1 else ''} × {problems} held-out problems"

    spread = " (mean ± standard deviation over seeds)" if number > 1 else ""
    scores = Table(title=f"Exact match, {over}{spread}", title_justify="left")
    for heading in ("method", "xx maths", "English maths", "description"):
        scores.add_column(heading, justify="right" if "maths" in heading else "left", no_wrap=heading != "description")
    for method, description in METHODS.items():
        values = [_with_spread(study.score(method, language)) for language in ("xx", "en")]
        scores.add_row(method, *values, description, style="bold" if method == "layer swap" else "")
    yield scores

    differences = Table(
        title="Layer swap minus the other method, xx maths, paired\n"
        "(clearly: a seed's 95 % interval over its problems excludes 0)",
        title_justify="left",
    )
    for heading in ("than", "difference", "95 % over seeds", "clearly better : worse", "seed by seed"):
        differences.add_column(heading, justify="left" if heading in ("than", "seed by seed") else "right")
    for method in _COMPARED:
        paired = study.against(method)
        summary = paired.over_seeds
        differences.add_row(
            method,
            f"{summary.mean:+.3f}",
            "" if summary.interval is None else f"± {summary.interval:.3f}",
            f"{paired.won} : {paired.lost} of {number}",
            " ".join(f"{value:+.3f}" for value in summary.values),
        )
    yield differences

    if study.scene.unfamiliar:
        groups = {method: study.by_unfamiliar(method) for method in METHODS}
        words = Table(title="xx maths by unfamiliar words", title_justify="left")
        words.add_column("method")
        for label in groups["base"]:
            words.add_column(label, justify="right")
        for method, by_label in groups.items():
            words.add_row(method, *(f"{summary.mean:.3f}" for summary in by_label.values()))
        yield words


def _with_spread(summary: Summary) -> str:
    return f"{summary.mean:.3f}" + ("" if summary.spread is None else f" ± {summary.spread:.3f}")


def results(study: Study) -> dict[str, Any]:
    """All results as plain data, except the single answers."""
    scene = study.scene
    return {
        "format": LAB_FORMAT,
        "caveat": CAVEAT,
        "scene": {"name": scene.name, "question": scene.question, "unfamiliar": sorted(scene.unfamiliar)},
        "methods": METHODS,
        "problems": len(study.seeds[0].unfamiliar),
        "seeds": [
            {
                "seed": seed.seed,
                "bottom": seed.bottom,
                "top": seed.top,
                "scale": seed.scale,
                "development": {
                    "grid": [{"bottom": b, "top": u, "xx": value} for (b, u), value in seed.grid.items()],
                    "scales": [{"scale": scale, "xx": value} for scale, value in seed.scales.items()],
                },
                "test": {
                    method: {language: float(right.mean()) for language, right in by_language.items()}
                    for method, by_language in seed.right.items()
                },
                "training_losses": seed.losses,
            }
            for seed in study.seeds
        ],
        "scores": {
            method: {language: asdict(study.score(method, language)) for language in ("xx", "en")} for method in METHODS
        },
        "layer_swap_minus": {method: asdict(study.against(method)) for method in _COMPARED},
        "by_unfamiliar_words": {
            method: {label: asdict(summary) for label, summary in study.by_unfamiliar(method).items()}
            for method in METHODS
        },
        "versions": {"adapterswap": __version__, **{name: version(name) for name in _LIBRARIES}},
    }


def answers(study: Study) -> Iterator[dict[str, Any]]:
    """A row per seed, method and language, with a character per test problem: 1 for right, 0 for wrong."""
    for seed in study.seeds:
        for method, by_language in seed.right.items():
            for language, right in by_language.items():
                marks = "".join("01"[int(value)] for value in right)
                yield {"seed": seed.seed, "method": method, "language": language, "right": marks}
