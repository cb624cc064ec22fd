"""The shipped TyDi QA and XCOPA, against lm-evaluation-harness's tasks over the same rows."""

from __future__ import annotations

import gzip
import hashlib
import json
import unicodedata
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from click.testing import Result
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from refusals import refused
from tolerances import near

from adapterswap.errors import ArgumentError
from adapterswap.evaluation import Settings, evaluate
from adapterswap.evaluation.data import (
    LooseAnswer,
    read_tydiqa,
    read_xcopa,
    score_answer,
    tydiqa_prompt,
    tydiqa_task_names,
    xcopa_choices,
    xcopa_prompt,
)
from adapterswap.evaluation.offline_tasks import build_shipped_task
from adapterswap.evaluation.tasks import _resolve, load_tasks

from .conftest import LAYERS, byte_tokenizer, pico_model

Model = tuple[Any, Any]
DATA = Path(str(files("adapterswap.evaluation"))) / "data"
STOCK = Path(lm_eval.__file__).parent / "tasks"

# As published: sagorbrur/tydiqa-language-specific at 55c6649, cambridgeltl/xcopa at e2e9d7f.
SHA256 = {
    "bn": "548ef1e26217481aca1a304713350bc4bebb8c0084092ca1c5520a067dede71c",
    "en": "0a79feb66a13d4e5df8a5e1e8ad40b4a2d6622be6816c2914863b495cf0ee3e4",
    "sw": "0846933d9b60f1f7532b32641efccecc9ada29bafef5a87c26e740046c858ac9",
    "te": "373255d29d0bbaec24153041ceab057ea99a472fd18eaa3514233abab2074920",
    "val": "e35fb416b7b9557bcede9987a53d56895c04f3608817d3326da09c52082fbfc5",
    "test": "4ca583c40f9ac045a9b6114fc1f052b0f4ca7402e7a78f567c32a7d8246aa273",
}


@pytest.mark.parametrize(("code", "questions"), [("bn", 113), ("en", 440), ("sw", 499), ("te", 669)])
def test_tydiqa_is_as_published(code: str, questions: int) -> None:
    content = gzip.decompress((DATA / "tydiqa" / f"{code}.json.gz").read_bytes())
    assert hashlib.sha256(content).hexdigest() == SHA256[code]
    rows = read_tydiqa(f"tydiqa_goldp_{code}")
    assert len(rows) == questions
    assert all(answer in row["context"] for row in rows for answer in row["answers"])


@pytest.mark.parametrize(("name", "split", "questions"), [("xcopa_sw", "test", 500), ("xcopa_val_sw", "val", 100)])
def test_xcopa_is_as_published(name: str, split: str, questions: int) -> None:
    assert hashlib.sha256((DATA / "xcopa" / f"sw.{split}.jsonl").read_bytes()).hexdigest() == SHA256[split]
    assert len(read_xcopa(name)) == questions


def test_the_licences_travel_with_the_data() -> None:
    assert "Apache License" in (DATA / "tydiqa" / "LICENSE").read_text("utf-8")
    assert "Attribution 4.0 International" in (DATA / "xcopa" / "LICENSE").read_text("utf-8")


def stock_config(path: str) -> dict[str, Any]:
    config = dict(load_yaml(STOCK / path, resolve_func=True))
    for key in ("tag", "dataset_path", "dataset_name"):
        config.pop(key, None)
    return config


def stock_tydiqa(code: str) -> Any:
    """The harness's own task over the published rows, as they come from the Hub."""
    content = json.loads(gzip.decompress((DATA / "tydiqa" / f"{code}.json.gz").read_bytes()))
    rows = [
        {"id": asked["id"], "title": article["title"], "context": paragraph["context"], "question": asked["question"],
         "answers": {"text": [answer["text"] for answer in asked["answers"]]}}
        for article in content["data"] for paragraph in article["paragraphs"] for asked in paragraph["qas"]
    ]  # fmt: skip
    splits = {"train": Dataset.from_list(rows[1:2]), "validation": Dataset.from_list(rows)}
    return ConfigurableTask(
        config=stock_config(f"tydiqa/tydiqa_goldp_{code}.yaml") | {"custom_dataset": lambda **_: splits}
    )


def as_floats(scores: dict[str, Any]) -> Any:
    return pytest.approx({metric: float(score) for metric, score in scores.items()})


STOCK_SCORE = stock_config("tydiqa/tydiqa_goldp_en.yaml")["process_results"]


