"""A report's tables as LaTeX (booktabs), in one of three layouts.

`methods` makes a table for each target with a row for each method, `languages` one table with a group of columns for
each target, and `paper` one table with a column for each method (Bandarkar et al. 2025, tables 1 and 2). The best score
shown is bold and the second underlined. Knows reports; knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adapterswap.errors import ArgumentError, did_you_mean, printable
from adapterswap.planning.describe import error_text
from adapterswap.reporting.headline import MethodRow, Target, resampled
from adapterswap.reporting.report import Report

__all__ = ["COLUMNS", "LAYOUTS", "TableStyle", "latex_tables"]

LAYOUTS = ("methods", "languages", "paper")

# Escapes for what LaTeX reads as commands; [ and * would be arguments of the \\ that ends the line before.
_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "Δ": r"$\Delta$", "[": "{[}", "*": "{*}",
}  # fmt: skip
_MANY = 9  # with more columns, the text is smaller and closer
_HEAD = 9  # characters in a line of a column head
_LABEL = re.compile(r"[A-Za-z0-9:._/+-]+")


@dataclass(frozen=True)
class TableStyle:
    """How LaTeX tables look.

    Attributes:
        layout: `methods`: a table for each target, with a row for each method; `languages`: one table, with a group of
            columns for each target; `paper`: one table, with a column for each method.
        rows: the methods to show, in this order: families (all their rows) or rows (`layer_swap, selected`); by
            default all.
        columns: names of `COLUMNS`, in this order; in the layout `paper` they are rows. The default depends on the
            layout.
        percent: show scores × 100 with one decimal; all scores must be shares.
        label: for `\\ref`; if there are several tables, the second label ends in -2.
        caption: LaTeX that replaces the caption on how the numbers were computed.
        wide: use `table*`, which spans both columns of a page.
    """

    layout: str = "methods"
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    percent: bool = False
    label: str | None = None
    caption: str | None = None
    wide: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its head, in LaTeX.
        group: the head above it; neighbouring columns share one.
        value: its number in a row, or None.
        is_score: whether the best is marked.
    """

    head: str
    group: str
    value: Callable[[MethodRow], float | None]
    is_score: bool = True


COLUMNS: Mapping[str, Column] = {
    "n": Column("$n$", "units", lambda row: float(len(row.chosen)), False),
    "min": Column("min", "units", lambda row: row.spread.min if row.spread else None),
    "mean": Column("mean", "units", lambda row: row.spread.mean if row.spread else None),
    "stderr": Column("s.e.", "units", lambda row: row.spread.stderr if row.spread else None, False),
    "max": Column("max", "units", lambda row: row.spread.max if row.spread else None),
    "ci": Column(r"95\,\%", "units", lambda row: None, False),
    "difference": Column(r"$\Delta$", "reference", lambda row: row.difference.mean if row.difference else None),
    "interval": Column(r"95\,\%", "reference", lambda row: None, False),
    "effect": Column("$r$", "reference", lambda row: None, False),
    "p": Column("$p$", "reference", lambda row: None, False),
    "english": Column("English", "languages", lambda row: row.english),
    "languages": Column("all", "languages", lambda row: row.all_languages),
    "understanding": Column("other tasks", "languages", lambda row: row.understanding),
    "fidelity": Column("in language", "languages", lambda row: row.fidelity),
    "papers-mean": Column("mean", "papers", lambda row: row.papers.mean if row.papers else None),
    "papers-max": Column("max", "papers", lambda row: row.papers.max if row.papers else None),
    "error": Column(r"$\Delta W$ error", "", lambda row: row.relative_error, False),
}
"""The columns that a table can show, by their names in `TableStyle.columns`."""


def latex_tables(report: Report, style: TableStyle | None = None) -> str:
    """The tables as LaTeX for `booktabs`.

    Raises:
        ArgumentError: the layout, a method or a column is unknown; LaTeX cannot read the label or the caption; or
            `percent` is set and a score is not a share.
    """
    style = style or TableStyle()
    _check(report, style)
    if style.layout == "methods":
        return "\n".join(_by_method(report, target, style, place) for place, target in enumerate(report.targets))
    return _by_language(report, style) if style.layout == "languages" else _as_in_papers(report, style)


