"""Tables by layer: where experts changed the base, and how the changes of two experts compare.

Shows what `analyze` and `suggest` return; measures nothing itself. Names are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapterswap.analysis.analyzing import Analysis
from adapterswap.analysis.suggesting import Suggestion
from adapterswap.studio.strip import colour_of, text

__all__ = ["analysis_html", "suggestion_html"]

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
