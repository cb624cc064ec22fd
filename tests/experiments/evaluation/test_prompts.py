"""Prompts by chat templates: dates, reasoning, system turns; and tokens that the embedding does not have."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import TemplateError
from refusals import refused
from tokenizers import processors
from transformers import AutoTokenizer

import adapterswap
from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.subjects import Evaluation
from adapterswap.kit.errors import ArgumentError, BaseModelError, DataError

from .conftest import CHAT, byte_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHAT
THINKING = CHAT + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
TASK = ["mgsm_direct_sw"]


def templated(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def settings(**changes: Any) -> Settings:
    return Settings(**{"num_fewshot": 0, "limit": 1, "max_gen_toks": 4, "apply_chat_template": True, **changes})


def test_a_date_is_set_and_recorded(byte_model: tuple[Any, Any]) -> None:
    """A prompt with today's date is another prompt tomorrow, so the result says which date it had."""
    model, tokenizer = byte_model[0], templated(DATED)
    (fixed,) = preview(tokenizer, model.config, TASK, settings(date="2024-07-26"))
    assert fixed.prompt.startswith("26 Jul 2024\n")
    result = evaluate_model(model, tokenizer, TASK, settings(date="2024-07-26"))
    assert result.samples[0].prompt == fixed.prompt
    assert result.settings["date"] == "2024-07-26"
    today = datetime.date.today()
    result = evaluate_model(model, tokenizer, TASK, settings())
    assert result.settings["date"] in (today.isoformat(), datetime.date.today().isoformat())
    assert result.samples[0].prompt.endswith(fixed.prompt.removeprefix("26 Jul 2024"))


def test_results_of_templates_without_a_date_name_none(byte_model: tuple[Any, Any]) -> None:
    result = evaluate_model(byte_model[0], templated(CHAT), TASK, settings())
    assert not result.settings.keys() & {"date", "enable_thinking", "think_end_token"}


@pytest.mark.parametrize("date", ["26.7.2024", "2024-7-26", "20240726", "today"])
def test_another_form_of_date_is_refused(date: str) -> None:
    with refused(ArgumentError, "date"):
        settings(date=date).check(templated(DATED))


def test_the_template_turns_reasoning_off(byte_model: tuple[Any, Any]) -> None:
    tokenizer = templated(THINKING)
    (on,) = preview(tokenizer, byte_model[0].config, TASK, settings())
    (off,) = preview(tokenizer, byte_model[0].config, TASK, settings(enable_thinking=False))
    assert off.prompt == on.prompt + "<think></think>"
    result = evaluate_model(byte_model[0], tokenizer, TASK, settings(enable_thinking=False))
    assert (result.samples[0].prompt, result.settings["enable_thinking"]) == (off.prompt, False)