def _check(report: Report, style: TableStyle) -> None:
    if style.layout not in LAYOUTS:
        remedy = did_you_mean(style.layout, LAYOUTS, f"Use one of: {', '.join(LAYOUTS)}")
        raise ArgumentError(f"unknown layout {style.layout!r}", remedy, parameter="layout")
    rows = [row for target in report.targets for row in target.rows]
    row_names = list(dict.fromkeys(name for row in rows for name in (row.family, row.label)))
    for kind, chosen, names in (("row", style.rows, row_names), ("column", style.columns, list(COLUMNS))):
        for name in chosen or ():
            if name not in names:
                remedy = did_you_mean(name, names, f"Use some of: {', '.join(names)}")
                raise ArgumentError(f"unknown {kind} {name!r}", remedy, parameter=f"{kind}s")
        if chosen is not None and not chosen:
            raise ArgumentError(f"`{kind}s` is empty", f"Use some of: {', '.join(names)}", parameter=f"{kind}s")
    if style.label is not None and not _LABEL.fullmatch(style.label):
        raise ArgumentError(
            f"{style.label!r} is not a valid label", "Use only letters, digits and : . _ / + -", parameter="label"
        )
    if style.caption is not None and not _is_balanced(style.caption):
        raise ArgumentError(
            f"the braces of the caption {style.caption!r} are not balanced", "Close each brace, or write \\{ and \\}",
            parameter="caption",
        )  # fmt: skip
    for target in report.targets if style.percent else ():
        spreads = [spread for row in target.rows for spread in (row.spread, row.papers) if spread is not None]
        beyond = [value for spread in spreads for value in (spread.min, spread.max) if not 0 <= value <= 1]
        if beyond:
            raise ArgumentError(
                f"{target.task} has a score of {beyond[0]:g}; only scores from 0 to 1 can be shown in percent",
                "Leave out `percent`",
                parameter="percent",
            )


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in re.sub(r"\\.", "", text, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and not text.endswith("\\")


# The layouts.


def _by_method(report: Report, target: Target, style: TableStyle, place: int) -> str:
    default = ["n", "min", "mean", "stderr", "max", "difference", "interval"]
    default += ["english", "languages"] * bool(target.languages) + ["papers-mean", "papers-max"]
    columns = list(style.columns or default)
    rows = _rows(target, style)
    cells = _filled(report, target, rows, columns, style)
    body = [
        f"{_tex(row.label)} & {' & '.join(cells[name][at] for name in columns)} \\\\" for at, row in enumerate(rows)
    ]
    heads = [COLUMNS[name].head for name in columns]
    head = [*_groups(report, columns, 2), f"method & {' & '.join(heads)} \\\\"]
    caption = f"{_metric(target)} over {report.units}. {_how([target], columns, style)}"
    return _table(style, place, f"l{'r' * len(columns)}", head, body, caption + _reduced(rows))


def _by_language(report: Report, style: TableStyle) -> str:
    columns = list(style.columns or ["mean", "max"])
    shown = [_rows(target, style) for target in report.targets]
    labels = list(dict.fromkeys(row.label for rows in shown for row in rows))
    if style.rows:
        labels = [row.label for row in _ordered([row for rows in shown for row in rows], style.rows)]
        labels = list(dict.fromkeys(labels))
    lines: dict[str, list[str]] = {label: [] for label in labels}
    for target, rows in zip(report.targets, shown, strict=True):
        cells = _filled(report, target, rows, columns, style)
        places = {row.label: at for at, row in enumerate(rows)}
        for label, line in lines.items():
            line += [cells[name][places[label]] if label in places else "--" for name in columns]
    body = [f"{_tex(label)} & {' & '.join(line)} \\\\" for label, line in lines.items()]
    heads = [COLUMNS[name].head for name in columns] * len(report.targets)
    groups = [f"\\multicolumn{{{len(columns)}}}{{c}}{{{_tex(_short(target))}}}" for target in report.targets]
    rules = [
        f"\\cmidrule(lr){{{2 + at * len(columns)}-{1 + (at + 1) * len(columns)}}}" for at in range(len(report.targets))
    ]
    head = [f" & {' & '.join(groups)} \\\\", "".join(rules), f"method & {' & '.join(heads)} \\\\"]
    caption = f"{_listed_metrics(report)} over {report.units}. {_how(report.targets, columns, style)}"
    all_rows = [row for rows in shown for row in rows]
    return _table(style, 0, f"l{'r' * len(columns) * len(report.targets)}", head, body, caption + _reduced(all_rows))


def _as_in_papers(report: Report, style: TableStyle) -> str:
    only_target = report.targets[0] if len(report.targets) == 1 else None
    default = ["mean", "max"]
    if only_target is not None:
        default = ["min", "mean", "max", *(["english", "languages"] if only_target.languages else [])]
    names = list(style.columns or default)
    shown = [_rows(target, style) for target in report.targets]
    columns = _ordered([row for rows in shown for row in rows], style.rows) if style.rows else shown[0]
    labels = list(dict.fromkeys([*(row.label for row in columns), *(row.label for rows in shown for row in rows)]))
    by_label = {row.label: row for rows in reversed(shown) for row in rows}
    body = []
    for at, (target, rows) in enumerate(zip(report.targets, shown, strict=True)):
        cells = _filled(report, target, rows, names, style)
        places = {row.label: place for place, row in enumerate(rows)}
        body += [r"\addlinespace"] * bool(at)
        for name in names:
            line = [cells[name][places[label]] if label in places else "--" for label in labels]
            title = {"english": "English mean", "languages": "all languages, mean"}.get(
                name, f"{_tex(_short(target))} {COLUMNS[name].head}"
            )
            body.append(f"{title} & {' & '.join(line)} \\\\")
    settings = [_tex(by_label[label].family) for label in labels]
    details = [_details(report, by_label[label]) for label in labels]
    head = [
        f"setting & {' & '.join(map(_stacked, settings))} \\\\[3pt]",
        f"details & {' & '.join(map(_stacked, details))} \\\\",
    ]
    caption = f"{_listed_metrics(report)}. {_how(report.targets, names, style)}"
    all_rows = [row for rows in shown for row in rows]
    return _table(style, 0, f"l{'r' * len(labels)}", head, body, caption + _reduced(all_rows))


def _details(report: Report, row: MethodRow) -> str:
    """`default, 9 pairs`: the configuration and the number of units."""
    number = len(row.chosen)
    unit = report.units
    if row.chosen and sum(side is not None for side in row.chosen[0].unit) < 2 and report.kind == "sweep":
        unit = "experts" if row.family.endswith(" expert") else "models"
    counted = f"{number} {unit if number != 1 else unit.removesuffix('s')}"
    return f"{row.kind}, {counted}" if row.kind in ("default", "selected") else "" if number == 1 else counted


def _stacked(head: str) -> str:
    """A head in several lines, as narrow as its longest word or `_HEAD` characters."""
    lines: list[str] = []
    for word in head.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= _HEAD:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    stacked = r"\\".join(lines)
    return head if len(lines) < 2 else f"\\shortstack[r]{{{stacked}}}"


def _rows(target: Target, style: TableStyle) -> list[MethodRow]:
    return list(target.rows) if style.rows is None else _ordered(target.rows, style.rows)


def _ordered(rows: Sequence[MethodRow], names: Sequence[str]) -> list[MethodRow]:
    """Rows in the order of `names`, each once; the name of a family stands for all its rows."""
    ordered: dict[str, MethodRow] = {}
    for name in names:
        exact = [row for row in rows if row.label == name]
        for row in exact or [row for row in rows if row.family == name]:
            ordered.setdefault(row.label, row)
    return list(ordered.values())


# The parts.


def _table(
    style: TableStyle, place: int, spec: str, head: Sequence[str], body: Sequence[str], caption: str
) -> str:  # fmt: skip
    environment = "table*" if style.wide else "table"
    label = None if style.label is None else style.label + (f"-{place + 1}" if place else "")
    used = style.caption, caption, *head, *body
    rare = "".join(sorted({character for text in used for character in text or "" if not _set_by_pdflatex(character)}))
    lines = [
        "% needs \\usepackage{booktabs,graphicx}" + f", and XeLaTeX or LuaLaTeX for {rare}" * bool(rare),
        f"\\begin{{{environment}}}[t]",
        r"\centering\small" if len(spec) <= _MANY else r"\centering\footnotesize",
        r"\setlength{\tabcolsep}{4pt}" if len(spec) <= _MANY else r"\setlength{\tabcolsep}{3pt}",
        r"\sbox0{%",
        f"\\begin{{tabular}}{{@{{}}{spec}@{{}}}}",
        r"\toprule",
        *head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}%",
        r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
        f"\\caption{{{caption if style.caption is None else style.caption}}}",
        *([] if label is None else [f"\\label{{{label}}}"]),
        f"\\end{{{environment}}}",
    ]
    return "\n".join(lines) + "\n"


