"""What the page shows besides its controls, as HTML: the strip of layers, answers, an analysis, a suggestion.

Every cell of the strip also has a letter and a label, so nothing depends on colour alone. All text of files is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    from adapterswap.engines.live.batch import Answers


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
        painted: the (layer, kind) pairs that were set by hand; their cells get a dot.
    """
    assert isinstance(plan.num_layers, int)  # `Workspace.open` refuses all others
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
    remarks = "".join(f"<li>{text(line)}</li>" for line in plan.remarks[:_REMARKS])
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
    picture = plan.picture
    letters = {meaning: letter for letter, meaning in picture.legend.items()}
    found: dict[tuple[int, str], list[Slot]] = {}
    shown = {(mark.layer, mark.kind) for mark in picture.marks}
    for slot in plan:
        if slot.layer is not None and (slot.layer, slot.kind) in shown and not slot.in_full:
            found.setdefault((slot.layer, slot.kind), []).append(slot)
    return {place: _cell(slots, letters) for place, slots in found.items()}


def _cell(slots: Sequence[Slot], letters: Mapping[str, str]) -> _Cell:
    meanings = list(dict.fromkeys(slot.label for slot in slots))
    shares: dict[str, float] = {}
    for slot in slots:
        for term in slot.terms:
            shares[term.expert] = shares.get(term.expert, 0.0) + abs(term.coefficient)
    if len(meanings) > 1:
        return _Cell("*", "; ".join(meanings), shares)
    owner = slots[0].owner_label
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
    found: list[Column] = []
    for kind in COLUMNS:
        if kind not in shown:
            continue
        if kind == "base":
            found.append(Column("base", BASE, None))
        elif kind == "this":
            found.append(Column("this composition", "", workspace.composition(choice)))
        else:
            names = choice.task if kind == "task" else choice.language
            if names and names[0] != BASE:
                found.append(Column(COLUMNS[kind], names[0], alone(names[0])))
    return found


def answers_html(shown: Sequence[Column], answers: Answers, experts: Sequence[str], *, right: str | None = None) -> str:
    """The answers as cards.

    Args:
        right: the right answer if it is known; each finished answer is then marked right or wrong.
    """
    cards = []
    for column, written, ended in zip(shown, answers.texts, answers.ended, strict=True):
        over = ended or answers.done
        mark = ""
        if right is not None and over:
            is_right = written.strip() == right and ended
            mark = (
                f'<span class="mark {"right" if is_right else "wrong"}">{"✓ right" if is_right else "✗ wrong"}</span>'
            )
        body = "<br>".join(map(text, written.strip().split("\n"))) or ("<i>(nothing)</i>" if over else "")
        cursor = "" if over else '<span class="cursor" aria-hidden="true"></span>'
        cards.append(_card(column, experts, f"{body}{cursor}", mark))
    return f'<div class="answers" aria-busy="{str(not answers.done).lower()}">{"".join(cards)}</div>'


def waiting_html(shown: Sequence[Column], experts: Sequence[str]) -> str:
    """The cards before the first token."""
    dots = '<span class="cursor" aria-hidden="true"></span>'
    return f'<div class="answers" aria-busy="true">{"".join(_card(c, experts, dots, "") for c in shown)}</div>'


def timing_text(answers: Answers, *, rows: int) -> str:
    """The times of the switch and the first token, and the speed."""
    parts = [f"switched in <b>{1000 * answers.switch_seconds:.1f} ms</b>"]
    if answers.first_seconds is not None:
        parts.append(f"first token after <b>{1000 * answers.first_seconds:.0f} ms</b>")
    if (speed := answers.tokens_per_second) is not None:
        together = f", {rows} answers at once" if rows > 1 else ""
        parts.append(f"<b>{speed:,.0f}</b> tokens/s{together}")
    return f'<p class="timing">{" · ".join(parts)}</p>'


def _card(column: Column, experts: Sequence[str], body: str, mark: str) -> str:
    colour, _ = colour_of(column.name, experts)
    edge = f"border-top-color:{colour}" if column.name else ""
    this = " this" if not column.name else ""
    name = f" <small>{text(column.name)}</small>" if column.name not in ("", BASE) else ""
    return (
        f'<section class="answer{this}" style="{edge}"><h4>{text(column.title)}{name}{mark}</h4>'
        f'<div class="written" dir="auto">{body}</div></section>'
    )


