"""A report's tables as CSV, with every number in full, and as LaTeX (booktabs).

The best score shown is bold and the second underlined.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

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
                    writer.writerow(_csv_line(target, row, task, spread))
    return text.getvalue()


def _csv_line(target: Target, row: MethodRow, task: str, spread: Spread | None) -> list[object]:
    """The values of a row on a task, in the order of `_CSV_HEAD`."""
    line: list[object] = [csv_text(target.task), csv_text(row.family), row.kind, csv_text(task)]

    # The scores on this task
    if spread is None:
        line += [0, row.expected, None, None, None, None]
    else:
        line += [spread.units, row.expected, spread.min, spread.mean, spread.stderr, spread.max]

    # What only the target's own line has
    difference, papers, fidelity = None, None, None
    if task == target.task:
        difference, papers, fidelity = row.difference, row.papers, row.fidelity
    if difference is None:
        line += [None] * 4
    else:
        line += [csv_text(difference.to), difference.mean, difference.low, difference.high]
    if papers is None:
        line += [None] * 3
    else:
        line += [papers.min, papers.mean, papers.max]

    if row.relative_error is None:
        line += ["no", None]
    else:
        line += ["yes", row.relative_error]
    return [*line, fidelity]


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


Shown = float | tuple[float, float] | str | None
"""What a column shows of a row: a number, the two ends of an interval, or text; None is a dash."""
Value = Callable[[Report, MethodRow], Shown]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its head, in LaTeX.
        group: the head above it; neighbouring columns share one.
        value: what it shows of a row.
        is_score: whether the best is marked.
        is_share: whether more is better, whatever the target's score is.
    """

    head: str
    group: str
    value: Value
    is_score: bool = True
    is_share: bool = False


def _of(path: str) -> Value:
    """A column of an attribute of a row: `english`; or, after a point, of that attribute's own: `spread.mean`.

    A row without a `spread` has a dash.
    """

    def value(report: Report, row: MethodRow) -> Shown:
        attribute: Any = row
        for name in path.split("."):
            if attribute is not None:
                attribute = getattr(attribute, name)
        shown: Shown = attribute
        return shown

    return value


def _of_several(name: str, path: str) -> Value:
    """As `_of`, if the score `name` has several units: one has no minimum and maximum beside its mean."""

    def value(report: Report, row: MethodRow) -> Shown:
        if not _has_several(getattr(row, name)):
            return None
        return _of(path)(report, row)

    return value


def _has_several(spread: Spread | None) -> bool:
    return spread is not None and spread.units > 1


def _effect(report: Report, row: MethodRow) -> str | None:
    """The rank-biserial correlation of the comparison with the reference."""
    comparison = _comparison(report, row)
    if comparison is None:
        return None
    return _number(comparison.effect)


def _p(report: Report, row: MethodRow) -> str | None:
    """The p-value of Wilcoxon's test against the reference."""
    comparison = _comparison(report, row)
    if comparison is None or comparison.wilcoxon is None:
        return None
    if comparison.wilcoxon < 0.001:
        return "$<$0.001"
    return f"{comparison.wilcoxon:.3f}"


def _comparison(report: Report, row: MethodRow) -> RankComparison | None:
    if report.ranking is None or report.ranking.ranks.reference is None:
        return None
    return report.ranking.ranks.against(row.label, report.ranking.ranks.reference)


def _relative_error(report: Report, row: MethodRow) -> str | None:
    if row.relative_error is None:
        return None
    return _error(row.relative_error)


def _error(value: float) -> str:
    return error_text(value).replace("<", "$<$")


