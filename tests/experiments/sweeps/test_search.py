"""Searches beside the whole grid: the same cells, chosen by the documents to choose on alone, and the same again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tiers import ALL

from adapterswap.experiments.sweeps import SweepProgress, SweepRecipe, prepare, summarize, sweep
from adapterswap.experiments.sweeps.grid import Trial
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.recipe import Search
from adapterswap.experiments.sweeps.results import CellResult, Findings, TaskValue
from adapterswap.experiments.sweeps.run import Estimate
from adapterswap.experiments.sweeps.search import ask, batches
from adapterswap.kit.errors import DataError, FieldError

from .conftest import SETTINGS, plain

pytest.importorskip("optuna")

Content = Callable[..., dict[str, Any]]
ZONES = {"bottom": [0, 1, 2, 3], "top": [0, 1, 2, 4]}


def trials_of(fields: dict[str, list[Any]]) -> list[Trial]:
    points = (dict(zip(fields, values, strict=True)) for values in product(*fields.values()))
    return [Trial(values, (str(number),)) for number, values in enumerate(points)]


def asked(search: Search, fields: dict[str, list[Any]], value: Callable[[Any], float]) -> list[dict[str, Any]]:
    return [dict(trial.values) for trial, _ in ask(trials_of(fields), search, lambda trial, _: value(trial.values))]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_searches_are_reproducible_and_try_no_configuration_twice(sampler: Any) -> None:
    fields = {"bottom": [5, 3, 4], "density": [0.2, 0.9, 0.3], "weights": ["equal", "magnitude"], "seed": [7, 1]}

    def value(values: Any) -> float:
        return float(values["bottom"] - values["density"] + (values["weights"] == "equal"))

    result = asked(Search(sampler=sampler, trials=20), fields, value)
    assert len(result) == 20 == len({str(sorted(values.items())) for values in result})
    assert result == asked(Search(sampler=sampler, trials=20), fields, value)
    # a search with fewer trials is the beginning of a longer one
    assert result[:12] == asked(Search(sampler=sampler, trials=12), fields, value)
    assert result != asked(Search(sampler=sampler, trials=20, seed=1), fields, value)
    every = asked(Search(sampler=sampler, trials=1000), fields, value)
    assert len(every) == 36 == len({str(sorted(values.items())) for values in every})


def test_searches_beat_chance() -> None:
    """A smooth hill over 4,096 configurations, 60 of them asked for: over ten seeds, against the random sampler."""
    fields = {name: list(range(8)) for name in ("bottom", "top", "bottom_transition", "top_transition")}

    def value(values: Any) -> float:
        return -sum((values[name] - best) ** 2 for name, best in zip(fields, (5, 2, 1, 6), strict=True))

    best: dict[str, list[float]] = {}
    for sampler in ("tpe", "random"):
        searches = [Search.model_validate({"sampler": sampler, "trials": 60, "seed": seed}) for seed in range(10)]
        best[sampler] = [max(map(value, asked(search, fields, value))) for search in searches]
    assert sum(best["tpe"]) > sum(best["random"])
    assert sum(tpe >= random for tpe, random in zip(best["tpe"], best["random"], strict=True)) >= 7


@pytest.fixture
def searching(content: Content, world: Path) -> Callable[..., SweepRecipe]:
    """Two pairs, and 15 configurations that fit 6 layers; `math2` is another expert."""

    def make(**changes: Any) -> SweepRecipe:
        experts = {name: str(world / name) for name in ("math1", "math2")}
        families = {"swap": ZONES, "parts": {"partition": ["A", "B"]}}
        settings = {**SETTINGS, "max_gen_toks": 2}
        changes = {"task_experts": experts, "compositions": families, "settings": settings, **changes}
        return SweepRecipe.model_validate(content(**changes))

    return make


def test_a_search_judges_cells_of_the_grid(searching: Callable[..., SweepRecipe], world: Path, tmp_path: Path) -> None:
    search = {"trials": 5, "family": "swap"}
    prepared = prepare(searching(search=search))
    assert Estimate.of(prepared).families == {
        "base": 1, "task expert": 2, "language expert": 1, "swap": 2 * 5, "parts": 2 * 2,
    }  # fmt: skip
    reports: list[SweepProgress] = []
    run = sweep(prepared, tmp_path / "run", device="cpu", tell=reports.append)
    assert (reports[-1].done, reports[-1].total) == (18, 18)
    swaps = [result.cell for result in run.results if result.cell.family == "swap"]
    assert [cell.configuration for cell in swaps[::2]] == [cell.configuration for cell in swaps[1::2]]  # both pairs
    assert len({cell.cell for cell in swaps}) == 10
    assert swaps[0].default  # b = 1 and u = 0 of 6 layers come first
    grid = prepare(searching(task_experts={"math1": str(world / "math1")}))
    judged = {result.cell.cell: result for result in sweep(grid, tmp_path / "grid", device="cpu").results}
    found = [result for result in run.results if "math2" not in result.cell.short]
    assert len(judged) > len(found) == 1 + 1 + 1 + 5 + 2
    assert all(judged[result.cell.cell] == result for result in found)
    (row,) = (row for row in summarize(run) if row.family == "swap")
    assert (row.n, row.configurations) == (10, 5)


def test_only_the_documents_to_choose_on_are_used(searching: Callable[..., SweepRecipe]) -> None:
    """Other scores on the documents to report on change no question; other scores on the documents to choose on do."""
    prepared = prepare(searching(search={"trials": 15}, baselines=["base"]))
    task = prepared.tasks["mgsm_direct_sw"]

    def order(prepared: PreparedSweep, select: float, report: float) -> list[str]:
        """Scores that rise with the bottom zone, or fall, by half."""
        result: list[str] = []
        known = Findings()
        for batch in batches(prepared, known):
            for cell in (assignment.cell for assignment in batch):
                height = cell.composition.get("bottom", 0)
                docs = dict.fromkeys(task.select, select * height) | dict.fromkeys(task.report, report * height)
                known.results[cell.cell] = CellResult(cell, {task.name: TaskValue(None, None, {}, docs)}, {})
                result.append(cell.short)
        return result

    assert order(prepared, 1, 1) == order(prepared, 1, -9)
    assert order(prepared, 1, 1) != order(prepared, -1, 1)
    blind = replace(prepared, tasks={task.name: replace(task, select=())})
    with refused(DataError, "primary"):
        order(blind, 1, 1)


def test_a_resumed_search_asks_the_same_questions(searching: Callable[..., SweepRecipe], tmp_path: Path) -> None:
    prepared = prepare(searching(search={"trials": 4}))
    sweep(prepared, tmp_path / "peace", device="cpu")
    shutil.copytree(tmp_path / "peace", tmp_path / "killed")
    lines = (tmp_path / "killed" / "cells.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (len(lines) - 2, 9) if ALL else (9,):  # in the middle of a trial
        (tmp_path / "killed" / "cells.jsonl").write_bytes(b"".join(lines[:kept]))
        sweep(prepared, tmp_path / "killed", device="cpu")
        assert plain(tmp_path / "killed") == plain(tmp_path / "peace")
    more = sweep(prepare(searching(search={"trials": 5})), tmp_path / "killed", device="cpu")
    assert len(more.results) == len(lines) + 2
    assert [json.loads(line)["cell"] for line in lines] == [result.cell.cell for result in more.results[: len(lines)]]


@pytest.mark.parametrize(
    ("changes", "parameter", "named"),
    [
        ({"search": {}, "compositions": [{"bottom": 1}]}, None, "no family"),
        ({"search": {"family": "soup"}, "compositions": {"swap": ZONES}}, None, "'soup'"),
        ({"search": {"sampler": "grid"}, "compositions": {"swap": ZONES}}, "search.sampler", "'grid'"),
        ({"search": {"trials": 0}, "compositions": {"swap": ZONES}}, "search.trials", "0"),
    ],
)
def test_an_impossible_search_is_refused(
    changes: dict[str, Any], parameter: str | None, named: str, content: Content, tmp_path: Path
) -> None:
    import yaml

    from adapterswap.experiments.sweeps import SweepRecipe

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content(**changes)))
    with refused(FieldError, parameter, match=named):
        SweepRecipe.read(tmp_path / "recipe.yaml")
