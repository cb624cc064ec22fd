"""MGSM's data is complete, and its prompts are exact, also compared with lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from adapterswap.experiments.evaluation.harness import build_mgsm_task
from adapterswap.experiments.evaluation.mgsm import LANGUAGES, mgsm_task, mgsm_task_names, read_mgsm

DATA = Path(str(files("adapterswap.experiments.evaluation"))) / "data" / "mgsm"

# As published: google-research/url-nlp at 452a21ad3dae5668c06ceeac21ff073e1e40f9be.
SHA256 = {
    "en": "50021d0f28cc957edcb44e7806425b1c7fbd648ddcb9e0a8ec689d10e57d40fa",
    "sw": "2bac828d77229e65d7c7197b1ad4a2cb5b1fe99b163f2cbdd66501de6a2115c4",
    "bn": "6b00bc7cc635547e866989284afa924d789b5affa2eb8de623c385dd943ad977",
    "te": "dd6b1452c244bb2e4ba254c01ea84137f80c1cefc57d69c23b0ed88b9c0f36b7",
    "ja": "59a2b50debe77981fd784cb3b2bef1505e3abf2a37116dc9d7a366ab029b4637",
    "th": "f3932dc5ad8e9d0ea82b017adc1e1461dd647af861e7166d6741986602a0cfd6",
    "zh": "b2fa63151022370a0de1f4211c8c284eae74b0f5a3b003b1d5982c0d4a73f661",
    "de": "4dfea30fede44b813e2e496f5f0534049e83c7cc8aed6e00600b30ec62053626",
    "fr": "36207c1c03fd7cd3ea491441eb755408199f94e4a647851df531bbaedc99d606",
    "es": "5bd27ebdf00140cec845c5298dc17715f5cd57d8edda6df1976db40bf3f0750a",
    "ru": "6bd30fd2e80c5bac23f566fb4ae0e6a55a19578401fbf9a01fb21beb3645fef8",
}

# A native_cot prompt with 2 shots in each language: its first words, its answer word, the end of its second shot.
GOLDEN = {
    "bn": ("প্রশ্ন: রজারের 5টি টেনিস বল আছে।", "ধাপে ধাপে উত্তর:", "উত্তর হল 29।"),
    "de": ("Frage: Roger hat 5 Tennisbälle.", "Schritt-für-Schritt-Antwort:", "Die Antwort lautet 29."),
    "en": ("Question: Roger has 5 tennis balls.", "Step-by-Step Answer:", "The answer is 29."),
    "es": ("Pregunta: Roger tiene 5 pelotas de tenis.", "Respuesta paso a paso:", "La respuesta es 29."),
    "fr": ("Question : Roger a 5 balles de tennis.", "Réponse étape par étape :", "La réponse est 29."),
    "ja": ("問題：ロジャーは5個のテニスボールがあります。", "ステップごとの答え：", "答えは29です。"),
    "ru": ("Задача: у Роджера 5 теннисных мячей.", "Пошаговое решение:", "Ответ — 29."),
    "sw": ("Swali: Roger ana mipira 5 ya tenisi.", "Jibu la Hatua kwa Hatua:", "Jibu ni 29."),
    "te": ("ప్రశ్న: రోజర్ వద్ద 5 టెన్నిస్ బంతులు ఉన్నాయి.", "దశలవారీగా సమాధానం:", "సమాధానం 29."),
    "th": ("โจทย์: โรเจอร์มีลูกเทนนิส", "คำตอบทีละขั้นตอน:", "คำตอบคือ 29"),
    "zh": ("问题：罗杰有 5 个网球。", "逐步解答：", "答案是 29。"),
}


def prompt(task: Any, shots: int, document: int = 0) -> str:
    text = task.fewshot_context(task.task_docs[document], num_fewshot=shots)
    assert isinstance(text, str)
    return text


def exemplars(code: str) -> list[dict[str, Any]]:
    """The published rows, read without our code."""
    rows = map(json.loads, (DATA / "exemplars.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n"))
    return [row for row in rows if row["language"] == code]


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_data_is_as_published(code: str) -> None:
    assert hashlib.sha256((DATA / f"{code}.tsv").read_bytes()).hexdigest() == SHA256[code]
    language = read_mgsm(code)
    assert len(language.questions) == 250
    assert len(language.exemplars) == 8
    assert [gold for _, gold in language.questions] == [gold for _, gold in read_mgsm("en").questions]
    assert [e.number for e in language.exemplars] == [11, 29, 39, 9, 33, 8, 8, 5]


def test_the_licence_travels_with_the_data() -> None:
    assert "Creative Commons Attribution 4.0" in (DATA / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_shots_are_the_exemplars_word_for_word(code: str) -> None:
    rows, task = exemplars(code), build_mgsm_task(f"mgsm_native_cot_{code}")
    question = (DATA / f"{code}.tsv").read_text(encoding="utf-8").partition("\t")[0]
    for shots in (2, 8):
        text = prompt(task, shots)
        blocks = [f"{row['question']}\n{row['answer']}\n\n" for row in rows[:shots]]
        assert text.startswith("".join(blocks))
        requested = text.removeprefix("".join(blocks))
        question_word, answer_word = (rows[0][key].partition("：" if code in ("ja", "zh") else ":")[0] for key in
                                      ("question", "answer"))  # fmt: skip
        mark, space = ("：", "") if code in ("ja", "zh") else (":", " ")
        assert requested == f"{question_word}{mark}{space}{question}\n{answer_word}{mark}"


@pytest.mark.parametrize("code", LANGUAGES)
def test_golden_prompts(code: str) -> None:
    begin, answer_word, end = GOLDEN[code]
    text = prompt(build_mgsm_task(f"mgsm_native_cot_{code}"), 2)
    shots = text.split("\n\n")
    assert text.startswith(begin)
    assert len(shots) == 3
    assert shots[1].endswith(end)
    assert shots[2].endswith(f"\n{answer_word}")  # nothing after it: the prompt does not contain the gold answer
    assert text.count(answer_word) == 3


@pytest.mark.parametrize("code", LANGUAGES)
def test_direct_prompts_answer_with_bare_numbers(code: str) -> None:
    word = {"de": "Antwort:", "es": "Respuesta:", "fr": "Réponse :"}.get(code, "Answer:")
    text = prompt(build_mgsm_task(f"mgsm_direct_{code}"), 8)
    answers = [block.rpartition(f"\n{word}")[2] for block in text.split("\n\n")]
    assert answers == ["11", "29", "39", "9", "33", "8", "8", "5", ""]


def test_english_solutions_to_questions_in_another_language() -> None:
    text = prompt(build_mgsm_task("mgsm_en_cot_sw"), 8)
    for swahili, english in zip(exemplars("sw"), exemplars("en"), strict=True):
        assert f"{swahili['question']}\n{english['answer']}\n\n" in text


def test_every_document_gets_the_same_shots() -> None:
    task = build_mgsm_task("mgsm_native_cot_sw")
    assert prompt(task, 0) == mgsm_task("mgsm_native_cot_sw").prompt(task.task_docs[0]["question"])
    heads = {prompt(task, 8, document)[:2000] for document in range(20)}
    assert len(heads) == 1


def stock_task(name: str) -> Any:
    """The harness's own task over the same data, its shots in the same order."""
    mode, _, code = name.removeprefix("mgsm_").rpartition("_")
    config = dict(
        load_yaml(Path(lm_eval.__file__).parent / "tasks" / "mgsm" / mode / f"{name}.yaml", resolve_func=True)
    )
    for key in ("tag", "dataset_path", "dataset_name"):
        config.pop(key, None)
    shots = [
        {"question": row["question"], "answer": row["answer"], "answer_number": row["number"]}
        for row in exemplars(code)
    ]
    lines = (DATA / f"{code}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")[:5]
    requested = [
        {"question": question, "answer": None, "answer_number": int(gold.replace(",", ""))}
        for question, gold in (line.split("\t") for line in lines)
    ]
    config["custom_dataset"] = lambda **_: {"train": Dataset.from_list(shots), "test": Dataset.from_list(requested)}
    config["fewshot_config"] = {"sampler": "first_n", "split": "train"}
    return ConfigurableTask(config=config)


