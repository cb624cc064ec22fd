"""Which methods and units enter the statistics; effect sizes; corrections for many comparisons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from adapterswap.cli import main
from adapterswap.experiments.reporting.statistics import holm, rank
from adapterswap.experiments.sweeps import Run
from adapterswap.kit.errors import ArgumentError

from .conftest import Written
from .crafting import craft, recipe
from .reading import SW, reported, row


def test_only_compositions_are_ranked(written: Written) -> None:
    every = written.report.ranking
    assert every is not None
    assert every.single == ("base", "task expert", "language expert", "joint SFT")
    report = reported(written.run, methods=["compositions"])
    found = report.ranking
    assert found is not None
    assert found.methods == ("soup", "layer_swap, selected", "partition B")
    assert (found.single, found.excluded) == ((), every.single)
    table = np.array([
        [row(report, label).chosen[place].score for label in found.methods] for place in range(9)
    ])  # fmt: skip
    assert found.ranks.statistic == pytest.approx(stats.friedmanchisquare(*table.T).statistic)
    assert found.ranks.statistic < (every.ranks.statistic or 0)
    assert [each.label for each in report.targets[0].rows] == [each.label for each in written.report.targets[0].rows]


def test_without_the_reference_every_two_are_compared(written: Written) -> None:
    report = reported(written.run, reference="soup", methods=["layer_swap", "partition B", "base"])
    assert report.ranking is not None
    ranks = report.ranking.ranks
    assert ranks.reference is None
    assert len(ranks.comparisons) == 3
    assert all(each.wilcoxon is not None for each in ranks.comparisons)


@pytest.mark.parametrize(
    ("methods", "reference"),
    [
        (None, "task expert"),
        (["soup", "task expert"], "task expert"),
        (["compositions"], "soup"),
        (["layer_swap", "base"], "base"),
        (["partition B", "layer_swap"], "layer_swap"),  # the run's first
    ],
)
def test_the_default_reference_is_tested_itself(written: Written, methods: list[str] | None, reference: str) -> None:
    report = reported(written.run, methods=methods)
    assert report.reference == reference
    assert report.ranking is not None
    assert report.ranking.ranks.reference is not None
    assert all(each.difference is None or each.difference.to.startswith(reference) for each in report.targets[0].rows)


def test_units_are_those_of_the_named_experts(written: Written) -> None:
    report = reported(written.run, units=["math1", "math2+sw3"])
    pairs = {("math1", f"sw{i}") for i in (1, 2, 3)} | {("math2", "sw3")}
    assert {chosen.unit[:2] for chosen in row(report, "soup").chosen} == pairs
    assert {chosen.unit[0] for chosen in row(report, "task expert").chosen} == {"math1", "math2"}
    assert len(row(report, "joint SFT").chosen) == 2  # goes with every pair
    assert row(report, "soup").expected == 4
    assert report.ranking is not None
    assert (report.ranking.ranks.settings, report.ranking.ranks.p) == (4, None)
    task = Run.read(written.run).tasks[SW]
    scores = [
        np.mean([result.results[SW].docs[doc] for doc in task.report]) for result in Run.read(written.run).results
        if result.cell.family == "soup" and (*result.cell.task_expert, *result.cell.language_expert) in pairs
    ]  # fmt: skip
    spread = row(report, "soup").spread
    assert spread is not None
    assert spread.mean == pytest.approx(np.mean(scores))
    assert "math1, math2+sw3" in report.remarks[-1]
    assert "--units math1 --units math2+sw3" in report.commands[-1]


@pytest.mark.parametrize(
    ("content", "parameter"),
    [
        ({"methods": ["sou"]}, "methods"), ({"methods": []}, "methods"), ({"methods": ["soup"]}, "methods"),
        ({"units": ["sw9"]}, "units"), ({"units": []}, "units"), ({"units": ["base"]}, "units"),
    ],
)  # fmt: skip
def test_names_that_the_run_does_not_have(written: Written, content: dict[str, list[str]], parameter: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        reported(written.run, **content)
    assert caught.value.parameter == parameter


def test_effect_sizes_by_hand() -> None:
    # Differences of a and b: 3, -1, 2, 0, 4: ranks 4, 2, 3, 1, 5; (4 + 3 + 5 - 2) / 15.
    result = rank([[3, 0], [0, 1], [2, 0], [1, 1], [4, 0]], "ab")
    assert result is not None
    assert result.comparisons[0].effect == pytest.approx(10 / 15)
    ahead = rank([[k + 1, k] for k in range(6)], "ab")
    assert ahead is not None
    assert ahead.comparisons[0].effect == 1


def test_kendalls_w_measures_the_agreement_of_ranks() -> None:
    generator = np.random.default_rng(3)
    table = generator.random((7, 4))
    result = rank(table, "abcd")
    assert result is not None
    # W is linear in the mean of Spearman's correlations of all pairs of settings: ρ = (n W - 1) / (n - 1).
    correlations = [stats.spearmanr(table[i], table[j]).statistic for i in range(7) for j in range(i)]
    assert result.agreement == pytest.approx((np.mean(correlations) * 6 + 1) / 7)


def test_indicators_are_corrected_for_their_number(tmp_path: Path) -> None:
    requested = recipe(
        task_experts={f"math{i}": f"m{i}" for i in range(1, 7)}, language_experts={f"sw{i}": f"s{i}" for i in (1, 2)}
    )
    report = reported(craft(tmp_path / "run", requested, documents=24))
    swaps = [each for each in report.indicators if each.merged == "layer_swap, selected"]
    for attribute, corrected in (("pearson_p", "pearson_holm"), ("spearman_p", "spearman_holm")):
        plain = [getattr(each.correlation, attribute) for each in swaps]
        known = [p for p in plain if p is not None]
        assert known
        assert [getattr(each, corrected) for each in swaps if getattr(each, corrected) is not None] == holm(known)
        assert [getattr(each, corrected) is None for each in swaps] == [p is None for p in plain]


def test_the_command(written: Written, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    arguments = [
        "report", str(written.run), "-o", str(tmp_path / "report"), "--methods", "soup,layer_swap", "--methods", "base",
        "--units", "math1,math2", "--figures", str(figures), "--column-width", "8cm",
    ]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    content = json.loads((figures / "figures.json").read_text())
    assert content["width_in"] == pytest.approx(8 / 2.54)
    assert content["lacking"].keys() == {"truncation"}
    names = {f"{name}.{suffix}" for name in content["figures"] for suffix in ("pdf", "svg", "png")}
    assert {path.name for path in figures.iterdir()} == names | {"figures.json"}
    assert set(content["figures"]["critical-difference"]["data"]["mean_ranks"]) == {
        "base", "soup", "layer_swap, selected"
    }  # fmt: skip
    again = CliRunner().invoke(main, [*arguments, "--overwrite"])
    assert again.exit_code == 0, again.output
    (figures / "mine.txt").touch()
    refused = CliRunner().invoke(main, [*arguments, "--overwrite"])
    assert refused.exit_code == 3
    assert (figures / "mine.txt").exists()


def test_folders_that_overlap(written: Written, tmp_path: Path) -> None:
    for figures in (tmp_path / "out", tmp_path / "out" / "figures", tmp_path):
        result = CliRunner().invoke(
            main, ["report", str(written.run), "-o", str(tmp_path / "out"), "--figures", str(figures), "--dry-run"]
        )
        assert result.exit_code == 2
        assert "overlap" in result.stderr
