"""The world's grammar, its problems, and the separation of training rows and test problems."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from adapterswap.experiments.lab import SCENES
from adapterswap.experiments.lab.scenes import draw_problems, language_rows, math_rows, pretraining_rows
from adapterswap.experiments.lab.tasks import LabRow, code_switched_question, more_or_fewer, translation
from adapterswap.experiments.lab.world import (
    GAIN_VERBS,
    LOSS_VERBS,
    NUMBERS,
    PATTERNS,
    VOCABULARY,
    WORDS,
    Fact,
    WordProblem,
    draw_problem,
    word,
)

# A fifth of the rows is enough, drawn once for all tests.
SMALL = {name: replace(scene, pretraining_rows=20_000, language_rows=4_000) for name, scene in SCENES.items()}
GAP = SMALL["gap"]


@cache
def pretraining(name: str) -> list[LabRow]:
    return pretraining_rows(SMALL[name], 0)


def test_a_token_is_one_word_of_one_language() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert not set(WORDS) & set(WORDS.values())
    assert len(set(WORDS.values())) == len(WORDS)
    shared = {token for pattern in PATTERNS.values() for token in pattern["en"].split()}
    assert {token for pattern in PATTERNS.values() for token in pattern["xx"].split()} & shared <= {
        ".", "?", "{who}", "{verb}", "{thing}", "{object}", "{place}", "{count}", "{adjective}"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fact", "english", "xx"),
    [
        (Fact("has", "Anna", "pens", 7), "Anna has seven pens .", "Anna ka leles sebos zudis ."),
        (Fact("likes", "Ben", "pens", adjective="red"), "Ben likes red pens .", "Ben ka pules zudis sobe ."),
        (Fact("is in", "Cara", place="river"), "Cara is in the river .", "Cara ka bepi du vevek ."),
        (Fact("changes", "Dan", "hats", 2, verb="loses"), "Dan loses two hats .", "Dan ka vurin femok gosuk ."),
        (Fact("who has", object="eggs"), "who has eggs ?", "ketun ka leles taras qo ?"),
    ],
)
def test_facts_occur_in_both_languages(fact: Fact, english: str, xx: str) -> None:
    assert (fact.tell("en"), fact.tell("xx")) == (english, xx)


def solve(prompt: str) -> str:
    """Solve an English problem from its text alone."""
    who, thing = re.fullmatch(r".* how many (\w+) does (\w+) have now \? <calc>", prompt).group(2, 1)  # type: ignore[union-attr]
    number = {name: str(value) for value, name in enumerate(NUMBERS, 1)}
    terms = ""
    for sentence in prompt.split(" . "):
        if match := re.match(rf"{who} (\w+) (\w+) {thing}$", sentence):
            verb, count = match.groups()
            sign = {True: " + ", False: " - "}[verb in GAIN_VERBS] if verb != "has" else ""
            terms += f"{sign}#{number[count]}"
    return terms


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_answers_follow_from_the_text(scene: object) -> None:
    for problem in draw_problems(scene, "test", 300):  # type: ignore[arg-type]
        assert problem.answer == solve(problem.prompt("en"))


def test_nobody_has_a_negative_number() -> None:
    rng = Random(1)
    for _ in range(500):
        problem = draw_problem(rng, part="train", two_steps=0.5)
        left = 0
        for sign, fact in zip(("+", *problem.signs), problem.facts, strict=True):
            left += fact.count if sign == "+" else -fact.count
            assert left >= 0


def test_a_problem_is_the_same_in_both_languages() -> None:
    back = {xx: en for en, xx in WORDS.items()}
    for problem in draw_problems(GAP, "test", 100):
        english, xx = Counter(problem.prompt("en").split()), Counter(problem.prompt("xx").split())
        content = set(WORDS) | {"Anna", "Ben", "Cara", "Dan", "Eva", "Finn", "Gita", "Hugo"}
        result = Counter({token: n for token, n in english.items() if token in content})
        assert result == Counter(
            {back.get(token, token): n for token, n in xx.items() if back.get(token, token) in content}
        )


def test_the_parts_are_disjoint_and_about_8_1_1() -> None:
    rng, parts = Random(2), Counter[str]()
    for _ in range(300):
        parts["test"] += draw_any(rng).part == "test"
    assert 10 < parts["test"] < 60
    test = draw_problems(GAP, "test", 500)
    development = draw_problems(GAP, "development", 500)
    assert len(set(test)) == 500
    assert not {problem.facts for problem in test} & {problem.facts for problem in development}


def draw_any(rng: Random) -> WordProblem:
    """A problem of any part: both facts drawn independently."""
    who, thing = rng.choice("ABC"), "pens"
    verb = rng.choice((*GAIN_VERBS, *LOSS_VERBS))
    return WordProblem(
        (Fact("has", who, thing, rng.randint(2, 12)), Fact("changes", who, thing, rng.randint(1, 2), verb=verb))
    )


@pytest.mark.parametrize("name", SCENES)
def test_test_problems_are_not_trained_on(name: str) -> None:
    scene = SMALL[name]
    requested = [problem for part in ("test", "development") for problem in draw_problems(scene, part, 1500)]
    known = {
        (
            problem.facts[0].who,
            word(problem.facts[0].object, language),
            tuple(f.tell(language) for f in problem.facts),
        )
        for problem in requested
        for language in ("en", "xx")
    }
    questions = 0
    for row in (*pretraining(name), *math_rows(scene, 0), *language_rows(scene, 0)):
        if "?" not in row.prompt:
            continue
        questions += 1
        told = [f"{sentence} ." for sentence in row.prompt.split(" . ") if "?" not in sentence]
        for who, thing in {(sentence.split()[0], sentence.split()[-2]) for sentence in told}:
            own = tuple(sentence for sentence in told if sentence.startswith(who) and thing in sentence.split())
            assert (who, thing, own) not in known, row
    assert questions > 8_000


def test_the_language_experts_rows_hold_no_maths() -> None:
    rows = language_rows(GAP, 0)
    used = frozenset[str]().union(*(row.words for row in rows))
    assert not used & {"<calc>", "+", "-", "<xx>"}
    assert {word(meaning, "xx") for meaning in GAP.unfamiliar} <= used
    # English occurs only in translations into English.
    english = set(WORDS)
    for row in rows:
        assert not frozenset(row.prompt.split()) & english
        assert row.prompt.endswith("<en>") or not row.words & english


def test_the_base_rarely_sees_the_unfamiliar_words() -> None:
    rows = pretraining("gap")
    withheld = {word(meaning, "xx") for meaning in GAP.unfamiliar}
    met = sum(bool(row.words & withheld) for row in rows)
    assert 0 < met < 0.01 * len(rows)
    familiar = set(WORDS.values()) - withheld
    counts = Counter(token for row in rows for token in row.words & familiar)
    assert min(counts[token] for token in familiar) > 200


@pytest.mark.parametrize("draw", [pretraining_rows, math_rows, language_rows])
def test_rows_follow_from_the_seed(draw: object) -> None:
    few = replace(GAP, pretraining_rows=2_000)
    one, again, other = (draw(few, seed) for seed in (0, 0, 1))  # type: ignore[operator]
    assert one == again
    assert one != other


def test_kinds_of_examples() -> None:
    rng = Random(3)
    for _ in range(100):
        row = more_or_fewer(rng, "en")
        verb = next(token for token in row.prompt.split() if token in GAIN_VERBS or token in LOSS_VERBS)
        assert row.completion == ("more" if verb in GAIN_VERBS else "fewer")
    row = translation(Random(4), "en", "xx")
    assert row == LabRow(translation(Random(4), "xx", "en").completion + " <xx>", row.completion)
    mixed = [code_switched_question(rng) for _ in range(50)]
    assert any(row.words & set(WORDS) and row.words & set(WORDS.values()) for row in mixed)
