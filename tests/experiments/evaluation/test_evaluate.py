"""`evaluate_model` on pico models, against plain loops without the harness."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused

from adapterswap import AdapterswapError, LiveComposer, layer_swap, write_adapter
from adapterswap.engines.live import load_experts
from adapterswap.experiments.evaluation import (
    EvaluationResult,
    Sample,
    Score,
    Settings,
    TaskResult,
    evaluate_model,
    write_result,
)
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.mgsm import mgsm_task
from adapterswap.kit.errors import ArgumentError, OutputError, RunError

from .conftest import byte_tokenizer, pico_model

Model = tuple[Any, Any]
SHORT = {"num_fewshot": 2, "limit": 3, "max_gen_toks": 16}


def written(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """The model's text after `prompt`, one token at a time, without `generate` and its caches."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    begin = ids.shape[1]
    for _ in range(tokens):
        with torch.no_grad():
            following = model(ids).logits[0, -1].argmax()
        if following == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, following.reshape(1, 1)], dim=1)
    return str(tokenizer.decode(ids[0, begin:], skip_special_tokens=True))


def test_outputs_equal_a_plain_loop_over_the_model(byte_model: Model) -> None:
    model, tokenizer = byte_model
    result = evaluate_model(model, tokenizer, ["mgsm_direct_sw"], Settings(batch_size=1, **SHORT))
    task = mgsm_task("mgsm_direct_sw")
    shots = [f"{task.prompt(question)}{answer}\n\n" for question, answer in task.shots()[:2]]
    assert len(result.samples) == 3
    for sample, (question, gold) in zip(result.samples, task.language.questions, strict=False):
        prompt = "".join(shots) + task.prompt(question)
        assert sample.prompt == prompt
        assert sample.target == str(gold)
        assert sample.output == written(model, tokenizer, prompt, 16).split("Swali:")[0]


def test_selected_documents_are_prompted_as_among_all(byte_model: Model) -> None:
    """Across tasks, in whatever order they are named, and past the limit."""
    chosen = {"mgsm_direct_sw": (4, 1), "mgsm_direct_en": {0}}
    every = evaluate_model(*byte_model, list(chosen), Settings(batch_size=1, **(SHORT | {"limit": 5})))
    some = evaluate_model(*byte_model, list(chosen), Settings(batch_size=1, **SHORT), documents=chosen)
    assert [(sample.task, sample.doc_id) for sample in some.samples] == [
        ("mgsm_direct_sw", 1), ("mgsm_direct_sw", 4), ("mgsm_direct_en", 0),
    ]  # fmt: skip
    assert some.samples == tuple(sample for sample in every.samples if sample.doc_id in chosen[sample.task])
    assert [task.num_docs for task in some.tasks.values()] == [2, 1]


def test_a_batch_gives_what_single_prompts_give(byte_model: Model) -> None:
    alone = evaluate_model(*byte_model, ["mgsm_native_cot_te"], Settings(batch_size=1, **SHORT))
    together = evaluate_model(*byte_model, ["mgsm_native_cot_te"], Settings(batch_size=3, **SHORT))
    assert alone.samples == together.samples
    assert len({sample.output for sample in alone.samples}) > 1


