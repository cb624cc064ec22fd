"""Successive halving: the right trials continue, abandoned trials are not cells, and a killed search ends the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from tiers import ALL

from adapterswap.experiments.sweeps import Run, SweepProgress, SweepRecipe, prepare, sweep
from adapterswap.experiments.sweeps.grid import Assignment, Cell, Trial
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.recipe import Halving, Search
from adapterswap.experiments.sweeps.results import Findings, RungResult, TaskValue
from adapterswap.experiments.sweeps.run import Estimate
from adapterswap.experiments.sweeps.search import ask, rungs

from .conftest import plain
from .test_dying import dying

pytest.importorskip("optuna")

Content = Callable[..., dict[str, Any]]
SEARCH = {"sampler": "random", "trials": 8, "halving": {"min_documents": 3, "reduction_factor": 2}}


def test_rungs_have_fewer_documents_than_there_are() -> None:
    assert Halving(min_documents=16, reduction_factor=3).rungs(125) == (16, 48)
    assert Halving(min_documents=16, reduction_factor=3).rungs(144) == (16, 48)
    assert Halving(min_documents=16, reduction_factor=3).rungs(145) == (16, 48, 144)
    assert Halving(min_documents=125).rungs(125) == ()


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_the_right_trials_continue(factor: int) -> None:
    """By the rule itself: of n trials that came to a rung, one goes on if it is among the best n / factor there."""
    trials = [Trial({"bottom": number}, (str(number),)) for number in range(30)]
    settings = Search(sampler="random", trials=30, halving=Halving(min_documents=5, reduction_factor=factor))
    steps = Halving(min_documents=5, reduction_factor=factor).rungs(100)

    def value(trial: Trial, documents: int | None) -> float:
        """Another order at each rung."""
        return float((trial.values["bottom"] * 7 + (documents or 0)) % 30)

    questions = list(ask(trials, settings, value, rungs=steps))
    came: dict[int | None, list[Trial]] = {step: [] for step in (*steps, None)}
    expected: list[tuple[Trial, int | None]] = []
    for trial in dict.fromkeys(trial.values["bottom"] for trial, _ in questions):
        for step in (*steps, None):
            came[step].append(trials[trial])
            expected.append((trials[trial], step))
            ranked = sorted((value(rival, step) for rival in came[step]), reverse=True)
            if value(trials[trial], step) < ranked[max(len(ranked) // factor, 1) - 1]:
                break
    assert questions == expected
    assert 30 == len(came[steps[0]]) > len(came[steps[1]]) > len(came[None]) > 0


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of 24 short questions: which of two syllables is likelier? A random model's scores differ there."""
    folder, chosen = tmp_path_factory.mktemp("tasks"), Random(0)

    def drawn(count: int) -> str:
        return "".join(chosen.choices("abcdefgh", k=count))

    for name in ("syllables", "others"):
        rows = [{"question": drawn(6), "choices": [drawn(2), drawn(2)], "label": n % 2} for n in range(24)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{folder}/{name}.jsonl"}},
            "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def test_a_rung_on_other_documents_is_not_known() -> None:
    """A search that is resumed with another seed has rungs of the same size, with other documents."""
    cell = Cell("0123456789ab", "swap", ("math",), ("sw",), {}, "math+sw", False, ("syllables",))
    result = Findings()
    value = TaskValue(None, None, {}, {1: 1.0, 2: 0.0})
    result.rungs[cell.cell, 2] = RungResult(cell.cell, 2, {"syllables": value}, {})
    assert result.get(Assignment(cell, {"syllables": (1, 2)})) == result.rungs[cell.cell, 2]
    assert result.get(Assignment(cell, {"syllables": (1, 3)})) is None


@pytest.fixture(scope="module")
def halving(world: Path, tasks: Path) -> Content:
    """Two pairs, 13 configurations that fit 6 layers, 24 documents, of which 18 are there to choose on."""

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "base_model": str(world / "base"),
            "task_experts": {name: str(world / name) for name in ("math1", "math2")},
            "language_experts": {"sw1": str(world / "sw1")},
            "compositions": {"swap": {"bottom": [0, 1, 2, 3], "top": [0, 1, 2, 4]}},
            "tasks": ["syllables"],
            "retention": ["others"],
            "settings": {"batch_size": 48, "include_path": str(tasks)},
            "selection": {"fraction": 0.75},
            "search": SEARCH,
            **changes,
        }

    return make


def prepared_from(content: dict[str, Any]) -> PreparedSweep:
    return prepare(SweepRecipe.model_validate(content))


@pytest.fixture(scope="module")
def peace(halving: Content, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[SweepProgress]]:
    """An undisturbed search, and what it reported."""
    reports: list[SweepProgress] = []
    folder = tmp_path_factory.mktemp("halving") / "peace"
    return sweep(prepared_from(halving()), folder, device="cpu", tell=reports.append), reports