class _Scripted:
    """What a model says, as the harness's own code then cuts and scores it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, text: str) -> None:
        import torch
        from lm_eval.models.huggingface import HFLM

        self.stops: list[list[str]] = []

        def generate(model: Any, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
            self.stops.append(stop)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][: max_length - context.shape[1]]
            return torch.cat([context, torch.tensor([ids])], dim=1)

        monkeypatch.setattr(HFLM, "_model_generate", generate)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Its name occurs in none of the harness's files: each in which it occurs would be read.
CHOICE = """
task: yes_or_no_here
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: 0
"""


@pytest.mark.parametrize(
    ("template", "begins"), [(CHATML, 0), ("{{ bos_token }}" + CHATML, 1), (None, 1)], ids=["chatml", "bos", "plain"]
)
def test_training_and_evaluation_begin_alike(
    byte_model: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, begins: int
) -> None:
    """A tokenizer that begins every text with <s>: a chat template writes that itself, or there is none, as in
    transformers and TRL. The ids of both kinds of requests, of the preview and of a training row are the same."""
    from lm_eval.models.huggingface import HFLM

    from adapterswap.experiments.training.texts import Example
    from adapterswap.experiments.training.tokens import tokenize

    tokenizer = templated(template or CHAT)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([begin])
    seen: dict[str, list[int]] = {}

    def generate(model: Any, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        seen["generate"] = context[0].tolist()
        return context

    def score(model: Any, requests: Any, **kwargs: Any) -> Any:
        seen["score"] = [*requests[0][1], *requests[0][2]]
        return [(0.0, False) for _ in requests]

    monkeypatch.setattr(HFLM, "_model_generate", generate)
    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", score)
    monkeypatch.setattr("adapterswap.experiments.evaluation.harness.shared_contexts", lambda *args: {})
    (tmp_path / "rows.json").write_text(json.dumps([{"question": "1 + 1 = 2?"}]))
    (tmp_path / "choice.yaml").write_text(CHOICE.replace("DATA", str(tmp_path / "rows.json")))
    chosen = settings(apply_chat_template=template is not None, include_path=tmp_path)
    for tasks in (TASK, ["yes_or_no_here"]):
        evaluate_model(byte_model[0], tokenizer, tasks, chosen)
    (generating,), (scoring,) = (
        preview(tokenizer, byte_model[0].config, tasks, chosen) for tasks in (TASK, ["yes_or_no_here"])
    )
    for ids, previewed, answer in ((seen["generate"], generating, ""), (seen["score"], scoring, "yes")):
        assert [*ids[: begins + 1]].count(1) == begins
        assert previewed.longest == len(ids) - len(answer) - (template is None and bool(answer))
        text = previewed.prompt + answer if template else previewed.prompt + " " * bool(answer) + answer
        row, _ = tokenize([Example(text, ((0, len(text)),), chat=template is not None)], tokenizer, max_length=10_000)
        assert row.ids.tolist()[: len(ids)] == ids
        if template:
            turns = [{"role": "user", "content": "1 + 1 = 2?"}]
            if answer:
                rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
                assert ids[: -len(answer)] == rendered["input_ids"]


@pytest.mark.parametrize("end", ["</think>", "</think>, special", "17"])
def test_only_what_follows_the_reasoning_is_scored(
    byte_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """MGSM's answers end at a newline and the word for a question; reasoning may contain them."""
    tokenizer = templated(THINKING)
    if end.endswith("special"):
        tokenizer.add_tokens(["</think>"], special_tokens=True)
    end = end.removesuffix(", special")
    mark = (
        "</think>" if end == "</think>" else tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(17)])
    )
    said = f"Is it 5?\nSwali: hm{mark}Jibu ni 11.\nSwali: more"
    scripted = _Scripted(monkeypatch, tokenizer, said + "<eos>")
    chosen = settings(enable_thinking=True, think_end_token=int(end) if end.isdigit() else end, max_gen_toks=200)
    result = evaluate_model(byte_model[0], tokenizer, TASK, chosen)
    (sample,) = result.samples
    assert sample.output == "Jibu ni 11.\n"
    assert not sample.cut
    assert scripted.stops == [["<eos>"]]


def test_an_answer_that_never_left_its_reasoning_is_cut(
    byte_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = templated(THINKING)
    _Scripted(monkeypatch, tokenizer, "Swali: it goes on and on and on")
    chosen = settings(enable_thinking=True, think_end_token="</think>", max_gen_toks=10)
    (sample,) = evaluate_model(byte_model[0], tokenizer, TASK, chosen).samples
    assert (sample.cut, sample.output) == (True, "")


@pytest.mark.parametrize(
    ("template", "changes", "parameter"),
    [
        (THINKING, {"enable_thinking": True}, "think_end_token"),
        (THINKING, {"enable_thinking": False, "apply_chat_template": False}, "enable_thinking"),
        (CHAT, {"enable_thinking": False}, "enable_thinking"),
    ],
)
def test_reasoning_that_cannot_be_turned_on_or_off_is_refused(
    template: str, changes: dict[str, Any], parameter: str
) -> None:
    with refused(ArgumentError, parameter):
        settings(**changes).check(templated(template))


def test_likelihoods_have_no_reasoning(byte_model: tuple[Any, Any], tmp_path: Path) -> None:
    task = own_task(tmp_path, "What?", output_type="multiple_choice", doc_to_choice=["a", "b"], doc_to_target=0)
    chosen = settings(enable_thinking=True, think_end_token="</think>", include_path=task)
    with refused(ArgumentError, "enable_thinking"):
        evaluate_model(byte_model[0], templated(THINKING), ["own"], chosen)


def own_task(folder: Path, question: str, **changes: Any) -> Path:
    """The folder of a task `own` with one document."""
    (folder / "rows.jsonl").write_text(json.dumps({"q": question, "a": "b"}) + "\n")
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "exact_match"}], **changes,
    }  # fmt: skip
    if task["output_type"] != "generate_until":
        task["metric_list"] = [{"metric": "acc"}]
    (folder / "own.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(
    ("instruction", "parameter"), [("Be brief.", "system_instruction"), (None, "apply_chat_template")]
)
def test_a_template_that_refuses_a_system_turn_is_named(
    byte_model: tuple[Any, Any], tmp_path: Path, runs: bool, instruction: str | None, parameter: str
) -> None:
    """The harness would leave the turn out; the task's files are not at fault."""
    folder = own_task(tmp_path, "What?", **({} if instruction else {"description": "Answer."}))
    chosen = settings(system_instruction=instruction, include_path=folder)
    model, tokenizer = byte_model[0], templated(STRICT)
    with refused(ArgumentError, parameter):
        evaluate_model(model, tokenizer, ["own"], chosen) if runs else preview(tokenizer, model.config, ["own"], chosen)