COLUMNS: Mapping[str, Column] = {
    "n": Column("$n$", "units", lambda _, row: str(len(row.chosen)), is_score=False),
    "min": Column("min", "units", _of_several("spread", "spread.min")),
    "mean": Column("mean", "units", _of("spread.mean")),
    "stderr": Column("s.e.", "units", _of("spread.stderr"), is_score=False),
    "max": Column("max", "units", _of_several("spread", "spread.max")),
    "ci": Column(r"95\,\%", "units", _of("interval"), is_score=False),
    "difference": Column(r"$\Delta$", "reference", _of("difference.mean")),
    "interval": Column(r"95\,\%", "reference", _of("difference.interval"), is_score=False),
    "effect": Column("$r$", "reference", _effect, is_score=False),
    "p": Column("$p$", "reference", _p, is_score=False),
    "english": Column("English", "languages", _of("english")),
    "languages": Column("all", "languages", _of("all_languages")),
    "understanding": Column("other tasks", "languages", _of("understanding"), is_share=True),
    "fidelity": Column("in language", "languages", _of("fidelity"), is_share=True),
    "papers-mean": Column("mean", "papers", _of("papers.mean")),
    "papers-max": Column("max", "papers", _of_several("papers", "papers.max")),
    "error": Column(r"$\Delta W$ error", "", _relative_error, is_score=False),
}
"""The columns that a table can show, by their names in `TableStyle.columns`."""


def latex_table(report: Report, style: TableStyle | None = None, target: Target | None = None) -> str:
    """The table as LaTeX for `booktabs`."""
    style = style or TableStyle()
    _check(report, style)
    targets = report.targets if target is None else (target,)

    # The rows of each target, and of all; and the columns
    shown: list[list[MethodRow]] = []
    rows: list[MethodRow] = []
    for each in targets:
        of_target = list(each.rows)
        if style.rows is not None:
            of_target = _ordered(of_target, style.rows)
        shown.append(of_target)
        rows += of_target
    columns = style.columns or _default_columns(report, targets, rows)

    # Row → its line: its label, and a cell for each target and column
    lines: dict[str, list[str]] = {}
    in_order = rows if style.rows is None else _ordered(rows, style.rows)
    for row in in_order:
        lines[row.label] = [_tex(row.label)]
    for each, of_target in zip(targets, shown, strict=True):
        for name in columns:
            cells = _cells(report, each, of_target, COLUMNS[name], style.percent)
            for label, line in lines.items():
                line.append(cells.get(label, "--"))

    spec = f"l{'r' * len(columns) * len(targets)}"
    head = _head(report, targets, columns)
    body = [f"{' & '.join(line)} \\\\" for line in lines.values()]
    caption = style.caption
    if caption is None:
        metrics: dict[str, None] = {}
        for each in targets:
            metrics[f"{_tex(report.labels.task(each.task))} ({_tex(each.metric)})"] = None
        how = _how(report, targets, columns, style)
        caption = f"{'; '.join(metrics)} over {report.units}. {how}{_reduced(rows)}"
    return _table(style, spec, head, body, caption)


def _default_columns(report: Report, targets: Sequence[Target], rows: Sequence[MethodRow]) -> list[str]:
    """The columns of a table without `columns`: those that show something."""
    names = ["mean", "max"]
    if len(targets) == 1:
        names = ["n", "min", "mean", "stderr", "max", "difference", "interval"]
        if targets[0].languages:
            names += ["english", "languages"]
        if targets[0].chosen:  # otherwise it is the mean again
            names += ["papers-mean", "papers-max"]

    # One unit needs no number of units. The rows that are not shown count too.
    several = False
    for target in targets:
        for row in target.rows:
            if _has_several(row.spread):
                several = True
    if not several:
        names = [name for name in names if name not in ("n", "min", "max", "papers-max")]

    not_empty = []
    for name in names:
        value_of = COLUMNS[name].value
        if any(value_of(report, row) is not None for row in rows):
            not_empty.append(name)
    return not_empty


def _check(report: Report, style: TableStyle) -> None:
    """Refuse rows that the report does not have, and percent of scores that are not shares."""
    names: dict[str, None] = {}
    for target in report.targets:
        for row in target.rows:
            names |= dict.fromkeys((row.family, row.label))
    _check_names("row", style.rows, list(names))

    if not style.percent:
        return
    for target in report.targets:
        values = []
        for row in target.rows:
            for spread in (row.spread, row.papers):
                if spread is not None:
                    values += [spread.min, spread.max]
        beyond = [value for value in values if not 0 <= value <= 1]
        if beyond:
            raise ArgumentError(
                f"{target.task} has a score of {beyond[0]:g}; only scores from 0 to 1 can be shown in percent",
                "Leave out `percent`",
                parameter="percent",
            )


