"""FLORES from local files in both layouts, with sacrebleu's scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import sacrebleu
from pyarrow import parquet
from refusals import refused

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.downloaded import FLORES_PATH, flores_metrics, is_flores
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError, DataError, NotFoundError

from .conftest import byte_tokenizer, pico_model

Model = tuple[Any, Any]

# Sentences of our own, in the place of FLORES's.
SENTENCES = {
    "eng_Latn": ["The cat sleeps on the mat.", "We plant maize in March.", "He said: “Rain is coming.”"],
    "swh_Latn": ["Paka analala juu ya mkeka.", "Tunapanda mahindi mwezi wa Machi.", "Alisema: “Mvua inakuja.”"],
    "jpn_Jpan": ["猫はマットの上で眠る。", "私たちは三月にトウモロコシを植える。", "彼は「雨が降る」と言った。"],
    "zho_Hans": ["猫睡在垫子上。", "我们三月种玉米。", "他说：“要下雨了。”"],
}


@pytest.fixture
def flores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in FLORES-200's layout; dev holds the same sentences backwards."""
    folder = tmp_path / "flores200_dataset"
    for split, order in (("devtest", 1), ("dev", -1)):
        (folder / split).mkdir(parents=True)
        for code, sentences in SENTENCES.items():
            text = "".join(f"{sentence}\n" for sentence in sentences[::order])
            (folder / split / f"{code}.{split}").write_text(text, encoding="utf-8")
    monkeypatch.setenv(FLORES_PATH, str(folder))
    return folder


