r"""pdfLaTeX sets every table in the widths of papers: no errors, nothing wider than a column, readable text.

The pages have the widths of ACL's two columns (16 cm, 6 mm apart, 11 points) and of NeurIPS (5.5 in, 10 points). A
table that is wider than its column is scaled to it; \resizebox is watched, and bounded for tables made for a width.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from adapterswap.experiments.reporting import Report
from adapterswap.experiments.reporting.latex import COLUMNS, TableStyle, latex_table

from .conftest import Written

pytestmark = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

PAGES = {
    "acl": r"\documentclass[11pt,twocolumn]{article}"
    r"\usepackage[textwidth=16cm,textheight=24.7cm,columnsep=0.6cm]{geometry}",
    "neurips": r"\documentclass[10pt]{article}\usepackage[textwidth=5.5in,textheight=9in]{geometry}",
}
WATCHED = (
    r"\let\resize\resizebox\renewcommand\resizebox{\typeout{SCALED \which: \the\linewidth\space of \the\wd0}\resize}"
)
WRONG = re.compile(r"^!|^Overfull \\[hv]box|Float too large|Missing character|^[^ ]+\.tex:\d+:", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    name: str
    text: str


def compiled(tables: list[Table], page: str, folder: Path) -> dict[str, float]:
    """By how much pdfLaTeX scaled each table; 1 where it did not."""
    body = [f"\\def\\which{{{table.name}}}\n{table.text}\\clearpage" for table in tables]
    head = [PAGES[page], r"\usepackage{booktabs,graphicx}", WATCHED, r"\begin{document}"]
    (folder / f"{page}.tex").write_text("\n".join([*head, *body, r"\end{document}"]), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-file-line-error", f"{page}.tex"]
    environment = os.environ | {"max_print_line": "10000"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=900, check=False)
    log = (folder / f"{page}.log").read_text(encoding="latin-1")
    assert result.returncode == 0, log[-3000:]
    assert not (outcome := WRONG.search(log)), log[max(0, outcome.start() - 500) : outcome.end() + 500]
    scaled = dict.fromkeys((table.name for table in tables), 1.0)
    for name, line, wide in re.findall(r"SCALED (\S+): ([\d.]+)pt of ([\d.]+)pt", log):
        scaled[name] = float(line) / float(wide)
    return scaled


def every_table(reports: dict[str, Report]) -> Iterator[Table]:
    rows = ["base", "soup", "layer_swap"]
    chosen = {
        "all": TableStyle(), "columns": TableStyle(columns=["n", "mean", "max", "difference"]),
        "every-column": TableStyle(columns=list(COLUMNS)), "rows": TableStyle(rows=rows),
        "both": TableStyle(rows=rows, columns=["mean", "max", "interval", "p"]),
    }  # fmt: skip
    for report_name, report in reports.items():
        for choice, style in chosen.items():
            for wide in (False, True):
                for percent in (False, True):
                    name = f"{report_name}-{choice}{'-wide' * wide}{'-percent' * percent}"
                    yield Table(name, latex_table(report, replace(style, wide=wide, percent=percent)))


@pytest.mark.parametrize("page", PAGES)
def test_every_table_compiles_and_stays_in_its_column(written: Written, two: Report, page: str, tmp_path: Path) -> None:
    tables = list(every_table({"one": written.report, "two": two}))
    assert len(tables) == 2 * 5 * 4
    compiled(tables, page, tmp_path)


def test_tables_made_for_a_width_are_scaled_by_a_tenth_at_most(written: Written, two: Report, tmp_path: Path) -> None:
    one = written.report
    narrow = TableStyle(columns=["n", "mean", "max", "difference"], percent=True)
    both = {"columns": (one, narrow), "languages": (two, TableStyle(percent=True))}
    for page, styles in {
        "acl": both | {"all": (one, TableStyle(wide=True, percent=True))},
        "neurips": both | {"all": (one, TableStyle()), "percent": (one, TableStyle(percent=True))},
    }.items():
        tables = [Table(name, latex_table(report, style)) for name, (report, style) in styles.items()]
        scaled = compiled(tables, page, tmp_path)
        assert all(factor > 0.9 for factor in scaled.values()), (page, scaled)


def test_any_name_compiles(written: Written, tmp_path: Path) -> None:
    """What LaTeX reads as commands, quotes and accents; what pdfLaTeX cannot set is said at the top of the table."""
    target = written.report.targets[0]
    names = ['a_b & 100 % #1 $x$ {y} ~z^2 \\end{table} "q" <i> | – é ß', "[A] bracket", "*star"]
    rows = tuple(replace(row, label=name) for row, name in zip(target.rows, names, strict=False))
    report = replace(written.report, targets=(replace(target, rows=rows, task='t"_^'),))
    table = Table("names", latex_table(report, TableStyle(label="tab:x")))
    assert "XeLaTeX" not in table.text
    compiled([table], "neurips", tmp_path)
    foreign = replace(report, targets=(replace(target, rows=(replace(rows[0], label="交換"),)),))
    assert latex_table(foreign).splitlines()[0].endswith("XeLaTeX or LuaLaTeX for 交換")
