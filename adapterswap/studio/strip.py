"""The strip of layers as HTML: a column per layer, with a button for its attention and one for its MLP.

Every cell also has a letter and a label, so nothing depends on colour alone. All text from files is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from adapterswap.errors import AdapterswapError, printable
from adapterswap.planning.describe import COLOURS, blend_of, draw, marks, owner_label, unusual
from adapterswap.planning.plan import Plan
from adapterswap.planning.rules import BASE
from adapterswap.planning.slots import Slot

_REMARKS = 4
_KIND = {"attention": "attention", "mlp": "MLP", "other": "other"}
_SHORT = {"attention": "attn", "mlp": "mlp", "other": "other"}


def text(value: object) -> str:
    """Text from a file, a model or a visitor, escaped for HTML."""
    return escape(printable(str(value)))


def colour_of(name: str, experts: Sequence[str]) -> tuple[str, str]:
    """An expert's colour and the colour of text on it; the same everywhere on the page."""
    return COLOURS[list(experts).index(name) % len(COLOURS)] if name in experts else ("#8a8f98", "#000000")


@dataclass(frozen=True)
class _Cell:
    """One kind of module in one layer, as the strip shows it."""

    letter: str
    meaning: str
    shares: Mapping[str, float]


def strip_html(plan: Plan, experts: Sequence[str], *, title: str, painted: Sequence[tuple[int, str]] = ()) -> str:
    """The strip of a plan.

    Args:
        plan: what to draw.
        experts: all experts, in the order of their colours.
        title: the method.
        painted: the (layer, kind) pairs that were set by hand; their cells get a dot.
    """
    assert isinstance(plan.num_layers, int)  # `open_workspace` refuses all others
    cells = _cells(plan)
    kinds = [kind for kind in _KIND if any(of == kind for _, of in cells)]
    columns = []
    for layer in range(plan.one_depth("the studio")):
        buttons = "".join(
            _button(layer, kind, cells.get((layer, kind)), experts, (layer, kind) in painted) for kind in kinds
        )
        columns.append(
            f'<div class="layer" role="group" aria-label="layer {layer}"><button type="button" class="number" '
            f'tabindex="-1" data-cell="{layer}" aria-label="layer {layer}: assign all of it" title="layer {layer}: '
            f'assign all of it">{layer}</button>{buttons}</div>'
        )
    names = "".join(f"<span>{_SHORT[kind]}</span>" for kind in kinds)
    by_hand = f", {len(painted)} cell{'s' * (len(painted) != 1)} changed by hand" if painted else ""
    remarks = "".join(f"<li>{text(line)}</li>" for line in unusual(plan)[:_REMARKS])
    return (
        f'<div class="strip"><p class="headline">{text(title + by_hand)}</p>'
        f'<div class="body"><div class="kinds" aria-hidden="true"><span></span>{names}</div>'
        f'<div class="layers" role="group" aria-label="layers from bottom to top">{"".join(columns)}</div></div>'
        '<p class="direction" aria-hidden="true">input<i></i>output</p>'
        f"{_legend(plan, experts)}" + (f'<ul class="remarks">{remarks}</ul>' if remarks else "") + "</div>"
    )


def error_html(error: AdapterswapError) -> str:
    """An error's message, as an alert."""
    lines = "".join(f"<li>{text(problem)}</li>" for problem in error.problems)
    return f'<div class="problem" role="alert"><ul>{lines}</ul></div>'


def _cells(plan: Plan) -> dict[tuple[int, str], _Cell]:
    picture = draw(marks(plan), plan.num_layers, tuple(plan.experts))
    letters = {meaning: letter for letter, meaning in picture.legend.items()}
    found: dict[tuple[int, str], list[Slot]] = {}
    shown = {(mark.layer, mark.kind) for mark in marks(plan)}
    for slot in plan:
        if slot.layer is not None and (slot.layer, slot.kind) in shown and not slot.in_full:
            found.setdefault((slot.layer, slot.kind), []).append(slot)
    return {place: _cell(slots, letters) for place, slots in found.items()}


def _cell(slots: Sequence[Slot], letters: Mapping[str, str]) -> _Cell:
    meanings = list(dict.fromkeys(owner_label(slot) or blend_of(slot) for slot in slots))
    shares: dict[str, float] = {}
    for slot in slots:
        for term in slot.terms:
            shares[term.expert] = shares.get(term.expert, 0.0) + abs(term.coefficient)
    if len(meanings) > 1:
        return _Cell("*", "; ".join(meanings), shares)
    owner = owner_label(slots[0])
    letter = "·" if owner == BASE else letters.get(meanings[0], "?") if owner else "+"
    return _Cell(letter, meanings[0], {} if owner == BASE else shares)


def _button(layer: int, kind: str, cell: _Cell | None, experts: Sequence[str], by_hand: bool) -> str:
    if cell is None:
        return f'<span class="cell none" title="layer {layer} {_KIND[kind]}: no expert adapts it"></span>'
    label = f"layer {layer} {_KIND[kind]}: {cell.meaning}" + (", set by hand" if by_hand else "")
    mark = " by-hand" if by_hand else ""
    plain = "" if cell.shares else " base"
    return (
        f'<button type="button" class="cell{mark}{plain}" tabindex="-1" data-cell="{layer}.{kind}" '
        f'aria-label="{text(label)}" title="{text(label)}" style="{_ground(cell.shares, experts)}">'
        f"{text(cell.letter)}</button>"
    )


def _ground(shares: Mapping[str, float], experts: Sequence[str]) -> str:
    """The style of a cell: an expert's colour, or for a blend stripes as wide as its shares."""
    if not shares:
        return ""
    if len(shares) == 1:
        colour, ink = colour_of(next(iter(shares)), experts)
        return f"background:{colour};color:{ink}"
    total, edge, stops = sum(shares.values()) or 1.0, 0.0, []
    for name, share in shares.items():
        colour, _ = colour_of(name, experts)
        stops.append(f"{colour} {edge:.0f}% {(edge := edge + 100 * share / total):.0f}%")
    return f"background:linear-gradient(135deg,{','.join(stops)});color:#fff;text-shadow:0 0 3px #000,0 0 3px #000"


def _legend(plan: Plan, experts: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    shares: dict[str, Mapping[str, float]] = {}
    letters: dict[str, str] = {}
    for cell in _cells(plan).values():
        counts[cell.meaning] = counts.get(cell.meaning, 0) + 1
        shares[cell.meaning], letters[cell.meaning] = cell.shares, cell.letter
    shown = sorted(counts, key=lambda meaning: -counts[meaning])[:8]
    items = "".join(
        f'<li><span class="swatch{"" if shares[meaning] else " base"}" style="{_ground(shares[meaning], experts)}">'
        f"{text(letters[meaning])}</span>{text(meaning)}</li>"
        for meaning in shown
    )
    return f'<ul class="legend" aria-label="Legend">{items}</ul>'
