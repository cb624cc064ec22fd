"""Pictures of an analysis, each with the caption that a reader of a paper needs.

The first picture follows figures 2 and 4-9 of Bandarkar et al. (ICLR 2025): one row per layer with the last on top, one
column per matrix, darker where more changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterswap.experiments.analysis.interference import FractionTable, Interference
from adapterswap.kit.style import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def describe_fractions(tables: Sequence[FractionTable], *, one_scale: bool = True) -> str:
    """The caption of `draw_fractions`, with the threshold of every expert."""
    known: dict[str, str] = {}
    for table in tables:
        if table.threshold is not None:
            known[table.expert] = f"{table.threshold:.3g}"
    thresholds = list(known.values())
    if len(known) < len(tables):
        at = "The threshold is that of the source, which does not record it."
    elif len(thresholds) == 1:
        at = f"The threshold is {thresholds[0]}."
    elif len(set(thresholds)) == 1:
        at = f"The threshold is {thresholds[0]} for all experts."
    else:
        of_experts = [f"{value} ({name})" for name, value in known.items()]
        at = f"Thresholds: {', '.join(of_experts)}."

    scale = ""
    if len(tables) > 1 and one_scale:
        scale = ", on one scale for all experts"
    elif len(tables) > 1:
        scale = ", each on its own scale"
    hatched = ""
    if any(len(table.cells) < len(table.layers) * len(table.modules) for table in tables):
        hatched = " Hatched: not adapted."
    return (
        "The share of the rows of each weight matrix whose mean absolute change is above a threshold, by layer (the "
        f"last on top) and kind of matrix. {at} Darker: a larger share{scale}.{hatched}"
    )


def describe_norms(experts: int, *, relative: bool) -> str:
    """The caption of `draw_norms`."""
    of = "‖ΔW‖"
    if relative:
        of = "‖ΔW‖ / ‖W‖, relative to the base's weights"
    number = f"{experts} experts"
    if experts == 1:
        number = "one expert"
    return (
        f"Frobenius norms of the changes of {number}, {of}, by layer; "
        "the attention and MLP matrices of a layer are taken together."
    )


def describe_meetings(pairs: int) -> str:
    """The caption of `draw_meetings`."""
    return (
        f"The cosine of ΔW for each of {pairs} pairs of experts, over all layers. Grey numbers lie where 95 % of "
        "cosines lie after the rows and columns of one expert's ΔW are shuffled. Each pair is compared by "
        "itself, without a correction for their number."
    )


def describe_interference(pair: Interference) -> str:
    """The caption of `draw_interference`."""
    layers = len(pair.by_layer())
    shared = ""
    if pair.shared_start is not None:
        shared = (
            " Both adapters were trained from the same initial A, so they read from similar subspaces whatever they "
            "learned."
        )
    return (
        f"{pair.experts[0]} and {pair.experts[1]}, layer by layer: the cosine of the two ΔW, the overlap of the "
        "subspaces that they write into and read from, and the share of elements whose signs differ. Grey: where 95 % "
        "of values lie after the rows and columns of one expert's ΔW are shuffled, for each of "
        f"{layers} layers by itself, without a correction for their number.{shared}"
    )


_BAND = "#dcdcdc"
_CELL = 0.27  # inches that a number needs

_TALLEST = 40.0  # inches for all rows of a heatmap at most
_TOGETHER = 6  # experts in one panel
_MANY = 40  # layers, whose markers would touch each other
_ABREAST = 5.0  # inches of width that three panels in a row need


def draw_fractions(tables: Sequence[FractionTable], width: float, *, one_scale: bool = True) -> Figure:
    """A heatmap for each expert, layer by module: the share of rows above the threshold.

    Args:
        one_scale: use one colour scale for all; otherwise each ends at its own largest share, as in the paper.
    """
    import numpy as np

    # Panels whose columns are at least 0.11 inches wide, at most three in a line.
    largest = [max(table.cells.values()) for table in tables]
    columns = max(len(table.modules) for table in tables)
    layers = max(len(table.layers) for table in tables)
    across = max(1, min(3, len(tables), int((width - 0.7) / (0.35 + 0.11 * columns))))
    down = math.ceil(len(tables) / across)
    figure = STYLE.figure(width, down * (1.35 + min(0.105 * layers, _TALLEST)))
    grid = figure.subplots(down, across, squeeze=False)

    for axes, table, own in zip(grid.flat, tables, largest, strict=False):
        values = np.full((len(table.layers), len(table.modules)), np.nan)
        for (layer, module), value in table.cells.items():
            values[layer, table.modules.index(module)] = value
        for layer, column in np.argwhere(np.isnan(values)).tolist():
            STYLE.hatch_cell(axes, column, layer, zorder=0)
        most = own
        if one_scale:
            most = max(largest)
        image = axes.imshow(values, origin="lower", cmap="Greens", vmin=0, vmax=most or 1.0, aspect="auto")
        if not one_scale:
            _bar(figure, image, [axes], "share of rows")

        labels = [module.rpartition(".")[2] for module in table.modules]
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        axes.set_yticks(_ticks(len(table.layers)))
        title = STYLE.wrapped(table.expert, int((width - 0.7) / across / 0.07))
        if table.threshold is not None:
            title += f"\nabove {table.threshold:.2g}"
        axes.set_title(title, fontsize=STYLE.small)
        axes.tick_params(labelsize=STYLE.note, length=0)

    for axes in grid.flat[len(tables) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("layer")
    if one_scale:
        _bar(figure, image, list(grid.flat[: len(tables)]), "share of rows")
    return figure


def _bar(figure: Figure, image: Any, panels: Any, label: str, shrink: float = 0.6, pad: float = 0.01) -> None:
    """The scale of colours beside panels."""
    bar = figure.colorbar(image, ax=panels, shrink=shrink, pad=pad)
    bar.set_label(label)
    bar.ax.tick_params(labelsize=STYLE.note)


def draw_norms(norms: Mapping[str, Mapping[int, float]], width: float, *, relative: bool) -> Figure:
    """A line for each expert: ‖ΔW‖ of every layer, or ‖ΔW‖ / ‖W‖ where `relative`.

    Experts of one family (math1, math2, …: names that differ in their last number) share a colour, and differ in line
    and marker. With more than `_TOGETHER` experts, each family has its own panel, with shared axes.
    """
    families = [family_of(expert) for expert in norms]
    looks = STYLE.looks_by_family(families)
    columns, lines = STYLE.legend_shape(list(norms), width, cut=24, inches=0.066, room=0.55)

    # A panel for each family, or one without a title for all.
    if len(norms) <= _TOGETHER:
        families = [""] * len(norms)
    names = list(dict.fromkeys(families))
    across = min(len(names), 3)
    if width < _ABREAST:
        across = 1
    down = math.ceil(len(names) / across)
    figure = STYLE.figure(width, 0.3 + 1.6 * down + lines * 0.17)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    panels = dict(zip(names, grid.flat, strict=False))

    handles = []
    for (expert, layers), family, look in zip(norms.items(), families, looks, strict=True):
        marker_size = 2.6
        if len(layers) > _MANY:
            marker_size = 1.6
        handles += panels[family].plot(
            list(layers),
            list(layers.values()),
            label=STYLE.wrapped(expert, 24),
            color=look.colour,
            linestyle=look.line,
            marker=look.marker,
            markersize=marker_size,
            linewidth=1.0,
        )

    # The axes are shared: only the lowest panels have layers, and only the first of a row have norms.
    norm = "‖ΔW‖"
    if relative:
        norm = "‖ΔW‖ / ‖W‖"
    for place, (name, axes) in enumerate(panels.items()):
        if name:
            axes.set_title(STYLE.wrapped(name, int(width / across / 0.07)), fontsize=STYLE.small)
        x = y = ""
        is_lowest = place + across >= len(names)
        axes.tick_params(labelbottom=is_lowest)
        if is_lowest:
            x = "layer"
        if place % across == 0:
            y = norm
        _finish(axes, x, y)

    for axes in grid.flat[len(names) :]:
        axes.remove()
    grid[0, 0].set_ylim(bottom=0)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.0, handlelength=2.6)
    return figure


def draw_interference(pair: Interference, width: float) -> Figure:
    """Three panels over the layers: the cosine, the overlap of subspaces compared with chance, the conflicting signs.

    The grey band behind each line is its 95 % interval if one of the experts is shuffled. The axes extend
    as far to either side of the values of unrelated experts (a cosine of 0, half of the signs), so that the band and
    both directions can be seen.
    """
    is_stacked = width < _ABREAST
    if is_stacked:
        figure = STYLE.figure(width, 4.1)
        cosine, overlap, signs = figure.subplots(3, 1, sharex=True)
    else:
        figure = STYLE.figure(width, 1.9)
        cosine, overlap, signs = figure.subplots(1, 3)
    figure.suptitle(STYLE.wrapped(" and ".join(pair.experts), int(width / 0.065)), fontsize=STYLE.text)

    # The bands, of which only the first one has an entry in a legend. That of `read` is hatched over that of `written`.
    cosine.axhline(0, color=STYLE.grey, linewidth=0.8)
    shuffled = pair.shuffled_by_layer()
    for axes, key, label, edge, hatch in (
        (cosine, "cosine", "shuffled", _BAND, ""),
        (overlap, "written", "_", _BAND, ""),
        (overlap, "read", "_", STYLE.grey, "////"),
        (signs, "sign_conflicts", "_", _BAND, ""),
    ):
        # Half a layer wide to either side, so that a single layer has a band too.
        x: list[float] = []
        low: list[float] = []
        high: list[float] = []
        for layer, bands in shuffled.items():
            band = bands[key]
            if band is not None:
                x += [layer - 0.5, layer + 0.5]
                low += [band[0]] * 2
                high += [band[1]] * 2
        axes.fill_between(
            x,
            low,
            high,
            color=_BAND,
            edgecolor=edge,
            hatch=hatch,
            linewidth=0.3,
            label=label,
            zorder=0,
        )
    cosine.legend()

    layers = pair.by_layer()
    first, second, _ = STYLE.looks(3)
    for axes, key, look in (
        (cosine, "cosine", first),
        (overlap, "written", first),
        (overlap, "read", second),
        (signs, "sign_conflicts", first),
    ):
        values: list[float] = []
        for numbers in layers.values():
            value = numbers[key]
            if value is None:
                value = math.nan  # a gap in the line
            values.append(value)
        axes.plot(
            list(layers),
            values,
            label=key,
            color=look.colour,
            linestyle=look.line,
            marker=look.marker,
            markersize=2.6,
            linewidth=1.0,
        )
    if pair.shared_start is not None:
        overlap.set_title("read shows a shared initial A", fontsize=STYLE.small)
    overlap.set_ylim(bottom=0)
    overlap.legend()
    signs.axhline(0.5, color=STYLE.grey, linestyle=":")

    # As far to either side of the middle.
    for axes, middle, lowest, highest in ((cosine, 0.0, -1.0, 1.0), (signs, 0.5, 0.0, 1.0)):
        bottom, top = axes.get_ylim()
        far = max(middle - bottom, top - middle)
        axes.set_ylim(max(lowest - 0.02, middle - far), min(highest + 0.02, middle + far))

    # Panels one below the other share the layers of the last one.
    of_upper = "layer"
    if is_stacked:
        of_upper = ""
    _finish(cosine, of_upper, "cosine of ΔW")
    _finish(overlap, of_upper, "overlap of subspaces")
    _finish(signs, "layer", "signs in conflict")
    return figure


def draw_meetings(pairs: Sequence[Interference], width: float) -> Figure:
    """The cosine of every pair of experts over all layers, as a square of experts by experts.

    Cosines within the band of a shuffled expert are grey. Colours end at the largest absolute cosine, or at 0.1 if all
    are smaller, so that noise stays pale.
    """
    import numpy as np

    numbered: dict[str, None] = {}
    for pair in pairs:
        numbered |= dict.fromkeys(pair.experts)
    names = list(numbered)

    # The lower triangle: each expert in the rows against those before it.
    values = np.full((len(names), len(names)), np.nan)
    inside = set()
    for pair in pairs:
        if pair.cosine is None:
            continue
        column, row = map(names.index, pair.experts)
        values[row, column] = pair.cosine
        band = pair.shuffled_cosine
        if band is not None and band[0] <= pair.cosine <= band[1]:
            inside.add((row, column))

    most = 0.1
    if np.isfinite(values).any():
        most = max(most, float(np.nanmax(np.abs(values), initial=0.0)))
    labels = [STYLE.wrapped(name, 14) for name in names]
    size = min(width, 1.2 + 0.42 * len(names))
    figure = STYLE.figure(width, size)
    axes = figure.add_subplot()
    image = axes.imshow(values[1:, :-1], cmap="PuOr", vmin=-most, vmax=most)
    axes.set_xticks(range(len(names) - 1), labels[:-1], rotation=90)
    axes.set_yticks(range(len(names) - 1), labels[1:])
    axes.tick_params(labelsize=STYLE.note, length=0)

    if (size - 1.2) / len(names) > _CELL:
        for (row, column), value in np.ndenumerate(values):
            if np.isnan(value):
                continue
            colour = STYLE.readable_on(tuple(image.cmap(image.norm(value))))
            if (row, column) in inside:
                colour = STYLE.grey
            axes.text(column, row - 1, f"{value:.2f}", ha="center", va="center", fontsize=STYLE.note, color=colour)
    _bar(figure, image, axes, "cosine of ΔW", shrink=0.7, pad=0.02)
    return figure


def family_of(name: str) -> str:
    """A name without the number at its end: `math` of `math1`, `math-2` and `math #3`."""
    return name.rstrip("0123456789").rstrip(" -_.#") or name


def _finish(axes: Any, x: str, y: str) -> None:
    """Labels, and whole numbers for layers."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _ticks(layers: int) -> list[int]:
    """The layers whose numbers are shown next to a heatmap: all if they are few, else some."""
    step = max(4, layers // 60)
    if layers <= 16:
        step = 1
    elif layers <= 40:
        step = 2
    return list(range(0, layers, step))
