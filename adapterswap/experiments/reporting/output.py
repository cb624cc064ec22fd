"""Write a report: its page, its tables, its numbers and its figures.

The page is one HTML file without network, external fonts or scripts, and nothing that a model wrote is ever run. The
templates, the style and the script are in `page/`. Text is escaped by Jinja, and a content security policy in the page
allows its own script by hash and no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap import __version__
from adapterswap.core import error_text
from adapterswap.experiments.reporting.figures import (
    PlannedFigure,
    labels_of,
    lead_indicators,
    number_text,
    p_value,
    plan_figures,
)
from adapterswap.experiments.reporting.headline import Target, resampled
from adapterswap.experiments.reporting.latex import TableStyle, csv_table, latex_table
from adapterswap.experiments.reporting.report import REPORT_FORMAT, Labels, Report, make_report
from adapterswap.experiments.reporting.source import lab_source, open_source
from adapterswap.experiments.reporting.statistics import MIN_UNITS
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, check_type, visible
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.text import expand
from adapterswap.kit.files.yaml import dump_yaml
from adapterswap.kit.style import STYLE

if TYPE_CHECKING:
    from jinja2 import Environment


_TYPES = {"pdf": "application/pdf", "svg": "image/svg+xml", "csv": "text/csv", "tex": "application/x-tex"}


def render_page(
    report: Report, figures: Sequence[tuple[PlannedFigure, Mapping[str, bytes]]] = (), table: TableStyle | None = None
) -> str:
    """The page as HTML. The same report gives the same text.

    Args:
        figures: the figures that it shows, each with its files: `svg` and `pdf` → content.
        table: the style of the LaTeX that it offers to download.
    """
    from markupsafe import Markup

    def figures_at(place: int, *kinds: str) -> list[tuple[PlannedFigure, dict[str, str]]]:
        """The figures of these kinds at a place of the page, with the addresses of their files."""
        chosen = []
        for kind in kinds:
            for figure, contents in figures:
                if (figure.kind, figure.place) == (kind, place):
                    addresses = {suffix: _address(suffix, content) for suffix, content in contents.items()}
                    chosen.append((figure, addresses))
        return chosen

    folder = files("adapterswap.experiments.reporting") / "page"
    script = (folder / "script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")

    untested: dict[str, Any] = {}
    for target in report.targets:
        untested[target.task] = [] if target.of_corpus else target.untested
    template = _environment().get_template("report.html")
    return template.render(
        report=report,
        version=__version__,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        target_names=[report.labels.task(target.task) for target in report.targets],
        labels=report.labels,
        indicators=lead_indicators(report),
        ranked=_ranked(report),
        shown=figures_at,
        table_links=[_table_links(report, target, table) for target in report.targets],
        lead_labels=labels_of(report, report.lead),
        resampled=[resampled(target) for target in report.targets],
        untested=untested,
        disagreements=[pair for pair in report.disagreements if pair.examples],
        min_units=MIN_UNITS,
        recipe=dump_yaml(report.recipe) if report.recipe else "",
    )


def _table_links(report: Report, target: Target, style: TableStyle | None) -> list[tuple[str, str, str]]:
    """(suffix, file name, address) of a target's table in each format."""
    texts = {"csv": csv_table(replace(report, targets=(target,))), "tex": latex_table(report, style, target)}
    stem = "table-" + re.sub(r"[^A-Za-z0-9\-_.]", "-", target.task)
    links = []
    for suffix, text in texts.items():
        content = text.encode("utf-8", "backslashreplace")
        links.append((suffix, f"{stem}.{suffix}", _address(suffix, content)))
    return links


def _address(suffix: str, content: bytes) -> str:
    return f"data:{_TYPES[suffix]};base64,{base64.b64encode(content).decode('ascii')}"