@pytest.mark.parametrize("code", ["bn", "en", "sw", "te"])
def test_tydiqa_matches_the_harness(code: str) -> None:
    ours, stock = build_shipped_task(f"tydiqa_goldp_{code}"), stock_tydiqa(code)
    for row, published in zip(ours.task_docs, stock.task_docs, strict=True):
        assert ours.doc_to_text(row) == stock.doc_to_text(published)
        assert ours.doc_to_target(row) == stock.doc_to_target(published)
    assert ours.fewshot_context(ours.task_docs[0], 1) == stock.fewshot_context(stock.task_docs[0], 1)
    assert ours.config.generation_kwargs["until"] == stock.config.generation_kwargs["until"]
    # Right and wrong answers: another row's, a part of the row's own, more than the row's own.
    rows = list(ours.task_docs)
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        words = row["answers"][0].split()
        for answer in (*row["answers"], other["answers"][0], words[0].upper(), f"The {' '.join(words)}, 7 %!", ""):
            assert ours.process_results(row, [answer]) == as_floats(stock.process_results(row, [answer]))


@given(
    st.text(alphabet="ab the, An.১1-$", max_size=12), st.lists(st.text(alphabet="ab the, an", max_size=8), min_size=1)
)
def test_the_score_of_any_answer_matches_the_harness(answer: str, golds: list[str]) -> None:
    assert score_answer("tydiqa_goldp_en", answer, golds) == as_floats(STOCK_SCORE({"answers": golds}, [answer]))


def test_f1_by_hand() -> None:
    score = score_answer("tydiqa_goldp_en", "the 3rd of May", ["May 1999", "3rd May"])
    assert score == {"exact_match": 0, "f1": pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))}  # 3rd, of, May | 3rd, May


@pytest.mark.parametrize(
    ("code", "answer", "gold", "stock", "loose"),
    [
        ("bn", "1984 সালের 24 অক্টোবর", "১৯৮৪ সালের ২৪ অক্টোবর", 0, 1),
        ("te", "ఎల్ఎల్బీ", "ఎల్ఎల్\u200cబీ", 0, 1),
        ("sw", "km2 390,757", "km² 390,757", 0, 0),
        ("en", "１９９９", "1999", 0, 1),
        ("en", "The 2 billion copies.", "2 Billion Copies", 1, 1),
    ],
)
def test_what_the_loose_comparison_adds(code: str, answer: str, gold: str, stock: int, loose: int) -> None:
    name = f"tydiqa_goldp_{code}"
    assert score_answer(name, answer, [gold])["exact_match"] == stock
    assert score_answer(name, LooseAnswer(answer), [gold])["exact_match"] == loose


@pytest.mark.parametrize("name", tydiqa_task_names())
def test_a_published_answer_scores_one_in_every_unicode_form(name: str) -> None:
    for row in read_tydiqa(name):
        for answer in row["answers"]:
            assert score_answer(name, answer, row["answers"]) == {"exact_match": 1, "f1": 1}
            decomposed = LooseAnswer(unicodedata.normalize("NFD", answer))
            assert score_answer(name, decomposed, row["answers"]) == {"exact_match": 1, "f1": 1}


def test_shots_are_the_first_questions_about_other_passages() -> None:
    name = "tydiqa_goldp_sw"
    task, rows = build_shipped_task(name), read_tydiqa(name)
    for row in rows[:60]:
        shots = [other for other in rows if other["context"] != row["context"]][:2]
        before = "".join(f"{tydiqa_prompt(name, shot)} {shot['answers'][0]}\n\n" for shot in shots)
        assert task.fewshot_context(row, 2) == before + tydiqa_prompt(name, row)


def stock_xcopa() -> Any:
    splits = {
        name: Dataset.from_list(read_xcopa(ours))
        for name, ours in (("validation", "xcopa_val_sw"), ("test", "xcopa_sw"))
    }
    return ConfigurableTask(config=stock_config("xcopa/default_sw.yaml") | {"custom_dataset": lambda **_: splits})


def test_xcopa_matches_the_harness() -> None:
    ours, stock = build_shipped_task("xcopa_sw"), stock_xcopa()
    for row, published in zip(ours.task_docs, stock.task_docs, strict=True):
        assert ours.fewshot_context(row, 0) == stock.fewshot_context(published, 0)
        assert ours.doc_to_choice(row) == stock.doc_to_choice(published)
        assert ours.doc_to_target(row) == stock.doc_to_target(published)
    assert list(ours.aggregation()) == list(stock.aggregation()) == ["acc"]


def test_shots_of_xcopa_are_val_s_first_and_val_shows_none() -> None:
    val, row = read_xcopa("xcopa_val_sw"), read_xcopa("xcopa_sw")[3]
    before = "".join(f"{xcopa_prompt(shot)} {xcopa_choices(shot)[shot['label']]}\n\n" for shot in val[:2])
    assert build_shipped_task("xcopa_sw").fewshot_context(row, 2) == before + xcopa_prompt(row)
    tasks = load_tasks(["xcopa_val_sw", "xcopa_sw"], Settings(num_fewshot=3))["tasks"]
    assert {name: task.get_config("num_fewshot") for name, task in tasks.items()} == {"xcopa_sw": 3, "xcopa_val_sw": 0}


