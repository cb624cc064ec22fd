"""One-step word problems in real languages, from the templates of templates.jsonl: for tests, and to train on.

A problem is drawn once and written in every language of its template: the same people, things and numbers. Templates
have two parts: settings are chosen on problems of `development`, results are those of `test`. Everything is the same
for the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from adapterswap.kit.errors import ArgumentError

Part = Literal["development", "test"]

EACH = {"development": 10, "test": 5}
"""Problems of each template."""

_NAMES = {
    "en": {
        "m": ("Tom", "Ben", "Jack", "Sam", "David", "Peter"),
        "f": ("Anna", "Kate", "Lucy", "Mary", "Jane", "Sarah"),
    },
    "es": {
        "m": ("Pedro", "Pablo", "Luis", "Diego", "Juan", "Carlos"),
        "f": ("María", "Ana", "Carmen", "Elena", "Lucía", "Marta"),
    },
    "fr": {
        "m": ("Pierre", "Paul", "Lucas", "Thomas", "Louis", "Hugo"),
        "f": ("Marie", "Claire", "Sophie", "Julie", "Laura", "Nadia"),
    },
}
_THINGS = {
    "en": ("apples", "books", "pens", "oranges", "flowers", "photos", "hats", "keys", "toys", "bottles"),
    "es": (
        "manzanas",
        "libros",
        "bolígrafos",
        "naranjas",
        "flores",
        "fotos",
        "sombreros",
        "llaves",
        "juguetes",
        "botellas",
    ),
    "fr": ("pommes", "livres", "stylos", "oranges", "fleurs", "photos", "chapeaux", "clés", "jouets", "bouteilles"),
}
_Person = tuple[str, int]  # gender, and place in `_NAMES` of a language
_PEOPLE: list[_Person] = [("m", place) for place in range(6)] + [("f", place) for place in range(6)]
_SPANISH_MASCULINE = {"libros", "bolígrafos", "sombreros", "juguetes"}
_ENGLISH_PRONOUNS = {"m": ("he", "his", "him"), "f": ("she", "her", "her")}
_LARGEST = 30  # the largest number that is added to or subtracted from
_DIGIT = (2, 9)  # the range of a number of one digit
_TRIES = 5000  # a template with only two numbers has 64 problems


@dataclass(frozen=True)
class Template:
    """A problem without its people, things and numbers.

    Attributes:
        name: `d01` … for development, `t01` … for test.
        operation: + - * or /, from the number {a} to the number {b}.
        texts: language → the problem, with fields in braces.
    """

    name: str
    part: Part
    operation: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class WordProblem:
    """A problem with its right answer.

    Attributes:
        template: the name of its template.
        questions: language → the text.
        number: the right answer.
        choices: the right answer and three others, in random order.
    """

    template: str
    operation: str
    questions: Mapping[str, str]
    number: int
    choices: tuple[int, ...]

    @property
    def answer(self) -> str:
        return str(self.number)

    def prompt(self, language: str) -> str:
        """What a model reads before its answer; the words around the question are English in every language."""
        return f"Question: {self.questions[language]}\nAnswer:"

    def as_row(self, language: str) -> dict[str, Any]:
        """A document of a task for lm-evaluation-harness."""
        return {
            "question": self.questions[language],
            "choices": [str(number) for number in self.choices],
            "label": self.choices.index(self.number),
            "template": self.template,
            "operation": self.operation,
        }


@cache
def templates() -> tuple[Template, ...]:
    """All templates, in the order of the file."""
    read = []
    for line in Path(__file__).with_name("templates.jsonl").read_text(encoding="utf-8").splitlines():
        texts = json.loads(line)
        name, part, operation = texts.pop("id"), texts.pop("part"), texts.pop("operation")
        read.append(Template(name, part, operation, texts))
    return tuple(read)


def draw_problem(template: Template, rng: Random) -> WordProblem:
    """A problem of a template, in all its languages."""
    a, b, answer = _numbers(template.operation, rng)
    first, second = rng.sample(_PEOPLE, 2)
    thing = rng.choice(range(len(_THINGS["en"])))

    questions = {}
    for language, text in template.texts.items():
        questions[language] = text.format(a=a, b=b, **_fields(language, first, second, thing))
    return WordProblem(template.name, template.operation, questions, answer, _choices(a, b, answer, rng))


def _numbers(operation: str, rng: Random) -> tuple[int, int, int]:
    """The two numbers of a problem, and its answer."""
    if operation == "+":
        a, b = rng.randint(5, _LARGEST), rng.randint(*_DIGIT)
        return a, b, a + b
    if operation == "-":
        b = rng.randint(*_DIGIT)
        a = rng.randint(b + 2, _LARGEST)
        return a, b, a - b
    a, b = rng.randint(*_DIGIT), rng.randint(*_DIGIT)
    if operation == "*":
        return a, b, a * b
    return a * b, b, a


def _choices(a: int, b: int, answer: int, rng: Random) -> tuple[int, ...]:
    """The answer among results of other operations and numbers near it, all above zero."""
    others = {a + b, a - b, a * b}
    if a % b == 0:
        others.add(a // b)
    others = {number for number in others if number > 0 and number != answer}
    picked = rng.sample(sorted(others), min(2, len(others)))

    near = []
    for step in (-10, -2, -1, 1, 2, 10):
        number = answer + step
        if number > 0 and number not in picked:
            near.append(number)
    picked += rng.sample(near, 3 - len(picked))
    choices = [answer, *picked]
    rng.shuffle(choices)
    return tuple(choices)


def _fields(language: str, first: _Person, second: _Person, thing: int) -> dict[str, str]:
    """The values of a template's fields in a language, for two people and a place in `_THINGS`."""
    gender, place = first
    other_gender, other_place = second
    things = _THINGS[language][thing]
    fields = {"A": _NAMES[language][gender][place], "B": _NAMES[language][other_gender][other_place], "things": things}
    if language == "en":
        he, his, him = _ENGLISH_PRONOUNS[gender]
        return fields | {"he": he, "his": his, "him": him, "His": his.capitalize()}
    if language == "es":
        how_many = "Cuántos" if things in _SPANISH_MASCULINE else "Cuántas"
        return fields | {"How_many": how_many}

    pronouns = {"m": "il", "f": "elle"}
    of_things = f"d'{things}" if things[0] in "aeiouéœ" else f"de {things}"
    they = "elles" if gender == other_gender == "f" else "ils"
    return fields | {
        "of_things": of_things,
        "he": pronouns[gender],
        "he_b": pronouns[other_gender],
        "they": they,
        "they_f": f"{pronouns[gender]}s",  # with a sister
    }


