"""The share of an answer that is in its task's language: lingua on short texts, and scores of a whole evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused
from tolerances import near
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.languages import is_same_language, language_of, language_share
from adapterswap.experiments.evaluation.subjects import Evaluation
from adapterswap.kit.errors import ArgumentError, DependencyError

SWAHILI = "Roger ana mipira mitano ya tenisi. Ananunua makopo mawili zaidi ya mipira ya tenisi."
ENGLISH = "Roger has five tennis balls. He buys two more cans of tennis balls."
TELUGU = "రోజర్ వద్ద ఐదు టెన్నిస్ బంతులు ఉన్నాయి. అతడు మరో రెండు క్యాన్‌లు కొన్నాడు."


@pytest.mark.parametrize(
    ("text", "language", "share"),
    [
        (SWAHILI, "sw", 1.0), (SWAHILI, "swh_Latn", 1.0), (ENGLISH, "sw", 0.0), (ENGLISH, "en", 1.0),
        (ENGLISH, "eng_Latn", 1.0), (TELUGU, "te", 1.0), (TELUGU, "tel_Telu", 1.0), ("5 + 2 * 3 = 11.", "sw", None),
        ("", "sw", None), ("Jibu ni 11.", "zh", 0.0), ("罗杰有五个网球。他又买了两罐网球。", "zh", 1.0),
    ],
)  # fmt: skip
def test_a_text_in_one_language(text: str, language: str, share: float | None) -> None:
    assert language_share(text, language) == share


def test_an_answer_that_changes_its_language() -> None:
    """Each sentence counts by its letters; numbers and formulas do not."""
    letters = [sum(character.isalpha() for character in text) for text in (SWAHILI, ENGLISH)]
    mixed = f"{SWAHILI}\n{ENGLISH}\n5 + 6 = 11"
    assert language_share(mixed, "sw") == near(letters[0] / sum(letters))
    assert language_share(mixed, "en") == near(letters[1] / sum(letters))


def test_a_point_in_a_number_ends_no_sentence() -> None:
    """Lingua takes `00 ya bahshishi` alone for English."""
    assert language_share("Analipa $15.00 ya bahshishi.", "sw") == 1.0


@pytest.mark.parametrize("between", [" ", "\n"])
def test_thai_sentences_have_no_full_stop(between: str) -> None:
    """A name in another script belongs to its Thai sentence, and a sentence in English after it does not."""
    thai = "Roger มีลูกเทนนิส 5 ลูก เขาซื้อลูกเทนนิสเพิ่มอีก 2 กระป๋อง"
    letters = [sum(character.isalpha() for character in text) for text in (thai, ENGLISH)]
    assert language_share(thai, "th") == 1.0
    assert language_share(thai + between + ENGLISH, "th") == near(letters[0] / sum(letters))
    assert language_share("5 + 6 = 11 ดังนั้นคำตอบคือ 11", "th") == 1.0


def test_languages_of_tasks() -> None:
    names = ("mgsm_native_cot_sw", "mgsm_direct_te@2", "belebele_swh_Latn", "flores_eng_Latn-swh_Latn", "gsm8k")
    assert [language_of(name) for name in names] == ["sw", "te", "swh_Latn", "swh_Latn", None]
    assert is_same_language("sw", "swh_Latn")
    assert is_same_language("xx", "xx")
    assert not is_same_language("sw", "tel_Telu")
    assert not is_same_language("xx", "yy")


def test_unrecognisable_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ArgumentError, parameter="language"):
        language_share(SWAHILI, "xx")
    monkeypatch.setattr("adapterswap.kit.dependencies.find_spec", lambda name: None)
    with refused(DependencyError):
        language_share(SWAHILI, "sw")


def make_task(folder: Path, language: str = "sw") -> str:
    """A task whose scores depend on the language of the model's text."""
    (folder / "rows.jsonl").write_text('{"q": "Swali: 1 + 1?", "a": "2"}\n{"q": "Swali: 2 + 2?", "a": "4"}\n')
    (folder / "task.yaml").write_text(
        f"task: sums_{language}\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['Swali:'], max_gen_toks: 4}\n"
        "metric_list:\n  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n"
    )
    return f"sums_{language}"


def test_an_evaluation_has_the_share_as_a_score(
    tmp_path: Path, byte_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(byte_base).eval()
    tokenizer = AutoTokenizer.from_pretrained(byte_base)
    name = make_task(tmp_path)
    plain = evaluate_model(model, tokenizer, [name], Settings(include_path=tmp_path))
    answers = iter([f"{SWAHILI} {ENGLISH}", "1 + 1"])
    written: list[str] = []

    def share(text: str, language: str) -> float | None:
        assert language == "sw"
        written.append(text)
        return language_share(next(answers), language)

    monkeypatch.setattr("adapterswap.experiments.evaluation.languages.language_share", share)
    result = evaluate_model(model, tokenizer, [name], Settings(include_path=tmp_path, language_fidelity=True))
    assert written == [sample.output for sample in plain.samples]
    score = result.tasks[name].score(metric="language_share")
    letters = [sum(character.isalpha() for character in text) for text in (SWAHILI, ENGLISH)]
    assert score.value == near(letters[0] / sum(letters))  # the second answer has no words, and no share
    assert (score.filter, score.stderr, score.higher_is_better) == ("language", None, True)
    assert [sample.scores.get("language") is None for sample in result.samples] == [False, True]
    assert result.tasks[name].scores[:-1] == plain.tasks[name].scores
    assert result.settings["language_fidelity"] is True
    assert plain.settings["language_fidelity"] is False


def test_tasks_without_answers_in_a_language_are_refused(tmp_path: Path, byte_base: Path) -> None:
    name = make_task(tmp_path, "xx")
    settings = Settings(include_path=tmp_path, language_fidelity=True)
    with refused(ArgumentError, parameter="language_fidelity"):
        Evaluation.prepare(byte_base, [name], settings=settings)
    Evaluation.prepare(byte_base, [name], settings=Settings(include_path=tmp_path))