@pytest.fixture(scope="module")
def whole(halving: Content, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The grid without a search."""
    folder = tmp_path_factory.mktemp("halving") / "whole"
    return sweep(prepared_from(halving(search=None)), folder, device="cpu")


def test_continued_trials_are_judged_as_in_the_grid(
    halving: Content, peace: tuple[Run, list[SweepProgress]], whole: Run
) -> None:
    assert rungs(prepared_from(halving())) == (3, 6, 12)
    run, reports = peace
    assert (reports[-1].done, reports[-1].total) == (4 + 2 * 8, 4 + 2 * 8)
    assert [progress.done for progress in reports] == sorted(progress.done for progress in reports)
    swaps = [result.cell for result in run.results if result.cell.family == "swap"]
    given_up = {cell.configuration for cell in run.given_up}
    assert len(given_up) + len({cell.configuration for cell in swaps}) == 8
    assert len(given_up) >= 2
    assert swaps[0].default  # the papers' default comes first, and has no rival yet

    judged = {result.cell.cell: result for result in whole.results}
    assert all(judged[result.cell.cell] == result for result in run.results)
    task = run.tasks["syllables"]
    nested: dict[int, set[int]] = {}
    for rung in run.rungs:
        assert list(rung.results) == ["syllables"]  # retention can wait
        docs = rung.results["syllables"].docs
        assert len(docs) == rung.documents
        assert set(docs) <= set(task.select)
        assert docs == {doc: judged[rung.cell].results["syllables"].docs[doc] for doc in docs}
        assert nested.setdefault(rung.documents, set(docs)) == set(docs)  # the same for all
    assert nested[3] < nested[6] < nested[12]


def test_a_finished_grid_answers_all_questions(halving: Content, whole: Run, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    before = plain(tmp_path / "run")
    sweep(prepared_from(halving()), tmp_path / "run", device="cpu")
    assert plain(tmp_path / "run") == before


def test_the_better_trials_go_on(halving: Content, peace: tuple[Run, list[SweepProgress]]) -> None:
    """By the recorded scores, of which higher is better: those among the best half of the trials that came there."""
    run = peace[0]
    configuration_of = {cell.cell: cell.configuration for cell in prepared_from(halving()).grid.cells}
    scores: dict[int, dict[Any, list[float]]] = {}
    for rung in run.rungs:
        docs = rung.results["syllables"].docs
        of_trial = scores.setdefault(rung.documents, {}).setdefault(configuration_of[rung.cell], [])
        of_trial.append(sum(docs.values()) / len(docs))

    finished = {result.cell.configuration for result in run.results if result.cell.family == "swap"}
    going_on = {3: scores[6].keys(), 6: scores[12].keys(), 12: finished}
    for documents, configurations in going_on.items():
        came: list[float] = []
        for configuration, parts in scores[documents].items():
            came.append(sum(parts) / len(parts))
            ranked = sorted(came, reverse=True)
            assert (configuration in configurations) == (came[-1] >= ranked[max(len(came) // 2, 1) - 1])


def test_an_interrupted_search_asks_the_same_questions(
    halving: Content, peace: tuple[Run, list[SweepProgress]], tmp_path: Path
) -> None:
    prepared, undisturbed = prepared_from(halving()), peace[0].folder
    shutil.copytree(undisturbed, tmp_path / "cut")
    cells, seen = (undisturbed / name for name in ("cells.jsonl", "rungs.jsonl"))
    assert len(seen.read_bytes().splitlines()) > 16
    for kept_cells, kept_rungs in ((6, 9), (4, 0)) if ALL else ((6, 9),):
        for path, kept in ((cells, kept_cells), (seen, kept_rungs)):
            lines = path.read_bytes().splitlines(keepends=True)
            torn = lines[kept][:20]
            (tmp_path / "cut" / path.name).write_bytes(b"".join(lines[:kept]) + torn)
        result = Estimate.of(prepared, tmp_path / "cut")
        assert (result.cells, result.finished) == (4 + 2 * 8, kept_cells)
        sweep(prepared, tmp_path / "cut", device="cpu")
        assert plain(tmp_path / "cut") == plain(undisturbed)


@pytest.mark.full
def test_a_killed_search_ends_the_same(
    halving: Content, peace: tuple[Run, list[SweepProgress]], tmp_path: Path
) -> None:
    found = dying(halving(), kill={"folder": str(tmp_path / "killed"), "kills": 4, "seed": 1})["kill"]
    assert [code for code, _ in found["killed_at"]].count(-9) >= 2
    assert found["last"] == 0
    assert plain(tmp_path / "killed") == plain(peace[0].folder)
    assert json.loads((tmp_path / "killed" / "rungs.jsonl").read_text().splitlines()[0])["documents"] == 3
