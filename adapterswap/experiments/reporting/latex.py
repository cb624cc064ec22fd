"""A report's tables as CSV, with every number in full, and as LaTeX (booktabs).

The best score shown is bold and the second underlined.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeGuard

from adapterswap.core import error_text
from adapterswap.experiments.reporting.headline import MethodRow, Spread, Target, resampled
from adapterswap.experiments.reporting.report import Report
from adapterswap.experiments.reporting.statistics import RankComparison
from adapterswap.kit.errors import ArgumentError, did_you_mean, printable
from adapterswap.kit.files.text import csv_text

_CSV_HEAD = (
    "target", "method", "choice", "task", "units", "expected_units", "min", "mean", "stderr", "max", "reference",
    "difference", "low", "high", "papers_min", "papers_mean", "papers_max", "reduced",
    "relative_error", "language_share",
)  # fmt: skip


def csv_table(report: Report) -> str:
    """A line for each target, method and task; the target's own line has differences and the papers' protocol."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_HEAD)
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
        csv_text(target.task), csv_text(row.family), row.kind, csv_text(task),
        spread.units if spread else 0, row.expected,
        *((spread.min, spread.mean, spread.stderr, spread.max) if spread else [None] * 4),
        *((csv_text(difference.to), difference.mean, difference.low, difference.high) if difference else [None] * 4),
        *((papers.min, papers.mean, papers.max) if papers else [None] * 3),
        "no" if row.relative_error is None else "yes", row.relative_error,
        row.fidelity if own else None,
    ]  # fmt: skip


# Escapes for what LaTeX reads as commands; [ and * would be arguments of the \\ that ends the line before.
_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "Δ": r"$\Delta$", "[": "{[}", "*": "{*}",
}  # fmt: skip
_MANY = 9  # with more columns, the text is smaller and closer
_RARE = re.compile(r"[^\x00-\xff–—…‘’“”]")  # pdfLaTeX prints Latin-1 and punctuation without further packages
_LABEL = re.compile(r"[A-Za-z0-9:._/+-]+")


