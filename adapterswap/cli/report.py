"""`adapterswap report`: a sweep or a lab run → one HTML page, LaTeX, CSV, JSON, and figures."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

from adapterswap.cli.options import Folder, Json, Output, Text
from adapterswap.cli.output import echo, note, note_output, number_text, print_json, print_table, table, working
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from adapterswap.experiments.reporting import Report
    from adapterswap.experiments.reporting.headline import MethodRow, Target


_WIDTH = 140  # characters, without a terminal
_MINIMUM, _MAXIMUM, _ENGLISH, _ALL, _PAPERS = 2, 4, 7, 8, 9  # places of columns
_LEAST = (_PAPERS, _ALL, _ENGLISH, _MINIMUM, _MAXIMUM)  # the first to drop on a narrow terminal


@declare("report")
def report_command(
    runs: Annotated[tuple[Folder, ...], "RUN…"],
    *,
    reference: Annotated[str, "METHOD"] | None = None,
    methods: Annotated[tuple[str, ...], "METHOD,…"] = (),
    units: Annotated[tuple[str, ...], "UNIT,…"] = (),
    figures: Folder | None = None,
    column_width: Annotated[str, "W"] = "3.25in",
    rows: Annotated[tuple[str, ...], "METHOD"] = (),
    columns: Annotated[tuple[str, ...], "C,…"] = (),
    percent: bool = False,
    label: Annotated[str, "NAME"] | None = None,
    caption: Text | None = None,
    wide: bool = False,
    title: Text | None = None,
    task_label: Annotated[tuple[str, ...], "NAME=TEXT"] = (),
    expert_label: Annotated[tuple[str, ...], "NAME=TEXT"] = (),
    out_path: Output | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page, LaTeX and CSV of a sweep or a lab run.

    RUN is a folder that `adapterswap sweep` or `adapterswap lab` wrote; a sweep does not have to be finished. Several
    sweeps are reported as one if they have the same base, experts, tasks, settings and versions. Writes
    report.html (one self-contained file), tables.tex, tables.csv and summary.json.

    Configurations are chosen on one half of the documents and reported on the other. The papers' own protocol, the best
    on the test set itself, is shown next to it. Differences to the reference have intervals over experts and documents.

    Args:
        reference: Method to compare the others with.  [default: task expert, or soup if --methods leaves it out]
        methods: Methods to rank and test; `compositions` means all that compose something.  [default: all]
        units: Pairs, experts or seeds to include.  [default: all]
        figures: Folder to write figures to: PDF, SVG and PNG.
        column_width: Width of the figures: in, cm, mm or pt.
        rows: LaTeX: a method to show; repeatable.  [default: all]
        columns: LaTeX: n, mean, difference, p, …; see docs/report.md.
        percent: LaTeX: scores × 100, with one decimal.
        label: LaTeX: label for \\ref.
        caption: LaTeX: caption.  [default: how the numbers were made]
        wide: LaTeX: table*, across both columns.
        title: Heading of the page.  [default: name of the run's folder]
        task_label: What to call a task; repeatable.
        expert_label: What to call an expert; repeatable.
        out_path: Folder to write; needed for several runs.  [default: RUN-report]
        dry_run: Compute and print everything, but write nothing.
        as_json: Print JSON: the content of summary.json.

    Examples:
        adapterswap report runs/swahili
        adapterswap report runs/swahili --figures figures -o page
    """
    from adapterswap.experiments.reporting.latex import TableStyle
    from adapterswap.experiments.reporting.output import check_targets, report
    from adapterswap.kit.errors import ArgumentError
    from adapterswap.kit.files.text import expand

    # Where to write: by default beside the run, with `-report` after its name
    target: Path | None = None
    if out_path:
        target = expand(out_path)
    elif len(runs) == 1:
        run = expand(runs[0])
        if run.name in ("", ".."):
            run = run.resolve()  # `.` has no name to add -report to
        target = run.with_name(f"{run.name}-report")
    elif not dry_run:
        raise ArgumentError(
            "`out_path` is required for a report of several runs", "Pass the folder to write", parameter="out_path"
        )

    written, drawn = target, figures
    if dry_run:
        check_targets([expand(run) for run in runs], target, figures, overwrite=overwrite)
        written = drawn = None
    style = TableStyle(list(rows) or None, _names(columns), percent, label, caption, wide)
    with working("computing the report"):
        results = report(
            runs, written, reference=reference, methods=_names(methods), units=_names(units),
            figures=drawn, column_width=column_width, table=style, title=title,
            task_label=_labels(task_label, "task_label"), expert_label=_labels(expert_label, "expert_label"),
            overwrite=overwrite,
        )  # fmt: skip

    if as_json:
        print_json({"dry_run": dry_run, **results.as_json()})
    else:
        _print(results)
    if target is not None:
        note_output(target, "report.html, tables.tex, tables.csv, …", dry_run=dry_run)
    if figures is not None:
        for kind, reason in results.lacking_figures.items():
            note(f"No figure {kind}: {reason}")
        note_output(figures, "PDF, SVG, PNG and figures.json", dry_run=dry_run)


