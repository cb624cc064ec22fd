"""A sweep's cells against the same compositions evaluated alone: live, from disk, and by PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api import metrics
from refusals import refused
from safetensors.numpy import load_file
from tiers import ALL

from adapterswap import AdapterswapError, write_adapter
from adapterswap.engines.live import find_adapter
from adapterswap.experiments.evaluation import EvaluationResult, evaluate_model
from adapterswap.experiments.evaluation.subjects import Subject
from adapterswap.experiments.sweeps import (
    Run,
    SweepProgress,
    SweepRecipe,
    prepare,
    read_prompts,
    read_samples,
    summarize,
    sweep,
)
from adapterswap.experiments.sweeps.judge import way_of
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.kit.errors import ArgumentError, CompositionError, FieldError

from .conftest import SETTINGS

Recipe = Callable[..., SweepRecipe]

FAMILIES: list[dict[str, Any]] = [
    {"bottom": 2, "top": 1, "bottom_transition": 1},
    {"partition": ["A", "Z"]},
    {"method": "soup", "task_weight": 2},
    {"method": "soup", "weights": "magnitude"},
    {"method": ["task_arithmetic"], "scale": 0.6},
    {"method": "slerp"},
    {"method": "ties", "density": 0.4, "max_rank": 6},
    {"method": ["dare_linear", "dare_ties"], "density": 0.5, "seed": 3, "max_rank": 6},
    {"method": "magnitude_prune", "density": 0.3, "max_rank": 6},
    {"name": "cut", "bottom": 2, "top": 1, "row_threshold": 0.05},
    {"name": "truncated", "bottom": 2, "top": 1, "max_rank": 2},
    {"language": "base", "bottom": 1, "top": 1},
]


@pytest.fixture(scope="module")
def swept(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedSweep, Run]:
    """Every method, over one pair; math1 has rank 4, sw2 rank 2."""
    recipe = SweepRecipe.model_validate(
        {
            "base_model": str(world / "base"),
            "task_experts": {"math1": str(world / "math1")},
            "language_experts": {"sw2": str(world / "sw2")},
            "extra": {"joint SFT": str(world / "joint")},
            "compositions": FAMILIES,
            "tasks": ["mgsm_direct_sw"],
            "retention": ["mgsm_direct_en@0"],  # where all others have the settings' one shot
            "settings": SETTINGS,
        }
    )
    prepared = prepare(recipe)
    return prepared, sweep(prepared, tmp_path_factory.mktemp("sweep") / "run", device="cpu")


def rows(result: EvaluationResult) -> list[dict[str, Any]]:
    keys = ("task", "doc_id", "target", "output", "answers", "scores")
    return [{key: sample.as_json()[key] for key in keys} for sample in result.samples]


def test_every_cell_equals_a_separate_evaluation(swept: tuple[PreparedSweep, Run], tmp_path: Path) -> None:
    """In the model as `evaluate` loads it; and, but for rounding, from an adapter that was composed on disk.

    Every second cell, and on disk every third of these: that live and written compositions agree, tests/engines/live
    shows.
    """
    prepared, run = swept
    assert len(run.results) == 4 + 14
    differing = {}
    for number, result in enumerate(run.results if ALL else run.results[1::2]):
        cell, plan = result.cell, prepared.plans[result.cell.cell]
        samples = read_samples(run.folder, cell.cell)
        with Subject(prepared.base, plan=plan, **cell.output).loaded(device="cpu") as model:
            alone = evaluate_model(model, prepared.base.tokenizer, cell.tasks, prepared.settings)
        assert samples == rows(alone), cell.short
        for name, value in result.results.items():
            score = alone.tasks[name].score("normalized")
            assert (value.value, value.stderr) == (score.value, score.stderr)
            assert value.cut == alone.tasks[name].cut
            scores = {f"{score.metric},{score.filter}": score.value for score in alone.tasks[name].scores}
            assert value.scores == scores
            assert list(value.docs.values()) == [
                row["scores"]["normalized"]["exact_match"] for row in samples if row["task"] == name
            ]
        if plan is not None and (ALL or number % 3 == 0):
            folder = write_adapter(plan, tmp_path / cell.cell, **cell.output)
            with Subject(prepared.base, adapter=find_adapter(str(folder))).loaded(device="cpu") as model:
                composed = evaluate_model(model, prepared.base.tokenizer, cell.tasks, prepared.settings)
            differing[cell.short] = sum(a != b for a, b in zip(samples, rows(composed), strict=True))
    assert differing == dict.fromkeys(differing, 0)
    outputs = {str([row["output"] for row in read_samples(run.folder, r.cell.cell)]) for r in run.results}
    assert len(outputs) > 12  # the methods do differ


def test_only_compositions_with_new_tensors_are_reduced(swept: tuple[PreparedSweep, Run]) -> None:
    prepared, run = swept
    reduced = {result.cell.family for result in run.results if way_of(prepared, result.cell) == "reduced"}
    assert reduced == {"ties", "dare_linear", "dare_ties", "magnitude_prune", "cut", "truncated"}


def test_the_folder_describes_the_sweep(swept: tuple[PreparedSweep, Run], world: Path) -> None:
    prepared, run = swept
    assert run.unfinished == ()
    assert [result.cell for result in run.results] == list(run.cells) == list(prepared.grid.cells)
    assert run.tasks == prepared.tasks
    assert (run.tasks["mgsm_direct_sw"].language, run.tasks["mgsm_direct_sw"].role) == ("sw", "target")
    assert (run.tasks["mgsm_direct_en@0"].language, run.tasks["mgsm_direct_en@0"].role) == ("en", "retention")
    assert run.tasks["mgsm_direct_sw"].primary == ("exact_match", "normalized")
    assert run.described["settings"]["dtype"] == "float32"
    assert run.described["settings"]["limit"] == 3
    assert run.described["experts"]["sw2"]["side"] == "language"
    assert run.described["experts"]["extra-1"]["side"] == "joint SFT"
    prompts = read_prompts(run.folder, "mgsm_direct_sw")
    assert list(prompts) == [0, 1, 2]
    assert prompts[0].count("Swali:") == 2
    assert read_prompts(run.folder, "mgsm_direct_en@0")[0].count("Question:") == 1
    everything = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    assert str(world).encode() not in everything
    assert Run.read(run.folder) == run


def test_the_recipe_in_the_folder_can_be_run_again(swept: tuple[PreparedSweep, Run], world: Path) -> None:
    """With its names as paths again, it describes the same cells."""
    prepared, run = swept
    content = dict(run.described["recipe"])
    for side in ("task_experts", "language_experts"):
        content[side] = {name: str(world / place) for name, place in content[side].items()}
    content["extra"] = {row: [str(world / place) for place in places] for row, places in content["extra"].items()}
    content["base_model"] = str(world / content["base_model"])
    assert prepare(SweepRecipe.model_validate(content)).grid == prepared.grid


def test_a_composition_in_two_families_is_judged_once(recipe: Recipe, tmp_path: Path) -> None:
    families = [{"bottom": [1, 2], "top": 1}, {"name": "mine", "bottom": 2, "top": 1}]
    reports: list[SweepProgress] = []
    run = sweep(recipe(baselines=[], compositions=families), tmp_path / "run", device="cpu", tell=reports.append)
    first, same = (r for r in run.results if r.cell.composition["bottom"] == 2)
    assert (first.cell.family, same.cell.family) == ("layer_swap", "mine")
    assert same.seconds == {"switch": 0, "evaluate": 0}
    assert same.results == first.results
    assert read_samples(run.folder, same.cell.cell) == read_samples(run.folder, first.cell.cell)
    assert {progress.cell for progress in reports if progress.requests} == {run.cells[0].short, run.cells[1].short}
    assert (reports[-1].done, reports[-1].total) == (3, 3)


def test_a_truncated_cell_records_its_relative_error(world: Path, recipe: Recipe, tmp_path: Path) -> None:
    """Against numpy's singular values of the experts' own average, and against what `compose` records for TIES."""
    families = [
        {"method": "soup", "max_rank": 2},
        {"name": "whole", "method": "soup", "max_rank": 8},
        {"method": "ties", "density": 0.4, "max_rank": 4},
        {"bottom": 1},
    ]
    prepared = prepare(recipe(baselines=[], compositions=families, settings={**SETTINGS, "limit": 2}))
    run = sweep(prepared, tmp_path / "run", device="cpu")
    found = {result.cell.family: result for result in run.results}

    experts = [load_file(world / name / "adapter_model.safetensors") for name in ("math1", "sw1")]
    lost = []  # both have rank 4 and alpha 8, so one scale, which the relative error does not depend on
    for key in (key for key in experts[0] if "lora_A" in key):
        deltas = [(tensors[key.replace("_A", "_B")] @ tensors[key]).astype(np.float64) for tensors in experts]
        singular = np.linalg.svd(sum(deltas), compute_uv=False)
        lost.append(np.linalg.norm(singular[2:]) / np.linalg.norm(singular))
    assert found["soup"].relative_error == pytest.approx(max(lost), rel=1e-4)
    assert 0.1 < max(lost) < 1
    assert found["whole"].relative_error == pytest.approx(0, abs=1e-5)
    assert found["layer_swap"].relative_error is None

    ties = found["ties"].cell
    folder = write_adapter(prepared.plans[ties.cell], tmp_path / "ties", **ties.output)
    reduced = json.loads((folder / "adapterswap.json").read_text())["reduced"]
    assert found["ties"].relative_error == pytest.approx(
        max(module["relative_error"] for module in reduced.values()), rel=1e-4
    )
    errors = {row.family: row.relative_error for row in summarize(run)}
    assert errors == {family: result.relative_error for family, result in found.items()}


def test_each_pair_is_judged_in_its_own_language(world: Path, recipe: Recipe, tmp_path: Path) -> None:
    experts = {name: str(world / name) for name in ("sw1", "sw2")}
    tasks = {"sw1": ["mgsm_direct_sw"], "sw2": ["mgsm_direct_te"]}
    run = sweep(recipe(language_experts=experts, tasks=tasks, baselines=["base", "soup"]), tmp_path / "run")
    assert [list(result.results) for result in run.results] == [
        ["mgsm_direct_sw", "mgsm_direct_te"], ["mgsm_direct_sw"], ["mgsm_direct_te"],
    ]  # fmt: skip
    assert [(row.family, row.n) for row in summarize(run)] == [("base", 1), ("soup", 2)]


def test_the_best_configuration_is_chosen_on_one_half_and_reported_on_the_other(
    swept: tuple[PreparedSweep, Run],
) -> None:
    """Scores put in by hand: on the half to choose on, the second configuration is best, and on the whole the first."""
    from dataclasses import replace

    _, run = swept
    task = run.tasks["mgsm_direct_sw"]
    scores = {"bottom=1": {"select": 0.0, "report": 1.0}, "bottom=2": {"select": 1.0, "report": 0.0}}
    made = []
    for pair in ("m1+s1", "m2+s1"):
        for name, halves in scores.items():
            docs = {doc: halves[half] for half in halves for doc in getattr(task, half)}
            like = run.results[0]
            value = replace(like.results[task.name], docs=docs, value=sum(docs.values()) / len(docs))
            cell = replace(like.cell, family="layer_swap", short=f"{pair}@{name}", composition={"method": "layer_swap"})
            made.append(replace(like, cell=cell, results={task.name: value}))
    (row,) = summarize(replace(run, cells=tuple(result.cell for result in made), results=tuple(made)))
    assert len(task.select) == 2
    assert (row.n, row.configurations, row.best, row.chosen_at, row.reported_at) == (4, 2, "bottom=2", 1.0, 0.0)
    assert (row.minimum, row.mean, row.maximum) == pytest.approx((1 / 3, 1 / 2, 2 / 3))


def test_mistakes_are_reported_together_before_anything_is_loaded(recipe: Recipe, tmp_path: Path) -> None:
    bad = recipe(
        task_experts={"math1": "./nowhere"}, language_experts={"sw1": "./neither"}, base_model="./no-base"
    )  # fmt: skip
    with pytest.raises(AdapterswapError) as error:
        sweep(bad, tmp_path / "run")
    assert {problem.message.split(" does")[0] for problem in error.value.problems} == {
        "The path ./nowhere", "The path ./neither", "The path ./no-base",
    }  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "kind", "parameter", "value"),
    [
        ({"num_layers": 7}, CompositionError, "num_layers", "7"),
        ({"retention": ["mgsm_direct_sw"]}, FieldError, "retention", "mgsm_direct_sw"),
        ({"primary": {"mgsm_direct_te": "exact_match"}}, FieldError, "primary", "'mgsm_direct_te'"),
        ({"primary": {"mgsm_direct_sw": "acc"}}, FieldError, "primary", "'acc'"),
        ({"settings": {"limit": 2.5}}, ArgumentError, "limit", "2.5"),
    ],
)
def test_unsuitable_recipes_are_refused(
    changes: dict[str, Any], kind: type[AdapterswapError], parameter: str, value: str, recipe: Recipe
) -> None:
    with refused(kind, parameter, match=value):
        prepare(recipe(**changes))


def test_an_unused_expert_is_refused_unless_it_is_left_out(recipe: Recipe) -> None:
    with pytest.raises(AdapterswapError, match=r"math1\+sw1@bottom=0: .*'sw1'"):
        prepare(recipe(compositions=[{"bottom": [0, 1]}]))
    reset = recipe(compositions=[{"bottom": 0, "top": 0, "language": "base"}], baselines=[])
    assert len(prepare(reset).grid.cells) == 1


def test_a_primary_score_may_be_chosen(recipe: Recipe) -> None:
    chosen = prepare(recipe(primary={"mgsm_direct_sw": "exact_match,flexible-extract"}))
    assert chosen.tasks["mgsm_direct_sw"].primary == ("exact_match", "flexible-extract")


def _words_task(folder: Path) -> dict[str, Any]:
    """The settings under which `pico_words` is a task: the likelihood of a sentence's second word."""
    rows = [f'{{"text": "{text}"}}' for text in ("Haba na haba", "Maji ni uhai", "Pole pole", "Asante sana")]
    (folder / "rows.json").write_text("\n".join(rows) + "\n", encoding="utf-8")
    task = {
        "task": "pico_words", "output_type": "loglikelihood", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
        "doc_to_text": "{{text.split(' ')[0]}}", "doc_to_target": "{{' ' + text.split(' ')[1]}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    }  # fmt: skip
    (folder / "tasks").mkdir()
    (folder / "tasks" / "words.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return {"num_fewshot": 0, "limit": 4, "include_path": str(folder / "tasks")}


def test_targets_of_opposite_directions_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    """A mean of accuracy and perplexity has no best; beside a target, either may be reported."""
    settings = _words_task(tmp_path)
    both = {"tasks": ["mgsm_direct_sw", "pico_words"], "settings": settings}
    assert prepare(recipe(**both)).tasks["pico_words"].higher_is_better
    chosen = {"primary": {"pico_words": "perplexity"}}
    with refused(FieldError, "tasks", match="pico_words"):
        prepare(recipe(**both, **chosen))
    beside = {"tasks": ["mgsm_direct_sw"], "retention": ["pico_words"], "settings": settings}
    assert not prepare(recipe(**beside, **chosen)).tasks["pico_words"].higher_is_better


def test_a_perplexity_chooses_nothing(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents have log-likelihoods, whose mean would choose the worst configuration as the lowest."""
    # The harness draws 100,000 samples for a standard error, which is not compared here.
    bootstrap = metrics.bootstrap_stderr
    monkeypatch.setattr(metrics, "bootstrap_stderr", lambda f, xs, iters: bootstrap(f, xs, 1000))
    words = {"tasks": ["pico_words"], "settings": _words_task(tmp_path), "compositions": [{"bottom": [0, 1], "top": 1}]}
    run = sweep(recipe(**words, primary={"pico_words": "perplexity"}), tmp_path / "run")
    for result in run.results:
        value = result.results["pico_words"]
        assert value.docs == {}
        assert value.value is not None
        assert value.value > 1
    (row,) = (row for row in summarize(run) if row.family == "layer_swap")
    assert (row.best, row.chosen_at, row.configurations) == (None, None, 2)
    by_accuracy = sweep(recipe(**words), tmp_path / "by_accuracy")
    assert all(result.results["pico_words"].docs for result in by_accuracy.results)
