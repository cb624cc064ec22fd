"""The lab's pictures: accuracy over b and u, scores per method, and the problems on which a method gains.

Knows the study's numbers and matplotlib; knows nothing of training or tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.drawing import HATCH
from adapterswap.lab.seed import METHODS
from adapterswap.lab.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_pictures"]

_SWAP, _OTHER, _GREY = "#c2410c", "#1d4ed8", "#6b7280"
_DPI = 160


def draw_pictures(study: Study, folder: Path) -> list[Path]:
    """Write grid.png, scores.png and, if the scene has unfamiliar words, words.png to `folder`."""
    drawn = {"grid": _grid(study), "scores": _scores(study)}
    if study.scene.unfamiliar:
        drawn["words"] = _words(study)
    paths = []
    for name, figure in drawn.items():
        path = folder / f"{name}.png"
        # Without the software's version and the time, the same study gives the same bytes.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
        paths.append(path)
    return paths


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _grid(study: Study) -> Figure:
    import numpy as np
    from matplotlib.patches import Rectangle

    grid = study.mean_grid()
    bottoms, tops = (1 + max(zone[i] for zone in grid) for i in (0, 1))
    values = np.full((tops, bottoms), np.nan)
    for (bottom, top), value in grid.items():
        values[top, bottom] = value
    figure, axes = _figure(6.4, 3.6)
    for top, bottom in np.argwhere(np.isnan(values)).tolist():  # not evaluated; a score of 0 would look different
        axes.add_patch(
            Rectangle((bottom - 0.5, top - 0.5), 1, 1, facecolor="white", edgecolor=_GREY, hatch=HATCH, lw=0)
        )
    image = axes.imshow(values, origin="lower", cmap="Blues", vmin=0, aspect="auto")
    dark = 0.65 * np.nanmax(values)  # above this, white is easier to read than black
    chosen = [(seed.bottom, seed.top) for seed in study.seeds]
    for (bottom, top), value in grid.items():
        votes = chosen.count((bottom, top))
        text = f"{value:.2f}" + (f"\nchosen {votes}×" if votes else "")
        axes.text(bottom, top, text, ha="center", va="center", color="white" if value > dark else "black", fontsize=9)
    axes.set_xticks(range(bottoms))
    axes.set_yticks(range(tops))
    axes.set_xlabel("b: bottom layers from the language expert")
    axes.set_ylabel("u: top layers from the language expert")
    axes.set_title("Layer swap on the development set, xx maths", loc="left", fontsize=11)
    figure.colorbar(image, label="exact match, mean over seeds")
    return figure


def _scores(study: Study) -> Figure:
    figure, axes = _figure(7.2, 4.0)
    for row, method in enumerate(METHODS):
        colour = _SWAP if method == "layer swap" else _OTHER
        summary = study.score(method, "xx")
        axes.scatter(summary.values, [row] * len(summary.values), zorder=3, **_one_seed(colour))
        half = summary.interval or 0.0  # a share is between 0 and 1, and so is its interval
        ends = [[min(half, summary.mean)], [min(half, 1 - summary.mean)]]
        axes.errorbar(summary.mean, row, xerr=ends, fmt="o", ms=6, color=colour, capsize=4 if half else 0, lw=1.2)
        english = study.score(method, "en")
        axes.scatter(english.mean, row, marker="|", s=90, color=_GREY)
    axes.scatter([], [], marker="|", s=90, color=_GREY, label="English, mean")
    axes.scatter([], [], **_one_seed(_OTHER), label="xx, one seed")
    axes.errorbar(
        [], [], xerr=[], fmt="o", ms=6, color=_OTHER, capsize=4, label="xx, mean and 95 % interval over seeds"
    )
    axes.set_yticks(range(len(METHODS)), list(METHODS))
    axes.invert_yaxis()
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("exact match on held-out word problems")
    axes.set_title(f"Scene “{study.scene.name}”, {len(study.seeds)} seeds", loc="left", fontsize=11)
    _tidy(axes)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.34), ncols=3, frameon=False, fontsize=8)
    return figure


def _words(study: Study) -> Figure:
    figure, axes = _figure(6.4, 3.6)
    colours = {"math expert": _GREY, "reset": "#9ca3af", "soup": "#93c5fd", "sum": _OTHER, "layer swap": _SWAP}
    labels = list(study.by_unfamiliar("base"))
    width = 0.8 / len(colours)
    for position, (method, colour) in enumerate(colours.items()):
        summaries = study.by_unfamiliar(method)
        left = [group + (position - (len(colours) - 1) / 2) * width for group in range(len(labels))]
        means = [summaries[label].mean for label in labels]
        axes.bar(left, means, width * 0.9, color=colour, label=method)
        for place, label in zip(left, labels, strict=True):
            values = summaries[label].values
            axes.scatter([place] * len(values), values, zorder=3, **_one_seed("black"))
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_xlabel("words of the problem that the base hardly knows")
    axes.set_ylabel("exact match, xx maths")
    axes.set_title("Where the gain comes from (dots: seeds)", loc="left", fontsize=11)
    _tidy(axes)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def _one_seed(colour: str) -> dict[str, Any]:
    return {"s": 12, "facecolors": "white", "edgecolors": colour, "linewidths": 0.8}


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", lw=0.4, color="#e5e7eb")
    axes.set_axisbelow(True)
