"""A report's tables as CSV, with every number in full. Knows reports; `latex` writes the tables as LaTeX."""

from __future__ import annotations

import csv
import io

from adapterswap.reporting.headline import MethodRow, Spread, Target
from adapterswap.reporting.report import Report

__all__ = ["csv_table"]

_HEAD = (
    "target", "method", "choice", "task", "units", "expected_units", "min", "mean", "stderr", "max", "reference",
    "difference", "low", "high", "papers_min", "papers_mean", "papers_max", "reduced",
    "relative_error", "language_share",
)  # fmt: skip


def csv_table(report: Report) -> str:
    """A line for each target, method and task; the target's own line has differences and the papers' protocol."""
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
    difference, papers = (row.difference, row.papers) if own else (None, None)
    return [
        _harmless(target.task), _harmless(row.family), row.kind, _harmless(task),
        spread.units if spread else 0, row.expected,
        *((spread.min, spread.mean, spread.stderr, spread.max) if spread else [None] * 4),
        *((_harmless(difference.to), difference.mean, difference.low, difference.high) if difference else [None] * 4),
        *((papers.min, papers.mean, papers.max) if papers else [None] * 3),
        "yes" if row.is_reduced else "no", row.relative_error,
        row.fidelity if own else None,
    ]  # fmt: skip


def _harmless(name: str) -> str:
    """The name, quoted if a spreadsheet would read it as a formula."""
    return f"'{name}" if name[:1] in "=+-@\t\r" else name
