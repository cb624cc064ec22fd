"""A report's tables as CSV and as LaTeX (booktabs).

Knows reports; the CSV has every number in full, the LaTeX those of the page's first table.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from adapterswap.errors import printable
from adapterswap.planning.describe import error_text
from adapterswap.reporting.headline import MethodRow, Spread, Target, resampled
from adapterswap.reporting.report import Report

__all__ = ["csv_table", "latex_tables"]

_HEAD = (
    "target", "method", "choice", "task", "units", "expected_units", "min", "mean", "stderr", "max", "reference",
    "difference", "low", "high", "papers_min", "papers_mean", "papers_max", "reduced",
    "relative_error",
)  # fmt: skip
# What LaTeX reads as commands, as text.
_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
}  # fmt: skip


def csv_table(report: Report) -> str:
    """One line for each target, method and task; differences and the papers' protocol on the target's own line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD)
    for target in report.targets:
        for row in target.rows:
            for task in target.tasks:
                spread = row.tasks.get(task)
                if spread is not None or task == target.task:
                    writer.writerow(_line(target, row, task, spread))
    return text.getvalue()


def _line(target: Target, row: MethodRow, task: str, spread: Spread | None) -> list[object]:
    own = task == target.task
    apart, papers = (row.difference, row.papers) if own else (None, None)
    return [
        _harmless(target.task), _harmless(row.family), row.kind, _harmless(task),
        spread.units if spread else 0, row.expected,
        *((spread.min, spread.mean, spread.stderr, spread.max) if spread else [None] * 4),
        *((_harmless(apart.to), apart.mean, apart.low, apart.high) if apart else [None] * 4),
        *((papers.min, papers.mean, papers.max) if papers else [None] * 3),
        "yes" if row.is_reduced else "no", row.relative_error,
    ]  # fmt: skip


def _harmless(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in "=+-@\t\r" else name


def latex_tables(report: Report) -> str:
    """A table for each target task."""
    return "\n".join(_latex(report, target) for target in report.targets)


def _latex(report: Report, target: Target) -> str:
    languages = ("English", "all") if target.languages else ()
    heads = ("method", "$n$", "min", "mean", "s.e.", "max", r"$\Delta$", r"95\,\%", *languages, "mean", "max")
    groups = [
        r"\multicolumn{4}{c}{" + report.units + "}",
        r"\multicolumn{2}{c}{against " + _tex(report.reference) + "}",
    ]
    groups += [r"\multicolumn{2}{c}{languages}"] * bool(languages) + [r"\multicolumn{2}{c}{papers' protocol}"]
    rules = [r"\cmidrule(lr){3-6}", r"\cmidrule(lr){7-8}", r"\cmidrule(lr){9-10}"]
    rules += [r"\cmidrule(lr){11-12}"] * bool(languages)
    half = f"Chosen on {target.select} documents, reported on {target.report}. " if target.select else ""
    errors = f"{half}s.e.: over documents. 95\\,\\%: bootstrap over {_tex(resampled(target))}. "
    if target.of_corpus:
        errors = f"Scores of the whole corpus, {target.report} documents. "
    caption = (
        f"{_tex(target.task)}: {_tex(target.metric)} over {report.units}. {errors}"
        f"Papers' protocol: all documents, and of a selected row the best configuration on them.{_reduced(target)}"
    )
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small",
        f"\\caption{{{caption}}}",
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        f" & & {' & '.join(groups)} \\\\",
        "".join(rules),
        f"{' & '.join(heads)} \\\\",
        r"\midrule",
        *(_latex_row(row, languages=bool(languages)) for row in target.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(row: MethodRow, *, languages: bool) -> str:
    spread, apart, papers = row.spread, row.difference, row.papers
    interval = "--" if apart is None or apart.low is None else f"[{_number(apart.low)}, {_number(apart.high)}]"
    cells: Sequence[str] = (
        _tex(row.label), str(len(row.chosen)),
        *((_number(value) for value in (spread.min, spread.mean, spread.stderr, spread.max)) if spread else ["--"] * 4),
        _number(apart.mean if apart else None), interval,
        *((_number(row.english), _number(row.all_languages)) if languages else ()),
        _number(papers.mean if papers else None), _number(papers.max if papers else None),
    )  # fmt: skip
    return f"{' & '.join(cells)} \\\\"


def _reduced(target: Target) -> str:
    """A sentence on methods whose compositions were reduced to a rank; empty if there are none."""
    rows = [row for row in target.rows if row.is_reduced]
    errors = "; ".join(
        f"{_tex(row.label)} {'not recorded' if row.relative_error is None else _error(row.relative_error)}"
        for row in rows
    )
    return f" Reduced to low rank, with the largest relative error of a module's $\\Delta W$: {errors}." if rows else ""


def _error(value: float) -> str:
    return error_text(value).replace("<", "$<$")


def _number(value: float | None) -> str:
    if value is None:
        return "--"
    text = f"{value:.3f}" if abs(value) <= 1 else f"{value:.1f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return f"${text}$" if value < 0 else text


def _tex(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in printable(text))
