"""Runs without some cells, splits, pairs or differences: everything possible is reported, and nothing is NaN."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from adapterswap.cli import main
from adapterswap.experiments.reporting import open_source
from adapterswap.experiments.reporting.figures import plan_figures
from adapterswap.experiments.reporting.latex import csv_table, latex_table
from adapterswap.experiments.reporting.output import render_page
from adapterswap.experiments.sweeps import summarize
from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.experiments.sweeps.results import Run, RungResult
from adapterswap.kit.errors import ArgumentError, DataError, NotFoundError

from .conftest import Written
from .crafting import craft, recipe
from .reading import SW, reported, row, strict


def test_a_target_with_scores_of_a_whole_corpus(tmp_path: Path) -> None:
    report = reported(craft(tmp_path / "run", documents=8, corpus=(SW,)))
    result = row(report, "layer_swap, default")
    assert result.difference is not None
    assert (result.difference.low, result.difference.high) == (None, None)
    assert [each.kind for each in report.targets[0].rows if each.family == "layer_swap"] == ["default"]
    assert report.ranking is not None
    strict(report)


def test_without_a_split_the_best_follows_only_the_papers_protocol(tmp_path: Path) -> None:
    report = reported(craft(tmp_path / "run", documents=12, split=False))
    assert report.targets[0].select == 0
    kinds = {each.kind for each in report.targets[0].rows}
    assert kinds == {"only", "default"}
    free = reported(craft(tmp_path / "free", recipe(compositions=[{"bottom": [3, 4]}]), documents=12, split=False))
    result = next(each for each in free.targets[0].rows if each.family == "layer_swap")
    assert (result.kind, result.spread, result.difference, result.chosen) == ("none", None, None, ())
    assert result.papers is not None
    strict(free)


def test_what_a_search_left_out_is_reported(tmp_path: Path) -> None:
    """Three configurations of nine were judged with all pairs; two more were begun."""

    def finished(cell: Cell) -> bool:
        return cell.family != "layer_swap" or cell.composition.get("top", 0) == 2  # 5 and 2 are the papers' defaults

    folder = craft(tmp_path / "run", recipe(search={"trials": 5}), documents=8, finished=finished)
    begun = [cell for cell in Run.read(folder).cells if cell.configuration in ("bottom=3,top=0", "bottom=4,top=0")]
    lines = [json.dumps(RungResult(cell.cell, 2, {}, {}).as_json()) for cell in begun]
    (folder / "rungs.jsonl").write_text("\n".join(lines) + "\n")
    report = reported(folder)
    (message,) = report.remarks
    assert message.startswith(
        "layer_swap: a search (tpe) evaluated 3 of 9 configurations, and stopped 2 more after some"
    )
    assert report.missing == {}
    whole = reported(craft(tmp_path / "whole", recipe(search={"trials": 9}), documents=8))
    assert whole.remarks == ()


def test_one_pair(tmp_path: Path) -> None:
    requested = recipe(task_experts={"m1": "m"}, language_experts={"s1": "s"}, retention=[])
    report = reported(craft(tmp_path / "run", requested, documents=10))
    assert report.ranking is None
    assert report.indicators == ()
    result = row(report, "layer_swap, default")
    assert (result.english, result.all_languages) == (None, None)
    assert report.targets[0].languages == ()
    strict(report)


def test_two_experts_on_a_side_have_no_interval(tmp_path: Path) -> None:
    requested = recipe(task_experts={"m1": "m", "m2": "m"}, language_experts={"s1": "s", "s2": "s"}, retention=[])
    report = reported(craft(tmp_path / "run", requested, documents=10))
    result = row(report, "layer_swap, default").difference
    assert result is not None
    assert (result.units, result.low, result.high) == (4, None, None)
    assert report.ranking is not None
    assert (report.ranking.ranks.settings, report.ranking.ranks.p) == (4, None)
    page = render_page(report)
    assert "With fewer than 5 settings" in page
    assert "There is no interval (–)" in page
    assert result.reason.startswith("2 ")
    assert " -- " in latex_table(report)
    strict(report)


@pytest.mark.parametrize(
    ("tasks", "languages", "over"),
    [
        (1, 1, "documents"),
        (1, 3, "language experts and documents"),
        (3, 1, "task experts and documents"),
        (3, 3, "task experts, language experts and documents"),
    ],
)
def test_tables_name_what_their_intervals_are_over(tmp_path: Path, tasks: int, languages: int, over: str) -> None:
    sides = {
        "task_experts": {f"m{i}": "m" for i in range(tasks)},
        "language_experts": {f"s{i}": "s" for i in range(languages)},
    }
    requested = recipe(**sides, retention=[], compositions=[{"bottom": 5}])
    report = reported(craft(tmp_path / "run", requested, documents=8), reference="soup")
    assert f"intervals over {over}, " in latex_table(report)
    assert f"Intervals are over {over}.\n" in render_page(report)


def test_all_scores_equal(tmp_path: Path) -> None:
    report = reported(craft(tmp_path / "run", documents=6, values=lambda cell, task: [0.3] * 6))
    assert report.ranking is not None
    assert (report.ranking.ranks.statistic, report.ranking.ranks.p) == (0, 1)
    for each in report.targets[0].rows:
        if each.difference is not None:  # on six documents, nothing that differs is not much
            low, high = each.difference.interval or (0, 0)
            assert low == -high < -0.2
    assert all(each.correlation.pearson is None for each in report.indicators)
    assert report.disagreements[0].examples == ()
    default, selected = (row(report, f"layer_swap, {kind}").chosen for kind in ("default", "selected"))
    assert default == selected  # of equals the default is taken
    strict(report)


@pytest.mark.parametrize(
    "family",
    [
        {"name": "partitions", "partition": ["A", "B", "C"]},
        {"name": "partitions", "method": "soup", "weights": ["equal", "magnitude"]},
    ],
    ids=["partitions", "weights"],
)
def test_a_default_row_has_one_configuration(tmp_path: Path, family: dict[str, Any]) -> None:
    def rows() -> dict[str, set[str]]:
        result = reported(folder).targets[0].rows
        return {
            each.label: {one.configuration for one in each.chosen} for each in result if each.family == "partitions"
        }

    folder = craft(tmp_path / "run", recipe(compositions=[family], retention=[]), documents=12)
    if "weights" in family:
        assert rows().keys() == {"partitions, default", "partitions, selected"}
        assert rows()["partitions, default"] == {"method=soup,weights=equal"}
    else:
        assert rows().keys() == {"partitions, selected"}


def test_a_sweep_and_its_report_break_ties_alike(tmp_path: Path) -> None:
    folder = craft(tmp_path / "run", documents=6, values=lambda cell, task: [0.1, 0.2, 0.3, 0.1 + 0.2, 0.7, 0.3])
    run = Run.read(folder)
    backwards = replace(run, results=tuple(reversed(run.results)))
    for each in (run, backwards):
        (swaps,) = (one for one in summarize(each) if one.family == "layer_swap")
        assert swaps.best == "bottom=5,top=2"
    chosen = row(reported(folder), "layer_swap, selected").chosen
    assert {one.configuration for one in chosen} == {"bottom=5,top=2"}
    free = craft(tmp_path / "free", recipe(compositions=[{"bottom": [4, 3]}]), values=lambda cell, task: [0.5] * 40)
    (swaps,) = (one for one in summarize(Run.read(free)) if one.family == "layer_swap")
    chosen = row(reported(free), "layer_swap, selected").chosen
    assert {swaps.best} == {one.configuration for one in chosen} == {"bottom=4"}  # no default: the first


def test_compositions_of_a_lower_rank_say_so_everywhere(tmp_path: Path) -> None:
    ties = {"method": "ties", "density": [0.2, 0.5], "max_rank": 8}
    folder = craft(tmp_path / "run", recipe(compositions=[ties], retention=[]), documents=12)
    lines = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        if line["family"] == "ties":
            line["relative_error"] = 0.33 + number / 1000
    (folder / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = reported(folder)
    errors = {line["cell"]: line["relative_error"] for line in lines if line["family"] == "ties"}
    for each in report.targets[0].rows:
        expected = max((errors[one.cell] for one in each.chosen), default=0.0) if each.family == "ties" else None
        assert each.relative_error == expected
        if expected is not None:
            assert f'<td data-value="{expected}">{expected:.3f}</td>' in render_page(report)
            assert f"{each.label} {expected:.3f}" in latex_table(report)
    table = [line.rsplit(",", 3)[1:3] for line in csv_table(report).splitlines()]
    assert table[0] == ["reduced", "relative_error"]
    assert ["no", ""] in table
    assert ["yes", str(row(report, "ties, default").relative_error)] in table
    shown = CliRunner().invoke(main, ["report", str(folder), "--dry-run"])
    assert "ΔW error" in shown.stdout
    assert "ΔW error" not in render_page(reported(craft(tmp_path / "exact", documents=6)))
    strict(report)


def test_cut_outputs_and_scores_of_zero_are_remarks(tmp_path: Path) -> None:
    folder = craft(tmp_path / "run", recipe(retention=[]), documents=6, values=lambda cell, task: [0.0] * 6)
    lines = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    for line in lines:
        line["results"][SW]["cut"] = 0
    lines[3]["results"][SW]["cut"] = 5
    (folder / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cut, floor = reported(folder).remarks
    assert f"5 of {6 * len(lines)} outputs were cut at the token limit, in 1 of {len(lines)} cells" in cut
    assert f"all {len(lines)} cells scored 0" in floor
    assert cut in render_page(reported(folder))
    shown = CliRunner().invoke(main, ["report", str(folder), "--dry-run"])
    assert "were cut at the token limit" in shown.stderr


def test_missing_cells_are_reported_and_left_out(tmp_path: Path) -> None:
    def finished(cell: Cell) -> bool:
        return not (cell.family == "soup" and cell.task_expert == ("math1",)) and cell.composition.get("top") != 2

    report = reported(craft(tmp_path / "run", documents=10, finished=finished), reference="soup")
    assert report.missing == {"soup": 3, "layer_swap": 27}
    soup = row(report, "soup")
    assert (len(soup.chosen), soup.expected) == (6, 9)
    assert "layer_swap, default" not in [each.label for each in report.targets[0].rows]  # its default has top=2
    result = row(report, "layer_swap, selected").difference
    assert result is not None
    assert result.units == 6
    assert report.ranking is not None
    assert (report.ranking.ranks.settings, report.ranking.dropped) == (6, 3)
    strict(report)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_cells_may_be_missing(tmp_path: Path, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.integers(0, 90), min_size=1))
    places: dict[str, int] = {}

    def finished(cell: Cell) -> bool:
        return places.setdefault(cell.cell, len(places)) in kept

    folder = craft(tmp_path / "run", documents=4, finished=finished)
    strict(reported(folder))


def test_refusals(tmp_path: Path, written: Written) -> None:
    with refused(ArgumentError, "reference", match="'soop'"):
        reported(written.run, reference="soop")
    with refused(NotFoundError, "run"):
        open_source(tmp_path)
    with refused(DataError, "run"):
        open_source(craft(tmp_path / "none", documents=4, finished=lambda cell: False))
    target = craft(tmp_path / "retention", recipe(baselines=["base"], compositions=[]), documents=4)
    lines = (target / "cells.jsonl").read_text()
    content = json.loads(lines)
    del content["results"][SW]
    (target / "cells.jsonl").write_text(json.dumps(content) + "\n")
    with refused(DataError, match="line 1"):
        reported(target)


@pytest.mark.parametrize(
    ("name", "old", "new", "parameter"),
    [
        ("cells.jsonl", '"value": ', '"value": NaN, "was": ', None),
        ("cells.jsonl", '"method": "layer_swap"', '"method": "layer_swop"', None),
        ("samples", '"output": ', '"outpt": ', "run"),
        ("prompts", '"prompt": ', '"prmpt": ', "run"),
    ],
)
def test_damage_is_refused(tmp_path: Path, name: str, old: str, new: str, parameter: str | None) -> None:
    folder = craft(tmp_path / "run", documents=10)
    for path in [folder / name] if name.endswith("jsonl") else (folder / name).iterdir():
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    with refused(DataError, parameter):
        reported(folder)


def test_a_folder_without_samples_has_no_examples(tmp_path: Path) -> None:
    import shutil

    folder = craft(tmp_path / "run", documents=10)
    shutil.rmtree(folder / "samples")
    (result,) = reported(folder).disagreements
    assert result.examples == ()
    assert result.better + result.worse > 0


@pytest.mark.parametrize("documents", [1, 2, 4])
def test_one_or_two_documents_have_no_interval(tmp_path: Path, documents: int) -> None:
    """The winner on a single document is not significantly better."""
    folder = craft(
        tmp_path / "run",
        documents=documents,
        values=lambda cell, task: [float(cell.family == "layer_swap")] * documents,
    )
    report = reported(folder)
    assert report.targets[0].report in (1, 2)
    result = row(report, "layer_swap, default").difference
    assert result is not None
    assert (result.mean, result.low, result.high, result.over) == (1, None, None, ())
    assert 'class="apart"' not in render_page(report)
    shown = CliRunner().invoke(main, ["report", str(folder), "--dry-run"])
    assert "an interval needs at least 3" in shown.stderr
    strict(report)


def test_a_corpus_score_is_not_described_as_split(tmp_path: Path) -> None:
    report = reported(craft(tmp_path / "run", documents=8, corpus=(SW,)))
    assert (report.targets[0].select, report.targets[0].report, report.targets[0].of_corpus) == (0, 8, True)
    assert "Selected on" not in latex_table(report)
    assert "intervals over" not in latex_table(report)
    assert "are selected on" not in render_page(report).split("The score is")[1].split("</p>")[0]
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--dry-run"])
    assert f"{SW}, 8 documents" in shown.stdout
    assert "two experts" not in shown.stderr


def test_rows_whose_intervals_are_over_something_else_are_named(tmp_path: Path) -> None:
    requested = recipe(compositions=[{"bottom": 5}, {"name": "reset", "bottom": 5, "language": "base"}], retention=[])
    report = reported(craft(tmp_path / "run", requested, documents=8))
    overs = {each.label: each.difference.over for each in report.targets[0].rows if each.difference}
    assert overs["reset"] == overs["base"] == ("task experts", "documents")
    assert overs["soup"] == overs["layer_swap"] == ("task experts", "language experts", "documents")
    assert "reset: task experts and documents" in latex_table(report)
    joint = {f"joint{i}": "j" for i in range(3)}
    requested = recipe(compositions=[{"bottom": 5}], retention=[], extra={"joint": list(joint)})
    report = reported(craft(tmp_path / "joint", requested, documents=8), reference="soup")
    result = row(report, "joint").difference
    assert result is not None
    assert result.over == ("task experts", "language experts", "adapters", "documents")


def test_configurations_over_other_pairs_are_not_compared(tmp_path: Path) -> None:
    """A sweep that was stopped after the easiest pair of a worse configuration."""

    def finished(cell: Cell) -> bool:
        return cell.composition.get("bottom") != 4 or cell.short.startswith("math1+sw1@")

    def values(cell: Cell, task: str) -> list[float]:
        return [float(cell.short.startswith("math1+sw1@") and index % 2) for index in range(8)]

    requested = recipe(compositions=[{"bottom": [4, 5], "top": [2]}])
    folder = craft(tmp_path / "run", requested, documents=8, finished=finished, values=values)
    result = next(each for each in summarize(Run.read(folder)) if each.family == "layer_swap")
    assert (result.n, result.best) == (10, "bottom=5,top=2")
    assert result.mean == pytest.approx((0.5 + 0.5) / 10)
    (landscape,) = (figure for figure in plan_figures(reported(folder))[0] if figure.kind == "landscape")
    assert {cell["bottom"]: cell["units"] for cell in landscape.data["cells"]} == {4: 1, 5: 9}
    assert "*: a mean over fewer pairs" in landscape.caption


def test_a_difference_of_ranks_states_its_reversed_sign(tmp_path: Path) -> None:
    folder = craft(tmp_path / "run", recipe(retention=[]), documents=8)
    assert "its sign is reversed" not in render_page(reported(folder))
    described = json.loads((folder / "sweep.json").read_text())
    described["tasks"][SW]["higher_is_better"] = False
    (folder / "sweep.json").write_text(json.dumps(described))
    report = reported(folder)
    apart = row(report, "base").difference
    assert report.ranking is not None
    pair = {"base", "task expert"}
    ranked = next(each for each in report.ranking.ranks.comparisons if {each.one, each.other} == pair)
    assert apart is not None
    assert ranked.difference == pytest.approx(-apart.mean)
    assert "its sign is reversed" in render_page(report)


def test_a_difference_that_rounds_to_zero_has_no_sign(tmp_path: Path) -> None:
    """One document of 300 in one pair of nine."""

    def values(cell: Cell, task: str) -> list[float]:
        lost = cell.family == "layer_swap" and cell.short.startswith("math1+sw1@")
        return [float(not (lost and index == 299)) for index in range(300)]

    folder = craft(
        tmp_path / "run", recipe(retention=[], compositions=[{"bottom": 5}]), documents=300, split=False, values=values
    )
    report = reported(folder)
    result = row(report, "layer_swap").difference
    assert result is not None
    assert result.mean == pytest.approx(-1 / 2700)
    shown = CliRunner().invoke(main, ["report", str(folder), "--dry-run"])
    for text in (shown.stdout, latex_table(report), re.sub(r'data-value="[^"]*"', "", render_page(report))):
        assert re.search(r"[-\u2212+]0\.000(?!\d)", text) is None
