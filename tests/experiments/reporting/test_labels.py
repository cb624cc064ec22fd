"""A report's own names of tasks and experts, and figures and columns that show something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refused

from adapterswap.cli import main
from adapterswap.experiments.reporting.figures import plan_figures
from adapterswap.experiments.reporting.latex import latex_table
from adapterswap.experiments.reporting.output import render_page, report
from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.kit.errors import ArgumentError

from .crafting import craft, recipe
from .reading import EN, SW

ONE_PAIR = {"task_experts": {"math1": "experts/math1"}, "language_experts": {"sw1": "experts/sw1"}}
TWO_PAIRS = {
    "task_experts": {"math1": "experts/math1", "math2": "experts/math2"},
    "language_experts": {"sw1": "experts/sw1"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return craft(tmp_path / "run", documents=30)


def test_labels_are_on_the_page_in_tables_and_in_figures(run: Path) -> None:
    labels = {SW: "MGSM in Swahili", EN: "MGSM in English"}
    found = report(run, title="Math & Swahili", task_label=labels, expert_label={"sw1": "Swahili A", "math1": "Math A"})
    page = render_page(found)
    assert "<h1>Math &amp; Swahili</h1>" in page
    assert ">MGSM in Swahili</h2>" in page
    assert "MGSM in English</button>" in page
    assert "Math A + Swahili A" in page
    table = latex_table(found)
    assert "MGSM in Swahili (exact" in table
    captions = [figure.caption for figure in plan_figures(found)[0] if figure.kind != "critical-difference"]
    assert all("MGSM in Swahili" in caption for caption in captions)
    for text in (table, *captions):
        assert SW.replace("_", r"\_") not in text
        assert SW not in text
    (indicators,) = (figure for figure in plan_figures(found)[0] if figure.kind == "indicators")
    names = {point[0] for panel in indicators.data["panels"] for point in panel["points"]}
    assert {"Math A", "Swahili A", "sw2"} <= names
    assert f"--methods {SW}" not in page
    assert "adapterswap compose" in page
    assert "sw1" in page[page.index("adapterswap compose") :]  # commands have the names that work


def test_labels_of_what_the_run_lacks_are_refused(run: Path) -> None:
    with refused(ArgumentError, "task_label", match="mgsm_sw"):
        report(run, task_label={"mgsm_sw": "Swahili"})
    with refused(ArgumentError, "expert_label", match="sw9"):
        report(run, expert_label={"sw9": "Swahili"})
    outcome = CliRunner().invoke(main, ["report", str(run), "--dry-run", "--task-label", "Swahili"])
    assert outcome.exit_code == 2
    assert "--task-label" in outcome.stderr


def test_the_command_takes_labels(run: Path) -> None:
    outcome = CliRunner().invoke(main, ["report", str(run), "--dry-run", "--task-label", f"{SW}=Swahili = math"])
    assert outcome.exit_code == 0
    assert "Swahili = math, 15 documents" in outcome.stdout


def test_no_caption_has_a_setting_that_changes_nothing(run: Path) -> None:
    for figure in plan_figures(report(run))[0]:
        assert "transition" not in figure.caption
        assert "transition" not in str(figure.data)


def test_two_points_are_no_figure_and_dashes_no_column(tmp_path: Path) -> None:
    """With two pairs compositions have no intervals; those of the base alone would make them look less certain."""
    requested = recipe(**TWO_PAIRS, compositions=[{"method": "ties", "density": 0.5, "max_rank": 8}], retention=[])
    found = report(craft(tmp_path / "run", requested, documents=30, errors=lambda cell: 0.1))
    figures, lacking = plan_figures(found)
    assert "truncation" in lacking
    (scores,) = (figure for figure in figures if figure.kind == "scores")
    assert {row["interval"] for row in scores.data["rows"]} == {None}
    assert "95 %" not in scores.caption
    table = latex_table(found)
    assert "95\\,\\%" not in table
    body = [line.split("&") for line in table.splitlines() if line.count("&") > 2 and "multicolumn" not in line]
    columns = list(zip(*body[1:], strict=True))
    assert not any(all(cell.strip(" \\") == "--" for cell in column) for column in columns[1:])


def test_examples_show_the_text_of_choices(tmp_path: Path) -> None:
    """And which one each method chose: the likeliest, by characters if the score is `acc_norm`."""
    requested = recipe(**ONE_PAIR, compositions=[{"bottom": 5}], retention=[])

    def values(cell: Cell, task: str) -> list[float]:
        return [float(cell.family == "layer_swap")] * 8

    folder = craft(tmp_path / "run", requested, documents=8, values=values)
    choices = ["37", "<b>thirty</b>", "4"]
    prompts = folder / "prompts" / f"{SW}.jsonl"
    rows = [json.loads(line) | {"choices": choices} for line in prompts.read_text().splitlines()]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    likelihoods = [[-3.5, False], [-13.0, False], [-2.5, True]]
    for path in (folder / "samples").iterdir():
        samples = [json.loads(line) | {"output": likelihoods, "target": "0"} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))

    example = report(folder).disagreements[0].examples[0]
    assert example.target == "37"
    assert [choice.text for choice in example.outputs[0].choices] == choices
    assert [choice.is_chosen for choice in example.outputs[0].choices] == [False, False, True]
    page = render_page(report(folder))
    assert "answer <bdi>37</bdi>" in page
    assert '<li class="chosen"><bdi>4</bdi><span>−2.50, chosen</span></li>' in page
    assert "<bdi>&lt;b&gt;thirty&lt;/b&gt;</bdi>" in page

    described = json.loads((folder / "sweep.json").read_text())
    described["tasks"][SW]["primary"] = ["acc_norm", "none"]
    (folder / "sweep.json").write_text(json.dumps(described))
    example = report(folder).disagreements[0].examples[0]
    assert [choice.is_chosen for choice in example.outputs[0].choices] == [False, True, False]
