"""Hygiene: detecting math and overlap with evaluations, and dropping such rows."""

from __future__ import annotations

import csv
import json
import random
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.evaluation.mgsm import LANGUAGES, read_mgsm
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.experiments.training.data import SourceCounts, load_rows
from adapterswap.experiments.training.hygiene import Grams, Screen, hash_grams, looks_like_math, tokenize_words
from adapterswap.experiments.training.recipe import DatasetSource, Hygiene
from adapterswap.kit.errors import AdapterswapError, DataError, NotFoundError

from .conftest import echo_rows, word_tokenizer, write_jsonl

EXAMPLES = Path(__file__).parents[3] / "examples" / "real_data" / "data"


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "turn",
    [
        ("Solve for x.", "3x + 5 = 11, so x = 2"),
        ("", r"\frac{1}{2} of it"),
        ("", "He has 48/2 = 24 apples"),
        ("", "$5 x 3 = $15"),
        ("", "３＋４＝７です"),
        ("", "৪৮ ÷ ২ = ২৪টি"),
        ("", "12 cups + 3 cups of flour"),
        ("Ana mayai 16 kila siku na hula 3.", "13"),
        ("রবির ১৬টি ডিম আছে", "১৩"),
        ("It costs $1,000 and 20% are taken off", "$800."),
        ("", "answer <<3*4=12>>12 #### 12"),
    ],
)
def test_maths_is_recognised(turn: tuple[str, str]) -> None:
    assert looks_like_math([turn])


@pytest.mark.parametrize(
    "turn",
    [
        ("Translate: COVID-19 began in 2019-2020.", "COVID-19 ilianza mwaka 2019-2020."),
        ("When was he born?", "12/03/1984"),
        ("Open 24/7, call 555-1234.", "Ndiyo, saa 24/7."),
        ("They won 3:1, and the year was 1998.", "3:1"),
        ("The hotel has 1,089 rooms. How many rooms?", "1089"),
        ("What is 9 July?", "A day in summer, e.g. 10 - 12 hours of light"),
        ("How old is she?", "21"),
        ("Tell me of C++ and a = b.", "C++ is a language; a = b assigns."),
    ],
)
def test_other_texts_are_not_maths(turn: tuple[str, str]) -> None:
    assert not looks_like_math([turn])


@pytest.mark.parametrize(
    "piece", ["1", "1,", "1 ", "1 a", ".", "1/", "a=", "<<", "3 x ", "\n", "1" + " " * 50, "9" * 25]
)
def test_no_text_takes_long_to_judge(piece: str) -> None:
    text = piece * (50_000 // len(piece))
    began = time.process_time()
    looks_like_math([(text, text)])
    assert time.process_time() - began < 2  # about 0.01; quadratic time would be minutes


def test_worked_solutions_are_maths_in_every_language() -> None:
    for language in LANGUAGES:
        mgsm = read_mgsm(language)
        assert all(looks_like_math([(each.question, each.solution)]) for each in mgsm.exemplars), language
        bare = sum(looks_like_math([(question, str(answer))]) for question, answer in mgsm.questions)
        assert bare / len(mgsm.questions) >= 0.9, language


def test_real_rows_are_classified_correctly() -> None:
    math, swahili = rows_of("math_train.jsonl"), rows_of("swahili_train.jsonl")
    assert all(looks_like_math([(row["question"], row["answer"])]) for row in math)
    assert sum(looks_like_math([(row["prompt"], row["completion"])]) for row in swahili) <= 0.01 * len(swahili)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_question_is_found_inside_a_row_in_any_spelling(language: str) -> None:
    screen = Screen(Hygiene(overlap=["mgsm"]), Path())
    found = missed = 0
    for question, _ in read_mgsm(language).questions[:50]:
        inside = f"Please answer this one: {question.upper()} Think first."
        found += screen.judge([(inside, "18")], is_task=True) == "mgsm"
        missed += screen.judge([("hello there", question)], is_task=False) is None
    assert missed == 0
    assert found >= 48  # a question of fewer than 13 words is found on a line of its own only


def test_shuffled_words_do_not_match() -> None:
    screen = Screen(Hygiene(overlap=["mgsm"]), Path())
    for question, _ in read_mgsm("en").questions[:50]:
        words = question.split()
        random.Random(0).shuffle(words)
        assert screen.judge([(" ".join(words), "")], is_task=True) is None


def test_the_hashes_of_gsm8k_test_know_its_questions_and_no_others() -> None:
    """MGSM's English questions are the first 250 of them; the example's rows are of the training split."""
    screen = Screen(Hygiene(overlap=["gsm8k_test"]), Path())
    assert all(screen.judge([(question, "")], is_task=True) for question, _ in read_mgsm("en").questions)
    for name in ("math_train.jsonl", "math_heldout.jsonl", "swahili_train.jsonl"):
        assert not any(screen.judge([tuple(row.values())[:2]], is_task=True) for row in rows_of(name))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Él comió, 3 Manzanas!", ["el", "comio", "3", "manzanas"]),
        ("কৃষ্ণ ১২", ["কষণ", "12"]),
        ("a_b-c", ["a", "b", "c"]),
        ("日本、語", ["日本語", "本語", "語"]),
        ("16個のABC卵", ["16", "個の", "の", "abc", "卵"]),
        ("", []),
    ],
)
def test_tokens_of_a_text(text: str, tokens: list[str]) -> None:
    assert tokenize_words(text) == tokens