@dataclass(frozen=True)
class TableStyle:
    """How a LaTeX table looks.

    Attributes:
        rows: the methods to show, in this order: families (all their rows) or rows (`layer_swap, selected`); by
            default all.
        columns: names of `COLUMNS`, in this order; with several targets, each has these columns. By default mean and
            maximum, and more for a single target.
        percent: show scores × 100 with one decimal; all scores must be shares.
        label: for `\\ref`.
        caption: LaTeX that replaces the caption on how the numbers were computed.
        wide: use `table*`, which spans both columns of a page.

    Raises:
        ArgumentError: a column is unknown, `label` is not a valid label, or the braces of `caption` are not balanced.
    """

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    percent: bool = False
    label: str | None = None
    caption: str | None = None
    wide: bool = False

    def __post_init__(self) -> None:
        _check_names("column", self.columns, list(COLUMNS))
        if self.label is not None and not _LABEL.fullmatch(self.label):
            raise ArgumentError(
                f"{self.label!r} is not a valid label", "Use only letters, digits and : . _ / + -", parameter="label"
            )
        if self.caption is not None and not _is_balanced(self.caption):
            raise ArgumentError(
                f"The braces of the caption {self.caption!r} are not balanced",
                "Close each brace, or write \\{ and \\}",
                parameter="caption",
            )


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its head, in LaTeX.
        group: the head above it; neighbouring columns share one.
        value: what it shows of a row: a number, the two ends of an interval, or text; None is a dash.
        is_score: whether the best is marked.
        is_share: whether more is better, whatever the target's score is.
    """

    head: str
    group: str
    value: Callable[[Report, MethodRow], float | tuple[float, float] | str | None]
    is_score: bool = True
    is_share: bool = False


def _has_several(spread: Spread | None) -> TypeGuard[Spread]:
    """Whether a score has several units: one has no minimum and maximum beside its mean."""
    return spread is not None and spread.units > 1


def _effect(report: Report, row: MethodRow) -> str | None:
    comparison = _comparison(report, row)
    return None if comparison is None else _number(comparison.effect)


def _p(report: Report, row: MethodRow) -> str | None:
    comparison = _comparison(report, row)
    if comparison is None or comparison.wilcoxon is None:
        return None
    return "$<$0.001" if comparison.wilcoxon < 0.001 else f"{comparison.wilcoxon:.3f}"


def _comparison(report: Report, row: MethodRow) -> RankComparison | None:
    ranks = report.ranking.ranks if report.ranking is not None else None
    return ranks.against(row.label, ranks.reference) if ranks is not None and ranks.reference is not None else None


def _error(value: float) -> str:
    return error_text(value).replace("<", "$<$")


COLUMNS: Mapping[str, Column] = {
    "n": Column("$n$", "units", lambda _, row: str(len(row.chosen)), False),
    "min": Column("min", "units", lambda _, row: row.spread.min if _has_several(row.spread) else None),
    "mean": Column("mean", "units", lambda _, row: row.spread.mean if row.spread else None),
    "stderr": Column("s.e.", "units", lambda _, row: row.spread.stderr if row.spread else None, False),
    "max": Column("max", "units", lambda _, row: row.spread.max if _has_several(row.spread) else None),
    "ci": Column(r"95\,\%", "units", lambda _, row: row.interval, False),
    "difference": Column(r"$\Delta$", "reference", lambda _, row: row.difference.mean if row.difference else None),
    "interval": Column(
        r"95\,\%", "reference", lambda _, row: row.difference.interval if row.difference else None, False
    ),
    "effect": Column("$r$", "reference", _effect, False),
    "p": Column("$p$", "reference", _p, False),
    "english": Column("English", "languages", lambda _, row: row.english),
    "languages": Column("all", "languages", lambda _, row: row.all_languages),
    "understanding": Column("other tasks", "languages", lambda _, row: row.understanding, is_share=True),
    "fidelity": Column("in language", "languages", lambda _, row: row.fidelity, is_share=True),
    "papers-mean": Column("mean", "papers", lambda _, row: row.papers.mean if row.papers else None),
    "papers-max": Column("max", "papers", lambda _, row: row.papers.max if _has_several(row.papers) else None),
    "error": Column(
        r"$\Delta W$ error",
        "",
        lambda _, row: None if row.relative_error is None else _error(row.relative_error),
        False,
    ),
}
"""The columns that a table can show, by their names in `TableStyle.columns`."""


def latex_table(report: Report, style: TableStyle | None = None, target: Target | None = None) -> str:
    """The table as LaTeX for `booktabs`."""
    style = style or TableStyle()
    _check(report, style)
    targets = report.targets if target is None else (target,)
    default = ["mean", "max"]
    if len(targets) == 1:
        default = ["n", "min", "mean", "stderr", "max", "difference", "interval"]
        if targets[0].languages:
            default += ["english", "languages"]
        if targets[0].chosen:  # otherwise it is the mean again
            default += ["papers-mean", "papers-max"]
    if not any(_has_several(row.spread) for each in targets for row in each.rows):
        default = [name for name in default if name not in ("n", "min", "max", "papers-max")]
    shown = [list(each.rows) if style.rows is None else _ordered(each.rows, style.rows) for each in targets]
    rows = [row for of_target in shown for row in of_target]
    filled = [name for name in default if any(COLUMNS[name].value(report, row) is not None for row in rows)]
    columns = style.columns or filled
    lines = {row.label: [_tex(row.label)] for row in (rows if style.rows is None else _ordered(rows, style.rows))}
    for each, of_target in zip(targets, shown, strict=True):
        for name in columns:
            cells = _cells(report, each, of_target, COLUMNS[name], style.percent)
            for label, line in lines.items():
                line.append(cells.get(label, "--"))
    spec = f"l{'r' * len(columns) * len(targets)}"
    head = _head(report, targets, columns)
    body = [f"{' & '.join(line)} \\\\" for line in lines.values()]
    metrics = "; ".join(
        dict.fromkeys(f"{_tex(report.labels.task(each.task))} ({_tex(each.metric)})" for each in targets)
    )
    caption = f"{metrics} over {report.units}. {_how(report, targets, columns, style)}{_reduced(rows)}"
    return _table(style, spec, head, body, caption if style.caption is None else style.caption)


def _check(report: Report, style: TableStyle) -> None:
    rows = [row for target in report.targets for row in target.rows]
    row_names = list(dict.fromkeys(name for row in rows for name in (row.family, row.label)))
    _check_names("row", style.rows, row_names)
    for target in report.targets if style.percent else ():
        spreads = [spread for row in target.rows for spread in (row.spread, row.papers) if spread is not None]
        beyond = [value for spread in spreads for value in (spread.min, spread.max) if not 0 <= value <= 1]
        if beyond:
            raise ArgumentError(
                f"{target.task} has a score of {beyond[0]:g}; only scores from 0 to 1 can be shown in percent",
                "Leave out `percent`",
                parameter="percent",
            )


def _check_names(kind: str, chosen: Sequence[str] | None, names: Sequence[str]) -> None:
    for name in chosen or ():
        if name not in names:
            remedy = did_you_mean(name, names, f"Use some of: {', '.join(names)}")
            raise ArgumentError(f"Unknown {kind} {name!r}", remedy, parameter=f"{kind}s")
    if chosen is not None and not chosen:
        raise ArgumentError(f"`{kind}s` is empty", f"Use some of: {', '.join(names)}", parameter=f"{kind}s")


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in re.sub(r"\\.", "", text, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and not text.endswith("\\")


def _table(style: TableStyle, spec: str, head: Sequence[str], body: Sequence[str], caption: str) -> str:
    environment = "table*" if style.wide else "table"
    printed = "".join([caption, *head, *body])
    rare = "".join(sorted({*_RARE.findall(printed)}))
    lines = [
        "% needs \\usepackage{booktabs,graphicx}" + (f", and XeLaTeX or LuaLaTeX for {rare}" if rare else ""),
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
        f"\\caption{{{caption}}}",
        *([] if style.label is None else [f"\\label{{{style.label}}}"]),
        f"\\end{{{environment}}}",
    ]
    return "\n".join(lines) + "\n"


def _head(report: Report, targets: Sequence[Target], columns: Sequence[str]) -> list[str]:
    """The lines above the body: the targets if there are several, the groups of columns, and the columns' own heads."""
    groups = {
        "units": f"over {report.units}",
        "reference": f"against {_tex(report.reference)}",
        "languages": "languages",
        "papers": "papers' protocol",
        "": "",
    }
    if _is_single(columns):
        groups["reference"] = ""
    names = [groups[COLUMNS[name].group] for name in columns]
    lines = []
    if len(targets) > 1:
        languages = Counter(target.language for target in targets)
        titles = [
            report.labels.tasks.get(each.task) or (languages[each.language] == 1 and each.language) or each.task
            for each in targets
        ]
        lines += _spanning([[_tex(title)] * len(columns) for title in titles])
    if any(names) and (len(targets) == 1 or len({*names}) > 1):
        lines += _spanning([names] * len(targets))
    heads = [COLUMNS[name].head for name in columns] * len(targets)
    return [*lines, f"method & {' & '.join(heads)} \\\\"]


