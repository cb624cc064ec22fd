"""Reports over one pair, over few settings, and of scores that are shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapterswap.cli.report import _table
from adapterswap.cli.sweep import _print
from adapterswap.experiments.intervals import mean_interval
from adapterswap.experiments.reporting import Report
from adapterswap.experiments.reporting.latex import latex_table
from adapterswap.experiments.reporting.output import render_page, report
from adapterswap.experiments.sweeps import Run
from adapterswap.experiments.sweeps.grid import Cell

from .crafting import craft, recipe
from .reading import row

ONE_PAIR = {"task_experts": {"math1": "experts/math1"}, "language_experts": {"sw1": "experts/sw1"}}


@pytest.fixture
def one_pair(tmp_path: Path) -> Path:
    return craft(tmp_path / "run", recipe(**ONE_PAIR), documents=8)


def test_one_pair_has_a_mean_and_no_extremes(one_pair: Path) -> None:
    found = report(one_pair)
    spread = row(found, "soup").spread
    assert spread is not None
    assert (spread.units, spread.deviation, spread.min) == (1, None, spread.mean)
    heads = [str(column.header) for column in _table(found, found.targets[0], 200)[0].columns]
    assert "mean" in heads
    assert not {"min", "max"} & {*heads}
    text = latex_table(found)
    assert "& mean &" in text
    assert "& min" not in text
    assert "& max" not in text
    page = render_page(found)
    assert page.count(f"{spread.mean:.3f}") >= 1
    assert "±" not in page.replace("± its standard deviation", "")


def test_the_plus_minus_of_a_page_is_the_deviation_over_its_units(tmp_path: Path) -> None:
    found = report(craft(tmp_path / "run", documents=8))
    for name, spread in row(found, "soup").tasks.items():
        values = [result.results[name].mean_over(found_docs(found, name, tmp_path / "run"))
                  for result in Run.read(tmp_path / "run").results if result.cell.family == "soup"]  # fmt: skip
        assert spread.deviation == pytest.approx(np.std([value for value in values if value is not None], ddof=1))
        assert f"{spread.mean:.3f} ± {spread.deviation:.3f}" in render_page(found)


def found_docs(_: Report, name: str, run: Path) -> tuple[int, ...]:
    return Run.read(run).tasks[name].report


def test_a_difference_of_shares_is_never_beyond_one(tmp_path: Path) -> None:
    scores = {"soup": [1.0, 1.0, 1.0, 0.5], "base": [0.0] * 4}

    def values(cell: Cell, task: str) -> list[float]:
        return scores.get(cell.family, [0.25] * 4)

    run = craft(tmp_path / "run", recipe(**ONE_PAIR), documents=4, split=False, values=values)
    plain = mean_interval(np.subtract(scores["soup"], scores["base"]))
    assert plain.high is not None
    assert plain.high > 1
    for name, reference, end in (("soup", "base", "high"), ("base", "soup", "low")):
        difference = row(report(run, reference=reference), name).difference
        assert difference is not None
        assert getattr(difference, end) == (1 if end == "high" else -1)
    scores["soup"] = [100.0, 100.0, 100.0, 50.0]  # no shares
    difference = row(report(craft(tmp_path / "run", recipe(**ONE_PAIR), documents=4, split=False, values=values),
                            reference="base"), "soup").difference  # fmt: skip
    assert difference is not None
    assert difference.high is not None
    assert difference.high > 100


def test_five_pairs_are_too_few_for_wilcoxon(tmp_path: Path) -> None:
    experts = {f"math{i}": f"experts/math{i}" for i in range(1, 6)}
    run = craft(
        tmp_path / "run", recipe(task_experts=experts, language_experts=ONE_PAIR["language_experts"]), documents=6
    )
    found = report(run)
    assert found.ranking is not None
    ranks = found.ranking.ranks
    assert (ranks.settings, {each.wilcoxon for each in ranks.comparisons}) == (5, {None})
    assert ranks.least == min(1, ranks.tested / 16)
    assert ranks.p is not None
    assert "so it is left out (–)" in render_page(found)


@pytest.mark.parametrize("documents", [1, 8])
def test_a_sweep_says_what_it_chose_on(documents: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep of one document has none to choose on."""
    found: Any = Run.read(craft(tmp_path / "run", recipe(**ONE_PAIR), documents=documents))
    _print(found)
    output = capsys.readouterr().out
    assert ("Configurations are chosen on one part" in output) == (documents > 1)
    assert ("No configuration is chosen" in output) == (documents == 1)
    page = render_page(report(tmp_path / "run"))
    assert ("configurations are selected on a random part" in page) == (documents > 1)