@pytest.fixture
def enlarged(byte_base: Path, tmp_path: Path) -> Path:
    """A base whose tokenizer has a token that its embedding has no row for."""
    folder = tmp_path / "base"
    folder.mkdir()
    for file in byte_base.iterdir():
        shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(byte_base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["generate_until", "multiple_choice", "loglikelihood_rolling"])
def test_a_token_without_a_row_is_named_before_the_weights_are_loaded(
    enlarged: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "tasks").mkdir()
    more = {"doc_to_choice": ["a", "b"], "doc_to_target": 0} if kind == "multiple_choice" else {}
    if kind == "loglikelihood_rolling":
        more = {"doc_to_target": "{{q}}", "metric_list": [{"metric": "word_perplexity"}]}
    folder = own_task(tmp_path / "tasks", "<|new|> hi", output_type=kind, **more)
    if kind == "loglikelihood_rolling":
        task = yaml.safe_load((folder / "own.yaml").read_text()) | more
        (folder / "own.yaml").write_text(yaml.safe_dump(task))
    with refused(BaseModelError, "base_model", match=r"'<\|new\|>'.* 259"):
        Evaluation.prepare(enlarged, ["own"], settings=Settings(include_path=folder))


def test_a_larger_tokenizer_is_taken_where_prompts_do_not_use_its_tokens(enlarged: Path) -> None:
    result = adapterswap.evaluate(enlarged, TASK, limit=1, num_fewshot=0, max_gen_toks=2)
    assert len(result.samples) == 1