def _is_single(columns: Sequence[str]) -> bool:
    """Whether a single column compares with the reference, whose name is wider than the column: the caption has it."""
    return [COLUMNS[name].group for name in columns].count("reference") == 1


def _spanning(heads: Sequence[Sequence[str]]) -> list[str]:
    """A line of heads and the rules below it; equal neighbours within a target share one head."""
    cells, rules, place = [], [], 2
    for of_target in heads:
        for head, columns in groupby(of_target):
            size = len(list(columns))
            cells.append(f"\\multicolumn{{{size}}}{{c}}{{{head}}}")
            if head:
                rules.append(f"\\cmidrule(lr){{{place}-{place + size - 1}}}")
            place += size
    return [f" & {' & '.join(cells)} \\\\", "".join(rules)]


def _ordered(rows: Sequence[MethodRow], names: Sequence[str]) -> list[MethodRow]:
    """Rows in the order of `names`, each once; the name of a family stands for all its rows."""
    ordered: dict[str, MethodRow] = {}
    for name in names:
        exact = [row for row in rows if row.label == name]
        for row in exact or [row for row in rows if row.family == name]:
            ordered.setdefault(row.label, row)
    return list(ordered.values())


def _cells(report: Report, target: Target, rows: Sequence[MethodRow], column: Column, percent: bool) -> dict[str, str]:
    """Row → its cell; the best score is bold and the second underlined."""
    texts = []
    for row in rows:
        value = column.value(report, row)
        if value is None:
            texts.append("--")
        elif isinstance(value, tuple):
            texts.append(f"[{', '.join(_number(end, percent=percent) for end in value)}]")
        else:
            texts.append(value if isinstance(value, str) else _number(value, percent=percent))
    marked = _marked(texts, higher=target.higher_is_better or column.is_share) if column.is_score else texts
    return dict(zip((row.label for row in rows), marked, strict=True))


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


