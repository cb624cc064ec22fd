"""The numbers of a report against numbers computed from the cells by hand, and incomplete runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from scipy import stats

from adapterswap.experiments.reporting.output import _environment
from adapterswap.experiments.sweeps import Run
from adapterswap.experiments.sweeps.results import CellResult

from .conftest import Written
from .crafting import craft, recipe
from .reading import EN, SW, TE, reported, row, strict


def cells(run: Path, family: str) -> list[CellResult]:
    return [result for result in Run.read(run).results if result.cell.family == family]


def mean(result: CellResult, task: str, documents: tuple[int, ...]) -> float:
    return float(np.mean([result.results[task].docs[doc] for doc in documents]))


def test_a_default_is_reported_on_the_report_half(written: Written) -> None:
    task = Run.read(written.run).tasks[SW]
    defaults = [result for result in cells(written.run, "layer_swap") if result.cell.default]
    scores = [mean(result, SW, task.report) for result in defaults]
    outcome = row(written.report, "layer_swap, default")
    assert outcome.spread is not None
    assert (outcome.expected, outcome.spread.units, len(outcome.chosen)) == (9, 9, 9)
    assert (outcome.spread.min, outcome.spread.mean, outcome.spread.max) == pytest.approx(
        (min(scores), np.mean(scores), max(scores))
    )
    per_document = [np.mean([result.results[SW].docs[doc] for result in defaults]) for doc in task.report]
    assert outcome.spread.stderr == pytest.approx(stats.sem(per_document))
    assert outcome.english == pytest.approx(np.mean([mean(r, EN, task.report) for r in defaults]))
    over = [np.mean([mean(r, name, task.report) for r in defaults]) for name in (SW, EN, TE)]
    assert outcome.all_languages == pytest.approx(np.mean(over))
    assert written.report.targets[0].languages == (SW, EN, TE)
    assert outcome.papers is not None
    assert outcome.papers.mean == pytest.approx(np.mean([mean(r, SW, tuple(range(40))) for r in defaults]))


def test_the_best_is_chosen_on_one_half_and_reported_on_the_other(written: Written) -> None:
    task = Run.read(written.run).tasks[SW]
    by_pair: dict[Any, list[CellResult]] = {}
    for result in cells(written.run, "layer_swap"):
        by_pair.setdefault((result.cell.task_expert, result.cell.language_expert), []).append(result)
    outcome = row(written.report, "layer_swap, selected")
    assert len(outcome.chosen) == len(by_pair) == 9
    for chosen in outcome.chosen:
        tried = by_pair[(chosen.unit[0],), (chosen.unit[1],)]
        best = max(mean(result, SW, task.select) for result in tried)
        (picked,) = (result for result in tried if result.cell.cell == chosen.cell)
        assert mean(picked, SW, task.select) == pytest.approx(best)
        equals = [r for r in tried if mean(r, SW, task.select) == pytest.approx(best)]
        assert picked.cell.default == any(r.cell.default for r in equals)
        assert chosen.score == pytest.approx(mean(picked, SW, task.report))
    oracle = [max(mean(r, SW, tuple(range(40))) for r in tried) for tried in by_pair.values()]
    assert outcome.papers is not None
    assert (outcome.papers.min, outcome.papers.mean, outcome.papers.max) == pytest.approx(
        (min(oracle), np.mean(oracle), max(oracle))
    )


def test_differences_are_paired_by_expert_and_document(written: Written) -> None:
    task = Run.read(written.run).tasks[SW]
    soups = {(r.cell.task_expert, r.cell.language_expert): r for r in cells(written.run, "soup")}
    experts = {r.cell.task_expert: r for r in cells(written.run, "task expert")}
    apart = [
        mean(soup, SW, task.report) - mean(experts[task_expert], SW, task.report)
        for (task_expert, _), soup in soups.items()
    ]
    result = row(written.report, "soup").difference
    assert result is not None
    assert (result.units, result.to) == (9, "task expert")
    assert result.mean == pytest.approx(np.mean(apart))
    assert result.low is not None
    assert result.high is not None
    assert result.low < result.mean < result.high
    assert row(written.report, "task expert").difference is None
    for reference, units in (("task expert", 2 * 3), ("soup", 2 * 9)):  # each goes with every expert and pair
        joint = row(reported(written.run, reference=reference), "joint SFT")
        assert joint.spread is not None
        assert joint.difference is not None
        assert (joint.spread.units, joint.difference.units) == (2, units)


def test_a_score_of_a_whole_corpus_has_no_error(written: Written) -> None:
    spread = row(written.report, "soup").tasks["belebele_swh_Latn"]
    values = [result.results["belebele_swh_Latn"].value for result in cells(written.run, "soup")]
    assert spread.mean == pytest.approx(np.mean([value for value in values if value is not None]))
    assert spread.stderr is None


def test_ranks_over_pairs(written: Written) -> None:
    ranking = written.report.ranking
    assert ranking is not None
    assert ranking.methods == (
        "base", "task expert", "language expert", "joint SFT", "soup", "layer_swap, selected", "partition B"
    )  # fmt: skip
    assert (ranking.ranks.settings, ranking.dropped, ranking.left_out) == (9, 0, ())
    names = ("task expert", "layer_swap, selected")
    expert, swap = (row(written.report, name).spread for name in names)
    (found,) = (each for each in ranking.ranks.comparisons if (each.one, each.other) == names)
    assert expert is not None
    assert swap is not None
    assert found.difference == pytest.approx(expert.mean - swap.mean)
    assert found.wilcoxon is not None


def test_indicators_have_a_point_for_each_expert(written: Written) -> None:
    task = Run.read(written.run).tasks[SW]
    swaps = row(written.report, "layer_swap, selected").chosen
    (found,) = (
        each for each in written.report.indicators
        if (each.experts, each.signal, each.merged) == ("language expert", EN, "layer_swap, selected")
    )  # fmt: skip
    own = {
        result.cell.language_expert[0]: mean(result, EN, task.select)
        for result in cells(written.run, "language expert")
    }
    expected = [
        (name, score, np.mean([chosen.score for chosen in swaps if chosen.unit[1] == name]))
        for name, score in own.items()
    ]
    for (name, x, y), (other, own_score, merged) in zip(found.points, expected, strict=True):
        assert name == other
        assert (x, y) == pytest.approx((own_score, merged))
    if found.correlation.pearson is not None:
        assert found.correlation.pearson == pytest.approx(np.corrcoef(*np.array([p[1:] for p in found.points]).T)[0, 1])
    assert {each.merged for each in written.report.indicators} == {"soup", "layer_swap, selected", "partition B"}


def test_the_landscape(written: Written) -> None:
    first, second = written.report.grids
    assert (first.settings, second.settings) == (
        "", "transition zones of 1 and 0 layers"
    )  # fmt: skip
    assert [(cell.bottom, cell.top) for cell in first.cells] == [(b, u) for b in (3, 4, 5) for u in (0, 1, 2)]
    scores = [
        mean(result, SW, tuple(range(40)))
        for result in cells(written.run, "layer_swap")
        if (result.cell.composition["bottom"], result.cell.composition["top"]) == (4, 1)
        and not result.cell.composition.get("bottom_transition")
    ]
    (cell,) = (cell for cell in first.cells if (cell.bottom, cell.top) == (4, 1))
    assert (cell.mean, cell.units) == (pytest.approx(np.mean(scores)), 9)
    assert sum(cell.selected for grid in (first, second) for cell in grid.cells) == 9


def test_examples_are_documents_on_which_scores_differ(written: Written) -> None:
    (found,) = written.report.disagreements
    assert (found.one, found.other, found.language) == ("layer_swap, selected", "task expert", "sw")
    assert 0 < len(found.examples) <= 6
    for example in found.examples:
        swap, expert, soup = example.outputs
        assert swap.score != expert.score
        assert soup.method == "soup"
        assert example.question.startswith("Swali: ")
        assert str(2 * example.doc_id) in example.question
        assert example.target == str(example.doc_id)


def test_the_commands_run(written: Written) -> None:
    """The options of the commands are options of the command line, with values that it takes."""
    import shlex

    from adapterswap.cli.compose import compose_command as compose
    from adapterswap.cli.evaluate import evaluate_command as evaluate

    assert len(written.report.compositions) == 9
    for _, compose_line, evaluate_line in written.report.compositions:
        for command, line in ((compose, compose_line), (evaluate, evaluate_line)):
            # click remembers a command's help option, which is -h for all tests of the command line
            names = {"help_option_names": ["-h", "--help"]}
            parsed = command.make_context("x", shlex.split(line)[2:], **names).params
            assert parsed
        assert parsed["num_fewshot"] == 8


def test_every_composition_has_a_command(tmp_path: Path) -> None:
    from adapterswap.experiments.reporting.report import compose_command

    run = Run.read(craft(tmp_path / "run", recipe(
        compositions=[{"method": "ties", "density": 0.5, "max_rank": 8}, {"weights": "magnitude"}, {"partition": "Z"}],
        soup_sides=True, tasks=[SW], retention=[],
    ), documents=4))  # fmt: skip
    lines = {result.cell.short: compose_command(run, result.cell) for result in run.results}
    assert lines["base"] is None
    assert lines["math1"] is None
    ties = next(line for name, line in lines.items() if "density" in name and name.startswith("math1+sw1@"))
    assert ties is not None
    assert "--method ties --density 0.5 --max-rank 8" in ties
    assert any(line and line.count(" -t ") == 3 for line in lines.values())


def test_settings_of_the_recipe_are_in_the_command(tmp_path: Path) -> None:
    from adapterswap.experiments.reporting.report import evaluate_command

    run = Run.read(craft(tmp_path / "run", recipe(settings={"include_path": "own-tasks", "seed": 7}), documents=4))
    run.described["settings"]["seed"] = 7  # as the sweep itself records it
    line = evaluate_command(run, run.results[0].cell)
    assert line.endswith("--include-path own-tasks --sampling-seed 7")
    engine = {"name": "vllm", "arguments": {"max_num_seqs": 4}}
    run.described["settings"].update(dtype="bfloat16", language_fidelity=True, engine=engine)
    again = evaluate_command(run, run.results[0].cell)
    assert "--dtype bfloat16 --language-fidelity --engine vllm --engine-args max_num_seqs=4" in again
    # Two engines: the first task generated its answers.
    own = {
        "loglikelihood": {"device": "cpu", "dtype": "float32"},
        "engine": {**engine, "loglikelihood": "transformers"},
    }
    run.described["settings"].update(own)
    first, *others = run.results[0].results
    results = {name: replace(value, cut=0 if name == first else None) for name, value in run.results[0].results.items()}
    run = replace(run, results=(replace(run.results[0], results=results),))
    generated, compared = evaluate_command(run, run.results[0].cell).split("\n")
    assert f"--tasks {first} " in generated
    assert "--dtype bfloat16 --language-fidelity --engine vllm" in generated
    assert f"--tasks {','.join(others)} " in compared
    assert "--dtype float32" in compared
    assert "--engine" not in compared


def test_another_reference(written: Written) -> None:
    report, other = (reported(written.run, reference=name) for name in ("layer_swap", "soup"))
    default, selected = (row(report, f"layer_swap, {kind}") for kind in ("default", "selected"))
    assert default.difference is selected.difference is None
    soup = row(report, "soup").difference
    assert soup is not None
    assert soup.to == "layer_swap, selected"
    assert math.isclose(soup.mean, -(row(other, "layer_swap, selected").difference or soup).mean)
    assert report.lead != "layer_swap"


def test_a_rank_over_selected_and_default_configurations_says_both(tmp_path: Path) -> None:
    """A score of a whole corpus has no documents to select on."""
    belebele = "belebele_swh_Latn"
    requested = recipe(tasks=[SW, belebele], retention=[])
    report = reported(craft(tmp_path / "run", requested, documents=20, corpus=(belebele,)))
    assert report.ranking is not None
    assert "layer_swap, selected or layer_swap, default" in report.ranking.methods


def test_each_language_has_its_own_experts(tmp_path: Path) -> None:
    requested = recipe(
        language_experts={name: name for name in ("sw1", "sw2", "te1", "te2")},
        tasks={"sw*": [SW], "te*": [TE]},
        retention=[EN],
    )
    report = reported(craft(tmp_path / "run", requested, documents=20))
    assert [(target.task, target.language) for target in report.targets] == [(SW, "sw"), (TE, "te")]
    for target in report.targets:
        swap = next(row for row in target.rows if row.label == "layer_swap, selected")
        assert len(swap.chosen) == swap.expected == 6
        assert {chosen.unit[1] for chosen in swap.chosen} == {f"{target.language}1", f"{target.language}2"}
        assert set(swap.tasks) == {target.task, EN}
        assert swap.english is not None
        assert target.languages == (target.task, EN)  # these cells were not judged in the other language
        assert swap.all_languages == pytest.approx((swap.tasks[target.task].mean + swap.english) / 2)
        alone = next(row for row in target.rows if row.label == "language expert")
        assert alone.expected == 2
    assert report.ranking is not None
    assert report.ranking.ranks.settings == 12
    assert {(each.target, each.signal) for each in report.indicators} == {
        (SW, SW),
        (SW, TE),
        (SW, EN),
        (TE, TE),
        (TE, SW),
        (TE, EN),
    }
    strict(report)


def test_control_characters_are_visible_on_the_page() -> None:
    """Text of models and names; the style and the script are markup."""
    template = _environment().from_string("{{ text }}|{{ markup }}|{{ number }}")
    page = template.render(text="<b>\u202e\x9b\n", markup=Markup("<i>\u202e"), number=1)
    assert page == "&lt;b&gt;\\u202e\\u009b\n|<i>\u202e|1"