def with_tokenizer(expert: Path, folder: Path, template: str | None, **changes: Any) -> Path:
    """A copy of an expert with a tokenizer beside it, as trainers save it."""
    shutil.copytree(expert, folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for key, value in changes.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(folder)
    return folder


OURS, THEIRS = (f"{name} {{{{ messages[-1].content }}}}" for name in ("ours", "theirs"))


@pytest.fixture
def pair(byte_expert: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`pair(OURS, THEIRS)`: a task and a language expert with these chat templates."""

    def make(task: str | None, language: str | None) -> dict[str, str]:
        templates = {"task": task, "language": language}
        return {
            name: str(with_tokenizer(byte_expert(name), tmp_path / name, template))
            for name, template in templates.items()
        }

    return make


@pytest.mark.parametrize(
    ("task", "language", "chosen", "begins"),
    [
        (OURS, OURS, None, "ours "),
        (OURS, THEIRS, None, "ours "),
        (OURS, THEIRS, "language", "theirs "),
        (OURS, OURS, "base", "<user>"),
        (None, THEIRS, None, "theirs "),
        (None, None, None, "<user>"),
    ],
)
def test_a_composition_is_evaluated_with_the_template_of_the_merged_model(
    byte_base: Path, pair: Callable[..., dict[str, str]], tmp_path: Path, task: str, language: str, chosen: str | None,
    begins: str,
) -> None:  # fmt: skip
    plan = adapterswap.compose(adapterswap.Composition(experts=pair(task, language), bottom=1, top=1))
    prepared = Evaluation.prepare(byte_base, TASK, plan=plan, chat_template_from=chosen, settings=settings())
    (previewed,) = prepared.exam.preview()
    assert previewed.prompt.startswith(begins)
    assert ("companions" in prepared.described) == (begins != "<user>")
    if chosen is None:
        merged = adapterswap.merge(plan, byte_base, out_path=tmp_path / "merged")
        turns = [{"role": "user", "content": "Swali: 1 + 1?"}]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        wanted = AutoTokenizer.from_pretrained(merged).apply_chat_template(turns, **options)
        assert prepared.exam.base.tokenizer.apply_chat_template(turns, **options) == wanted


def test_an_adapter_is_evaluated_with_its_own_tokenizer(
    byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its template, and the token at which the merged model would stop."""
    expert = with_tokenizer(byte_expert("math"), tmp_path / "math", OURS, eos_token="<pad>")
    prepared = Evaluation.prepare(byte_base, TASK, adapter=expert, settings=settings())
    assert prepared.exam.base.tokenizer.eos_token == "<pad>"
    assert prepared.described["companions"] == {"tokenizer": "adapter", "chat_template": "adapter"}
    assert prepared.companions.prompt_lines
    result = prepared.run()
    assert result.samples[0].prompt.startswith("ours ")
    assert result.settings["generation_config"]["eos_token_id"] == 0


def test_a_base_without_a_tokenizer_takes_that_of_its_experts(
    byte_base: Path, byte_expert: Callable[[str], Path], pair: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(byte_base / name, bare / name)
    plan = adapterswap.compose(adapterswap.Composition(experts=pair(OURS, OURS), bottom=1, top=1))

    prepared = Evaluation.prepare(bare, TASK, plan=plan, settings=settings())
    assert prepared.exam.preview() == Evaluation.prepare(byte_base, TASK, plan=plan, settings=settings()).exam.preview()
    assert prepared.described["companions"] == {"tokenizer": "task", "chat_template": "task"}
    for options in ({}, {"adapter": byte_expert("math")}):
        with refused(BaseModelError, "base_model", match="has no tokenizer"):
            Evaluation.prepare(bare, TASK, settings=settings(), **options)


def test_a_template_of_nobody_cannot_be_chosen(byte_base: Path, byte_expert: Callable[[str], Path]) -> None:
    for chosen in ("nobody", "adapter"):
        with refused(ArgumentError, "chat_template_from"):
            Evaluation.prepare(
                byte_base, TASK, adapter=byte_expert("math"), chat_template_from=chosen, settings=settings()
            )


@pytest.mark.parametrize(("chosen", "begins"), [(None, "ours "), ("language", "theirs "), ("base", "<user>")])
def test_all_cells_of_a_sweep_have_one_template(
    byte_base: Path, pair: Callable[..., dict[str, str]], chosen: str | None, begins: str
) -> None:
    from adapterswap.experiments.sweeps import SweepRecipe, prepare

    places = pair(OURS, THEIRS)
    recipe = SweepRecipe.model_validate({
        "base_model": str(byte_base), "task_experts": {"task": places["task"]},
        "language_experts": {"language": places["language"]}, "tasks": TASK,
        "settings": {"num_fewshot": 0, "limit": 1, "apply_chat_template": True, "chat_template_from": chosen},
    })  # fmt: skip
    prepared = prepare(recipe)
    (previewed,) = prepared.exam(prepared.tasks).preview()
    assert previewed.prompt.startswith(begins)
    assert prepared.described["companions"]["chat_template"] == (chosen or "task")
    assert prepared.notes


@pytest.mark.parametrize(("chosen", "begins"), [("language", "theirs "), ("base", "<user>")])
def test_all_cells_of_a_sweep_have_the_tokenizer_that_the_recipe_names(
    byte_base: Path, pair: Callable[..., dict[str, str]], tmp_path: Path, chosen: str, begins: str
) -> None:
    """Also cells that are reduced first, and cells without its owner."""
    from adapterswap.experiments.sweeps import Run, SweepRecipe, prepare, sweep

    places = pair(OURS, THEIRS)
    recipe = SweepRecipe.model_validate({
        "base_model": str(byte_base), "task_experts": {"task": places["task"]},
        "language_experts": {"language": places["language"]}, "tasks": TASK, "tokenizer": chosen,
        "compositions": [{"bottom": 1, "top": 1}, {"method": "ties", "density": 0.5, "max_rank": 2}],
        "settings": {"num_fewshot": 0, "limit": 1, "max_gen_toks": 2, "apply_chat_template": True},
    })  # fmt: skip
    prepared = prepare(recipe)
    (previewed,) = prepared.exam(prepared.tasks).preview()
    assert previewed.prompt.startswith(begins)
    assert prepared.described["companions"] == {"tokenizer": chosen, "chat_template": chosen}
    run = sweep(prepared, tmp_path / "run", device="cpu")
    assert len(run.results) == 5
    assert Run.read(tmp_path / "run").described["recipe"]["tokenizer"] == chosen
    composed = {str(result.cell.composition.get("tokenizer")) for result in run.results if "+" in result.cell.short}
    assert composed == {chosen}


def test_a_recipe_sets_them() -> None:
    from adapterswap.experiments.sweeps.recipe import SweepSettings

    options = SweepSettings.model_validate(
        {"enable_thinking": False, "think_end_token": "</think>", "date": "2024-07-26", "apply_chat_template": True}
    ).as_settings()
    assert (options.enable_thinking, options.think_end_token, options.date) == (False, "</think>", "2024-07-26")
    assert SweepSettings.model_validate({"date": datetime.date(2024, 7, 26)}).date == "2024-07-26"  # as YAML reads it


LOOP = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "it ran for 0.2 seconds"),
        ("{{ 'long' * 5000000 }}", "it wrote 20,000,000 characters"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ range(10000000) }}", "Range too big"),
        ("{{ " + "(" * 100000 + " }}", "maximum recursion depth exceeded"),
        ("{% if %}", "Expected an expression"),
    ],
    ids=["loop", "length", "type", "range", "nesting", "syntax"],
)
def test_a_template_of_somebody_else_ends(
    byte_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    """In evaluations and in training. Only the loop runs into the limit of time, however slow the processor is."""
    from adapterswap.experiments import chat
    from adapterswap.experiments.chat import ChatTemplate

    if template == LOOP:
        monkeypatch.setattr(chat, "_SECONDS", 0.2)
    turns = [{"role": "user", "content": "?"}]
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TemplateError, match=re.escape(reason)):
        ChatTemplate(templated(template))(turns)
    assert (signal.getsignal(signal.SIGVTALRM), signal.getitimer(signal.ITIMER_VIRTUAL)) == (handler, (0.0, 0.0))
    broken = template == "{% if %}" or "((" in template
    assert ChatTemplate(templated(template)).reads("enable_thinking") is broken
    with refused(ArgumentError, "apply_chat_template", match=re.escape(reason)):
        preview(templated(template), byte_model[0].config, TASK, settings())


