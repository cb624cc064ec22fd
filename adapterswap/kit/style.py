"""How figures look and are saved: widths, fonts, colours, PDF, SVG and PNG.

Figures are made for print: one or two columns wide, with text of 6 to 8 points in an embedded font. The colours are
Okabe and Ito's, which colour-blind readers can distinguish; neighbours differ in lightness, so a grey print stays
readable, and each series has its own marker and line style. matplotlib is imported when a figure is made. The same
figure always gives the same bytes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adapterswap.kit.errors import ArgumentError, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FORMATS = ("pdf", "svg", "png")

_DPI = 300
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27, "bp": 1 / 72}
_CUT = 3  # lines of a name, at most

Line = str | tuple[int, tuple[float, ...]]


class Look(NamedTuple):
    """How one of several series is drawn."""

    colour: str
    marker: str
    line: Line


@dataclass(frozen=True)
class Style:
    """Widths, sizes of text and colours of all figures.

    Attributes:
        column: in inches: a column of ICML and NeurIPS' half width; ACL has 3.03.
        narrowest, widest: the same for any figure.
        text, small, note: in points.
        ink, grey, lead, light: colours.
        hatch: of cells without a number.
        colours: of series, by Okabe and Ito (2008), without yellow, which is too light on paper; neighbours differ in
            lightness.
        markers, lines: of series.
    """

    column: float = 3.25
    narrowest: float = 2.5
    widest: float = 20.0
    text: float = 7.5
    small: float = 7.0
    note: float = 6.0
    ink: str = "#1a1a1a"
    grey: str = "#6b6b6b"
    lead: str = "#0b4f8a"
    light: str = "#e3e3e3"
    hatch: str = "//////"
    colours: tuple[str, ...] = ("#0b4f8a", "#d55e00", "#1a1a1a", "#56b4e9", "#7a3b69", "#009e73", "#e69f00", "#cc79a7")
    markers: tuple[str, ...] = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
    lines: tuple[Line, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use our matplotlib settings inside the block, whatever the user's own settings are."""
        import matplotlib as mpl
        from matplotlib import rc_context

        with rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update({
                "font.family": _fonts(), "font.size": self.text,
                "axes.titlesize": self.text, "axes.labelsize": self.text,
                "xtick.labelsize": self.small, "ytick.labelsize": self.small, "legend.fontsize": self.small,
                "text.parse_math": False,  # names may hold dollars
                "text.color": self.ink, "axes.labelcolor": self.ink, "axes.edgecolor": self.grey,
                "xtick.color": self.grey, "ytick.color": self.grey,
                "xtick.labelcolor": self.ink, "ytick.labelcolor": self.ink,
                "axes.linewidth": 0.6, "lines.linewidth": 1.2, "lines.markersize": 3.5, "hatch.linewidth": 0.5,
                "hatch.color": self.grey, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5,
                "ytick.major.size": 2.5, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
                "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
                "svg.fonttype": "path",  # outlines, since a reader may lack the font
                "svg.hashsalt": "adapterswap", "axes.unicode_minus": True, "axes.formatter.useoffset": False,
            })  # fmt: skip
            yield

    def looks(self, number: int) -> list[Look]:
        """Looks for `number` series.

        Colours repeat after 8, markers after 9, lines after 4; all three only after 72.
        """
        return list(islice(map(Look, cycle(self.colours), cycle(self.markers), cycle(self.lines)), number))

    def looks_by_family(self, families: Sequence[str]) -> list[Look]:
        """Looks for series of these families: the colour is the family's, marker and line tell its members apart."""
        names = list(dict.fromkeys(families))
        hues = {name: look.colour for name, look in zip(names, self.looks(len(names)), strict=True)}
        places = [families[:place].count(family) for place, family in enumerate(families)]
        members = self.looks(len(families))
        return [members[place]._replace(colour=hues[name]) for name, place in zip(families, places, strict=True)]

    def inches(self, value: str | float) -> float:
        """The inches of a width: `3.25in`, `8.2cm`, `82mm`, `234pt` (TeX's points), `236bp`, or a number of inches."""
        remedy = "Pass a width such as 3.25in, 8.2cm or 234pt"
        units = "|".join(_INCHES)
        width = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+)\s*({units})?\s*", str(value).lower())
        if width is None:
            raise ArgumentError(f"{value!r} is not a width", remedy, parameter="column_width")

        inches = float(width[1]) * _INCHES[width[2] or "in"]
        low, high = self.narrowest, self.widest
        if not low <= inches <= high:
            raise ArgumentError(
                f"A width of {value} is {inches:.3g} in; figures can be {low:g} in to {high:g} in wide",
                remedy,
                parameter="column_width",
            )
        return inches

    @staticmethod
    def figure(width: float, height: float) -> Figure:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display

        return Figure(figsize=(width, height), layout="constrained")

    def grid(self, axes: Any, along: str) -> None:
        """Draw a light grid behind the data, along x, y or both."""
        axes.grid(axis=along, linewidth=0.4, color=self.light)
        axes.set_axisbelow(True)

    def hatch_cell(self, axes: Any, x: float, y: float, **more: Any) -> None:
        """Hatch the cell around (x, y) of a heat map, as it has no number: a score of 0 would look different."""
        from matplotlib.patches import Rectangle

        look = {"facecolor": "white", "edgecolor": self.grey, "hatch": self.hatch, **more}
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, linewidth=0, **look))

    def legend_shape(
        self, names: Sequence[str], width: float, *, cut: int, inches: float, room: float
    ) -> tuple[int, int]:
        """The number of columns that fit, and the number of lines of text that they take.

        Args:
            names: the entries, which are wrapped at `cut` characters.
            width: of the figure, in inches.
            inches: the width of a character.
            room: the width of a line and the space around it, in inches.
        """
        labels = [self.wrapped(name, cut) for name in names]
        widest = max(max(map(len, label.split("\n"))) for label in labels) * inches + room
        columns = max(1, min(len(names), int((width - 0.1) / widest)))
        tallest = max(label.count("\n") + 1 for label in labels)
        return columns, -(-len(names) // columns) * tallest

    @staticmethod
    def wrapped(text: str, characters: int) -> str:
        """A name wrapped at `characters`, in three lines at most; the rest is cut."""
        lines = textwrap.wrap(shown(text), max(4, characters), break_on_hyphens=True) or [""]
        if len(lines) > _CUT:
            lines = [*lines[: _CUT - 1], f"{lines[_CUT - 1][: max(3, characters - 1)]}…"]
        return "\n".join(lines)

    @staticmethod
    def readable_on(rgba: Sequence[float]) -> str:
        """Black or white, whichever is easier to read on the colour `rgba` (by WCAG's relative luminance)."""
        luminance = 0.0
        for share, channel in zip((0.2126, 0.7152, 0.0722), rgba, strict=False):  # without the opacity
            linear = channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
            luminance += share * linear

        # The contrast with black is (L + 0.05) / 0.05, the one with white 1.05 / (L + 0.05).
        if (luminance + 0.05) ** 2 > 1.05 * 0.05:
            return "black"
        return "white"

    def save(self, figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[str]:
        """Write `name` in each format; returns the files' names."""
        names = [f"{name}.{suffix}" for suffix in formats]
        for path in names:
            (folder / path).write_bytes(self.as_bytes(figure, path.rpartition(".")[2]))
        return names

    def as_bytes(self, figure: Figure, suffix: str) -> bytes:
        """A figure as a file's bytes, without a date or matplotlib's version: the same figure gives the same bytes."""
        import io

        metadata: dict[str, dict[str, Any]] = {
            "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
            "svg": {"Date": None, "Creator": None},
            "png": {"Software": None},
        }
        buffer = io.BytesIO()
        with self.applied():
            figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata[suffix])
        return buffer.getvalue()


STYLE = Style()


def shown(text: str) -> str:
    """`text` with characters that the fonts lack replaced by their codes, such as U+1234."""
    characters = []
    for character in printable(text):
        if character.isascii() or _covered(ord(character)):
            characters.append(character)
        else:
            characters.append(f"U+{ord(character):04X}")
    return "".join(characters)


@cache
def _covered(code: int) -> bool:
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    return any(code in FT2Font(font_manager.findfont(name)).get_charmap() for name in _fonts())


def _fonts() -> list[str]:
    return ["DejaVu Sans"]  # comes with matplotlib, so figures look the same everywhere
