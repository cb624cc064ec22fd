"""Scores under different settings are never mixed in one report without notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refused

import adapterswap
from adapterswap.cli import main
from adapterswap.experiments.reporting import make_report, open_source
from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.experiments.sweeps.recording import PREREGISTRATION_FORMAT
from adapterswap.kit.errors import ArgumentError, DataError

from .crafting import craft, recipe
from .reading import SW, reported, row, strict

SMALL: dict[str, Any] = {
    "task_experts": {"math1": "math1"},
    "language_experts": {"sw1": "sw1"},
    "compositions": [{"bottom": [4, 5]}],
    "retention": [],
}
OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "settings.num_fewshot": ({"settings": {"num_fewshot": 2}}, "2", "8"),
    "settings.gen_kwargs": ({"settings": {"gen_kwargs": {"temperature": 0.7}}}, '{"temperature": 0.7}', "unset"),
    "versions.torch": ({"versions": {"torch": "2.9.0"}}, '"2.9.0"', '"2.13.0"'),
    "base_model.revision": ({"base_model": {"revision": "def5678"}}, '"def5678"', '"abc1234"'),
    "experts.math1.sha256": (
        {"experts": {"math1": {"side": "task", "source": "you/math1", "revision": "00000001", "sha256": "cd" * 32}}},
        f'"{"cd" * 32}"'[:60],
        f'"{"ab" * 32}"'[:60],
    ),
}


def test_one_run_judged_in_two_folders_gives_the_report_of_the_whole(tmp_path: Path) -> None:
    """Each folder holds half of the cells, and some of them hold both."""
    requested = recipe(retention=[])
    places: dict[str, int] = {}

    def half(number: int) -> Path:
        def finished(cell: Cell) -> bool:
            return places.setdefault(cell.cell, len(places)) % 3 in (number, 2)

        return craft(tmp_path / f"half-{number}", requested, documents=12, finished=finished)

    whole = reported(craft(tmp_path / "whole", requested, documents=12))
    both = make_report(open_source(half(0), half(1)))
    assert both.name == "half-0 + half-1"
    assert both.missing == {}
    own = {"name", "commands", "compositions", "disagreements"}
    numbers = [{key: value for key, value in each.as_json().items() if key not in own} for each in (both, whole)]
    assert numbers[0] == numbers[1]
    assert both.disagreements == whole.disagreements  # samples are found in either folder
    assert "report half-0 half-1" in both.commands[-1]


def test_families_of_several_runs_are_rows_of_one_table(tmp_path: Path) -> None:
    first = craft(tmp_path / "first", recipe(retention=[]), documents=12)
    ties = recipe(compositions=[{"method": "ties", "density": [0.2, 0.5], "full_rank": True}], retention=[])
    second = craft(tmp_path / "second", ties, documents=12)
    alone = [{each.label: each for each in reported(folder).targets[0].rows} for folder in (first, second)]
    together = {each.label: each for each in make_report(open_source(first, second)).targets[0].rows}
    assert together == alone[0] | alone[1]


@pytest.mark.parametrize("name", OTHERS)
def test_runs_of_other_settings_are_refused(tmp_path: Path, name: str) -> None:
    changed, there, here = OTHERS[name]
    folder = craft(tmp_path / "run", recipe(**SMALL), documents=6)
    other = craft(tmp_path / "other", recipe(**SMALL), documents=6, changed=changed)
    with refused(DataError, "run") as error:
        open_source(folder, other)
    messages = [problem.message for problem in error.value.problems]
    (message,) = (each for each in messages if f"differ in {name}:" in each)
    for text in (there, here, str(folder), str(other)):
        assert text in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"documents": 8}, "num_docs"),
        ({"split": False}, "select"),
        ({"corpus": (SW,)}, "primary"),
        ({"values": lambda cell, task: [0.5] * 6}, "base has different scores"),
        ({"requested": recipe(**SMALL | {"compositions": [{"bottom": [3, 4]}]})}, "layer_swap"),
        ({"requested": recipe(**SMALL | {"compositions": [{"bottom": [4, 5], "max_rank": 8}]})}, "layer_swap"),
    ],
)
def test_runs_of_other_documents_scores_or_families_are_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = craft(tmp_path / "run", recipe(**SMALL), documents=6)
    other = craft(tmp_path / "other", **{"requested": recipe(**SMALL), "documents": 6} | changes)
    with refused(DataError, "run", match=named):
        open_source(folder, other)


def test_runs_that_cannot_be_joined(tmp_path: Path) -> None:
    folder = craft(tmp_path / "run", recipe(**SMALL), documents=6)
    with refused(ArgumentError, "run"):
        open_source(folder, tmp_path / "run" / ".")
    for nothing in ([], [folder, 5]):
        with refused(ArgumentError, "run"):
            adapterswap.report(nothing)  # type: ignore[arg-type]


def test_a_preregistration_of_one_run_is_shown_with_the_differences(tmp_path: Path) -> None:
    first = craft(tmp_path / "first", recipe(**SMALL), documents=6)
    second = craft(tmp_path / "second", recipe(**SMALL), documents=6)
    content = {
        "format": PREREGISTRATION_FORMAT,
        "sweep": json.loads((second / "sweep.json").read_text()),
        "comparison": {"reference": "task expert", "methods": None},
    }
    (second / "preregistration.json").write_text(json.dumps(content))
    assert make_report(open_source(first)).preregistration is None
    alone = make_report(open_source(second)).preregistration
    assert alone is not None
    assert alone.differences == ()
    both = make_report(open_source(first, second)).preregistration
    assert both is not None
    assert both.sha256 == alone.sha256
    assert both.differences == ("it is reported together with first",)
    (first / "preregistration.json").write_text(json.dumps(content))
    with refused(ArgumentError, "run"):
        make_report(open_source(first, second))


def test_on_the_command_line(tmp_path: Path) -> None:
    first = craft(tmp_path / "first", recipe(**SMALL), documents=6)
    ties = SMALL | {"compositions": [{"method": "ties", "density": 0.2, "max_rank": 8}]}
    second = craft(tmp_path / "second", recipe(**ties), documents=6)
    runs = [str(first), str(second)]
    written = CliRunner().invoke(main, ["report", *runs, "-o", str(tmp_path / "report")])
    assert written.exit_code == 0, written.output
    families = [
        row["family"] for row in json.loads((tmp_path / "report" / "summary.json").read_text())["targets"][0]["rows"]
    ]
    assert {"layer_swap", "ties"} <= set(families)
    assert CliRunner().invoke(main, ["report", *runs, "--dry-run", "--json"]).exit_code == 0
    assert CliRunner().invoke(main, ["report", *runs]).exit_code == 2  # no folder to write
    inside = CliRunner().invoke(main, ["report", *runs, "-o", str(second / "report")])
    assert inside.exit_code == 3
    other = craft(tmp_path / "second", recipe(**ties), documents=6, changed={"settings": {"num_fewshot": 2}})
    refusal = CliRunner().invoke(main, ["report", str(first), str(other), "-o", str(tmp_path / "mixed")])
    assert refusal.exit_code == 3
    assert "settings.num_fewshot" in refusal.stderr
    assert not (tmp_path / "mixed").exists()


def test_a_cell_whose_score_is_not_a_number_is_left_out_with_a_remark(tmp_path: Path) -> None:
    folder = craft(tmp_path / "run", recipe(**SMALL), documents=6)
    lines = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    (place,) = (place for place, line in enumerate(lines) if line["short"] == "math1+sw1@bottom=5")
    value = lines[place]["results"][SW]
    value |= {"value": None, "docs": [], "scores": dict.fromkeys(value["scores"])}
    (folder / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = reported(folder)
    (remark,) = report.remarks
    assert remark.startswith(f"{SW}: 1 of {len(lines)} cells have no score")
    swap = row(report, "layer_swap, selected")
    assert [chosen.configuration for chosen in swap.chosen] == ["bottom=4"]
    strict(report)
