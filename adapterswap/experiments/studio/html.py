"""What the page shows besides its controls, as HTML: the strip of layers, answers, an analysis, a suggestion.

Every cell of the strip also has a letter and a label, so nothing depends on colour alone. All text of files is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from adapterswap.core import BASE, Composition, Plan
from adapterswap.core.planning.describe import COLOURS
from adapterswap.core.planning.slots import Slot
from adapterswap.experiments.analysis.analysis import Analysis
from adapterswap.experiments.analysis.suggestion import Suggestion
from adapterswap.experiments.lab.shown import LabProblems
from adapterswap.experiments.studio.choice import Choice
from adapterswap.experiments.studio.workspace import Scores, Workspace, alone
from adapterswap.kit.errors import AdapterswapError, printable

if TYPE_CHECKING:
    from adapterswap.engines.live.streaming import Answers


_REMARKS = 4
_KIND = {"attention": "attention", "mlp": "MLP", "other": "other"}
_SHORT = {"attention": "attn", "mlp": "mlp", "other": "other"}
_GREY = "#8a8f98"
_CURSOR = '<span class="cursor" aria-hidden="true"></span>'


def text(value: object) -> str:
    """Text from a file, a model or a visitor, escaped for HTML."""
    return escape(printable(str(value)))


def colour_of(name: str, experts: Sequence[str]) -> tuple[str, str]:
    """An expert's colour and the colour of text on it; the same everywhere on the page."""
    if name not in experts:
        return _GREY, "#000000"
    return COLOURS[list(experts).index(name) % len(COLOURS)]


@dataclass(frozen=True)
class _Cell:
    """One kind of module in one layer, as the strip shows it."""

    letter: str
    meaning: str
    shares: Mapping[str, float]


def strip_html(plan: Plan, experts: Sequence[str], *, title: str, painted: Sequence[tuple[int, str]] = ()) -> str:
    """The strip of a plan.

    Args:
        painted: the (layer, kind) pairs that were set by hand; their cells get a dot.
    """
    assert isinstance(plan.num_layers, int)  # `Workspace.open` refuses all others
    cells = _cells(plan)
    present = {kind for _, kind in cells}
    kinds = [kind for kind in _KIND if kind in present]

    # A column for each layer: its number, and a cell for each kind.
    columns = []
    for layer in range(plan.one_depth("the studio")):
        buttons = ""
        for kind in kinds:
            buttons += _button(layer, kind, cells.get((layer, kind)), experts, (layer, kind) in painted)
        columns.append(
            f'<div class="layer" role="group" aria-label="layer {layer}"><button type="button" class="number" '
            f'tabindex="-1" data-cell="{layer}" aria-label="layer {layer}: assign all of it" title="layer {layer}: '
            f'assign all of it">{layer}</button>{buttons}</div>'
        )

    if painted:
        cells_changed = "1 cell" if len(painted) == 1 else f"{len(painted)} cells"
        title += f", {cells_changed} changed by hand"
    names = "".join(f"<span>{_SHORT[kind]}</span>" for kind in kinds)
    remarks = "".join(f"<li>{text(line)}</li>" for line in plan.remarks[:_REMARKS])
    if remarks:
        remarks = f'<ul class="remarks">{remarks}</ul>'
    return (
        f'<div class="strip"><p class="headline">{text(title)}</p>'
        f'<div class="body"><div class="kinds" aria-hidden="true"><span></span>{names}</div>'
        f'<div class="layers" role="group" aria-label="layers from bottom to top">{"".join(columns)}</div></div>'
        '<p class="direction" aria-hidden="true">input<i></i>output</p>'
        f"{_legend(cells.values(), experts)}{remarks}</div>"
    )


def error_html(error: AdapterswapError) -> str:
    """An error's message, as an alert."""
    lines = "".join(f"<li>{text(problem)}</li>" for problem in error.problems)
    return f'<div class="problem" role="alert"><ul>{lines}</ul></div>'


