"""The papers' figures and tables show the data, and one command makes one PDF."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "which_layers"


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import papers

    return papers


def test_figures_show_the_papers_own_numbers(papers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}

    def keep(style: Any, figure: Any, folder: Path, name: str) -> None:
        drawn[name] = figure

    monkeypatch.setattr(type(papers.STYLE), "save", keep)
    papers.draw_figures(tmp_path)
    assert list(drawn) == ["figure-2", *(f"figure-{number}" for number in range(4, 10))]
    with (EXAMPLE / "first_paper.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for number, expert in papers.FIGURES.items():
        axes = drawn[f"figure-{number}"].axes[0]
        assert axes.get_title() == expert
        modules = [label.get_text() for label in axes.get_xticklabels()]
        assert modules == ["wq", "wk", "wv", "wo", "w1", "w3", "w2"]
        shown = {text.get_position(): text.get_text() for text in axes.texts}
        image = axes.images[0].get_array()
        own = [row for row in rows if row["expert"] == expert]
        assert len(own) == len(shown) == 32 * 7
        for row in own:
            layer, value = int(row["layer"]), float(row["fraction_of_rows_above_threshold"])
            column = modules.index(row["module"].rpartition(".")[2])
            assert image[layer, column] == value
            assert shown[column, layer] == f"{value:.3f}"
    first, second = (axes for axes in drawn["figure-2"].axes if axes.images)
    assert [axes.images[0].get_clim()[1] for axes in (first, second)] == [
        max(float(row["fraction_of_rows_above_threshold"]) for row in rows if row["expert"] == expert)
        for expert in papers.REPRESENTATIVE
    ]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_one_command_makes_the_pdf(tmp_path: Path) -> None:
    """One expert per side, trained for two steps."""
    out = tmp_path / "paper"
    command = [sys.executable, str(EXAMPLE / "papers.py"), str(out)]
    tiny = ["--experts", "1", "--rows", "64", "--problems", "6"]
    process = subprocess.run([*command, *tiny], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert (out / "papers.pdf").read_bytes().startswith(b"%PDF")
    heads = {
        "first-paper-table-1": ["xx mean", "xx max"],
        "first-paper-table-2": ["xx min", "xx mean", "xx max", "English mean", "all languages, mean"],
        "second-paper-table-1": ["Math-only", "Language-only", "Data mixing", "Simultaneous SFT", "Layer-Swapping"],
        "second-paper-table-2": ["base (no SFT)", "{[}Z]", "{[}A]", "{[}B]", "{[}C]", "None"],
    }
    for name, rows in heads.items():
        lines = (out / f"{name}.tex").read_text().split("\\midrule\n")[1].split("\\bottomrule")[0].splitlines()
        assert [line.startswith(row) for line, row in zip(lines, rows, strict=True)] == [True] * len(rows)
    again = subprocess.run([*command, *tiny], capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "exists" in again.stderr
