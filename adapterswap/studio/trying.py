"""Answers side by side, and tables by layer of what the experts changed, as `analyze` and `suggest` return it.

All text from models, and all names, are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterswap.analysis.analyzing import Analysis
from adapterswap.analysis.suggesting import Suggestion
from adapterswap.planning.composition import Composition
from adapterswap.planning.rules import BASE
from adapterswap.studio.choice import Choice
from adapterswap.studio.strip import colour_of, text
from adapterswap.studio.workspace import LabProblems, Scores, Workspace, alone

if TYPE_CHECKING:
    from adapterswap.live.batching import Answers

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
        shown: the compared compositions.
        answers: their answers.
        experts: all experts, in the order of their colours.
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
        body = text(written).replace("\n", "<br>") or ("<i>(nothing)</i>" if over else "")
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
    english = "" if language == "en" else f"In English: {text(problem.prompt('en').removesuffix(' <calc>'))} "
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
        f"expert's effect in the layers and {language:.0%} of the language expert's.</p></div>"
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
