"""Checkpoints evaluated on tasks during training: what is kept, what is written, and that training is not affected."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap import layer_swap, suggest
from adapterswap.core.experts.adapter import open_adapter
from adapterswap.experiments.evaluation import Settings, evaluate_model, exam
from adapterswap.experiments.training import TrainRecipe, TrainReport, estimate, train
from adapterswap.experiments.training.selection import (
    JudgedCheckpoint,
    SelectionOptions,
    best_first,
    is_judged,
    worn_out,
)
from adapterswap.kit.errors import AdapterswapError, DependencyError, FieldError, RunError
from adapterswap.kit.files.yaml import shipped_recipes

from .conftest import echo_rows, make_expert, recipe_maker, word_tokenizer
from .spying import spied

MakeRecipe = Callable[..., TrainRecipe]

# Which word comes last? Training on the rows raises this score; the second task asks for another word, so it falls.
CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{{label}}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
GROUP = """
group: pico_both
task: [pico_last, pico_first]
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: true}
"""


@pytest.fixture(scope="session")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("data")
    rows = []
    for row in echo_rows(24, seed=9):
        words = row["question"].split()[1:]
        choices = sorted({*words, "w0", "w1"})
        rows.append(
            {
                "question": row["question"],
                "choices": choices,
                "last": choices.index(words[-1]),
                "first": choices.index(next(word for word in choices if word != words[-1])),
            }
        )
    (data / "rows.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for label in ("last", "first"):
        text = CHOICES.format(name=f"pico_{label}", data=data / "rows.json", label=label)
        (folder / f"{label}.yaml").write_text(text, encoding="utf-8")
    (folder / "group.yaml").write_text(GROUP, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def selecting(pico: Callable[[str], Path], own_tasks: Path, tmp_path_factory: Any) -> MakeRecipe:
    """`selecting(tasks=[…], keep_best=2, training={…})`: a recipe of five checkpoints, judged."""
    make_recipe = recipe_maker(pico("llama"), tmp_path_factory.mktemp("selecting"))

    def make(**changes: Any) -> TrainRecipe:
        keys = SelectionOptions.model_fields.keys()
        chosen = {key: changes.pop(key) for key in list(changes) if key in keys}
        selection = {"tasks": ["pico_last"], "include_path": str(own_tasks)} | chosen
        training = {"max_steps": 10, "save_every_samples": 16} | changes.pop("training", {})
        return make_recipe(rows=echo_rows(96), selection=selection, training=training, **changes)

    return make


@pytest.fixture(scope="module")
def judged(selecting: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainRecipe, TrainReport]:
    """An undisturbed run by two tasks, whose checkpoints are kept."""
    changes = {"validation": {"rows": 8}, "training": {"keep_checkpoints": True}}
    recipe = selecting(tasks=["pico_last", "pico_first"], keep_best=2, **changes)
    return recipe, train(recipe, out_path=tmp_path_factory.mktemp("judged") / "expert", progress=False)


def described(folder: Path) -> Any:
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_the_best_checkpoint_is_written_with_its_table(judged: tuple[TrainRecipe, TrainReport]) -> None:
    _, report = judged
    found = report.selection
    assert found is not None
    assert [row.step for row in found.table] == [2, 4, 6, 8, 10]
    assert found.metrics == {"pico_last": "acc,none", "pico_first": "acc,none"}
    scores = {row.step: row.score for row in found.table}
    assert len(set(scores.values())) > 1
    assert list(found.kept) == sorted(scores, key=lambda step: (-scores[step], step))[:2]
    result = described(report.path)["selection"]
    assert result["kept"] == list(found.kept)
    assert [row["step"] for row in result["table"]] == [2, 4, 6, 8, 10]
    assert all(row["eval_loss"] is not None for row in result["table"])
    assert [step for step, _ in report.eval_losses] == [2, 4, 6, 8, 10]
    card = (report.path / "README.md").read_text()
    assert (
        f"These are the weights after step {found.kept[0]}, the best of the checkpoints by pico_last and pico_first:"
        in card
    )
    assert f"| **{found.kept[0]}** | **{found.chosen.score:.4f} ± " in card

    # The last two checkpoints are the trainer's own; the best two are among those that were judged.
    kept = report.path.with_name("expert.checkpoints") / "best"
    assert sorted(path.name for path in (report.path / f"checkpoint-{found.kept[1]}").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert same(weights(report.path), weights(kept / f"checkpoint-{found.kept[0]}"))
    assert same(weights(report.path / f"checkpoint-{found.kept[1]}"), weights(kept / f"checkpoint-{found.kept[1]}"))
    assert not same(weights(report.path), weights(report.path / f"checkpoint-{found.kept[1]}"))
    assert sorted(path.name for path in kept.iterdir()) == sorted(f"checkpoint-{step}" for step in found.kept)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("judged", [True, False])
def test_a_ladder_of_adapters_is_kept(
    tmp_path: Path, selecting: MakeRecipe, monkeypatch: pytest.MonkeyPatch, judged: bool
) -> None:
    """Those of plain runs that end at these steps; also where the run crashed in between."""
    recipe = selecting(ladder=3, **({"keep_best": 5} if judged else {"tasks": []}))
    plain = recipe.model_copy(update={"selection": None})
    straight = plain.training.model_copy(update={"schedule": "constant", "warmup": 0})
    recipe, plain = (one.model_copy(update={"training": straight}) for one in (recipe, plain))
    report = train(recipe, out_path=tmp_path / "expert", progress=False)
    assert report.ladder == (3, 7, 10)
    assert described(report.path)["ladder"] == [3, 7, 10]
    kept = {*report.ladder, *(report.selection.kept if report.selection else ())}
    best = report.selection.kept[0] if report.selection else None
    folders = {path.name for path in report.path.glob("checkpoint-*")}
    assert folders == {f"checkpoint-{step}" for step in kept if step != best or step in report.ladder}
    for step in report.ladder:
        shorter = straight.model_copy(update={"max_steps": step})
        alone = train(plain.model_copy(update={"training": shorter}), out_path=tmp_path / f"{step}", progress=False)
        assert same(weights(report.path / f"checkpoint-{step}"), weights(alone.path))
        assert open_adapter(report.path / f"checkpoint-{step}").base_fingerprints
    if not judged:
        assert same(weights(report.path), weights(report.path / "checkpoint-10"))

    def crash(step: int, *_: Any) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with spied(monkeypatch, crash), pytest.raises(KeyboardInterrupt):
        train(recipe, out_path=tmp_path / "broken", progress=False)
    again = train(recipe, out_path=tmp_path / "broken", progress=False, resume=True)
    assert again.ladder == report.ladder
    assert all(same(weights(again.path / name), weights(report.path / name)) for name in folders)
    assert not (tmp_path / "broken.checkpoints").exists()


@pytest.mark.slow
def test_two_ladders_are_swept_and_reported(
    tmp_path: Path, selecting: MakeRecipe, own_tasks: Path, run: Callable[..., Result]
) -> None:
    """Every pair of checkpoints is a cell with the score of its own composition, and a place of the landscape."""
    sides = {"math": (3, 8), "swahili": (2, 6)}
    for side, (rungs, samples) in sides.items():
        recipe = selecting(ladder=rungs, tasks=[], training={"max_steps": samples})
        train(recipe, out_path=tmp_path / side, progress=False)
    steps = {
        side: sorted(int(path.name.removeprefix("checkpoint-")) for path in (tmp_path / side).glob("checkpoint-*"))
        for side in sides
    }
    assert [len(each) for each in steps.values()] == [3, 2]
    base = str(recipe.base_model)
    content = {
        "base_model": base,
        "task_experts": {"math": {"ladder": "math"}},
        "language_experts": {"swahili": {"ladder": "swahili"}},
        "compositions": [{"bottom": 1, "top": 0}],
        "tasks": ["pico_last"],
        "settings": {"num_fewshot": 0, "include_path": str(own_tasks)},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    result = run("sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "swept", "--device", "cpu")
    assert result.exit_code == 0, result.output
    result = run("report", tmp_path / "swept", "-o", tmp_path / "report", "--figures", tmp_path / "figures")
    assert result.exit_code == 0, result.output
    (grid,) = json.loads((tmp_path / "report" / "summary.json").read_text())["grids"]
    assert (grid["family"], grid["ladders"]) == ("layer_swap", ["math", "swahili"])
    pairs = {(cell["bottom"], cell["top"]): cell["mean"] for cell in grid["cells"]}
    assert [*pairs] == [(one, other) for one in steps["math"] for other in steps["swahili"]]
    for (one, other), mean in pairs.items():
        math, swahili = tmp_path / "math" / f"checkpoint-{one}", tmp_path / "swahili" / f"checkpoint-{other}"
        plan = layer_swap(math, swahili, base_model=base, bottom=1, top=0)
        alone = adapterswap.evaluate(base, "pico_last", plan=plan, include_path=own_tasks, device="cpu")
        scores = [sample.scores["none"]["acc"] for sample in alone.samples]
        assert mean == pytest.approx(sum(scores) / len(scores))
        assert len(suggest(math, swahili, base_model=base).as_json()["layers"]) == plan.num_layers
    assert len(set(pairs.values())) > 1
    assert (tmp_path / "figures" / "landscape.pdf").exists()
    figure = json.loads((tmp_path / "figures" / "figures.json").read_text())["figures"]["landscape"]
    assert figure["data"]["axes"] == ["math, steps", "swahili, steps"]
    assert "by the steps of the checkpoints of math and swahili" in figure["caption"]
    assert 'id="landscape"' in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize("started", [False, True])
def test_a_score_equals_evaluating_the_written_expert(
    tmp_path: Path, selecting: MakeRecipe, judged: Any, own_tasks: Path, pico: Callable[[str], Path], started: bool
) -> None:
    """Also where modules of a start have ranks of their own and are not all trained."""
    _, report = judged
    if started:
        start = {"start": str(make_expert(pico("llama"), tmp_path / "start", rank_pattern={"q_proj": 2}))}
        recipe = selecting(tasks=["pico_last", "pico_first"], keep_best=2, adapter={"layers": "0-3"}, **start)
        report = train(recipe, out_path=tmp_path / "e", progress=False)
    assert report.selection is not None
    for step, folder in zip(report.selection.kept, [report.path, *report.path.glob("checkpoint-*")], strict=True):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pico("llama")), folder)
        result = evaluate_model(model, word_tokenizer(), ["pico_last", "pico_first"], Settings(include_path=own_tasks))
        row = next(row for row in report.selection.table if row.step == step)
        values = {name: result.tasks[name].score(metric="acc") for name in ("pico_last", "pico_first")}
        assert row.tasks == {name: score.value for name, score in values.items()}
        assert row.score == pytest.approx(sum(score.value for score in values.values()) / 2)
        errors = [score.stderr for score in values.values()]
        assert row.stderr == pytest.approx(math.sqrt(sum(e * e for e in errors if e is not None)) / 2)


@pytest.mark.parametrize(
    "changes",
    [{"adapter": {"dropout": 0.2}, "training": {"gradient_checkpointing": True}}, {"adapter": "none"}],
)
def test_training_is_not_affected(tmp_path: Path, selecting: MakeRecipe, changes: dict[str, Any]) -> None:
    changes = {
        **changes,
        "training": {"keep_checkpoints": True, **changes.get("training", {})},
        "validation": {"rows": 8},
    }
    judged = selecting(**changes)
    plain = judged.model_copy(update={"selection": None})
    first = train(judged, out_path=tmp_path / "judged", progress=False)
    second = train(plain, out_path=tmp_path / "plain", progress=False)
    assert first.train_losses == second.train_losses
    assert first.eval_losses[-1] == second.eval_losses[-1]
    for name in ("checkpoint-8", "checkpoint-10"):
        (file,) = (tmp_path / "plain.checkpoints" / name).glob("*.safetensors")
        assert file.read_bytes() == (tmp_path / "judged.checkpoints" / name / file.name).read_bytes()


def test_full_models_are_selected_too(tmp_path: Path, selecting: MakeRecipe) -> None:
    recipe = selecting(adapter="none", keep_best=2, training={"learning_rate": 0.01, "keep_checkpoints": True})
    report = train(recipe, out_path=tmp_path / "expert", progress=False)
    assert report.selection is not None
    best, second = report.selection.kept
    kept = tmp_path / "expert.checkpoints" / "best"
    for folder, step in ((report.path, best), (report.path / f"checkpoint-{second}", second)):
        assert same(load_file(folder / "model.safetensors"), load_file(kept / f"checkpoint-{step}/model.safetensors"))


def test_resuming_evaluates_nothing_twice(
    tmp_path: Path, judged: tuple[TrainRecipe, TrainReport], monkeypatch: Any
) -> None:
    recipe, unbroken = judged
    requested: list[int] = []
    real = exam.evaluate_model

    def counted(*args: Any, **kwargs: Any) -> Any:
        requested.append(1)
        if len(requested) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(exam, "evaluate_model", counted)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out_path=tmp_path / "expert", progress=False)
    resumed = train(recipe, out_path=tmp_path / "expert", resume=True, progress=False)
    assert resumed.resumed_from == 6
    assert len(requested) == 6  # at 2 and 4, interrupted at 6; again at 6, then at 8 and 10
    assert resumed.selection == unbroken.selection
    for name in ("adapter_model.safetensors", "training.json", "README.md"):
        assert (tmp_path / "expert" / name).read_bytes() == (unbroken.path / name).read_bytes()


def test_a_terminated_run_is_judged_when_resumed(tmp_path: Path, selecting: MakeRecipe, monkeypatch: Any) -> None:
    recipe = selecting(training={"max_steps": 4, "save_every_samples": 8})
    unbroken = train(recipe, out_path=tmp_path / "unbroken", progress=False)
    real = exam.evaluate_model

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(exam, "evaluate_model", interrupted)
        with refused(RunError):
            train(recipe, out_path=tmp_path / "expert", progress=False)
    rows = json.loads((tmp_path / "expert.checkpoints" / "selection.json").read_text())["table"]
    assert [row["step"] for row in rows] == [1]  # step 2 was saved but not judged
    resumed = train(recipe, out_path=tmp_path / "expert", resume=True, progress=False)
    assert resumed.resumed_from == 2
    assert resumed.selection == unbroken.selection


def test_other_weights_and_tasks_are_not_trusted_on_resume(
    tmp_path: Path, selecting: MakeRecipe, own_tasks: Path, monkeypatch: Any
) -> None:
    """The best weights and their tasks are checked, since other weights still look like a valid expert."""
    tasks = shutil.copytree(own_tasks, tmp_path / "tasks")
    recipe = selecting(training={"max_steps": 6, "save_every_samples": 8}, include_path=str(tasks))
    out, folder = tmp_path / "expert", tmp_path / "expert.checkpoints"
    with monkeypatch.context() as patched:
        patched.setattr(TrainReport, "__init__", lambda self, **fields: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # after training, before anything is written
            train(recipe, out_path=out, progress=False)
    shutil.copytree(folder, tmp_path / "kept")

    def changed_task() -> None:
        for file in tasks.glob("*.yaml"):
            file.write_text(file.read_text() + 'target_delimiter: "  "\n')

    edits: dict[str, Callable[[], object]] = {
        r"selection\.json": (folder / "selection.json").unlink,
        "selection_tasks": changed_task,
    }
    for named, edit in edits.items():
        edit()
        with refused(RunError, "resume", match=named):
            train(recipe, out_path=out, resume=True, progress=False)
        assert not out.exists()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", folder)


def test_early_stopping(tmp_path: Path, selecting: MakeRecipe, monkeypatch: Any) -> None:
    """pico_first asks for what training unlearns, so it soon stops improving."""
    recipe = selecting(tasks=["pico_first"], early_stopping=2, training={"max_steps": 40, "learning_rate": 0.05})
    report = train(recipe, out_path=tmp_path / "expert", progress=False)
    found = report.selection
    assert found is not None
    assert found.stopped_early
    assert report.steps == found.table[-1].step < 40
    assert report.steps == found.kept[0] + 2 * 2
    assert f"stopped early after step {report.steps}" in found.notes()
    with monkeypatch.context() as patched:
        patched.setattr(TrainReport, "__init__", lambda self, **fields: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # after training, before anything is written
            train(recipe, out_path=tmp_path / "again", progress=False)
    resumed = train(recipe, out_path=tmp_path / "again", resume=True, progress=False)
    assert resumed.resumed_from == resumed.steps == report.steps
    for name in ("adapter_model.safetensors", "training.json", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "expert" / name).read_bytes()


def test_every_so_many_checkpoints_and_the_last(tmp_path: Path, selecting: MakeRecipe) -> None:
    recipe = selecting(every=2, tasks=["pico_last", "pico_first"], metric={"pico_last": "acc_norm"})
    expected = estimate(recipe)
    assert expected.selection == {"checkpoints": 3, "documents": 48, "requests": expected.selection["requests"]}
    report = train(recipe, out_path=tmp_path / "expert", progress=False)
    assert report.selection is not None
    assert [row.step for row in report.selection.table] == [4, 8, 10]
    assert report.selection.metrics == {"pico_last": "acc_norm,none", "pico_first": "acc,none"}


def test_a_group_is_one_score(tmp_path: Path, selecting: MakeRecipe) -> None:
    recipe = selecting(tasks=["pico_both"], training={"max_steps": 2})
    report = train(recipe, out_path=tmp_path / "group", progress=False)
    assert report.selection is not None
    assert report.selection.metrics == {"pico_both": "acc,none"}


def test_mistakes_are_reported_before_anything_is_trained(
    tmp_path: Path, selecting: MakeRecipe, make_recipe: MakeRecipe, monkeypatch: Any
) -> None:
    def check(recipe: TrainRecipe, refusal: Callable[[], AbstractContextManager[Any]]) -> None:
        for call in (lambda: estimate(recipe), lambda: train(recipe, out_path=tmp_path / "expert", progress=False)):
            with refusal():
                call()
        assert not (tmp_path / "expert").exists()

    check(
        selecting(tasks=["pico_lost"]),
        lambda: pytest.raises(AdapterswapError, match=r"'pico_lost'.* Did you mean 'pico_last'"),
    )
    for metric, named in (("f1", "'f1'.* acc,none, acc_norm,none"), ({"pico": "acc"}, "'pico' .*pico_last")):
        check(selecting(metric=metric), partial(refused, FieldError, "selection.metric", match=named))
    check(
        selecting(tasks=["pico_both"], metric="acc_norm"),
        partial(refused, FieldError, "selection.metric", match="pico_both .*'acc_norm'"),
    )
    check(
        selecting(tasks=["mgsm_direct_en"], max_gen_toks=5000),
        partial(refused, FieldError, "selection", match="mgsm_direct_en.* 5000"),
    )
    with pytest.raises(FieldError, match=r"training\.save_every_samples is null"):
        make_recipe(selection={"tasks": ["pico_last"]})
    monkeypatch.setattr(
        "adapterswap.experiments.training.base.find_spec", lambda name: None if name == "lm_eval" else name
    )
    check(selecting(), partial(refused, DependencyError, "selection", match=r"adapterswap\[eval\]"))


def test_the_command_line_reports_selection(tmp_path: Path, selecting: MakeRecipe, run: Callable[..., Result]) -> None:
    recipe = selecting(keep_best=2, training={"max_steps": 4}).model_dump(mode="json", exclude_unset=True)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    shown = run("train", path, "--dry-run", "--set", "selection.tasks=[pico_last, mgsm_direct_sw]")
    assert shown.exit_code == 0, shown.stderr
    assert "selection   2 checkpoints to evaluate, 274 documents in " in shown.stdout
    assert "selection by mgsm_direct_sw: the second paper found math in the target language a weaker" in shown.stderr
    result = run("train", path, "-o", tmp_path / "expert")
    assert result.exit_code == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("checkpoint  ")]
    assert len(rows) == 2
    assert sorted(row.rpartition(", ")[2] for row in rows) == ["kept", "written"]
    assert all("(pico_last 0." in row for row in rows)


def test_maths_in_the_target_language_is_reported() -> None:
    assert SelectionOptions(tasks=["belebele_swh_Latn", "mgsm_native_cot_en"]).notes() == []
    (note,) = SelectionOptions(tasks=["belebele_swh_Latn", "mgsm_native_cot_sw"]).notes()
    assert note.startswith("selection by mgsm_native_cot_sw: ")


def test_shipped_selections_name_tasks_that_the_harness_has(known_tasks: frozenset[str]) -> None:
    fragments = [path for name, path in shipped_recipes("regimes").items() if "/select-" in name]
    assert len(fragments) == 5
    for path in fragments:
        options = SelectionOptions.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))["selection"])
        assert known_tasks.issuperset(options.tasks), path
        assert options.notes() == []


def row(step: int, score: float) -> JudgedCheckpoint:
    return JudgedCheckpoint(step, score, None, {}, None)


tables = st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=12).map(
    lambda scores: [row(10 * (place + 1), score) for place, score in enumerate(scores)]
)


@given(tables, st.integers(1, 4))
def test_patience_ends_after_rows_without_improvement(table: list[JudgedCheckpoint], patience: int) -> None:
    best, since = -math.inf, 0
    for entry in table:
        best, since = (entry.score, 0) if entry.score > best else (best, since + 1)
    assert worn_out(table, patience) == (since >= patience)
    assert not worn_out(table, None)
    first = best_first(table)[0]
    assert first.score == max(entry.score for entry in table)
    assert not any(entry.score == first.score and entry.step < first.step for entry in table)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4))
def test_the_last_step_is_judged_and_others_at_even_distances(steps: int, save: int, every: int) -> None:
    judged = [step for step in range(1, steps + 1) if is_judged(step, steps, save, every)]
    assert judged == sorted({*range(save * every, steps + 1, save * every), steps})


def test_scores_of_different_kinds_count_equally() -> None:
    scores = {
        "mgsm": ("exact_match", 0.4, 0.03, True),
        "flores": ("chrf++", 50.0, None, True),
        "wikitext": ("perplexity", 2.0, 0.1, False),
    }
    judged = JudgedCheckpoint.of(5, scores, 1.5)
    assert judged.score == pytest.approx((0.4 + 0.5 - 2.0) / 3)
    assert judged.stderr is None
    assert judged.tasks == {"mgsm": 0.4, "flores": 50.0, "wikitext": 2.0}
    del scores["flores"]
    assert JudgedCheckpoint.of(5, scores, None).stderr == pytest.approx(math.hypot(0.03, 0.1) / 2)


def test_code_of_a_task_needs_trust(
    selecting: MakeRecipe, own_tasks: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    tasks, marker = tmp_path / "tasks", tmp_path / "marker"
    tasks.mkdir()
    include = f"include: {own_tasks / 'last.yaml'}\n"
    (tasks / "coded.yaml").write_text(f"task: pico_coded\n{include}process_docs: !function code.docs\n")
    (tasks / "code.py").write_text(f"open({str(marker)!r}, 'w').close()\n\ndef docs(docs):\n    return docs\n")
    recipe = selecting(tasks=["pico_coded"], include_path=str(tasks), training={"max_steps": 2})
    file, command = tmp_path / "coded.recipe.yaml", ("-o", tmp_path / "out", "--device", "cpu")
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    for call in (lambda: estimate(recipe), lambda: train(recipe, out_path=tmp_path / "out")):
        with pytest.raises(AdapterswapError) as result:
            call()
        assert all("trust_task_code" in problem.remedy for problem in result.value.problems)
    for options in (["--dry-run"], []):
        refused = run("train", file, *command, *options)
        assert refused.exit_code == 2
        assert "--trust-task-code" in refused.stderr
    assert not marker.exists()
    for options in (["--dry-run"], []):
        allowed = run("train", file, *command, *options, "--trust-task-code")
        assert allowed.exit_code == 0, allowed.output
    assert marker.exists()
