"""A plan in a notebook: the strip of layers as a table with inline colours, without scripts or style sheets.

The colours are Okabe and Ito's (2008), which colour-blind readers can tell apart. Every cell also holds its letter, so
nothing depends on the colours. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from adapterswap.errors import printable
from adapterswap.experts.layers import deepest
from adapterswap.planning.describe import draw, headline, marks, unusual
from adapterswap.planning.plan import Plan

__all__ = ["COLOURS", "plan_html"]

# (background, text), in the order of the experts; the first two also differ in grey. Only experts have colours.
COLOURS = (
    ("#0072B2", "#FFFFFF"), ("#E69F00", "#000000"), ("#009E73", "#000000"), ("#F0E442", "#000000"),
    ("#56B4E9", "#000000"), ("#D55E00", "#000000"), ("#CC79A7", "#000000"),
)  # fmt: skip
_PLAIN = ("#FFFFFF", "#000000")
_CELL = "text-align:center;min-width:1.5em;padding:1px 2px;border:1px solid #888888"
_REMARKS = 5  # lines below the strip
_HEAD = "font-weight:normal;font-size:75%;text-align:center;padding:1px 2px"


def plan_html(plan: Plan) -> str:
    """The plan as a fragment of HTML. Names are escaped."""
    picture = draw(marks(plan), plan.num_layers, tuple(plan.experts))
    colours = {mark: COLOURS[place % len(COLOURS)] for place, mark in enumerate(picture.owners)}
    head = "".join(f'<th scope="col" style="{_HEAD}">{layer}</th>' for layer in range(deepest(plan.num_layers)))
    rows = [f"<tr><th></th>{head}</tr>"]
    for kind, row in picture.rows.items():
        cells = "".join(_cell(mark, picture.legend, colours, layer) for layer, mark in enumerate(row))
        rows.append(f'<tr><th scope="row" style="{_HEAD}">{_text(kind)}</th>{cells}</tr>')
    legend = " &nbsp; ".join(
        f'<span style="{_CELL};{_colour(colours.get(mark, _PLAIN))}">{_text(mark)}</span> {_text(meaning)}'
        for mark, meaning in picture.legend.items()
    )
    remarks = "".join(f"<div>{_text(line)}</div>" for line in unusual(plan)[:_REMARKS])
    return (
        f'<div style="overflow-x:auto"><div>{_text(f"Plan: {headline(plan)}")}</div>'
        f'<table style="border-collapse:collapse">{"".join(rows)}</table><div>{legend}</div>{remarks}</div>'
    )


def _cell(mark: str, legend: Mapping[str, str], colours: Mapping[str, tuple[str, str]], layer: int) -> str:
    title = f"layer {layer}: {legend.get(mark, 'no expert adapts it')}"
    style = f"{_CELL};{_colour(colours.get(mark, _PLAIN))}"
    return f'<td style="{style}" title="{_text(title)}">{_text(mark)}</td>'


def _colour(pair: tuple[str, str]) -> str:
    return f"background:{pair[0]};color:{pair[1]}"


def _text(text: str) -> str:
    return escape(printable(text))
