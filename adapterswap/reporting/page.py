"""A report as one HTML page without network, external fonts or scripts. Nothing that a model wrote is ever run.

The templates, the style and the script are in `page/`. Text is escaped by Jinja, and a content security policy in the
page allows its own script by hash and no other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from adapterswap import __version__
from adapterswap.files.yaml import dump_yaml
from adapterswap.planning.describe import error_text
from adapterswap.reporting import charts
from adapterswap.reporting.headline import Target, resampled
from adapterswap.reporting.latex import TableStyle, csv_table, latex_table
from adapterswap.reporting.report import Report
from adapterswap.reporting.statistics import MIN_UNITS

if TYPE_CHECKING:
    from jinja2 import Environment

    from adapterswap.reporting.figures import PlannedFigure


Link = tuple[str, str, list[tuple[str, str]]]
"""(title, the file's name, [(suffix, address)])."""

_TYPES = {"pdf": "application/pdf", "svg": "image/svg+xml", "csv": "text/csv", "tex": "application/x-tex"}


def render_page(
    report: Report, figures: Sequence[tuple[PlannedFigure, Mapping[str, bytes]]] = (), table: TableStyle | None = None
) -> str:
    """The page as HTML. The same report gives the same text.

    Args:
        figures: the figures that it offers to download, each with its files: suffix → content.
        table: the style of the LaTeX that it offers to download.
    """
    from markupsafe import Markup

    def links(kind: str, place: int) -> list[Link]:
        shown = [(figure, contents) for figure, contents in figures if (figure.kind, figure.place) == (kind, place)]
        return [_link(f"Figure: {kind.replace('-', ' ')}", figure.name, contents) for figure, contents in shown]

    folder = files("adapterswap.reporting") / "page"
    script = (folder / "script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return _environment().get_template("report.html").render(
        report=report,
        version=__version__,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        target_names=[target.task for target in report.targets],
        bars=[charts.bars(target) for target in report.targets],
        maps=charts.heatmaps(report.grids, {target.task: target.higher_is_better for target in report.targets}),
        scatters=[charts.scatter(indicator) for indicator in charts.lead_indicators(report)],
        ranked=_ranked(report),
        links=links,
        table_links=[_table_links(report, target, table) for target in report.targets],
        lead_labels=charts.labels_of(report, report.lead),
        resampled=[resampled(target) for target in report.targets],
        disagreements=[pair for pair in report.disagreements if pair.examples],
        min_units=MIN_UNITS,
        recipe=dump_yaml(report.recipe) if report.recipe else "",
        width=charts.WIDTH, height=charts.HEIGHT, left=charts.LEFT, bottom=charts.BOTTOM,
    )  # fmt: skip


def _table_links(report: Report, target: Target, style: TableStyle | None) -> list[Link]:
    texts = {"csv": csv_table(replace(report, targets=(target,))), "tex": latex_table(report, style, target)}
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in target.task)
    contents = {suffix: text.encode("utf-8", "backslashreplace") for suffix, text in texts.items()}
    return [_link("Table", f"table-{name}", contents)]


def _link(title: str, name: str, contents: Mapping[str, bytes]) -> Link:
    encoded = {suffix: base64.b64encode(content).decode("ascii") for suffix, content in contents.items()}
    return title, name, [(suffix, f"data:{_TYPES[suffix]};base64,{text}") for suffix, text in encoded.items()]


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("adapterswap.reporting", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        error=error_text,
        p_value=_p_value,
        p_text=_p_text,
        score=lambda value: "–" if value is None else charts.number_text(value),
        signed=lambda value: charts.number_text(value, signed=True),
        unit=lambda unit: " + ".join(part for part in unit if part is not None) or "–",
        minus=lambda text: text.replace("-", "−"),
    )
    return environment


def _ranked(report: Report) -> list[tuple[Any, ...]]:
    """The methods by mean rank, each with its comparison to the reference if that was ranked."""
    if report.ranking is None:
        return []
    ranks = report.ranking.ranks
    reference = next((label for label in charts.labels_of(report, report.reference) if label in ranks.mean_ranks), None)
    ordered = sorted(ranks.mean_ranks.items(), key=lambda item: (item[1], item[0]))
    return [(label, mean_rank, reference and ranks.against(label, reference)) for label, mean_rank in ordered]


def _p_value(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _p_text(value: float | None) -> str:
    """A p-value in running text, without a line break."""
    text = _p_value(value)
    return f"p\u00a0{text}".replace("< ", "<\u00a0") if text.startswith("<") else f"p\u00a0=\u00a0{text}"
