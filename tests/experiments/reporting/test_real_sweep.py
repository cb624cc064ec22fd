"""A real sweep of pico models: the report shows the sweep's scores, and its commands compose the judged adapters."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path

import choices
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from adapterswap.cli import main
from adapterswap.experiments.reporting import make_report, open_source, write_report
from adapterswap.experiments.sweeps import SweepRecipe, sweep
from experiments.sweeps import conftest as sweeping

from .reading import row, strict

TASK = choices.TASK


world = sweeping.world  # its base and its experts


def test_a_real_sweep(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = {
        "base_model": str(world / "base"),
        "task_experts": {name: str(world / name) for name in ("math1", "math2")},
        "language_experts": {name: str(world / name) for name in ("sw1", "sw2")},
        "baselines": ["base", "task", "language", "soup"],
        "compositions": [{"bottom": [1, 2], "top": [0, 1]}],
        "tasks": [TASK],
        "settings": {"limit": 40, "batch_size": 8, "include_path": str(choices.write_task(tmp_path / "own"))},
    }
    run = sweep(SweepRecipe.model_validate(requested), tmp_path / "run")
    report = make_report(open_source(tmp_path / "run"), reference="base")
    strict(report)
    write_report(report, tmp_path / "report", runs=[tmp_path / "run"])
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    told = re.search(r"recipe.yaml</summary>\n<pre[^>]*>(.*?)</pre>", page, flags=re.DOTALL)
    assert told is not None
    assert SweepRecipe.model_validate(yaml.safe_load(unescape(told[1]))).settings.limit == 40

    soups = [result for result in run.results if result.cell.family == "soup"]
    assert len(soups) == 4
    answer_ = row(report, "soup")
    assert answer_.papers is not None
    assert answer_.papers.mean == pytest.approx(np.mean([result.results[TASK].value for result in soups]))
    (apart,) = report.disagreements
    assert apart.better + apart.worse > 0
    for example in apart.examples:
        assert example.question
        assert all(re.match(r"choice 0: log-likelihood -\d+\.\d\d", output.text) for output in example.outputs)
        assert not any(output.answers for output in example.outputs)
        assert example.question in page.replace("&#39;", "'").replace("&#34;", '"').replace("&amp;", "&")

    monkeypatch.chdir(world)  # where the names in the run are folders
    name, line, _ = report.compositions[0]
    outcome = CliRunner().invoke(main, [*shlex.split(line)[1:-1], str(tmp_path / "composed")])
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads((tmp_path / "composed" / "adapterswap.json").read_text())
    chosen = next(result.cell for result in run.results if result.cell.short == name)
    assert {key: record["composition"].get(key) for key in ("bottom", "top")} == {
        key: chosen.composition.get(key) for key in ("bottom", "top")
    }
