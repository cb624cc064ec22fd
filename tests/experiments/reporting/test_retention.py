"""What is retained besides the target's score: understanding of its language, and answers written in it."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from tolerances import near

from adapterswap.experiments.reporting import Report
from adapterswap.experiments.reporting.latex import TableStyle, csv_table, latex_table
from adapterswap.experiments.reporting.output import render_page
from adapterswap.experiments.sweeps.grid import Cell

from .crafting import craft, recipe
from .reading import EN, SW, TE, reported, row, strict

BELEBELE = "belebele_swh_Latn"


def share(cell: Cell, task: str) -> float:
    """English experts answer in English."""
    return {"base": 0.5, "task expert": 0.125, "language expert": 1.0}.get(cell.family, 0.75) if task == SW else 0.25


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Report:
    requested = recipe(retention=[EN, TE, BELEBELE])
    return reported(craft(tmp_path_factory.mktemp("kept") / "run", requested, shares=share))


def test_understanding_is_of_other_tasks_in_the_language(kept: Report) -> None:
    for actual in kept.targets[0].rows:
        assert actual.understanding == near(actual.tasks[BELEBELE].mean)
        assert actual.english == near(actual.tasks[EN].mean)


def test_fidelity_is_the_mean_over_cells(kept: Report) -> None:
    expected = {"base": 0.5, "task expert": 0.125, "language expert": 1.0, "soup": 0.75}
    assert {name: row(kept, name).fidelity for name in expected} == near(expected)


def test_both_are_shown(kept: Report) -> None:
    strict(kept)
    page = render_page(kept)
    assert "answers in its language" in page
    assert "other tasks in its language" in page
    text = latex_table(kept, TableStyle(columns=["english", "understanding", "fidelity"], percent=True))
    (line,) = (line for line in text.splitlines() if line.startswith("task expert"))
    values = row(kept, "task expert")
    for value in (values.english, values.understanding, values.fidelity):
        assert value is not None
        assert f"{100 * value:.1f}" in line
    lines = csv.DictReader(io.StringIO(csv_table(kept)))
    assert {line["language_share"] for line in lines if line["task"] == SW and line["method"] == "soup"} == {"0.75"}


def test_more_is_better_whatever_the_target_is(kept: Report) -> None:
    """Of a perplexity less is better, of the share of answers in its language more."""
    target = replace(kept.targets[0], higher_is_better=False)
    text = latex_table(replace(kept, targets=(target,)), TableStyle(columns=["fidelity"], percent=True))
    (bold,) = (line for line in text.splitlines() if "\\textbf" in line)
    assert bold.startswith("language expert")


def test_both_are_absent_if_not_measured(tmp_path: Path) -> None:
    """A corpus score is not a share of right answers, and a sweep without `language_fidelity` has no share."""
    report = reported(craft(tmp_path / "run", recipe(retention=[EN, BELEBELE]), corpus=(BELEBELE,)))
    assert {(found.understanding, found.fidelity) for found in report.targets[0].rows} == {(None, None)}
    page = render_page(report)
    assert "answers in its language" not in page
    assert "other tasks in its language" not in page


def test_the_mean_over_languages_is_of_one_score(tmp_path: Path) -> None:
    """chrF of one language and exact match of the others have no mean."""
    report = reported(craft(tmp_path / "run", recipe(retention=[EN, TE]), corpus=(TE,)))
    assert report.targets[0].languages == (SW, EN)
    for actual in report.targets[0].rows:
        assert actual.all_languages == near((actual.tasks[SW].mean + actual.tasks[EN].mean) / 2)


def test_a_benchmark_with_other_shots_is_the_same_benchmark(tmp_path: Path) -> None:
    shots = [f"{SW}@8", f"{SW}@2"]
    report = reported(craft(tmp_path / "run", recipe(tasks=shots, retention=[]), codes=dict.fromkeys(shots, "sw")))
    assert [target.task for target in report.targets] == shots  # a table each
    for target in report.targets:
        assert target.languages == ()
        assert {found.understanding for found in target.rows} == {None}
