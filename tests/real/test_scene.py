"""The French scene: the base that the package gives, its problems, an evaluation and a training against plain loops."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

import adapterswap as asw
from adapterswap.experiments.lab.french import FrenchPlan, write_task
from adapterswap.experiments.lab.shown import find_models
from adapterswap.experiments.lab.smollm2 import package_file, write_smollm2
from adapterswap.experiments.lab.word_problems import EACH, draw_problems, questions_of, templates, training_rows
from adapterswap.kit.errors import ArgumentError, NotFoundError, OutputError

from .conftest import EXAMPLE, EXPERTS


def test_the_base_has_the_weights_of_the_file(base: Path, model: Any, tokenizer: Any) -> None:
    """A block of 4 bits, by the format's definition; and a key weight's rows in transformers' order."""
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(package_file()).tensors}
    block = tensors["blk.3.attn_k.weight"].data[1][:20].tobytes()  # the second row's first 32 weights
    scale, minimum = np.frombuffer(block[:4], np.float16).astype(np.float32)
    halves = np.frombuffer(block[4:], np.uint8)
    expected = scale * np.concatenate([halves & 15, halves >> 4]).astype(np.float32) + minimum
    # A head's first half is in even rows of the file, its second half in odd ones: row 1 is the first of that half.
    stored = model.model.layers[3].self_attn.k_proj.weight[32, :32].detach().numpy()
    np.testing.assert_array_equal(stored, expected)
    assert tokenizer.tokenize(" 1205") == ["Ġ", "1", "2", "0", "5"]
    assert write_smollm2(base) == base  # kept


def test_a_short_answer_is_right(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1]).strip() == "Paris"