def _cells(plan: Plan) -> dict[tuple[int, str], _Cell]:
    """The cells of the strip, by layer and kind."""
    picture = plan.picture
    letters = {meaning: letter for letter, meaning in picture.legend.items()}
    shown = {(mark.layer, mark.kind) for mark in picture.marks}
    slots_of: dict[tuple[int, str], list[Slot]] = {}
    for slot in plan.modules.values():
        if slot.layer is not None and (slot.layer, slot.kind) in shown:
            slots_of.setdefault((slot.layer, slot.kind), []).append(slot)

    cells = {}
    for place, slots in slots_of.items():
        meanings = list(dict.fromkeys(slot.label for slot in slots))
        shares: dict[str, float] = {}
        for slot in slots:
            for term in slot.terms:
                shares[term.expert] = shares.get(term.expert, 0.0) + abs(term.coefficient)

        owner = slots[0].owner_label
        if len(meanings) > 1:
            cells[place] = _Cell("*", "; ".join(meanings), shares)
        elif owner == BASE:
            cells[place] = _Cell("·", meanings[0], {})
        elif owner:
            cells[place] = _Cell(letters.get(meanings[0], "?"), meanings[0], shares)
        else:  # several experts
            cells[place] = _Cell("+", meanings[0], shares)
    return cells


