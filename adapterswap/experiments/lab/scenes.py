"""The scenes: the mixtures of rows for pretraining and for the experts, and the held-out problems.

A scene is data; functions draw rows from it, the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from adapterswap.experiments.lab import tasks
from adapterswap.experiments.lab.tasks import LabRow
from adapterswap.experiments.lab.world import WordProblem, draw_problem, word

_Kind = Callable[[Random], LabRow]


@dataclass(frozen=True)
class Scene:
    """The data of a scene's base, experts and tests.

    Attributes:
        summary: one line for the command line.
        question: the question that the scene answers, for the report.
        unfamiliar: meanings whose xx word is almost absent from pretraining; language data and tests use all words.
        kept: the probability that a pretraining example with such a word is kept.
        pretraining: weights of the kinds of pretraining examples.
        pretraining_rows: their number.
        worked: the share of word problems with right answers in pretraining. The others only repeat the first number,
            so the skill is latent in the base until the math expert is trained.
        two_steps: the share of problems with a second gain or loss.
        math_rows: English word problems, all worked out, for the math expert.
        language: weights of the kinds of the language expert's rows; none is about answers of word problems.
        language_rows: their number.
    """

    name: str
    summary: str
    question: str
    unfamiliar: frozenset[str]
    kept: float
    pretraining: Mapping[str, float]
    pretraining_rows: int
    worked: float
    two_steps: float
    math_rows: int
    language: Mapping[str, float]
    language_rows: int


_GAP = Scene(
    name="gap",
    summary="The base hardly knows 11 of the language's verbs and numbers; the language expert learns them.",
    question="Do the language expert's bottom layers teach the math expert the unfamiliar words?",
    unfamiliar=frozenset(
        ("finds", "gets", "makes", "loses", "breaks", "lends", "three", "five", "six", "nine", "eleven")
    ),
    kept=0.004,
    pretraining={
        "question en": 0.20, "story en": 0.08, "counting en": 0.03, "word problem en": 0.14,
        "question xx": 0.08, "story xx": 0.05, "word problem xx": 0.04,
        "translation en xx": 0.05, "translation xx en": 0.07,
        "code-switched story": 0.12, "code-switched question": 0.10,
    },
    pretraining_rows=100_000,
    worked=0.3,
    two_steps=0.0,
    math_rows=3_000,
    language={"more or fewer xx": 0.3, "read off xx": 0.3, "translation xx en": 0.2, "counting xx": 0.2},
    language_rows=12_000,
)  # fmt: skip

_NO_GAP = replace(
    _GAP,
    name="no-gap",
    summary="The base knows every word, so the language expert has nothing to add; the reset shows this.",
    question="Does a gain come from the language expert, or only from undoing the math expert's outer layers?",
    unfamiliar=frozenset(),
    pretraining={**_GAP.pretraining, "word problem xx": 0.02},
    two_steps=0.4,
)

SCENES = {scene.name: scene for scene in (_GAP, _NO_GAP)}


def pretraining_rows(scene: Scene, seed: int) -> list[LabRow]:
    """The base's rows: English, some xx, translation, code-switched text, and mostly unsolved word problems."""
    rng = Random(f"{scene.name} pretraining {seed}")
    kinds = _kinds(scene)
    withheld = frozenset(word(meaning, "xx") for meaning in scene.unfamiliar)

    rows = []
    for kind in rng.choices(list(scene.pretraining), list(scene.pretraining.values()), k=scene.pretraining_rows):
        row = kinds[kind](rng)
        while withheld & row.words and rng.random() >= scene.kept:
            row = kinds[kind](rng)
        rows.append(row)
    return rows


def math_rows(scene: Scene, seed: int) -> list[LabRow]:
    """The math expert's rows: English word problems, worked out."""
    rng = Random(f"{scene.name} math {seed}")
    return [tasks.word_problem(rng, "en", two_steps=scene.two_steps) for _ in range(scene.math_rows)]


def language_rows(scene: Scene, seed: int) -> list[LabRow]:
    """The language expert's rows: generic tasks in xx with its full vocabulary, without word problems."""
    return _draw_rows(scene, scene.language, Random(f"{scene.name} language {seed}"))


def source_rows(scene: Scene, seed: int) -> list[LabRow]:
    """The rows of `language_rows` in English, for a reference expert, without translation."""
    english = {}
    for name, weight in scene.language.items():
        if not name.startswith("translation"):
            english[f"{name.removesuffix(' xx')} en"] = weight
    return _draw_rows(scene, english, Random(f"{scene.name} source {seed}"))


def _draw_rows(scene: Scene, weights: Mapping[str, float], rng: Random) -> list[LabRow]:
    """As many rows as the language expert has, of kinds drawn with these weights."""
    kinds = _kinds(scene)
    drawn = rng.choices(list(weights), list(weights.values()), k=scene.language_rows)
    return [kinds[kind](rng) for kind in drawn]


def draw_problems(scene: Scene, part: str, number: int) -> list[WordProblem]:
    """`number` different problems of `part` (`development` or `test`), the same for every seed."""
    rng = Random(f"{scene.name} {part}")
    problems: dict[WordProblem, None] = {}
    while len(problems) < number:
        problems[draw_problem(rng, part=part, two_steps=scene.two_steps)] = None
    return list(problems)


def _kinds(scene: Scene) -> dict[str, _Kind]:
    """The functions that draw a row, by the names that `Scene.pretraining` and `Scene.language` use."""
    kinds: dict[str, _Kind] = {
        "code-switched story": tasks.code_switched,
        "code-switched question": tasks.code_switched_question,
        "translation en xx": partial(tasks.translation, source="en", target="xx"),
        "translation xx en": partial(tasks.translation, source="xx", target="en"),
    }
    for language in ("en", "xx"):
        kinds |= {
            f"question {language}": partial(tasks.question, language=language),
            f"story {language}": partial(tasks.story, language=language),
            f"counting {language}": partial(tasks.counting, language=language),
            f"read off {language}": partial(tasks.read_off, language=language),
            f"more or fewer {language}": partial(tasks.more_or_fewer, language=language),
            f"word problem {language}": partial(
                tasks.word_problem, language=language, worked=scene.worked, two_steps=scene.two_steps
            ),
        }
    return kinds