@pytest.fixture(scope="module")
def memorizer() -> Model:
    """A model that has memorised the first two answers of mgsm_direct_sw, and continues with a question."""
    task, tokenizer = mgsm_task("mgsm_direct_sw"), byte_tokenizer()
    model = pico_model(layers=2, spread=0.05).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = []
    for question, gold in task.language.questions[:2]:
        prompt = tokenizer(task.prompt(question))["input_ids"]
        answer = tokenizer(f" {gold}.00\n\nSwali:")["input_ids"]
        rows.append((torch.tensor([prompt + answer]), len(prompt)))
    for _ in range(60):
        for ids, begin in rows:
            logits = model(ids).logits[0, begin - 1 : -1]
            torch.nn.functional.cross_entropy(logits, ids[0, begin:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def test_each_filter_counts_right_answers_in_its_own_way(memorizer: Model) -> None:
    result = evaluate_model(
        *memorizer, ["mgsm_direct_sw"], Settings(num_fewshot=0, limit=3, max_gen_toks=20, batch_size=1)
    )
    first, second, third = result.samples
    assert (first.output, second.output) == (" 18.00\n\n", " 3.00\n\n")
    assert [sample.scores["normalized"]["exact_match"] for sample in (first, second, third)] == [1, 1, 0]
    assert first.answers == {"remove_whitespace": "18.00", "flexible-extract": "18.00", "normalized": "18"}
    task = result.tasks["mgsm_direct_sw"]
    assert task.score("flexible-extract").value == task.score("remove_whitespace").value == 0  # they read 18.00 as 1800
    assert task.score("normalized").value == pytest.approx(2 / 3)
    assert task.score("normalized").stderr == pytest.approx(statistics.stdev([1, 1, 0]) / 3**0.5)
    assert (task.num_docs, task.num_fewshot) == (3, 0)


def test_outputs_that_end_are_not_counted_as_cut(memorizer: Model) -> None:
    ended = evaluate_model(*memorizer, ["mgsm_direct_sw"], Settings(num_fewshot=0, limit=2, max_gen_toks=30))
    assert [sample.cut for sample in ended.samples] == [False, False]
    assert ended.tasks["mgsm_direct_sw"].cut == 0
    stopped = evaluate_model(*memorizer, ["mgsm_direct_sw"], Settings(num_fewshot=0, limit=2, max_gen_toks=3))
    assert [sample.output for sample in stopped.samples] == [" 18", " 3."]
    assert stopped.tasks["mgsm_direct_sw"].cut == 2


def test_one_document_has_no_standard_error(byte_model: Model) -> None:
    result = evaluate_model(*byte_model, ["mgsm_direct_en"], Settings(num_fewshot=0, limit=1, max_gen_toks=4))
    assert {score.stderr for score in result.tasks["mgsm_direct_en"].scores} == {None}


@pytest.fixture
def experts(byte_expert: Callable[[str], Path], byte_base: Path) -> dict[str, Any]:
    options = {"bottom": 2, "top": 1, "bottom_transition": 1, "base_model": str(byte_base)}
    return {"task": str(byte_expert("math")), "language": str(byte_expert("swahili")), **options}


def test_repeated_evaluations_live_and_from_disk_agree(
    byte_model: Model, experts: dict[str, Any], byte_base: Path, tmp_path: Path
) -> None:
    model, tokenizer = byte_model
    tasks = ["mgsm_direct_sw", "mgsm_native_cot_sw"]

    def run(model: Any) -> Any:
        return evaluate_model(model, tokenizer, tasks, Settings(**SHORT)).samples

    base = run(model)
    plan = layer_swap(**experts)
    folder = write_adapter(plan, tmp_path / "composed")
    live_model = load_experts(model, plan)
    composer = LiveComposer(live_model)
    other = layer_swap(**(experts | {"bottom": 0, "top": 0, "bottom_transition": 0}))
    with composer.use(plan):
        live = run(live_model)
    with composer.use(other):
        math_alone = run(live_model)
    with composer.use(plan):
        assert run(live_model) == live
    with live_model.disable_adapter():
        assert run(live_model) == base
    fresh = PeftModel.from_pretrained(type(model).from_pretrained(byte_base, dtype=torch.float32), folder)
    assert run(fresh) == live
    assert len({tuple(sample.output for sample in samples) for samples in (base, live, math_alone)}) == 3


@pytest.mark.parametrize("wrapped", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "lm_head"]}])
def test_adapters_on_tied_embeddings_are_left_alone(wrapped: dict[str, Any]) -> None:
    """The harness ties the weights of every model, which raises on these."""
    model = pico_model()
    config = type(model.config).from_dict(model.config.to_dict() | {"tie_word_embeddings": True})
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = get_peft_model(type(model)(config), LoraConfig(**({"target_modules": ["q_proj"]} | wrapped)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.manual_seed(sum(name.encode()))
            parameter.data += torch.randn(parameter.shape) * 0.1
    model.eval()
    (sample,) = evaluate_model(model, byte_tokenizer(), ["mgsm_direct_sw"], Settings(**(SHORT | {"limit": 1}))).samples
    assert sample.output == written(model, byte_tokenizer(), sample.prompt, 16).split("Swali:")[0]


def test_the_callers_model_and_state_are_unchanged(byte_model: Model) -> None:
    model, tokenizer = byte_model
    tokenizer.pad_token = None
    model.train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    evaluate_model(model, tokenizer, ["mgsm_direct_sw"], Settings(num_fewshot=0, limit=1, max_gen_toks=2))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert tokenizer.pad_token is None
    assert tokenizer.padding_side == byte_tokenizer().padding_side


def test_nothing_is_printed(byte_model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    evaluate_model(*byte_model, ["mgsm_direct_sw"], Settings(num_fewshot=0, limit=1, max_gen_toks=2))
    assert capfd.readouterr() == ("", "")


def test_sampling_follows_the_seed(byte_model: Model) -> None:
    def outputs(seed: int) -> list[Any]:
        options = {"gen_kwargs": {"do_sample": True, "temperature": 1.0}, "seed": seed, **SHORT}
        return [
            sample.output for sample in evaluate_model(*byte_model, ["mgsm_direct_sw"], Settings(**options)).samples
        ]

    assert outputs(1) == outputs(1)
    assert outputs(1) != outputs(2)


def test_progress_counts_every_request(byte_model: Model) -> None:
    reports: list[tuple[int, int]] = []
    tasks = ["mgsm_direct_sw", "mgsm_direct_te"]
    options = {"num_fewshot": 0, "limit": 2, "max_gen_toks": 2}
    evaluate_model(
        *byte_model, tasks, Settings(**options), on_progress=lambda done, total: reports.append((done, total))
    )
    assert reports == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_chat_prompts_are_turns(byte_model: Model) -> None:
    options = {**SHORT, "limit": 1, "apply_chat_template": True, "system_instruction": "Be brief."}
    (sample,) = evaluate_model(*byte_model, ["mgsm_direct_sw"], Settings(**options)).samples
    task = mgsm_task("mgsm_direct_sw")
    turns = "".join(f"<user>{task.prompt(q)}</user><assistant>{a}</assistant>" for q, a in task.shots()[:2])
    requested = task.prompt(task.language.questions[0][0])
    assert sample.prompt == f"<system>Be brief.</system>{turns}<user>{requested}</user><assistant>"
    (previewed,) = preview(byte_model[1], byte_model[0].config, ["mgsm_direct_sw"], Settings(**options))
    assert previewed.prompt == sample.prompt


def test_a_prompt_that_does_not_fit_is_refused_or_counted() -> None:
    tokenizer, options = byte_tokenizer(), {"num_fewshot": 2, "limit": 3, "max_gen_toks": 8, "batch_size": 1}
    (previewed,) = preview(tokenizer, pico_model(layers=1).config, ["mgsm_direct_sw"], Settings(**options))
    context = previewed.longest + 8
    fitting = evaluate_model(pico_model(layers=1, context=context), tokenizer, ["mgsm_direct_sw"], Settings(**options))
    assert fitting.tasks["mgsm_direct_sw"].truncated == 0
    tight = pico_model(layers=1, context=context - 1)
    sizes = rf"mgsm_direct_sw: a prompt of {previewed.longest} tokens .* context of {context - 1}"
    with refused(ArgumentError, "max_gen_toks", match=sizes):
        evaluate_model(tight, tokenizer, ["mgsm_direct_sw"], Settings(**options))
    result = evaluate_model(tight, tokenizer, ["mgsm_direct_sw"], Settings(truncate=True, **options))
    assert result.tasks["mgsm_direct_sw"].truncated == 1


def test_a_preview_shows_the_prompts_of_an_evaluation(byte_model: Model) -> None:
    model, tokenizer = byte_model
    tasks = ["mgsm_native_cot_te", "mgsm_en_cot_ja"]
    previews = preview(tokenizer, model.config, tasks, Settings(**SHORT))
    result = evaluate_model(model, tokenizer, tasks, Settings(**SHORT))
    for task in previews:
        requested = [sample.prompt for sample in result.samples if sample.task == task.name]
        assert (task.prompt, task.num_docs, task.num_requests) == (requested[0], 3, 3)
        assert task.longest == max(len(prompt.encode()) for prompt in requested)
        assert task.room == model.config.max_position_embeddings - task.longest


def test_the_folder_is_reproducible_and_contains_no_paths(byte_model: Model, tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = evaluate_model(*byte_model, ["mgsm_direct_ja"], Settings(**SHORT))
        write_result(result, tmp_path / name, subject={"base_model": {"source": "byte-base"}})
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert set(one) == {"results.json", "samples.jsonl"}
    assert str(tmp_path).encode() not in b"".join(one.values())
    content = json.loads(one["results.json"])
    assert content["subject"] == {"base_model": {"source": "byte-base"}}
    assert content["tasks"][0]["name"] == "mgsm_direct_ja"
    assert content["first_prompts"]["mgsm_direct_ja"] == result.samples[0].prompt
    rows = [json.loads(line) for line in one["samples.jsonl"].decode().split("\n") if line]
    assert [row["doc_id"] for row in rows] == [0, 1, 2]
    assert [row["output"] for row in rows] == [sample.output for sample in result.samples]
    with refused(OutputError, "out_path"):
        write_result(result, tmp_path / "one")


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    score = Score("ppl", "none", float("nan"), float("inf"), False)
    sample = Sample("t", 0, {"x": float("nan")}, "p", "1", [[float("-inf"), False], [-1.5, True]], {}, {"none": {}})
    result = EvaluationResult({"t": TaskResult("t", 1, 0, "1", (score,))}, (sample,), {})
    write_result(result, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert (content["tasks"][0]["scores"][0]["value"], content["tasks"][0]["scores"][0]["stderr"]) == (None, None)
    row = json.loads((tmp_path / "out" / "samples.jsonl").read_text("utf-8"), parse_constant=pytest.fail)
    assert (row["doc"], row["output"]) == ({"x": None}, [[None, False], [-1.5, True]])


def test_outputs_with_lone_surrogates_are_read_back(tmp_path: Path) -> None:
    sample = Sample("t", 0, {"x": "y"}, "p", "1", "half: \ud800", {}, {"none": {}})
    write_result(EvaluationResult({}, (sample,), {}), tmp_path / "out", subject={"base_model": "a\udcff"})
    assert json.loads((tmp_path / "out/samples.jsonl").read_text("utf-8"))["output"] == sample.output
    assert json.loads((tmp_path / "out/results.json").read_text("utf-8"))["subject"] == {"base_model": "a\udcff"}


def test_a_device_without_memory_is_an_error(byte_model: Model) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    byte_model[0].model.register_forward_pre_hook(full)
    with refused(RunError, "batch_size"):
        evaluate_model(*byte_model, ["mgsm_direct_sw"], Settings(batch_size=4, **SHORT))


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": -3},
        {"limit": 2.5},
        {"limit": float("nan")},
        {"limit": 1e308},
        {"limit": float("inf")},
        {"batch_size": 0},
        {"max_gen_toks": -1},
        {"num_fewshot": 9},
        {"num_fewshot": -1},
    ],
    ids=str,
)
def test_bad_settings_are_refused(byte_model: Model, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with refused(ArgumentError, name, match=re.escape(str(value))):
        evaluate_model(*byte_model, ["mgsm_direct_sw"], Settings(**options))


def test_all_bad_settings_are_reported_together(byte_model: Model) -> None:
    model, tokenizer = byte_model
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(AdapterswapError) as caught:
        evaluate_model(model, tokenizer, ["mgsm_direct_sw"], Settings(limit=0, batch_size=0, apply_chat_template=True))
    assert [problem.parameter for problem in caught.value.problems] == [
        "limit", "batch_size", "base_model", "apply_chat_template",
    ]  # fmt: skip


def test_a_fraction_of_the_documents(byte_model: Model) -> None:
    previews = preview(byte_model[1], byte_model[0].config, ["mgsm_direct_sw"], Settings(limit=0.1))
    assert [(task.num_docs, task.num_fewshot) for task in previews] == [(25, 8)]


@pytest.mark.parametrize("chat", [True, False])
def test_the_longest_prompt_is_counted_like_the_harness(byte_model: tuple[Any, Any], chat: bool) -> None:
    """The token that begins every text precedes a prompt once, from the template or the tokenizer."""
    from tokenizers.processors import TemplateProcessing

    from adapterswap.experiments.evaluation.harness import EvaluatedModel
    from adapterswap.kit.processes import Processes

    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    settings = Settings(num_fewshot=0, limit=1, max_gen_toks=2, apply_chat_template=chat)
    (previewed,) = preview(tokenizer, byte_model[0].config, ["mgsm_direct_sw"], settings)
    harness = EvaluatedModel(
        byte_model[0], tokenizer, settings=settings, batch_size=1, processes=Processes(),
        check=lambda: None, on_begin=None, on_progress=None,
    )  # fmt: skip
    requested = harness.tok_encode(previewed.prompt)
    assert requested[:2].count(1) == 1
    assert previewed.longest == len(requested)