def test_templates_in_other_threads_are_rendered_without_a_timer() -> None:
    from adapterswap.experiments.chat import ChatTemplate

    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(ChatTemplate(templated(CHAT)), [{"role": "user", "content": "?"}]).result()
    assert text == "<user>?</user>"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("doc_to_text", LOOP, "A task's template cannot be rendered: it ran for 0.2 seconds"),
        ("doc_to_text", "{{ 'long' * 5000000 }}", "it wrote 20,000,000 characters"),
        (
            "filter_list",
            [{"name": "f", "filter": [{"function": "regex", "regex_pattern": "(a+)+$"}, {"function": "take_first"}]}],
            "the answers cannot be filtered or scored: it ran for",
        ),
        (
            "metric_list",
            [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
              "regexes_to_ignore": ["(a+)+$"]}],
            "the answers cannot be filtered or scored: it ran for",
        ),
    ],
    ids=["loop", "length", "filter", "metric"],
)  # fmt: skip
def test_a_task_file_of_somebody_else_ends(
    byte_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    from adapterswap.experiments import chat
    from adapterswap.experiments.evaluation import stock_tasks

    monkeypatch.setattr(chat, "_SECONDS", 0.2)
    monkeypatch.setattr(stock_tasks.bounded_filters.__wrapped__, "__kwdefaults__", {"seconds": 0.2})
    tokenizer = byte_tokenizer()
    _Scripted(monkeypatch, tokenizer, "a" * 60 + "!<eos>")
    (tmp_path / "rows.json").write_text(json.dumps([{"question": "?", "answer": "a"}]))
    task = {
        "task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["x"], "max_gen_toks": 100},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}], key: value,
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
    with refused(DataError, "tasks", match=re.escape(reason)):
        evaluate_model(byte_model[0], tokenizer, ["mine"], settings(apply_chat_template=False, include_path=tmp_path))