def _set_by_pdflatex(character: str) -> bool:
    """Whether pdfLaTeX prints a character without further packages: Latin-1 and punctuation."""
    return ord(character) <= 0xFF or character in "–—…‘’“”"


def _groups(report: Report, columns: Sequence[str], first: int) -> list[str]:
    """The line above the heads: the groups of neighbouring columns."""
    names = {
        "units": f"over {report.units}", "reference": f"against {_tex(report.reference)}", "languages": "languages",
        "papers": "papers' protocol", "": "",
    }  # fmt: skip
    runs: list[tuple[str, int]] = []
    for name in columns:
        group = COLUMNS[name].group
        if runs and runs[-1][0] == group:
            runs[-1] = group, runs[-1][1] + 1
        else:
            runs.append((group, 1))
    heads, rules, place = [], [], first
    for group, size in runs:
        heads.append(f"\\multicolumn{{{size}}}{{c}}{{{names[group]}}}")
        if group:
            rules.append(f"\\cmidrule(lr){{{place}-{place + size - 1}}}")
        place += size
    return [f" & {' & '.join(heads)} \\\\", "".join(rules)] if any(group for group, _ in runs) else []


def _filled(
    report: Report, target: Target, rows: Sequence[MethodRow], columns: Sequence[str], style: TableStyle
) -> dict[str, list[str]]:
    """Column → its cells; the best score is bold and the second underlined."""
    cells = {}
    for name in columns:
        column = COLUMNS[name]
        if name in ("ci", "interval"):
            cells[name] = [_interval(row, name, style) for row in rows]
        elif name in ("effect", "p"):
            cells[name] = [_tested(report, row, name) for row in rows]
        elif name == "n":
            cells[name] = [str(len(row.chosen)) for row in rows]
        elif name == "error":
            cells[name] = [_error(row) for row in rows]
        else:
            texts = [_number(column.value(row), style) for row in rows]
            cells[name] = _marked(texts, higher=target.higher_is_better) if column.is_score else texts
    return cells


