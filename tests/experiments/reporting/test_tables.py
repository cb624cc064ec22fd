"""CSV, LaTeX, JSON and the page as files: complete, deterministic, and safe with any names."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from adapterswap.experiments.reporting import make_report, open_source, write_report
from adapterswap.experiments.reporting.figures import plan_figures
from adapterswap.experiments.reporting.latex import csv_table, latex_table
from adapterswap.experiments.reporting.output import render_page
from adapterswap.kit.style import STYLE

from .conftest import Written
from .crafting import HOSTILE
from .reading import SW, row


def test_the_same_run_gives_the_same_bytes(written: Written, tmp_path: Path) -> None:
    shutil.copytree(written.run, tmp_path / "run")
    write_report(make_report(open_source(tmp_path / "run")), tmp_path / "report")
    names = sorted(path.name for path in written.folder.iterdir())
    assert names == ["report.html", "summary.json", "tables.csv", "tables.tex"]
    for name in names:
        content = (written.folder / name).read_bytes()
        assert content == (tmp_path / "report" / name).read_bytes()
        assert str(tmp_path.parent).encode() not in content


def test_csv_has_every_number(written: Written) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_table(written.report))))
    found = {(line["method"], line["choice"], line["task"]): line for line in lines}
    swap = row(written.report, "layer_swap, selected")
    line = found["layer_swap", "selected", SW]
    assert swap.spread is not None
    assert swap.difference is not None
    assert swap.papers is not None
    assert float(line["mean"]) == swap.spread.mean
    assert (float(line["low"]), float(line["high"])) == (swap.difference.low, swap.difference.high)
    assert float(line["papers_max"]) == swap.papers.max
    assert found["layer_swap", "selected", "mgsm_native_cot_en"]["papers_max"] == ""
    assert len(found) == len(lines) == len(written.report.targets[0].rows) * 4


def test_latex_is_booktabs(written: Written) -> None:
    text = latex_table(written.report)
    columns = re.search(r"\\begin\{tabular\}\{@\{\}(\w+)@\{\}\}", text)
    assert columns is not None
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 2 + len(written.report.targets[0].rows)
    for line in lines[1:]:
        assert len(re.split(r"(?<!\\)&", line)) == len(columns[1])
    assert "mgsm\\_native\\_cot\\_sw" in text
    assert text.count("{") == text.count("}")


def test_hostile_names_stay_text(written: Written) -> None:
    target = written.report.targets[0]
    rows = tuple(replace(each, family=f"=1+{HOSTILE}", label=f"={HOSTILE}\\input{{x}}") for each in target.rows)
    report = replace(written.report, name=HOSTILE, targets=(replace(target, task=HOSTILE, rows=rows),), grids=())
    figures = plan_figures(report)[0]
    page = render_page(report, [(figure, {"svg": b"", "pdf": b""}) for figure in figures])
    assert page.count("<script") == 1
    assert page.count("<img") == len(figures) > 0
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
    assert "\\input" not in latex_table(report)
    assert all(line.startswith(("target", "</pre>", '"')) for line in csv_table(report).splitlines())
    assert ",'=1+" in csv_table(report).replace('"', "")


def test_lone_surrogates_do_not_fail(written: Written, tmp_path: Path) -> None:
    (found,) = written.report.disagreements
    example = found.examples[0]
    outputs = (replace(example.outputs[0], text="\ud83d \x00 \x1b[31m"), *example.outputs[1:])
    broken = replace(found, examples=(replace(example, outputs=outputs),))
    write_report(replace(written.report, disagreements=(broken,)), tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_page_is_self_contained(written: Written) -> None:
    seen: list[tuple[str, str]] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            seen.extend(
                (name, value or "") for name, value in attributes if name in ("src", "href", "srcset", "action")
            )

    Links().feed(written.page)
    assert seen
    assert all(value.startswith(("#", "data:")) for _, value in seen)
    assert "url(" not in written.page
    assert "@import" not in written.page


def test_headings_tables_and_languages(written: Written) -> None:
    page = written.page
    assert [int(level) for level in re.findall(r"<h(\d)", page)][:2] == [1, 2]
    levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", page)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert '<html lang="en">' in page
    assert page.count("<table>") == len(re.findall(r"<thead>", page))
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="#|aria-labelledby=")([^"]+)"', page):
        assert target in ids


def test_summary_is_json_without_outputs(written: Written) -> None:
    text = (written.folder / "summary.json").read_text()
    content = json.loads(text)
    assert content["format"] == "adapterswap-report/1"
    assert content["targets"][0]["rows"][0]["label"] == "base"
    assert "owned" not in text


def test_the_page_ranks_the_right_way_round(written: Written) -> None:
    ranks = written.page.split('id="ranks"')[1].split("</section>")[0]
    for method in ("base", "partition B"):  # one listed before the reference, one after it
        spread, expert = row(written.report, method).spread, row(written.report, "task expert").spread
        assert spread is not None
        assert expert is not None
        result = re.search(rf'data-value="{method}">.*?</td>\s*<td data-value="([^"]+)"', ranks, flags=re.DOTALL)
        assert result is not None
        assert float(result[1]) == pytest.approx(spread.mean - expert.mean)


def test_the_page_shows_every_figure_and_every_task(written: Written) -> None:
    figures = plan_figures(written.report)[0]
    assert written.page.count("<img") == len(figures)
    for figure in figures:
        assert f"<figcaption>{figure.caption} <a" in unescape(written.page)
        image = base64.b64encode(STYLE.as_bytes(figure.draw(STYLE.column), "svg")).decode("ascii")
        assert f'<img src="data:image/svg+xml;base64,{image}"' in written.page
    table = written.page.split("<h3>On every task</h3>")[1].split("</table>")[0]
    for method in written.report.targets[0].rows:
        cells = table.split(f'data-value="{method.label}">')[1].split("</tr>")[0]
        for task, spread in method.tasks.items():
            assert f'<td data-value="{spread.mean}">{spread.mean:.3f}' in cells, task


def test_the_page_has_every_indicator_of_the_lead(written: Written) -> None:
    section = written.page.split('id="indicators"')[1].split("</section>")[0]
    shown = [each for each in written.report.indicators if each.merged == "layer_swap, selected"]
    assert section.count('<th scope="row"') == len(shown)
    for each in shown:
        for value in (each.correlation.pearson, each.correlation.spearman):
            assert value is not None
            assert f'<td data-value="{value}">{f"{value:.2f}".replace("-", "−")}</td>' in section