words = st.lists(st.sampled_from("abcdefgh"), max_size=40)


@given(words, words)
def test_texts_overlap_if_they_share_thirteen_words(one: list[str], other: list[str]) -> None:
    def windows(tokens: list[str]) -> set[tuple[str, ...]]:
        whole = {tuple(tokens)} if 8 <= len(tokens) < 13 else set()
        return whole | {tuple(tokens[i : i + 13]) for i in range(len(tokens) - 12)}

    meet = bool(windows(one) & windows(other))
    assert Grams.of([" ".join(one)]).meet(hash_grams(" ".join(other))) == meet


@given(words, words)
def test_a_text_overlaps_every_text_that_contains_it(before: list[str], after: list[str]) -> None:
    core = [f"w{number}" for number in range(13)]
    assert Grams.of([" ".join(core)]).meet(hash_grams(" ".join([*before, *core, *after])))
    assert not Grams.of([" ".join(core)]).meet(hash_grams(" ".join([*before, *core[:-1], *after])))


@given(st.lists(st.integers(0, 2**48 - 1)))
def test_grams_are_read_back(hashes: list[int]) -> None:
    grams = Grams(np.array(hashes, np.uint64))
    again = Grams.from_bytes(grams.to_bytes())
    assert len(again) == len(grams) == len(set(hashes))
    assert all(again.meet(np.array([value], np.uint64)) for value in hashes)


def test_files_of_texts_count_too(tmp_path: Path) -> None:
    sentence = "Jumatatu, wanasayansi kutoka Shule ya Tiba walitangaza uvumbuzi wa chombo kipya cha uchunguzi."
    (tmp_path / "flores.swh").write_text(f"Ndiyo.\n{sentence}\nSentensi hii ina maneno manane tu na si zaidi.\n")
    screen = Screen(Hygiene(overlap=["flores.swh"]), tmp_path)
    assert screen.judge([("Tafsiri: x", f"«{sentence}»")], is_task=True) == "flores.swh"
    assert screen.judge([("", "Moja.\nSentensi hii ina maneno manane tu na si zaidi\nMbili.")], is_task=True)
    assert screen.judge([("", "Ndiyo.")], is_task=True) is None


def test_files_that_are_not_evaluations_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("Ndiyo.\n")
    (tmp_path / "latin").write_bytes("é\n".encode("latin-1"))
    with refused(AdapterswapError, "hygiene.overlap") as caught:
        Screen(Hygiene(overlap=["mgsm", "mgms", "short", "latin", "."]), tmp_path)
    assert [problem.kind for problem in caught.value.problems] == [NotFoundError, DataError, DataError, DataError]
    for problem, name in zip(caught.value.problems, ("mgms", "short", "latin", ""), strict=True):
        assert str(tmp_path / name) in problem.message


QUESTION = read_mgsm("sw").questions[0][0]
MIXED = [
    {"q": "Habari gani?", "a": "Nzuri."},
    {"q": "2 na 3 ni ngapi?", "a": "2 + 3 = 5"},
    {"q": QUESTION, "a": "18"},
    {"q": "Sema.", "a": None},
]