def _environment() -> Environment:
    """Jinja's environment for the page, which escapes all that is inserted."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("adapterswap.experiments.reporting", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_shown,
    )
    environment.filters.update(
        error=error_text,
        p_value=p_value,
        score=_score,
        signed=lambda value: number_text(value, signed=True),
        minus=lambda text: text.replace("-", "−"),
    )
    return environment


def _score(value: float | None) -> str:
    if value is None:
        return "–"
    return number_text(value)


def _shown(value: Any) -> Any:
    """A value as the page shows it: text of models and names with its control characters made visible."""
    if type(value) is str:
        return visible(value)
    return value


def _ranked(report: Report) -> list[tuple[Any, ...]]:
    """The methods by mean rank, each with its comparison to the reference if that was ranked."""
    if report.ranking is None:
        return []

    ranks = report.ranking.ranks
    references = [label for label in labels_of(report, report.reference) if label in ranks.mean_ranks]
    ranked = []
    for label, mean_rank in sorted(ranks.mean_ranks.items(), key=lambda item: (item[1], item[0])):
        comparison = None
        if references:
            comparison = ranks.against(label, references[0])
        ranked.append((label, mean_rank, comparison))
    return ranked


REPORT = OutputKind("summary.json", lambda record: record.get("format") == REPORT_FORMAT)
"""What `report` writes."""

FIGURES_FORMAT = "adapterswap-figures/1"
_FIGURES = "figures.json"


FIGURES = OutputKind(_FIGURES, lambda record: record.get("format") == FIGURES_FORMAT)
"""What `report` writes to the folder of figures."""


def report(
    run: str | Path | Sequence[str | Path],
    out_path: str | Path | None = None,
    *,
    reference: str | None = None,
    methods: Sequence[str] | None = None,
    units: Sequence[str] | None = None,
    figures: str | Path | None = None,
    column_width: str | float = STYLE.column,
    table: TableStyle | None = None,
    title: str | None = None,
    task_label: Mapping[str, str] | None = None,
    expert_label: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Report:
    """Report a sweep or a lab run: compute its statistics, and write its page, tables, JSON and figures.

    Args:
        run: the folder that `sweep` or `adapterswap lab` wrote; a sweep need not be finished. A list of sweeps is
            reported as one if they were evaluated under the same conditions.
        out_path: a folder to write report.html, tables.tex, tables.csv and summary.json to; by default nothing is
            written.
        reference: the method with which the others are compared; by default the task expert, or soup if
            `methods` leaves it out.
        methods: the methods to rank and test; `compositions` stands for all that compose something. By
            default all, with the base and single experts, which raise Friedman's χ². Tables show every method.
        units: the pairs (`math1+sw1`), experts (`sw1`) or seeds (`seed 3`) over which everything is computed; by
            default all.
        figures: a folder to write each figure to, as PDF, SVG and PNG, and figures.json with captions and all drawn
            numbers; by default no figures are written.
        column_width: the width of figures: `3.25in`, `8.2cm` or `234pt`; a number is in inches.
        table: how tables.tex looks: rows, columns, label and caption; see `TableStyle`.
        title: the heading of the page; by default the name of the run's folder.
        task_label, expert_label: name → what pages, tables and figures call it.
        overwrite: replace these folders if they hold a report and its figures.

    Returns:
        The content of the report, as data.

    Raises:
        ArgumentError: the run has no such method, unit, task or expert; `methods` leaves fewer than two; `column_width`
            is not a width; or `table` names unknown rows or columns, see `latex_table`.
        DataError: the run is damaged; no cell is finished; or several runs differ in the base, an expert, a task, a
            setting or a version. The error names it and both values.
        DependencyError: the `report` extra is not installed, or, with `figures`, the `plots` extra.
        NotFoundError: the folder holds neither a sweep nor a lab run.
        OutputError: the output exists (without `overwrite`), holds other files, overlaps the run, or cannot be written.
    """
    runs = [run] if isinstance(run, str | Path) else run
    remedy = "Pass the folder that `adapterswap sweep` or `adapterswap lab` wrote, or a list of such folders"
    check_type(runs, (list, tuple), "run", remedy)
    for path in runs:
        check_type(path, (str, Path), "run", remedy)
    if not runs:
        raise ArgumentError("`run` is empty", remedy, parameter="run")
    check_type(out_path, (str, Path, type(None)), "out_path", "Pass the path of the folder to write")
    check_type(figures, (str, Path, type(None)), "figures", "Pass the path of the folder to write")
    for name, chosen in (("methods", methods), ("units", units)):
        check_type(chosen, (list, tuple, type(None)), name, "Pass a list of names")
    check_type(table, (TableStyle, type(None)), "table", "Pass a TableStyle")
    check_type(title, (str, type(None)), "title", "Pass a text")
    for name, names in (("task_label", task_label), ("expert_label", expert_label)):
        check_type(names, (Mapping, type(None)), name, "Pass a mapping of names to labels")
        for key, value in (names or {}).items():
            check_type(key, str, name, "Pass a mapping of names to labels")
            check_type(value, str, name, "Pass a mapping of names to labels")

    # What can be refused is refused before anything is computed
    width = STYLE.inches(column_width)
    folders = [expand(path) for path in runs]
    source = open_source(*folders)
    check_targets(folders, out_path, figures, overwrite=overwrite)

    labels = Labels(title, dict(task_label or {}), dict(expert_label or {}))
    computed = make_report(source, reference=reference, methods=methods, units=units, labels=labels)
    latex_table(computed, table)  # raises if the style is not valid, also if nothing is written

    if out_path is not None:
        write_report(computed, out_path, table=table, overwrite=overwrite, runs=folders)
    if figures is not None:
        write_figures(computed, figures, width=width, overwrite=overwrite, runs=folders)
    return computed


def check_targets(
    runs: Sequence[Path], out_path: str | Path | None, figures: str | Path | None, *, overwrite: bool = False
) -> None:
    """Check whether both folders may be written. A dry run calls this too."""
    if out_path is not None:
        REPORT.check(out_path, overwrite=overwrite, inputs=runs)
    if figures is None:
        return

    require("plots")
    FIGURES.check(figures, overwrite=overwrite, inputs=runs)
    if out_path is not None:
        report_folder, figures_folder = expand(out_path).resolve(), expand(figures).resolve()
        if report_folder.is_relative_to(figures_folder) or figures_folder.is_relative_to(report_folder):
            raise ArgumentError(
                f"{figures} and the report's folder, {out_path}, overlap",
                "Give figures a folder of their own",
                parameter="figures",
            )


def write_report(
    report: Report,
    out_path: str | Path,
    *,
    table: TableStyle | None = None,
    overwrite: bool = False,
    runs: Sequence[Path] = (),
) -> None:
    """Write a report's folder.

    Args:
        out_path: the folder to write.
        table: how tables.tex looks.
        overwrite: replace the folder if it holds a report.
        runs: the folders that the report was made from; the output may not overlap them.

    Raises:
        ArgumentError: see `latex_table`.
        OutputError: see `OutputKind.folder`.
    """
    with REPORT.folder(out_path, overwrite=overwrite, inputs=runs) as folder:
        write_files(report, folder, table)


def write_figures(
    report: Report,
    folder: str | Path,
    *,
    width: float = STYLE.column,
    overwrite: bool = False,
    runs: Sequence[Path] = (),
) -> dict[str, str]:
    """Write every figure as PDF, SVG and PNG, and figures.json; returns kind → reason of those that are lacking."""
    require("plots")
    planned, lacking = plan_figures(report)
    with FIGURES.folder(folder, overwrite=overwrite, inputs=runs) as building:
        described = {}
        for figure in planned:
            STYLE.save(figure.draw(width), building, figure.name)
            described[figure.name] = {"kind": figure.kind, "caption": figure.caption, "data": figure.data}

        content = {
            "format": FIGURES_FORMAT,
            "adapterswap_version": __version__,
            "run": report.name,
            "width_in": width,
            "figures": described,
            "lacking": lacking,
        }
        _write(building / _FIGURES, _json(content))
    return lacking


def write_lab_report(
    folder: Path, content: Mapping[str, Any], answers: Iterable[Mapping[str, Any]], *, name: str,
    pictures: Mapping[str, str], width: float,
) -> None:  # fmt: skip
    """Write the report of a lab run into the run's folder, and some of its figures as PNG.

    Args:
        folder, content, answers, name: see `lab_source`.
        pictures: kind of figure → the name of its file.
        width: of these figures, in inches.
    """
    computed = make_report(lab_source(folder, content, answers, name=name))
    write_files(computed, folder)
    planned, _ = plan_figures(computed)
    for figure in planned:
        if figure.kind in pictures:
            STYLE.save(figure.draw(width), folder, pictures[figure.kind], ["png"])


def _json(content: Mapping[str, Any]) -> str:
    return visible(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def _write(path: Path, text: str) -> None:
    """Outputs of models and names may hold lone surrogates, which UTF-8 cannot encode."""
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def write_files(report: Report, folder: Path, table: TableStyle | None = None) -> None:
    """Write a report's files into an existing folder."""
    planned, _ = plan_figures(report)
    figures = []
    for plan in planned:
        figure = plan.draw(STYLE.column)
        images = {"svg": STYLE.as_bytes(figure, "svg"), "pdf": STYLE.as_bytes(figure, "pdf")}
        figures.append((plan, images))

    contents = {
        "report.html": render_page(report, figures, table),
        "tables.csv": csv_table(report),
        "tables.tex": latex_table(report, table),
        "summary.json": _json(report.as_json()),
    }
    for name, content in contents.items():
        _write(folder / name, content)