def meaning_html(lab: LabProblems | None, prompt: str) -> str:
    """What one of the lab's problems says in English, and its answer; nothing for other prompts."""
    if lab is None or prompt not in lab.known:
        return ""
    language, place = lab.known[prompt]
    problem = lab.problems[place]
    meaning = problem.prompt("en").removesuffix(" <calc>").removeprefix("Question: ").removesuffix("\nAnswer:")
    english = "" if language == "en" else f"In English: {text(meaning)} "
    return f'<p class="timing">{english}Expected answer: <b>{text(problem.answer)}</b></p>'


def score_html(scores: Scores, others: Mapping[str, Scores], experts: Sequence[str]) -> str:
    """A bar per language with the number of problems answered correctly, and a tick for each of `others`."""
    bars = []
    for label, (right, number) in scores.items():
        colours = {name: colour_of(name, experts)[0] for name in others}
        places = {name: 100 * others[name][label][0] / number for name in others}
        ticks = "".join(
            f'<i class="tick" style="left:{places[name]:.1f}%;background:{colours[name]}"></i>' for name in others
        )
        words = "".join(
            f'<span><i style="background:{colours[name]}"></i>{text(name)} {others[name][label][0]}</span>'
            for name in others
        )
        bars.append(
            f'<div class="score"><span>{text(label)}</span><span class="bar" role="img" aria-label="{right} of '
            f'{number} correct"><i style="width:{100 * right / number:.1f}%"></i>{ticks}</span>'
            f"<b>{right} / {number}</b><small>{words}</small></div>"
        )
    title = "<h4>Problems that this composition solves, by language</h4>"
    return f'<div class="scores">{title}{"".join(bars)}</div>'


_PAIRS = 3  # the most pairs of experts that are compared
_NUMBERS = {
    "cosine": "cosine of the two ΔW",
    "written": "overlap of the subspaces written to",
    "read": "overlap of the subspaces read from",
    "sign_conflicts": "share of signs that differ",
}


def analysis_html(analysis: Analysis, experts: Sequence[str], num_layers: int) -> str:
    """Changed rows and norms of each expert, and the interference of each pair, by layer."""
    threshold = analysis.threshold
    limit = "a threshold" if threshold is None else f"{threshold:.3g}, the median over the rows of these experts"
    parts = [f"<h4>Changed rows</h4><p>Percentage of rows whose mean |ΔW| exceeds {limit}.</p>"]
    for table in analysis.tables:
        rows = {
            part: {layer: table.cells[layer, part] for layer in range(num_layers) if (layer, part) in table.cells}
            for part in table.modules
        }
        parts.append(_table(table.expert, rows, num_layers, colour_of(table.expert, experts)[0], percent=True))
    parts.append("<h4>Size of the change</h4><p>‖ΔW‖ of all matrices of a layer together.</p>")
    norms = {each.expert: each.layer_norms() for each in analysis.changes}
    for name, values in norms.items():
        parts.append(_table(name, {"‖ΔW‖": values}, num_layers, colour_of(name, experts)[0]))
    for pair in analysis.pairs[:_PAIRS]:
        by_layer = pair.by_layer()
        rows = {
            label: {layer: abs(value) for layer, found in by_layer.items() if (value := found[key]) is not None}
            for key, label in _NUMBERS.items()
        }
        shared = (
            "" if pair.shared_start is None else " Both started from the same A, so they read from similar subspaces."
        )
        parts.append(f"<h4>{text(pair.experts[0])} and {text(pair.experts[1])}</h4><p>In percent.{shared}</p>")
        parts.append(_table("", rows, num_layers, "#8a8f98", percent=True))
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
    most = 1.0 if percent else max((value for values in rows.values() for value in values.values()), default=1.0) or 1.0
    head = "".join(f'<th scope="col">{layer}</th>' for layer in range(num_layers))
    body = ""
    for label, values in rows.items():
        cells = "".join(_number(values.get(layer), most, colour, percent) for layer in range(num_layers))
        body += f'<tr><th scope="row" title="{text(label)}">{text(label)}</th>{cells}</tr>'
    caption = f"<caption>{text(name)}</caption>" if name else ""
    return f'<div class="scroll" tabindex="0"><table>{caption}<tr><th></th>{head}</tr>{body}</table></div>'


def _number(value: float | None, most: float, colour: str, percent: bool) -> str:
    if value is None:
        return "<td></td>"
    shown = f"{100 * value:.0f}" if percent else f"{value:.2g}"
    share = 100 * min(value / most, 1.0)
    fill = f"color-mix(in srgb,{colour} calc({share:.0f}% * var(--deepest)),transparent)"
    return f'<td><span style="background:{fill}">{shown}</span></td>'