def draw_problems(part: Part, each: int | None = None, seed: int = 0) -> list[WordProblem]:
    """Different problems of every template of a part, `each` of them (by default those of `EACH`).

    Raises:
        ArgumentError: a template has fewer problems.
    """
    problems: list[WordProblem] = []
    for template in templates():
        if template.part != part:
            continue
        rng = Random(f"{part} {template.name} {seed}")
        seen: set[str] = set()
        for _ in range(each or EACH[part]):
            problems.append(_draw_other(template, rng, "en", seen, parameter="each"))
    return problems


def training_rows(number: int, seed: int, *, language: str = "en", exclude: Iterable[str] = ()) -> list[dict[str, str]]:
    """Solved problems of all templates in turn, shuffled, as prompts and completions.

    Args:
        exclude: questions that must not be among them, such as those of `draw_problems`.

    Raises:
        ArgumentError: a template has fewer problems.
    """
    rng = Random(f"training {language} {seed}")
    seen = set(exclude)
    rows = []
    for template in islice(cycle(templates()), number):
        problem = _draw_other(template, rng, language, seen, parameter="number")
        rows.append({"prompt": problem.prompt(language), "completion": f" {problem.answer}"})
    rng.shuffle(rows)
    return rows


def _draw_other(template: Template, rng: Random, language: str, seen: set[str], *, parameter: str) -> WordProblem:
    """A problem whose question is not in `seen`, to which it is added."""
    for _ in range(_TRIES):
        problem = draw_problem(template, rng)
        question = problem.questions[language]
        if question not in seen:
            seen.add(question)
            return problem
    raise ArgumentError(
        f"{_TRIES} draws found no further problem of template {template.name}",
        "Ask for fewer problems",
        parameter=parameter,
    )


def questions_of(problems: Sequence[WordProblem], language: str) -> list[str]:
    """The texts of problems in a language."""
    return [problem.questions[language] for problem in problems]