@pytest.fixture(scope="module")
def translator() -> Model:
    """A model that has memorised other texts than the references for the Japanese and Swahili prompts."""
    import torch

    tokenizer, model = byte_tokenizer(), pico_model(layers=2, spread=0.05).train()
    rows = []
    for language, code in (("Japanese", "jpn_Jpan"), ("Swahili", "swh_Latn")):
        for source, target in zip(SENTENCES["eng_Latn"], SENTENCES[code], strict=True):
            prompt = tokenizer(f"English sentence: {source}\n{language} sentence:")["input_ids"]
            answer = tokenizer(f" {target[:-4]}!\nEnglish")["input_ids"]
            rows.append((torch.tensor([prompt + answer]), len(prompt)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        for ids, begin in rows:
            logits = model(ids).logits[0, begin - 1 : -1]
            torch.nn.functional.cross_entropy(logits, ids[0, begin:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


@pytest.mark.parametrize(("code", "words"), [("swh_Latn", "13a"), ("jpn_Jpan", "char")])
def test_corpus_scores_match_sacrebleu(translator: Model, flores: Path, code: str, words: str) -> None:
    name = f"flores_eng_Latn-{code}"
    result = evaluate_model(*translator, [name], Settings(max_gen_toks=120))
    outputs = [sample.output.strip() for sample in result.samples]
    assert len(set(outputs)) == 3
    bleu = sacrebleu.corpus_bleu(outputs, [SENTENCES[code]], tokenize=words).score
    chrf = sacrebleu.corpus_chrf(outputs, [SENTENCES[code]], word_order=2).score
    assert 5 < bleu < 100
    assert 5 < chrf < 100
    task = result.tasks[name]
    assert [score.metric for score in task.scores] == ["chrf++", f"bleu_{words}"]
    assert task.score(metric="chrf++").value == pytest.approx(chrf)
    assert task.score(metric=f"bleu_{words}").value == pytest.approx(bleu)
    assert {score.stderr for score in task.scores} == {None}
    assert all(score.higher_is_better for score in task.scores)
    assert f"|tok:{words}|" in task.version
    assert f"|nw:2|space:no|version:{sacrebleu.__version__}" in task.version
    assert (task.num_docs, task.num_fewshot, task.cut) == (3, 0, 0)


def test_prompts_with_and_without_shots(byte_model: Model, flores: Path) -> None:
    def prompts(name: str, shots: int | None) -> list[str]:
        options = Settings(num_fewshot=shots, max_gen_toks=2)
        return [sample.prompt for sample in evaluate_model(*byte_model, [name], options).samples]

    english, swahili = SENTENCES["eng_Latn"], SENTENCES["swh_Latn"]
    requested = [f"Swahili sentence: {sentence}\nEnglish sentence:" for sentence in swahili]
    assert prompts("flores_swh_Latn-eng_Latn", None) == requested
    shots = f"{requested[2]} {english[2]}\n\n{requested[1]} {english[1]}\n\n"  # dev's first two
    assert prompts("flores_swh_Latn-eng_Latn", 2) == [shots + prompt for prompt in requested]
    assert prompts("flores_dev_swh_Latn-eng_Latn", 2) == requested[::-1]  # dev gets no shots from itself


def test_an_output_ends_with_its_line(translator: Model, flores: Path) -> None:
    result = evaluate_model(*translator, ["flores_eng_Latn-swh_Latn"], Settings(max_gen_toks=120))
    assert not any("\n" in sample.output.strip("\n") or "English" in sample.output for sample in result.samples)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("write", [as_parquet, as_jsonl])
def test_flores_plus_has_the_same_rows(flores: Path, tmp_path: Path, monkeypatch: Any, write: Callable) -> None:  # type: ignore[type-arg]
    name = "flores_eng_Latn-swh_Latn"
    expected = list(LoadedTasks.load([name]).tasks[name].eval_docs)
    plus = tmp_path / "flores_plus"
    (plus / "devtest").mkdir(parents=True)
    for code, sentences in SENTENCES.items():
        rows = [{"id": number, "iso_639_3": code[:3], "text": text} for number, text in enumerate(sentences)]
        write(plus / "devtest" / code, rows[::-1])  # ids define the order
    monkeypatch.setenv(FLORES_PATH, str(plus))
    assert list(LoadedTasks.load([name]).tasks[name].eval_docs) == expected


@pytest.mark.parametrize("ids", [[0, 1, 3], [0, 1, 1]])
def test_sentences_are_paired_by_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Both languages have as many sentences, but not the same ones."""
    (tmp_path / "devtest").mkdir()
    for code, numbers in (("eng_Latn", [0, 1, 2]), ("swh_Latn", ids)):
        as_jsonl(tmp_path / "devtest" / code, [{"id": number, "text": f"{code} {number}"} for number in numbers])
    monkeypatch.setenv(FLORES_PATH, str(tmp_path))
    with refused(DataError, match="sentence [12] is not in both"):
        LoadedTasks.load(["flores_eng_Latn-swh_Latn"])


def test_words_are_tokenised_by_script() -> None:
    found = {
        code: list(flores_metrics(code))[1] for code in ("swh_Latn", "ben_Beng", "tel_Telu", "zho_Hans", "tha_Thai")
    }
    assert found == {
        "swh_Latn": "bleu_13a",
        "ben_Beng": "bleu_13a",
        "tel_Telu": "bleu_13a",
        "zho_Hans": "bleu_zh",
        "tha_Thai": "bleu_char",
    }


def test_names_of_flores_tasks() -> None:
    assert is_flores("flores_eng_Latn-swh_Latn")
    assert is_flores("flores_dev_eng_Latn-swh_Latn")
    assert not is_flores("flores_en-sw")
    assert not is_flores("catalan_bench_flores_ca-es")


def test_missing_flores_files(flores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ArgumentError, "tasks", match="xyz_Latn"):
        LoadedTasks.load(["flores_eng_Latn-xyz_Latn"])
    with refused(DataError, match=r"tel_Telu\.devtest, tel_Telu\.parquet or tel_Telu\.jsonl"):
        LoadedTasks.load(["flores_eng_Latn-tel_Telu"])
    monkeypatch.setenv(FLORES_PATH, str(flores / "absent"))
    with refused(NotFoundError, match="absent"):
        LoadedTasks.load(["flores_eng_Latn-swh_Latn"])
    monkeypatch.delenv(FLORES_PATH)
    with refused(NotFoundError, match="FLORES_PATH"):
        LoadedTasks.load(["flores_eng_Latn-swh_Latn"])


def test_files_that_do_not_fit(flores: Path) -> None:
    name, path = "flores_eng_Latn-swh_Latn", flores / "devtest" / "swh_Latn.devtest"
    path.write_text("Moja.\nMbili.\n", encoding="utf-8")
    with refused(DataError, match="eng_Latn has 3, swh_Latn has 2"):
        LoadedTasks.load([name])
    path.write_text("Moja.\n\nTatu.\n", encoding="utf-8")
    with refused(DataError, match="sentence 2 of swh_Latn"):
        LoadedTasks.load([name])
    path.write_bytes("Moja.\nMbili\nTatú.\n".encode("latin-1"))
    with refused(DataError, match=r"swh_Latn\.devtest"):
        LoadedTasks.load([name])
    with refused(ArgumentError, "num_fewshot", match="4.*dev has only 3"):
        LoadedTasks.load(["flores_eng_Latn-jpn_Jpan"], Settings(num_fewshot=4))