def test_xcopa_equals_a_plain_loop(byte_model: Model) -> None:
    model, tokenizer = byte_model
    result = evaluate(model, tokenizer, ["xcopa_sw"], Settings(limit=4))
    right = []
    for row, sample in zip(read_xcopa("xcopa_sw"), result.samples, strict=False):
        totals = []
        for choice in xcopa_choices(row):
            begin = len(tokenizer(xcopa_prompt(row))["input_ids"])
            ids = tokenizer(f"{xcopa_prompt(row)} {choice}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logs = model(ids).logits[0].log_softmax(-1)
            totals.append(sum(float(logs[i - 1, ids[0, i]]) for i in range(begin, ids.shape[1])))
        assert [likelihood for likelihood, _ in sample.output] == near(totals, depth=LAYERS)
        right.append(totals.index(max(totals)) == row["label"])
    task = result.tasks["xcopa_sw"]
    assert len(right) == 4
    assert task.score(metric="acc").value == sum(right) / 4
    assert (task.num_fewshot, task.cut) == (0, None)


@pytest.fixture(scope="module")
def reader() -> Model:
    """A model that has memorised the third Swahili answer, in full-width digits."""
    name, tokenizer, model = "tydiqa_goldp_sw", byte_tokenizer(), pico_model(layers=2, spread=0.05).train()
    prompt = tokenizer(tydiqa_prompt(name, read_tydiqa(name)[2]))["input_ids"]
    ids = torch.tensor([prompt + tokenizer(" ２１４\n\n")["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        torch.nn.functional.cross_entropy(model(ids).logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def test_right_answers_are_counted_strictly_and_loosely(reader: Model) -> None:
    result = evaluate(*reader, ["tydiqa_goldp_sw"], Settings(num_fewshot=0, limit=3, max_gen_toks=20, batch_size=1))
    third = result.samples[2]
    assert third.output == " ２１４"  # it ends with its line
    assert third.target == "214 Tanzania Bara na majimbo 50 Zanzibar"  # 214 is right too
    assert third.scores == {"none": {"exact_match": 0, "f1": 0}, "normalized": {"exact_match": 1, "f1": 1}}
    assert third.answers == {"none": " ２１４", "normalized": " ２１４"}
    task = result.tasks["tydiqa_goldp_sw"]
    means = [
        sum(sample.scores["normalized"]["f1"] for sample in result.samples) / 3,
        task.score("normalized", "f1").value,
    ]
    assert means[0] == pytest.approx(means[1])
    assert (task.num_docs, task.num_fewshot, task.cut) == (3, 0, sum(sample.cut for sample in result.samples))


def test_shots_by_default_and_too_many() -> None:
    tasks = load_tasks(["tydiqa_goldp_sw", "xcopa_sw"])["tasks"]
    assert [task.get_config("num_fewshot") for task in tasks.values()] == [1, 0]
    with refused(ArgumentError, "num_fewshot") as caught:
        load_tasks(["tydiqa_goldp_sw", "xcopa_sw"], Settings(num_fewshot=101))
    assert [problem.message for problem in caught.value.problems] == [
        "101 shots are too many: tydiqa_goldp_sw has 8",
        "101 shots are too many: xcopa_sw has 100",
    ]


def test_whole_names_are_shipped_tasks_and_patterns_are_harness_tasks() -> None:
    requested = _resolve(
        ["xcopa_sw", "xcopa_*", "tydiqa_goldp_te", "tydiqa_goldp_fi", "tydiqa_goldp", "mgsm_direct_s?"]
    )
    assert requested.shipped == ("xcopa_sw", "tydiqa_goldp_te")
    assert requested.theirs == ("xcopa_*", "tydiqa_goldp_fi", "tydiqa_goldp")
    assert requested.mgsm == ("mgsm_direct_sw",)


def test_the_command_line(run: Callable[..., Result], byte_base: Path) -> None:
    tasks = "tydiqa_goldp_en,xcopa_val_sw,mgsm_direct_sw"
    options = ("--limit", 2, "--max-gen-toks", 4, "--device", "cpu", "--json")
    result = run("evaluate", "--base-model", byte_base, "--tasks", tasks, *options)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    found = {
        task["name"]: [(score["metric"], score["filter"]) for score in task["scores"]] for task in content["tasks"]
    }
    assert found["tydiqa_goldp_en"] == [
        (metric, name) for name in ("none", "normalized") for metric in ("exact_match", "f1")
    ]
    assert found["xcopa_val_sw"] == [("acc", "none")]
    assert content["settings"]["confirm_run_unsafe_code"] is False