@pytest.mark.parametrize("name", mgsm_task_names())
def test_prompts_match_the_harness(name: str) -> None:
    """Prompts, stops and stock filters are the harness's, except for its errors listed in docs/evaluate.md."""
    ours, stock = build_mgsm_task(name), stock_task(name)
    mode, _, code = name.removeprefix("mgsm_").rpartition("_")
    same = [prompt(ours, shots, 3) == prompt(stock, shots, 3) for shots in (0, 2, 8)]
    if code in ("ja", "zh") or (mode == "native_cot" and code == "ru"):
        assert same == [False, False, False]
    elif mode == "en_cot" and code != "en":
        assert same == [True, False, False]
    else:
        assert same == [True, True, True]
    assert ours.config.generation_kwargs == stock.config.generation_kwargs
    assert ours.config.filter_list[:2] == [_without_version(f) for f in stock.config.filter_list]
    assert ours.doc_to_target(ours.task_docs[3]) == stock.doc_to_target(stock.task_docs[3])


def _without_version(stock_filter: dict[str, Any]) -> dict[str, Any]:
    return {"name": stock_filter["name"], "filter": [dict(step) for step in stock_filter["filter"]]}


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("mgsm_direct_ja", [("問題： ジェイムズ", "問題：ジェイムズ")]),
        ("mgsm_direct_zh", [("问题： 詹姆斯", "问题：詹姆斯")]),
        (
            "mgsm_native_cot_ja",
            [
                ("問題： ジェイムズ", "問題：ジェイムズ"),
                ("ステップごとの答え: ジャーは", "ステップごとの答え：ロジャーは"),
                ("ステップごとの答え: 曜から", "ステップごとの答え：月曜から"),
                ("ステップごとの答え:", "ステップごとの答え："),
            ],
        ),
        (
            "mgsm_native_cot_ru",
            [("Пошаговоерешение:  ", "Пошаговое решение: "), ("Пошаговоерешение:", "Пошаговое решение:")],
        ),
    ],
)
def test_where_the_harness_departs_from_the_exemplars(name: str, differences: list[tuple[str, str]]) -> None:
    text = prompt(stock_task(name), 2, 3)
    for stock, ours in differences:
        assert stock in text
        text = text.replace(stock, ours)
    assert text == prompt(build_mgsm_task(name), 2, 3)