def load(folder: Path, rows: list[dict[str, Any]], hygiene: Hygiene, **source: Any) -> tuple[SourceCounts, list[str]]:
    write_jsonl(folder / "rows.jsonl", rows)
    result = DatasetSource(
        path="rows.jsonl", **({"prompt": "{q}", "completion": "{a}"} if not source.get("messages") else {}), **source
    )
    screen = Screen(hygiene, folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    [(counts, examples)] = load_rows(
        [result], folder, seed=0, chat=ChatTemplate(tokenizer), chat_prompts=False, separator=" ", screen=screen
    )
    return counts, [example.text for example in examples]


def test_rows_are_dropped_and_counted_by_reason(tmp_path: Path) -> None:
    counts, texts = load(tmp_path, MIXED, Hygiene(exclude_math=True))
    assert texts == ["Habari gani? Nzuri."]
    assert (counts.kept, counts.empty, counts.math, counts.overlap) == (4, 1, 1, {"mgsm": 1})


def test_the_tasks_own_maths_stays_and_evaluations_never_do(tmp_path: Path) -> None:
    counts, texts = load(tmp_path, MIXED, Hygiene(exclude_math=True), side="task")
    assert texts == ["Habari gani? Nzuri.", "2 na 3 ni ngapi? 2 + 3 = 5"]
    assert (counts.math, counts.overlap) == (0, {"mgsm": 1})


def test_an_overlap_may_be_refused(tmp_path: Path) -> None:
    with refused(DataError, "datasets", match="rows.jsonl, row 2 .*mgsm: .*Bata"):
        load(tmp_path, MIXED, Hygiene(on_overlap="refuse"))


def test_conversations_are_judged_by_their_turns(tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {
            "m": [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]
        }

    rows = [talk("a", "b", "c", "d"), talk("a", "b", "16 na 3?", "13"), talk(QUESTION, "b")]
    counts, texts = load(tmp_path, rows, Hygiene(exclude_math=True), messages="m")
    assert texts == ["abcd"]
    assert (counts.math, counts.overlap) == (1, {"mgsm": 1})


def test_runs_and_estimates_report_dropped_rows(make_recipe: Callable[..., TrainRecipe], tmp_path: Path) -> None:
    rows = [*echo_rows(32), {"question": "2 na 3?", "answer": "2 + 3 = 5"}, {"question": QUESTION, "answer": "18"}]
    recipe = make_recipe(rows=rows, hygiene={"exclude_math": True}, training={"max_steps": 1})
    expected = estimate(recipe).rows
    assert (expected.train, expected.math, expected.overlap, expected.dropped) == (32, 1, 1, 2)
    told = " ".join(expected.notes())
    assert "1 rows dropped: they look like math" in told
    assert "1 with mgsm" in told
    report = train(recipe, out_path=tmp_path / "out", progress=False)
    written = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert report.rows == expected
    assert written["rows"]["sources"][0]["overlap"] == {"mgsm": 1}
    assert written["recipe"]["hygiene"]["overlap"] == ["mgsm", "gsm8k_test"]


def test_a_source_of_nothing_else_is_refused(make_recipe: Callable[..., TrainRecipe]) -> None:
    rows = [{"question": f"{i} na 3?", "answer": f"{i} + 3 = {i + 3}"} for i in range(4)]
    with refused(DataError, "datasets", match="4 of 4 rows.*`side: task`"):
        estimate(make_recipe(rows=rows, hygiene={"exclude_math": True}))


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv", ".tsv"])
def test_evaluations_in_json_are_found_like_those_in_lines(tmp_path: Path, suffix: str, ascii_only: bool) -> None:
    """JSON's escapes hide the letters of a question, and its keys make a short one longer."""
    words = [f"నీటి{i}" for i in range(9)]
    questions = [
        " ".join(words),
        "Juma ana vitabu\nkumi na saba na anauza vitatu kati yake leo asubuhi sokoni mjini hapa",
    ]
    rows = [{"id": str(i), "question": question} for i, question in enumerate(questions)]
    if suffix == ".txt":
        content = "\n".join(questions)
    elif suffix == ".json":
        content = json.dumps({"rows": rows}, ensure_ascii=ascii_only)
    elif suffix in (".csv", ".tsv"):
        table = StringIO()
        writer = csv.DictWriter(table, list(rows[0]), delimiter="," if suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        content = table.getvalue()
    else:
        content = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    (tmp_path / f"mine{suffix}").write_text(content, encoding="utf-8")
    screen = Screen(Hygiene(overlap=[f"mine{suffix}"]), tmp_path)
    for question in questions:
        assert screen.judge([("", question)], is_task=True) == f"mine{suffix}", question
    assert (
        screen.judge([("", "Maji ya mto huu ni safi sana na watu wote wanayatumia kila siku nyumbani")], is_task=True)
        is None
    )