def _button(layer: int, kind: str, cell: _Cell | None, experts: Sequence[str], by_hand: bool) -> str:
    """A cell of the strip as a button, or a gap where no expert adapts the module."""
    if cell is None:
        return f'<span class="cell none" title="layer {layer} {_KIND[kind]}: no expert adapts it"></span>'
    label = f"layer {layer} {_KIND[kind]}: {cell.meaning}"
    classes = "cell"
    if by_hand:
        label += ", set by hand"
        classes += " by-hand"
    if not cell.shares:
        classes += " base"
    return (
        f'<button type="button" class="{classes}" tabindex="-1" data-cell="{layer}.{kind}" '
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

    total = sum(shares.values()) or 1.0
    begin = 0.0
    stops = []
    for name, share in shares.items():
        colour, _ = colour_of(name, experts)
        end = begin + 100 * share / total
        stops.append(f"{colour} {begin:.0f}% {end:.0f}%")
        begin = end
    return f"background:linear-gradient(135deg,{','.join(stops)});color:#fff;text-shadow:0 0 3px #000,0 0 3px #000"


def _legend(cells: Iterable[_Cell], experts: Sequence[str]) -> str:
    """What the letters mean, the most frequent first."""
    counts: dict[str, int] = {}
    examples: dict[str, _Cell] = {}
    for cell in cells:
        counts[cell.meaning] = counts.get(cell.meaning, 0) + 1
        examples[cell.meaning] = cell

    items = ""
    for meaning in sorted(counts, key=lambda meaning: -counts[meaning])[:8]:
        cell = examples[meaning]
        classes = "swatch" if cell.shares else "swatch base"
        items += (
            f'<li><span class="{classes}" style="{_ground(cell.shares, experts)}">{text(cell.letter)}</span>'
            f"{text(meaning)}</li>"
        )
    return f'<ul class="legend" aria-label="Legend">{items}</ul>'


COLUMNS = {"base": "base", "task": "task expert", "language": "language expert", "this": "this composition"}


@dataclass(frozen=True)
class Column:
    """One of the compared compositions.

    Attributes:
        title: the heading.
        name: the expert's name if it is a single expert, `base` for the base; otherwise empty.
        composition: what answers; None is the base.
    """

    title: str
    name: str
    composition: Composition | None


def columns(workspace: Workspace, choice: Choice, shown: Sequence[str]) -> list[Column]:
    """The compositions to compare."""
    compared: list[Column] = []
    for kind, title in COLUMNS.items():
        if kind not in shown:
            continue
        if kind == "base":
            compared.append(Column(title, BASE, None))
        elif kind == "this":
            compared.append(Column(title, "", workspace.composition(choice)))
        else:
            names = choice.task if kind == "task" else choice.language
            if names and names[0] != BASE:
                compared.append(Column(title, names[0], alone(names[0])))
    return compared


def answers_html(shown: Sequence[Column], answers: Answers, experts: Sequence[str], *, right: str | None = None) -> str:
    """The answers as cards.

    Args:
        right: the right answer if it is known; each finished answer is then marked right or wrong.
    """
    cards = []
    for column, written, ended in zip(shown, answers.texts, answers.ended, strict=True):
        body = "<br>".join(map(text, written.strip().split("\n")))
        mark = ""
        if not (ended or answers.done):
            body += _CURSOR
        else:
            body = body or "<i>(nothing)</i>"
            if right is not None and ended and written.strip() == right:
                mark = '<span class="mark right">✓ right</span>'
            elif right is not None:
                mark = '<span class="mark wrong">✗ wrong</span>'
        cards.append(_card(column, experts, body, mark))
    return f'<div class="answers" aria-busy="{str(not answers.done).lower()}">{"".join(cards)}</div>'


def waiting_html(shown: Sequence[Column], experts: Sequence[str]) -> str:
    """The cards before the first token."""
    cards = [_card(column, experts, _CURSOR, "") for column in shown]
    return f'<div class="answers" aria-busy="true">{"".join(cards)}</div>'


def timing_text(answers: Answers, *, rows: int) -> str:
    """The times of the switch and the first token, and the speed."""
    parts = [f"switched in <b>{1000 * answers.switch_seconds:.1f} ms</b>"]
    if answers.first_seconds is not None:
        parts.append(f"first token after <b>{1000 * answers.first_seconds:.0f} ms</b>")
    speed = answers.tokens_per_second
    if speed is not None:
        together = ""
        if rows > 1:
            together = f", {rows} answers at once"
        parts.append(f"<b>{speed:,.0f}</b> tokens/s{together}")
    return f'<p class="timing">{" · ".join(parts)}</p>'


def _card(column: Column, experts: Sequence[str], body: str, mark: str) -> str:
    """A column's answer under its title; the card of this composition, which has no name, stands out."""
    classes, edge = "answer this", ""
    if column.name:
        colour, _ = colour_of(column.name, experts)
        classes, edge = "answer", f"border-top-color:{colour}"
    name = ""
    if column.name not in ("", BASE):
        name = f" <small>{text(column.name)}</small>"
    return (
        f'<section class="{classes}" style="{edge}"><h4>{text(column.title)}{name}{mark}</h4>'
        f'<div class="written" dir="auto">{body}</div></section>'
    )


def meaning_html(lab: LabProblems | None, prompt: str) -> str:
    """What one of the lab's problems says in English, and its answer; nothing for other prompts."""
    if lab is None or prompt not in lab.place_of:
        return ""
    language, place = lab.place_of[prompt]
    problem = lab.problems[place]
    meaning = problem.prompt("en").removesuffix(" <calc>").removeprefix("Question: ").removesuffix("\nAnswer:")
    english = ""
    if language != "en":
        english = f"In English: {text(meaning)} "
    return f'<p class="timing">{english}Expected answer: <b>{text(problem.answer)}</b></p>'


def score_html(scores: Scores, others: Mapping[str, Scores], experts: Sequence[str]) -> str:
    """A bar per language with the number of problems answered correctly, and a tick for each of `others`."""
    bars = []
    for label, (right, number) in scores.items():
        ticks = words = ""
        for name, own_scores in others.items():
            colour, _ = colour_of(name, experts)
            own_right, _ = own_scores[label]
            ticks += f'<i class="tick" style="left:{100 * own_right / number:.1f}%;background:{colour}"></i>'
            words += f'<span><i style="background:{colour}"></i>{text(name)} {own_right}</span>'

        bars.append(
            f'<div class="score"><span>{text(label)}</span><span class="bar" role="img" aria-label="{right} of '
            f'{number} correct"><i style="width:{100 * right / number:.1f}%"></i>{ticks}</span>'
            f"<b>{right} / {number}</b><small>{words}</small></div>"
        )
    title = "<h4>Problems that this composition solves, by language</h4>"
    return f'<div class="scores">{title}{"".join(bars)}</div>'


_PAIRS = 3  # the most pairs of experts that are compared
_NUMBERS = {
    "cosine": "cosine",
    "written": "overlap, written",
    "read": "overlap, read",
    "sign_conflicts": "differing signs",
}
_WHAT = (
    "In percent: the cosine of the two ΔW; the overlap of the subspaces that they write to, and of those that they "
    "read from; the share of signs that differ."
)


def analysis_html(analysis: Analysis, experts: Sequence[str], num_layers: int) -> str:
    """Changed rows and norms of each expert, and the interference of each pair, by layer."""
    threshold = analysis.threshold
    limit = "a threshold"
    if threshold is not None:
        limit = f"{threshold:.3g}, the median over the rows of these experts"
    parts = [f"<h4>Changed rows</h4><p>Percentage of rows whose mean |ΔW| exceeds {limit}.</p>"]
    for table in analysis.tables:
        rows: dict[str, dict[int, float]] = {part: {} for part in table.modules}
        for (layer, part), share in table.cells.items():
            rows[part][layer] = share
        colour, _ = colour_of(table.expert, experts)
        parts.append(_table(table.expert, rows, num_layers, colour, percent=True))

    parts.append("<h4>Size of the change</h4><p>‖ΔW‖ of all matrices of a layer together.</p>")
    for changes in analysis.changes:
        colour, _ = colour_of(changes.expert, experts)
        parts.append(_table(changes.expert, {"‖ΔW‖": changes.layer_norms()}, num_layers, colour))

    for pair in analysis.pairs[:_PAIRS]:
        rows = {label: {} for label in _NUMBERS.values()}
        for layer, numbers in pair.by_layer().items():
            for key, label in _NUMBERS.items():
                value = numbers[key]
                if value is not None:
                    rows[label][layer] = abs(value)
        shared = " Both started from the same A, so they read from similar subspaces."
        if pair.shared_start is None:
            shared = ""
        parts.append(f"<h4>{text(pair.experts[0])} and {text(pair.experts[1])}</h4><p>{_WHAT}{shared}</p>")
        parts.append(_table("", rows, num_layers, _GREY, percent=True))
    return f'<div class="measured">{"".join(parts)}</div>'


def suggestion_html(suggestion: Suggestion) -> str:
    """The zones that `suggest` proposes, with its reasons."""
    task, language = suggestion.kept
    reasons = "".join(f"<li>{text(reason)}</li>" for reason in suggestion.reasons)
    proposal = ", ".join(f"{text(key)} {text(value)}" for key, value in suggestion.composition.items())
    return (
        f'<div class="measured"><h4>Suggested: {proposal}</h4><ul>{reasons}</ul><p>It keeps {task:.0%} of the task '
        f"expert's effect in the layers and {language:.0%} of the language expert's.</p><p>A proposal from "
        "weights only may be worse than the paper's layers: evaluate both.</p></div>"
    )


def _table(
    name: str, rows: Mapping[str, Mapping[int, float]], num_layers: int, colour: str, *, percent: bool = False
) -> str:
    """Rows of numbers by layer; the larger a number, the stronger the colour of its cell."""
    most = 1.0
    if not percent:
        most = max((max(values.values(), default=0.0) for values in rows.values()), default=0.0) or 1.0

    head = body = ""
    for layer in range(num_layers):
        head += f'<th scope="col">{layer}</th>'
    for label, values in rows.items():
        cells = ""
        for layer in range(num_layers):
            if layer not in values:
                cells += "<td></td>"
                continue
            value = values[layer]
            shown = f"{100 * value:.0f}" if percent else f"{value:.2g}"
            share = 100 * min(value / most, 1.0)
            fill = f"color-mix(in srgb,{colour} calc({share:.0f}% * var(--deepest)),transparent)"
            cells += f'<td><span style="background:{fill}">{shown}</span></td>'
        breakable = text(label).replace(".", ".<wbr>")
        body += f'<tr><th scope="row" title="{text(label)}">{breakable}</th>{cells}</tr>'

    caption = f"<caption>{text(name)}</caption>" if name else ""
    return f'<div class="scroll" tabindex="0"><table>{caption}<tr><th></th>{head}</tr>{body}</table></div>'
