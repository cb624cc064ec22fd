"""Write the test of the fifth plan: 100 templates of word problems in French, Spanish and English, four of each.

    python examples/smollm2/new_test.py

The templates are in new_templates.jsonl. They were written after the rows and seeds of every expert were frozen. A
problem is drawn once and written in each language: the same people and numbers. Each has two sets of four choices: the
usual one (results of other operations, and numbers near the right one), and one whose numbers all have as many digits
as the right one. A second test has sentences that no expert was trained on, with four English readings of as many
words. Everything is the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from make_data import NAMES as LANGUAGE_NAMES
from make_data import drawn_rows, pool_in_data

HERE = Path(__file__).parent
TEMPLATES = HERE / "new_templates.jsonl"
LANGUAGES = ("fr", "es", "en")
EACH, SEED = 4, 51
"""Problems of each template, and the seed of all draws."""
SENTENCES, SEEDS = 200, 5
"""Sentences to translate in each language, and seeds of the experts that must not have read them."""
NAMES = {
    "fr": ("Nicolas", "Mathis", "Zoé", "Manon", "Bruno", "Chloé", "Simon", "Rose"),
    "es": ("Nicolás", "Mateo", "Sofía", "Rosa", "Bruno", "Clara", "Simón", "Julia"),
    "en": ("Nick", "Matt", "Zoe", "Rose", "Bruno", "Chloe", "Simon", "Molly"),
}
_AMOUNT, _PART, _FACTOR, _FEW = (10, 60), (2, 30), (2, 9), (2, 5)

Form = tuple[tuple[tuple[int, int], ...], Callable[..., Fraction | int]]
"""The smallest and largest value of each number, and the answer."""

FORMS: dict[str, Form] = {
    "a+b": ((_AMOUNT, _PART), lambda a, b: a + b),
    "a-b": ((_AMOUNT, _PART), lambda a, b: a - b),
    "a*b": ((_FACTOR, (2, 12)), lambda a, b: a * b),
    "a/b": (((8, 90), _FACTOR), lambda a, b: Fraction(a, b)),
    "a+b+c": ((_PART, _PART, _PART), lambda a, b, c: a + b + c),
    "a-b-c": ((_AMOUNT, (2, 20), (2, 20)), lambda a, b, c: a - b - c),
    "a+b-c": ((_AMOUNT, _PART, (2, 20)), lambda a, b, c: a + b - c),
    "a-b+c": (((30, 60), (2, 25), (2, 20)), lambda a, b, c: a - b + c),
    "a+a+b": ((_PART, (2, 20)), lambda a, b: a + a + b),
    "a+a-b": ((_PART, (2, 20)), lambda a, b: a + a - b if b < a else 0),
    "b+a*b": ((_FEW, (3, 15)), lambda a, b: b + a * b),
    "2*a+b": (((10, 45), (5, 20)), lambda a, b: 2 * a + b),
    "a*b+c": ((_FACTOR, _FACTOR, (2, 20)), lambda a, b, c: a * b + c),
    "a*b-c": ((_FACTOR, _FACTOR, (2, 20)), lambda a, b, c: a * b - c),
    "a+b*c": ((_AMOUNT, _FACTOR, _FACTOR), lambda a, b, c: a + b * c),
    "a-b*c": (((20, 90), _FACTOR, _FACTOR), lambda a, b, c: a - b * c),
    "a*b*c": ((_FEW, _FEW, _FEW), lambda a, b, c: a * b * c),
    "(a-b)*c": ((_AMOUNT, _PART, _FACTOR), lambda a, b, c: (a - b) * c),
    "(a+b)*c": ((_FEW, _FEW, _FACTOR), lambda a, b, c: (a + b) * c),
    "(a-b)/c": ((_AMOUNT, (2, 20), _FACTOR), lambda a, b, c: Fraction(a - b, c)),
    "(a+b)/c": ((_PART, _PART, _FACTOR), lambda a, b, c: Fraction(a + b, c)),
    "a*b/c": ((_FACTOR, _FACTOR, _FACTOR), lambda a, b, c: Fraction(a * b, c)),
    "a/b+c": (((8, 72), _FACTOR, (2, 20)), lambda a, b, c: Fraction(a, b) + c),
    "a/2+b": (((8, 40), (2, 20)), lambda a, b: Fraction(a, 2) + b),
}
_LARGEST = 150  # of an answer


def draw_numbers(form: str, rng: Random) -> tuple[tuple[int, ...], int]:
    """Different numbers of a problem, and its answer: a whole number above 1 that is none of them."""
    ranges, answer_of = FORMS[form]

    while True:
        numbers = tuple(rng.randint(*limits) for limits in ranges)
        answer = Fraction(answer_of(*numbers))
        whole = answer.denominator == 1 and 2 <= answer <= _LARGEST
        if whole and answer not in numbers and len(set(numbers)) == len(numbers):
            return numbers, int(answer)


def other_results(numbers: Sequence[int], answer: int) -> list[int]:
    """What other operations on the numbers give."""
    results = {sum(numbers)}

    for one, other in permutations(numbers, 2):
        results |= {one + other, one - other, one * other}
        if one % other == 0:
            results.add(one // other)

    return sorted(result for result in results if 0 < result < 1000 and result != answer)


def draw_choices(numbers: Sequence[int], answer: int, rng: Random, *, equal: bool) -> list[int]:
    """The answer and three others, in random order; with `equal`, each has as many digits as the answer."""
    others = other_results(numbers, answer)
    near = [answer + step for step in (-20, -10, -5, -3, -2, -1, 1, 2, 3, 5, 10, 20) if answer + step > 0]

    if equal:
        digits = len(str(answer))
        others = [number for number in others if len(str(number)) == digits]
        near = [number for number in near if len(str(number)) == digits]

    picked = rng.sample(others, min(2, len(others)))
    picked += rng.sample([number for number in near if number not in picked], 3 - len(picked))
    choices = [answer, *picked]
    rng.shuffle(choices)

    return choices


def draw_rows(template: dict[str, str], each: int) -> dict[str, list[dict[str, Any]]]:
    """Language → the problems of a template, as documents of a task."""
    rng = Random(f"{SEED} {template['id']}")
    rows: dict[str, list[dict[str, Any]]] = {language: [] for language in LANGUAGES}
    seen: set[tuple[int, ...]] = set()

    while len(rows["en"]) < each:
        numbers, answer = draw_numbers(template["answer"], rng)
        if numbers in seen:
            continue
        seen.add(numbers)

        first, second = rng.sample(range(len(NAMES["en"])), 2)
        usual = draw_choices(numbers, answer, rng, equal=False)
        equal = draw_choices(numbers, answer, rng, equal=True)
        fields = dict(zip("abc", numbers, strict=False))

        for language in LANGUAGES:
            people = {"A": NAMES[language][first], "B": NAMES[language][second]}
            rows[language].append({
                "question": template[language].format(**fields, **people),
                "choices": [str(number) for number in usual],
                "label": usual.index(answer),
                "equal_choices": [str(number) for number in equal],
                "equal_label": equal.index(answer),
                "template": template["id"],
                "kind": template["kind"],
                "form": template["answer"],
            })  # fmt: skip

    return rows


def problems(each: int = EACH) -> dict[str, list[dict[str, Any]]]:
    """Language → all problems of the test."""
    rows: dict[str, list[dict[str, Any]]] = {language: [] for language in LANGUAGES}

    for line in TEMPLATES.read_text(encoding="utf-8").splitlines():
        for language, drawn in draw_rows(json.loads(line), each).items():
            rows[language] += drawn

    return rows


def translations(language: str) -> list[dict[str, Any]]:
    """Sentences that are in no rows, each with its English reading and those of three others of as many words."""
    pool = pool_in_data(language)
    trained = {row["text"] for seed in range(SEEDS) for row in drawn_rows(language, seed)}
    heading = LANGUAGE_NAMES[language]
    unseen = [pair for pair in pool if f"{heading}: {pair[0]}\nEnglish: {pair[1]}" not in trained]

    rng = Random(f"{SEED} translations {language}")
    by_length: dict[int, list[str]] = {}
    for _, english in unseen:
        by_length.setdefault(len(english.split()), []).append(english)

    rows = []

    for foreign, english in rng.sample(unseen, SENTENCES):
        others = [other for other in by_length[len(english.split())] if other != english]
        choices = [english, *rng.sample(others, 3)]
        rng.shuffle(choices)
        rows.append({"sentence": foreign, "choices": choices, "label": choices.index(english)})

    return rows


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (HERE / "data" / name).write_text(text, encoding="utf-8")


def main() -> None:
    for language, rows in problems().items():
        write(f"new_{language}.jsonl", rows)

    for language in ("fr", "es"):
        write(f"translations_{language}.jsonl", translations(language))


if __name__ == "__main__":
    main()
