"""Pictures of an analysis: changed rows by layer and module, norms by layer, and where two experts meet.

Knows tables of numbers and matplotlib. The layout of the first follows figures 2 and 4-9 of Bandarkar et al. (ICLR
2025): a row for each layer with the last on top, a column for each matrix, darker where more changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.analysis.changes import FractionTable
from adapterswap.analysis.interference import Interference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_fractions", "draw_interference", "draw_norms"]

_DPI = 160
_TALLEST = 40.0  # inches of a heatmap's rows; more layers share them
_COLOURS = ("#c2410c", "#1d4ed8", "#047857", "#6b7280", "#7c3aed", "#b45309")


def draw_fractions(tables: Sequence[FractionTable], path: Path) -> None:
    """A heatmap for each expert, all on one scale: the share of rows above the threshold, layer by module."""
    import numpy as np

    most = max(max(table.cells.values()) for table in tables) or 1.0
    columns = max(len(table.modules) for table in tables)
    layers = max(len(table.layers) for table in tables)
    across = min(3, len(tables))
    down = -(-len(tables) // across)
    figure = _figure((1.2 + 0.42 * columns) * across + 0.9, down * (1.5 + min(0.16 * layers, _TALLEST)))
    grid = figure.subplots(down, across, squeeze=False)
    for axes, table in zip(grid.flat, tables, strict=False):
        values = np.full((len(table.layers), len(table.modules)), np.nan)
        for (layer, module), value in table.cells.items():
            values[layer, table.modules.index(module)] = value
        image = axes.imshow(values, origin="lower", cmap="Greens", vmin=0, vmax=most, aspect="auto")
        axes.set_xticks(range(len(table.modules)), [_short(module) for module in table.modules], rotation=90)
        axes.set_yticks(_ticks(len(table.layers)))
        at = "" if table.threshold is None else f"\nabove {table.threshold:.2g}"
        axes.set_title(f"{table.expert}{at}", fontsize=9)
        axes.tick_params(labelsize=8, length=0)
    for axes in grid.flat[len(tables) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("layer", fontsize=8)
    bar = figure.colorbar(image, ax=list(grid.flat[: len(tables)]), shrink=0.6, pad=0.01)
    bar.set_label("share of rows", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    _save(figure, path)


def draw_norms(norms: Mapping[str, Mapping[int, float]], path: Path, *, relative: bool) -> None:
    """A line for each expert: ‖ΔW‖ of every layer, or ‖ΔW‖ / ‖W‖ where `relative`."""
    figure = _figure(6.4, 3.2)
    axes = figure.subplots()
    for colour, (expert, layers) in zip(_cycled(len(norms)), norms.items(), strict=True):
        axes.plot(list(layers), list(layers.values()), marker="o", markersize=3, color=colour, label=expert)
    axes.set_ylim(bottom=0)
    _finish(axes, "layer", "‖ΔW‖ / ‖W‖" if relative else "‖ΔW‖")
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)


def draw_interference(pair: Interference, path: Path) -> None:
    """Three panels over the layers: the cosine, the overlap of subspaces beside chance, the signs in conflict."""
    layers = pair.by_layer()
    chance = [sum(module.by_chance) / 2 for module in pair.modules]
    figure = _figure(9.6, 3.0)
    cosine, overlap, signs = figure.subplots(1, 3)
    figure.suptitle(" and ".join(pair.experts), fontsize=9)
    cosine.axhline(0, color=_COLOURS[3], linewidth=0.8)
    for axes, key, colour in ((cosine, "cosine", 0), (overlap, "written", 1), (overlap, "read", 2),
                              (signs, "sign_conflicts", 0)):  # fmt: skip
        values = [float("nan") if numbers[key] is None else numbers[key] for numbers in layers.values()]
        axes.plot(list(layers), values, marker="o", markersize=3, color=_COLOURS[colour], label=key)
    if pair.shared_start is not None:
        overlap.set_title("`read` shows a shared initial A", fontsize=8)
    overlap.axhline(sum(chance) / len(chance), color=_COLOURS[3], linestyle=":", label="by chance")
    overlap.set_ylim(bottom=0)
    overlap.legend(fontsize=8, frameon=False)
    signs.axhline(0.5, color=_COLOURS[3], linestyle=":")
    signs.set_ylim(0, 1)
    for axes, name in ((cosine, "cosine of ΔW"), (overlap, "overlap of subspaces"), (signs, "signs in conflict")):
        _finish(axes, "layer", name)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _cycled(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def _ticks(layers: int) -> list[int]:
    step = 1 if layers <= 16 else 2 if layers <= 40 else max(4, layers // 60)
    return list(range(0, layers, step))


def _save(figure: Figure, path: Path) -> None:
    # No software version and no time in the file: the same numbers give the same bytes.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