def _names(options: tuple[str, ...]) -> list[str] | None:
    """The names, separated by commas or by repeating the option; None if the option was not used."""
    if not options:
        return None
    names = [name.strip() for name in ",".join(options).split(",")]
    return [name for name in names if name]


def _labels(options: tuple[str, ...], parameter: str) -> dict[str, str]:
    """The labels of NAME=TEXT, by name."""
    from adapterswap.kit.errors import ArgumentError

    labels = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not name or not equals or not text.strip():
            raise ArgumentError(
                f"`{parameter}` is {option!r}, not NAME=TEXT", "Pass a name, = and its label", parameter=parameter
            )
        labels[name] = text.strip()
    return labels


def _print(report: Report) -> None:
    """Print the report's tables, its test over all methods, and what a reader of them should know."""
    width = _WIDTH
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns

    left_out: dict[str, None] = {}
    for target in report.targets:
        shown, names = _table(report, target, width)
        print_table(shown, width=_WIDTH)
        left_out |= dict.fromkeys(names)
    if left_out:
        note(f"Too wide for {width} characters: {', '.join(left_out)}; see tables.csv")

    ranking = report.ranking
    if ranking is not None and ranking.ranks is not None and ranking.ranks.p is not None:
        ranks = ranking.ranks
        kind: str | None = "settings"
        if ranking.over_groups:
            kind = ranking.group

        over = f"Friedman over {ranks.settings} {kind} and {len(ranks.mean_ranks)} methods"
        echo(f"{over}: χ² = {ranks.statistic:.2f}, p = {ranks.p:.3g}, Kendall's W = {ranks.agreement:.2f}")
        if ranking.single:
            note(
                f"{', '.join(ranking.single)} compose nothing and raise χ², since they are far from the others; "
                "use --methods compositions to leave them out"
            )

    for remark in report.untested:
        note(remark)
    if report.kind == "sweep":
        for remark in report.remarks:
            note(remark)
    if report.preregistration is not None:
        outcome = "the run matches"
        if report.preregistration.differences:
            outcome = f"the run differs: {'; '.join(report.preregistration.differences)}"
        note(f"Registered before the run: {outcome}")
    if report.missing:
        note(f"{sum(report.missing.values())} of {report.cells} cells are not finished")


def _table(report: Report, target: Target, width: int) -> tuple[Table, list[str]]:
    """A target's table with the columns that fit, and the heads of the others; the least important go first."""
    from rich.cells import cell_len

    # The columns that every report has, each with its head
    heads = ["method", report.units, "min", "mean", "max", f"minus {report.reference}", "95 %", "English", "all",
             "papers' mean"]  # fmt: skip
    lines = [heads, *(_cells(row) for row in target.rows)]
    columns = [list(column) for column in zip(*lines, strict=True)]

    # Those that only some reports have
    understanding = [row.understanding for row in target.rows]
    fidelity = [row.fidelity for row in target.rows]
    errors = [row.relative_error for row in target.rows]
    for head, values in (("other tasks", understanding), ("in language", fidelity)):
        if any(value is not None for value in values):
            columns.append([head, *map(number_text, values)])
    if any(error is not None for error in errors):
        from adapterswap.core import error_text

        column = ["ΔW error"]
        for error in errors:
            cell = "–"
            if error is not None:
                cell = error_text(error)
            column.append(cell)
        columns.append(column)

    # One unit has no minimum and maximum beside its mean. Where nothing was selected, the papers' mean is the mean.
    unneeded: set[int] = set()
    if not any(row.spread and row.spread.units > 1 for row in target.rows):
        unneeded.update((_MINIMUM, _MAXIMUM))
    if not target.chosen:
        unneeded.add(_PAPERS)
    shown = {place: column for place, column in enumerate(columns) if place not in unneeded}

    left_out: list[str] = []
    for place in _LEAST:
        if place not in shown:
            continue
        if sum(2 + max(map(cell_len, column)) for column in shown.values()) <= width:
            break
        left_out.append(shown.pop(place)[0])

    shown_heads, *rows = zip(*shown.values(), strict=True)
    documents = f"{target.report} documents{target.of_groups}"
    return table(*shown_heads, rows=rows, title=f"{report.labels.task(target.task)}, {documents}"), left_out


def _cells(row: MethodRow) -> list[str]:
    """The cells of a row that every report has."""
    units = f"{len(row.chosen)}"
    if len(row.chosen) != row.expected:
        units += f" of {row.expected}"

    minimum = mean = maximum = None
    if row.spread:
        mean = row.spread.mean
        if row.spread.units > 1:
            minimum, maximum = row.spread.min, row.spread.max

    difference = interval = "–"
    if row.difference is not None:
        difference = _signed(row.difference.mean)
        if row.difference.interval:
            interval = " … ".join(map(_signed, row.difference.interval))

    papers = None
    if row.papers:
        papers = row.papers.mean
    return [
        row.label,
        units,
        number_text(minimum),
        number_text(mean),
        number_text(maximum),
        difference,
        interval,
        number_text(row.english),
        number_text(row.all_languages),
        number_text(papers),
    ]


def _signed(value: float) -> str:
    """A number with its sign; zero after rounding has none."""
    text = f"{value:+.3f}"
    if float(text) == 0:
        return "0.000"
    return text