def _marked(texts: Sequence[str], *, higher: bool) -> list[str]:
    """Mark the best and second of numbers as written, so that equals are marked alike; if all are equal, mark none."""
    values = {text: float(text.strip("$")) for text in texts if text != "--"}
    ordered = sorted(set(values.values()), reverse=higher)
    if len(ordered) < 2:
        return list(texts)
    marks = {ordered[0]: "\\textbf", **({ordered[1]: "\\underline"} if len(ordered) > 2 else {})}

    def mark(text: str) -> str:
        command = marks.get(values[text]) if text in values else None
        if command is None:
            return text
        return f"$\\mathbf{{{text[1:-1]}}}$" if text[0] == "$" and command == "\\textbf" else f"{command}{{{text}}}"

    return [mark(text) for text in texts]


def _interval(row: MethodRow, name: str, style: TableStyle) -> str:
    if name == "ci":
        ends = row.interval
    else:
        difference = row.difference
        ends = (
            None
            if difference is None or difference.low is None or difference.high is None
            else (difference.low, difference.high)
        )
    return "--" if ends is None else f"[{_number(ends[0], style)}, {_number(ends[1], style)}]"


def _tested(report: Report, row: MethodRow, name: str) -> str:
    """Wilcoxon's p against the reference, corrected by Holm's method, or its effect size."""
    ranks = report.ranking.ranks if report.ranking is not None else None
    if ranks is None or ranks.reference is None:
        return "--"
    for comparison in ranks.comparisons:
        if {comparison.one, comparison.other} == {row.label, ranks.reference}:
            if name == "effect":
                return _number(comparison.effect if comparison.one == row.label else -comparison.effect, TableStyle())
            if comparison.wilcoxon is not None:
                return "$<$0.001" if comparison.wilcoxon < 0.001 else f"{comparison.wilcoxon:.3f}"
    return "--"