def _check_names(kind: str, chosen: Sequence[str] | None, names: Sequence[str]) -> None:
    """Refuse unknown names of columns or rows, and an empty list."""
    for name in chosen or ():
        if name not in names:
            remedy = did_you_mean(name, names, f"Use some of: {', '.join(names)}")
            raise ArgumentError(f"Unknown {kind} {name!r}", remedy, parameter=f"{kind}s")
    if chosen is not None and not chosen:
        raise ArgumentError(f"`{kind}s` is empty", f"Use some of: {', '.join(names)}", parameter=f"{kind}s")


def _is_balanced(text: str) -> bool:
    """Whether each brace is closed; escaped ones do not count."""
    depth = 0
    for character in re.sub(r"\\.", "", text, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and not text.endswith("\\")


def _table(style: TableStyle, spec: str, head: Sequence[str], body: Sequence[str], caption: str) -> str:
    """The whole table. LaTeX shrinks one that is wider than the page."""
    environment = "table*" if style.wide else "table"
    size, space = r"\small", "4pt"
    if len(spec) > _MANY:
        size, space = r"\footnotesize", "3pt"

    # pdfLaTeX stops at characters that it cannot print.
    needs = r"% needs \usepackage{booktabs,graphicx}"
    text = "".join([caption, *head, *body])
    rare = sorted(set(_RARE.findall(text)))
    if rare:
        needs += f", and XeLaTeX or LuaLaTeX for {''.join(rare)}"

    lines = [
        needs,
        f"\\begin{{{environment}}}[t]",
        rf"\centering{size}",
        rf"\setlength{{\tabcolsep}}{{{space}}}",
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
    ]
    if style.label is not None:
        lines.append(f"\\label{{{style.label}}}")
    return "\n".join([*lines, f"\\end{{{environment}}}"]) + "\n"


def _head(report: Report, targets: Sequence[Target], columns: Sequence[str]) -> list[str]:
    """The lines above the body: the targets if there are several, the groups of columns, and the columns' own heads."""
    lines = []
    if len(targets) > 1:
        languages = [target.language for target in targets]
        titles = []
        for target in targets:
            title = report.labels.tasks.get(target.task)
            if not title and languages.count(target.language) == 1:
                title = target.language  # short, and no other target has it
            titles.append([_tex(title or target.task)] * len(columns))
        lines += _spanning(titles)

    titles_of_groups = {
        "units": f"over {report.units}",
        "reference": f"against {_tex(report.reference)}",
        "languages": "languages",
        "papers": "papers' protocol",
        "": "",
    }
    if _is_single(columns):
        titles_of_groups["reference"] = ""
    groups = [titles_of_groups[COLUMNS[name].group] for name in columns]
    if any(groups) and (len(targets) == 1 or len({*groups}) > 1):
        lines += _spanning([groups] * len(targets))

    heads = [COLUMNS[name].head for name in columns] * len(targets)
    return [*lines, f"method & {' & '.join(heads)} \\\\"]


def _is_single(columns: Sequence[str]) -> bool:
    """Whether a single column compares with the reference, whose name is wider than the column: the caption has it."""
    return [COLUMNS[name].group for name in columns].count("reference") == 1


def _spanning(heads: Sequence[Sequence[str]]) -> list[str]:
    """A line of heads and the rules below it; equal neighbours within a target share one head."""
    cells = []
    rules = []
    place = 2  # the first column has the methods
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
        named = [row for row in rows if row.label == name]
        if not named:
            named = [row for row in rows if row.family == name]
        for row in named:
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
            low, high = value
            texts.append(f"[{_number(low, percent=percent)}, {_number(high, percent=percent)}]")
        elif isinstance(value, str):
            texts.append(value)
        else:
            texts.append(_number(value, percent=percent))

    if column.is_score:
        texts = _marked(texts, higher=target.higher_is_better or column.is_share)
    return {row.label: text for row, text in zip(rows, texts, strict=True)}


def _marked(texts: Sequence[str], *, higher: bool) -> list[str]:
    """Mark the best and second of numbers as written, so that equals are marked alike; if all are equal, mark none."""
    values: dict[str, float] = {}
    for text in texts:
        if text != "--":
            values[text] = float(text.strip("$"))
    ordered = sorted(set(values.values()), reverse=higher)
    if len(ordered) < 2:
        return list(texts)

    marked = []
    for text in texts:
        value = values.get(text)
        if value == ordered[0] and text.startswith("$"):
            # A negative number is in math mode, where \textbf does nothing.
            marked.append(f"$\\mathbf{{{text[1:-1]}}}$")
        elif value == ordered[0]:
            marked.append(f"\\textbf{{{text}}}")
        elif value == ordered[1] and len(ordered) > 2:
            marked.append(f"\\underline{{{text}}}")
        else:
            marked.append(text)
    return marked


def _how(report: Report, targets: Sequence[Target], columns: Sequence[str], style: TableStyle) -> str:
    """How the numbers in these columns were computed, once for all targets or, if they differ, for each target."""
    parts = []
    if style.percent:
        parts.append("In percent.")
    parts += _by_target(report, targets, _documents)
    if _is_single(columns):
        parts.append(f"Compared with {_tex(report.reference)}.")

    draws: dict[str, None] = {}
    for target in targets:
        if not target.of_corpus:
            draws[target.group or "documents"] = None
    if "stderr" in columns and draws:
        parts.append(f"s.e.: standard error over {_tex(' and '.join(draws))}.")
    if {"ci", "interval"} & {*columns}:
        parts += _by_target(report, targets, _intervals)

    if "p" in columns and report.why_no_wilcoxon:
        parts.append(f"{_tex(report.why_no_wilcoxon)}.")
    elif "p" in columns:
        settings = "settings"
        if report.ranking is not None and report.ranking.over_groups:
            settings = _tex(report.ranking.group or settings)
        parts.append(
            f"$p$: Wilcoxon's signed-rank test over the {settings} of all targets, corrected by Holm's method."
        )
    if "effect" in columns:
        parts.append("$r$: rank-biserial correlation of matched pairs.")

    if {"papers-mean", "papers-max"} & {*columns}:
        parts.append("Papers' protocol: all documents; for a selected row, the configuration that is best on them.")
    if any(COLUMNS[name].is_score for name in columns):
        parts.append("Bold: best of a column; underlined: second.")
    parts += _by_target(report, targets, _direction)
    return " ".join(filter(None, parts))


def _by_target(report: Report, targets: Sequence[Target], describe: Callable[[Target], str]) -> list[str]:
    """The sentence if it is the same for all targets; otherwise one for each target, with its name."""
    sentences = {target.task: describe(target) for target in targets}
    different = set(sentences.values())
    if len(different) == 1:
        return list(different)

    named = []
    for task, sentence in sentences.items():
        if sentence:
            named.append(f"{_tex(report.labels.task(task))}: {sentence}")
    return named


def _documents(target: Target) -> str:
    """On which documents scores are reported, for the caption."""
    if target.of_corpus:
        return f"Corpus-level scores, {target.report} documents."
    if target.select:
        return f"Selected on {target.select} documents, reported on {target.report} others."
    return ""


def _intervals(target: Target) -> str:
    if target.of_corpus:
        return ""
    return f"95\\,\\%: intervals over {_tex(resampled(target))}, not corrected for the number of rows."


def _direction(target: Target) -> str:
    return "" if target.higher_is_better else "Lower is better."


def _reduced(rows: Sequence[MethodRow]) -> str:
    """A sentence about methods whose compositions were reduced to a lower rank; empty if there are none."""
    largest: dict[str, float] = {}
    for row in rows:
        if row.relative_error is not None:
            largest[row.label] = max(row.relative_error, largest.get(row.label, row.relative_error))
    if not largest:
        return ""

    errors = [f"{_tex(label)} {_error(error)}" for label, error in largest.items()]
    what = "Reduced to a lower rank, with the largest relative error of a module's $\\Delta W$"
    return f" {what}: {'; '.join(errors)}."


def _number(value: float, *, percent: bool = False) -> str:
    """A number as LaTeX; a negative one is in math mode. Zero after rounding has no sign."""
    if percent:
        text = f"{100 * value:.1f}"
    elif abs(value) <= 1:
        text = f"{value:.3f}"
    else:
        text = f"{value:.1f}"

    if float(text) == 0:
        return text.removeprefix("-")
    if value < 0:
        return f"${text}$"
    return text


def _tex(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in printable(text))