def _how(report: Report, targets: Sequence[Target], columns: Sequence[str], style: TableStyle) -> str:
    """How the numbers in these columns were computed, once for all targets or, if they differ, for each target."""
    parts = ["In percent."] * style.percent
    parts += _by_target(report, targets, _documents)
    parts += [f"Compared with {_tex(report.reference)}."] * _is_single(columns)
    if "stderr" in columns and not all(target.of_corpus for target in targets):
        draws = dict.fromkeys(target.group or "documents" for target in targets if not target.of_corpus)
        parts.append(f"s.e.: standard error over {_tex(' and '.join(draws))}.")
    if {"ci", "interval"} & {*columns}:
        parts += _by_target(report, targets, _intervals)
    if "p" in columns:
        parts.append(
            f"{_tex(report.why_no_wilcoxon)}."
            if report.why_no_wilcoxon
            else f"$p$: Wilcoxon's signed-rank test over {_settings(report)}, corrected by Holm's method."
        )
    if "effect" in columns:
        parts.append("$r$: rank-biserial correlation of matched pairs.")
    if {"papers-mean", "papers-max"} & {*columns}:
        parts.append("Papers' protocol: all documents; for a selected row, the configuration that is best on them.")
    if any(COLUMNS[name].is_score for name in columns):
        parts.append("Bold: best of a column; underlined: second.")
    parts += _by_target(report, targets, lambda target: "" if target.higher_is_better else "Lower is better.")
    return " ".join(part for part in parts if part)


def _settings(report: Report) -> str:
    if report.ranking is not None and report.ranking.over_groups:
        return f"the {_tex(report.ranking.group or '')} of all targets"
    return "the settings of all targets"


def _by_target(report: Report, targets: Sequence[Target], describe: Callable[[Target], str]) -> list[str]:
    """The sentence if it is the same for all targets; otherwise one for each target, with its name."""
    sentences = {target.task: describe(target) for target in targets}
    if len({*sentences.values()}) == 1:
        return [next(iter(sentences.values()))]
    return [f"{_tex(report.labels.task(task))}: {sentence}" for task, sentence in sentences.items() if sentence]


def _documents(target: Target) -> str:
    if target.of_corpus:
        return f"Corpus-level scores, {target.report} documents."
    return f"Selected on {target.select} documents, reported on {target.report} others." if target.select else ""


def _intervals(target: Target) -> str:
    if target.of_corpus:
        return ""
    return f"95\\,\\%: intervals over {_tex(resampled(target))}, not corrected for the number of rows."


def _reduced(rows: Sequence[MethodRow]) -> str:
    """A sentence about methods whose compositions were reduced to a lower rank; empty if there are none."""
    reduced: dict[str, list[float]] = {}
    for row in rows:
        if row.relative_error is not None:
            reduced.setdefault(row.label, []).append(row.relative_error)
    errors = [f"{_tex(label)} {_error(max(values))}" for label, values in reduced.items()]
    sentence = " Reduced to a lower rank, with the largest relative error of a module's $\\Delta W$: "
    return f"{sentence}{'; '.join(errors)}." if errors else ""


def _number(value: float, *, percent: bool = False) -> str:
    text = f"{100 * value:.1f}" if percent else f"{value:.3f}" if abs(value) <= 1 else f"{value:.1f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return f"${text}$" if value < 0 else text


def _tex(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in printable(text))
