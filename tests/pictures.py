"""Properties that every figure for print must have."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from adapterswap.kit.style import STYLE

__all__ = ["check_figure", "check_files", "drawn_texts"]

_PIXEL = 1.5  # at 200 pixels to the inch; boxes may overlap by this much


def drawn_texts(figure: Any) -> dict[str, list[Any]]:
    """Every visible text → its bounding boxes, in pixels."""
    figure.set_dpi(200)
    canvas = FigureCanvasAgg(figure)
    with STYLE.applied():
        canvas.draw()
        renderer = canvas.get_renderer()
        result: dict[str, list[Any]] = {}
        for text in figure.findobj(Text):
            shown = text.get_visible() and text.get_text().strip() and (text.axes is None or text.axes.axison or text)
            if shown and _is_in_range(text):
                result.setdefault(text.get_text(), []).append(text.get_window_extent(renderer))
    return result


def _is_in_range(text: Any) -> bool:
    """Tick labels outside an axis's limits exist but are not drawn."""
    for axes in text.figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if text in (tick.label1, tick.label2):
                    return bool(low - 1e-9 <= tick.get_loc() <= high + 1e-9 and axis.get_visible() and axes.axison)
    return True


def check_figure(figure: Any, width: float) -> None:
    """All text is inside the canvas, does not overlap, and is at least 6 points; widths are as requested."""
    assert figure.get_figwidth() == width
    boxes = [(name, box) for name, found in drawn_texts(figure).items() for box in found]
    across, up = figure.get_size_inches() * 200
    assert boxes
    for name, box in boxes:
        inside = box.x0 >= -_PIXEL and box.y0 >= -_PIXEL and box.x1 <= across + _PIXEL and box.y1 <= up + _PIXEL
        assert inside, (name, box, (across, up))
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = min(a.x1, b.x1) - max(a.x0, b.x0) <= _PIXEL or min(a.y1, b.y1) - max(a.y0, b.y0) <= _PIXEL
        assert apart, (one, other, a, b)
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 6


def check_files(folder: Path, name: str, width: float) -> None:
    """A PDF with embedded TrueType fonts and no Type 3, an SVG that needs no font, a PNG at 300 dots per inch."""
    from PIL import Image

    pdf = (folder / f"{name}.pdf").read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", pdf)
    assert box is not None
    assert abs(float(box[1]) - 72 * width) < 0.01
    svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
    assert "<text" not in svg
    assert "font-family" not in svg
    assert "<script" not in svg
    with Image.open(folder / f"{name}.png") as image:
        assert abs(image.width - 300 * width) <= 1
        pixels = np.asarray(image.convert("L"))
    assert pixels.min() < 100 < 250 < pixels.max()  # something dark on white, also in grayscale