def test_problems_are_different_and_their_answers_right() -> None:
    assert sum(template.part == "test" for template in templates()) >= 30
    tests, development = draw_problems("test"), draw_problems("development")
    assert not {problem.template for problem in tests} & {problem.template for problem in development}
    for part, problems in (("test", tests), ("development", development)):
        assert len(problems) == EACH[part] * sum(template.part == part for template in templates())
        for problem in problems:
            numbers = [int(word) for word in problem.questions["en"].replace(".", " ").split() if word.isdigit()]
            a, b = numbers if problem.template not in ("d10", "t21", "t22", "t25") else numbers[::-1]
            assert problem.number == {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[problem.operation]
            assert len(set(problem.choices)) == 4
            assert min(problem.choices) > 0
            assert problem.number in problem.choices
    asked = questions_of([*tests, *development], "en")
    rows = training_rows(50, 3, exclude=asked)
    assert not {row["prompt"] for row in rows} & {f"Question: {question}\nAnswer:" for question in asked}


def test_more_problems_than_a_template_has_are_refused() -> None:
    with refused(ArgumentError, "each"):
        draw_problems("test", 65)
    with refused(ArgumentError, "number"):
        training_rows(65 * len(templates()), 0)


def test_the_data_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = runpy.run_path(str(EXAMPLE / "make_data.py"))
    (tmp_path / "tatoeba_english_french.tsv.gz").symlink_to(EXAMPLE / "data" / "tatoeba_english_french.tsv.gz")
    monkeypatch.setitem(script["main"].__globals__, "DATA", tmp_path)
    script["main"]()
    for file in sorted(tmp_path.glob("*.jsonl")):
        assert file.read_bytes() == (EXAMPLE / "data" / file.name).read_bytes(), file.name


@pytest.mark.full  # tests/experiments/evaluation compares with plain loops over pico models
def test_an_evaluation_is_a_plain_loop_over_whole_texts(base: Path, tokenizer: Any, model: Any, tmp_path: Path) -> None:
    tasks = write_task(tmp_path / "tasks", "development", each=1)
    name = "word_problems_development_fr"
    scores = asw.evaluate(
        str(base), adapter=str(EXPERTS["math"]), tasks=[name], include_path=tasks, limit=6, device="cpu"
    )  # fmt: skip
    composer = asw.LiveComposer.from_experts(model, EXPERTS)
    with composer.use("math"), torch.no_grad():
        for problem, sample in zip(draw_problems("development", 1)[:6], scores.samples, strict=True):
            for choice, (likelihood, _) in zip(problem.choices, sample.output, strict=True):
                ids = tokenizer(f"{problem.prompt('fr')} {choice}", return_tensors="pt")["input_ids"]
                begin = len(tokenizer(problem.prompt("fr"))["input_ids"])
                log_probabilities = composer.model(ids).logits[0].log_softmax(-1)
                expected = log_probabilities[begin - 1 : -1].gather(1, ids[0, begin:, None]).sum().item()
                assert likelihood == pytest.approx(expected, abs=2e-3)


def test_the_studio_opens_a_run(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    from adapterswap.experiments.studio.choice import first_choice
    from adapterswap.experiments.studio.html import meaning_html
    from adapterswap.experiments.studio.workspace import Workspace

    (tmp_path / "base").symlink_to(base)
    record = {"format": "adapterswap-lab-french/1", "experts": {name: str(path) for name, path in EXPERTS.items()}}
    (tmp_path / "results.json").write_text(json.dumps(record), encoding="utf-8")
    workspace = Workspace.of_lab(tmp_path)
    lab = workspace.lab
    assert lab is not None
    assert lab.languages == ("fr", "en")
    choice = first_choice(list(workspace.experts), workspace.num_layers, lab.zones)
    assert (choice.task, choice.language, choice.fields["bottom"], choice.fields["top"]) == (
        ("math",),
        ("french",),
        8,
        0,
    )
    assert len({problem.prompt("fr") for problem in lab.problems}) == lab.on_page
    first = lab.problems[0]
    assert f"Expected answer: <b>{first.answer}</b>" in meaning_html(lab, first.prompt("fr"))
    problems = lab.problems[:4]
    with workspace.holding(workspace.composition(choice)), torch.no_grad():
        marks = lab.make_questions(problems, "fr").exact_match(workspace.live.model)
        for problem, mark in zip(problems, marks, strict=True):
            ids = tokenizer(problem.prompt("fr"), return_tensors="pt")["input_ids"]
            wanted = [*tokenizer(f" {problem.answer}")["input_ids"], tokenizer.eos_token_id]
            answer = workspace.live.model.generate(input_ids=ids, max_new_tokens=len(wanted), do_sample=False)
            assert (answer[0, ids.shape[1] :].tolist() == wanted) == mark
    # The page begins with a problem that the composition solves, and asks it as the lab does: without a template.
    composition = workspace.composition(choice)
    shown = lab.problems[workspace.first_problem(composition)]
    (*_, last) = workspace.answers(shown.prompt("fr"), [composition], max_new_tokens=8, chat=workspace.is_chat)
    assert last.texts[0].strip() == shown.answer


def test_a_run_can_be_moved(base: Path, tmp_path: Path) -> None:
    """What a run has written does not name a place outside of it, and a copy reads its own files."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "base").symlink_to(base)
    plan = FrenchPlan.of(tmp_path / "run", experts=EXAMPLE / "experts", each=1)
    assert plan.write_inputs() == tmp_path / "run" / "sweep.yaml"
    record = {"format": "adapterswap-lab-french/1", "experts": {name: f"experts/{name}" for name in EXPERTS}}
    (tmp_path / "run" / "results.json").write_text(json.dumps(record), encoding="utf-8")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    for path in moved.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.parent.name != "base":
            assert str(tmp_path) not in path.read_text(encoding="utf-8"), path
            assert str(EXAMPLE) not in path.read_text(encoding="utf-8"), path

    recipe = asw.SweepRecipe.read(moved / "sweep.yaml")
    places = [recipe.base_model, *recipe.task_experts.values(), *recipe.language_experts.values()]
    assert all(Path(str(place)).is_relative_to(moved) for place in [*places, recipe.settings.include_path])
    models = find_models(moved)
    assert models.experts == {name: str(moved / "experts" / name) for name in EXPERTS}
    for name, folder in models.experts.items():
        assert (
            Path(folder, "adapter_model.safetensors").read_bytes()
            == (EXPERTS[name] / "adapter_model.safetensors").read_bytes()
        )

    name = "word_problems_test_fr"
    first, *others = (moved / "tasks" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    changed = json.loads(first) | {"question": "Combien font 2 et 2 ?"}
    (moved / "tasks" / f"{name}.jsonl").write_text("\n".join([json.dumps(changed), *others]) + "\n", encoding="utf-8")
    scores = asw.evaluate(str(base), tasks=[name], include_path=moved / "tasks", limit=1, device="cpu")
    assert "Combien font 2 et 2 ?" in scores.samples[0].prompt

    # Run again there, it is the same run; with other experts it is not.
    FrenchPlan.of(moved, each=1).write_inputs()
    with (moved / "experts" / "math" / "README.md").open("a", encoding="utf-8") as card:
        card.write("changed")
    with refused(OutputError, "out_path"):
        FrenchPlan.of(moved, experts=EXAMPLE / "experts")


@pytest.mark.full
def test_a_moved_run_goes_on(tmp_path: Path) -> None:
    """All of a small run; where it was moved to, nothing is evaluated again."""
    first = FrenchPlan.of(tmp_path / "run", experts=EXAMPLE / "experts", each=1).run(device="cpu")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    cells = (moved / "sweep" / "cells.jsonl").read_bytes()
    second = FrenchPlan.of(moved, experts=EXAMPLE / "experts", each=1).run(device="cpu")
    assert (moved / "sweep" / "cells.jsonl").read_bytes() == cells
    assert second.answers == first.answers


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(OutputError) as refused:
        FrenchPlan.of(tmp_path / "mine", experts=EXAMPLE / "experts")
    assert refused.value.parameter == "out_path"
    with pytest.raises(NotFoundError) as missing:
        FrenchPlan.of(tmp_path / "out", experts=tmp_path)
    assert missing.value.parameter == "experts"


@pytest.mark.full  # tests/experiments/training compares steps with plain torch, and rows with TRL
@pytest.mark.slow
def test_eight_steps_are_those_of_plain_trl(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    """The same rows in the same steps, by TRL's own trainer and logits: the losses agree up to rounding.

    Rows are joined and shuffled before training, so TRL gets them in that order. The rows of a step have answers of
    different lengths, so its loss is a mean over tokens, not over the batches that are accumulated.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    steps, batch, accumulated, seed = 8, 1, 2, 3
    rows = study_rows("math-0.jsonl")
    rows = sorted(rows, key=lambda row: len(row["prompt"]))[: 3 * steps * batch * accumulated : 3]
    assert len({len(row["completion"]) for row in rows}) > 1
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = asw.TrainRecipe.model_validate(
        {
            "base_model": str(base),
            "datasets": [{"path": str(tmp_path / "rows.jsonl"), "prompt": "{prompt}", "completion": "{completion}"}],
            "adapter": {"r": 16, "alpha": 16, "rslora": True, "layers": "20-29"},
            "training": {
                "batch_size": batch, "gradient_accumulation": accumulated, "max_steps": steps, "learning_rate": 5e-4,
                "schedule": "linear", "warmup": 0.0, "device": "cpu", "dtype": "float32", "max_length": 128,
                "save_every_samples": None, "logging_steps": 1, "seed": seed, "data_seed": seed,
            },
        }
    )  # fmt: skip
    losses = [loss for _, loss in asw.train(recipe, out_path=tmp_path / "ours", progress=False).train_losses]
    shuffled = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        SFTConfig(
            str(tmp_path / "trl"), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated,
            max_steps=steps, learning_rate=5e-4, lr_scheduler_type="linear", warmup_steps=0, use_cpu=True, bf16=False,
            activation_checkpointing=False, logging_steps=1, report_to=[], seed=seed, data_seed=seed,
            save_strategy="no", completion_only_loss=True, max_length=128, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(shuffled),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=16, use_rslora=True, task_type="CAUSAL_LM",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            layers_to_transform=list(range(20, 30)), lora_dropout=0.0,
        ),
    )  # fmt: skip
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, rel=1e-3)  # rounding moved them by 2e-5
    assert losses[-1] < losses[0]


def study_rows(name: str) -> list[dict[str, str]]:
    """Rows of the example's data."""
    return [json.loads(line) for line in (EXAMPLE / "data" / name).read_text(encoding="utf-8").splitlines()]
