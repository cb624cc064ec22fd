"""The methods paragraph: every number comes from the run or the report, and only recorded facts are stated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from adapterswap.reporting import Report

from .conftest import Written
from .crafting import craft, recipe
from .reading import SW, reported


def test_it_states_what_the_run_recorded(written: Written) -> None:
    text = written.report.paragraph
    described = json.loads((written.run / "sweep.json").read_text())
    for name, expert in described["experts"].items():
        assert f"{name} ({expert['source']}@{expert['revision']}, SHA-256 {expert['sha256'][:12]}…)" in text
    for said in (
        "meta-llama/Llama-3.1-8B-Instruct@abc1234", "with 8 shots", SW, "on 20 documents", "on the other 20;", "seed 0",
        "torch 2.13.0", "transformers 5.23.0", "300 draws", "Nemenyi", "Holm",
    ):  # fmt: skip
        assert said in text
    ranking = written.report.ranking
    assert ranking is not None
    assert f"χ² = {ranking.ranks.statistic:.2f}" in text
    assert f"Kendall's W = {ranking.ranks.agreement:.2f}" in text
    assert "task experts are" in text
    assert "\n" not in text
    assert (written.folder / "methods.txt").read_text(encoding="utf-8") == f"{text}\n"
    assert "Methods, for a paper" in written.page


@pytest.fixture
def bare(tmp_path: Path) -> Report:
    """Of an older version: no settings, no versions, no revisions; one pair."""
    requested = recipe(task_experts={"math1": "m"}, language_experts={"sw1": "s"}, baselines=["soup"], retention=[])
    folder = craft(tmp_path / "run", requested, documents=12, split=False)
    described = json.loads((folder / "sweep.json").read_text())
    del described["settings"], described["versions"], described["adapterswap_version"]
    for expert in described["experts"].values():
        expert["revision"] = None
    (folder / "sweep.json").write_text(json.dumps(described))
    lines = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    for line in lines:
        del line["conditions"]
    (folder / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(folder / "samples")
    return reported(folder)


def test_unrecorded_facts_are_omitted(bare: Report) -> None:
    text = bare.paragraph
    for unsaid in ("None", "torch", "Friedman", "{", "()", "  ", "..", " ."):
        assert unsaid not in text
    assert "The task expert is math1" in text
    assert "no p-values" in text or "p" not in text.split()
    assert "set apart" in text