def _how(targets: Sequence[Target], columns: Sequence[str], style: TableStyle) -> str:
    """How the numbers in these columns were computed, once for all targets or, if they differ, for each target."""
    parts = ["In percent."] * style.percent
    parts += _by_target(targets, _documents)
    if "stderr" in columns and not all(target.of_corpus for target in targets):
        parts.append("s.e.: standard error over documents.")
    if {"ci", "interval"} & {*columns}:
        parts += _by_target(targets, _intervals)
    if "p" in columns:
        parts.append("$p$: Wilcoxon's signed-rank test over the settings of all targets, corrected by Holm's method.")
    if "effect" in columns:
        parts.append("$r$: rank-biserial correlation of matched pairs.")
    if {"papers-mean", "papers-max"} & {*columns}:
        parts.append("Papers' protocol: all documents; for a selected row, the configuration that is best on them.")
    marked = any(COLUMNS[name].is_score for name in columns)
    where = "row" if style.layout == "paper" else "column"
    parts.append(f"Bold: best of a {where}; underlined: second." * marked)
    parts += _by_target(targets, lambda target: "" if target.higher_is_better else "Lower is better.")
    return " ".join(part for part in parts if part)


def _by_target(targets: Sequence[Target], describe: Callable[[Target], str]) -> list[str]:
    """The sentence if it is the same for all targets; otherwise one for each target, with its name."""
    sentences = {target.task: describe(target) for target in targets}
    if len({*sentences.values()}) == 1:
        return [next(iter(sentences.values()))]
    return [f"{_tex(task)}: {sentence}" for task, sentence in sentences.items() if sentence]


def _documents(target: Target) -> str:
    if target.of_corpus:
        return f"Corpus-level scores, {target.report} documents."
    return f"Selected on {target.select} documents, reported on {target.report} others." if target.select else ""


def _intervals(target: Target) -> str:
    if target.of_corpus:
        return ""
    return f"95\\,\\%: pigeonhole bootstrap over {_tex(resampled(target))}, not corrected for the number of rows."


def _listed_metrics(report: Report) -> str:
    return "; ".join(dict.fromkeys(map(_metric, report.targets)))


def _metric(target: Target) -> str:
    return f"{_tex(target.task)} ({_tex(target.metric)})"


def _short(target: Target) -> str:
    return target.language or target.task


def _reduced(rows: Sequence[MethodRow]) -> str:
    """A sentence about methods whose compositions were reduced to a lower rank; empty if there are none."""
    reduced = {row.label: row for row in rows if row.is_reduced}
    errors = "; ".join(
        f"{_tex(label)} {'not recorded' if row.relative_error is None else _error(row)}"
        for label, row in reduced.items()
    )
    sentence = f" Reduced to a lower rank, with the largest relative error of a module's $\\Delta W$: {errors}."
    return sentence if reduced else ""


def _error(row: MethodRow) -> str:
    return "--" if row.relative_error is None else error_text(row.relative_error).replace("<", "$<$")


def _number(value: float | None, style: TableStyle) -> str:
    if value is None:
        return "--"
    small = ".3f" if abs(value) <= 1 else ".1f"
    text = f"{100 * value:.1f}" if style.percent else format(value, small)
    if float(text) == 0:
        return text.removeprefix("-")
    return f"${text}$" if value < 0 else text


def _tex(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in printable(text))
