"""Answers side by side: the compositions to compare, and their answers as HTML.

All text from models is escaped. Shows answers; computes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.compositions import Composition
from adapterswap.studio.choice import Choice
from adapterswap.studio.strip import colour_of, text

if TYPE_CHECKING:
    from adapterswap.live.streaming import Answers
    from adapterswap.studio.workspace import Workspace

__all__ = ["COLUMNS", "Column", "answers_html", "columns", "score_html", "timing_text", "waiting_html"]

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
    """The compositions to compare.

    Raises:
        FieldError, CompositionError: see `Choice.composition`.
    """
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
                found.append(Column(COLUMNS[kind], names[0], Composition(allocation=(Rule(expert=names[0]),))))
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


def score_html(scores: Mapping[str, tuple[int, int]]) -> str:
    """A bar per language with the number of problems answered correctly."""
    bars = []
    for label, (right, number) in scores.items():
        share = right / number if number else 0.0
        bars.append(
            f'<div class="score"><span>{text(label)}</span><span class="bar" role="img" '
            f'aria-label="{right} of {number} correct"><i style="width:{100 * share:.1f}%"></i></span>'
            f"<b>{right} / {number}</b></div>"
        )
    title = "<h4>Problems that this composition solves, by language</h4>"
    return f'<div class="scores">{title}{"".join(bars)}</div>'
