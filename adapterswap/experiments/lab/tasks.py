"""The kinds of training examples: questions, stories, counting, translation, code-switched text, word problems.

Each kind is a function of a random generator and one or two languages that draws a `LabRow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from adapterswap.experiments.lab.world import (
    ADJECTIVES,
    LARGEST,
    NAMES,
    OBJECTS,
    PLACES,
    WORDS,
    Fact,
    digit,
    draw_fact,
    draw_problem,
    number_word,
    word,
)

_SWITCHED = 0.4  # the share of words that code-switched text has in the other language


@dataclass(frozen=True)
class LabRow:
    """A row of training data. The loss is on the completion only, which is the whole text if the prompt is empty."""

    prompt: str
    completion: str

    @property
    def words(self) -> frozenset[str]:
        """The words of both."""
        return frozenset(f"{self.prompt} {self.completion}".split())


def question(rng: Random, language: str) -> LabRow:
    """A question about one of two facts; the answer is a name, a number in digits, or a word of the language."""
    kinds = (more_or_fewer, read_off, _who_has, _where_is, _which)
    kind = rng.choices(kinds, (3, 1, 1, 1, 1))[0]  # verbs of gaining and losing are the hardest to learn
    return kind(rng, language)


def read_off(rng: Random, language: str) -> LabRow:
    """How many objects a person has: the number in digits."""
    who, other = rng.sample(NAMES, 2)
    fact = Fact("has", who, rng.choice(tuple(OBJECTS)), rng.randint(1, LARGEST))
    facts = [fact, draw_fact(rng, other, ("likes", "is in"))]
    return _ask(rng, facts, Fact("how many", who, fact.object), language, digit(fact.count))


def more_or_fewer(rng: Random, language: str) -> LabRow:
    """Whether a person has more or fewer objects after a change."""
    problem = draw_problem(rng, part="train")
    query = Fact("more or fewer", object=problem.facts[0].object).tell(language)
    answer = "more" if problem.signs == ("+",) else "fewer"
    return LabRow(f"{problem.story(language)} {query}", word(answer, language))


def _who_has(rng: Random, language: str) -> LabRow:
    names, things = rng.sample(NAMES, 2), rng.sample(tuple(OBJECTS), 2)
    facts = [Fact("has", names[i], things[i], rng.randint(1, LARGEST)) for i in (0, 1)]
    return _ask(rng, facts, Fact("who has", object=things[0]), language, names[0])


def _where_is(rng: Random, language: str) -> LabRow:
    names, places = rng.sample(NAMES, 2), rng.sample(tuple(PLACES), 2)
    facts = [Fact("is in", names[i], place=places[i]) for i in (0, 1)]
    return _ask(rng, facts, Fact("where is", names[0]), language, word(places[0], language))


def _which(rng: Random, language: str) -> LabRow:
    names, adjectives = rng.sample(NAMES, 2), rng.sample(tuple(ADJECTIVES), 2)
    thing = rng.choice(tuple(OBJECTS))
    facts = [Fact("likes", names[i], thing, adjective=adjectives[i]) for i in (0, 1)]
    return _ask(rng, facts, Fact("which", names[0], thing), language, word(adjectives[0], language))


def _ask(rng: Random, facts: list[Fact], query: Fact, language: str, answer: str) -> LabRow:
    """The facts in random order, then the question."""
    rng.shuffle(facts)
    return LabRow(_tell([*facts, query], language), answer)


def story(rng: Random, language: str) -> LabRow:
    """Two to four facts as plain text."""
    return LabRow("", _tell(_draw_facts(rng, rng.randint(2, 4)), language))


def translation(rng: Random, source: str, target: str) -> LabRow:
    """One or two facts in `source`, the tag of the target language, and the same facts in `target`."""
    facts = _draw_facts(rng, rng.choice((1, 1, 2)))
    return LabRow(f"{_tell(facts, source)} <{target}>", _tell(facts, target))


def code_switched(rng: Random) -> LabRow:
    """A story as plain text with some words of the other language, which links the two vocabularies."""
    language = rng.choice(("en", "xx"))
    return LabRow("", _switch(rng, story(rng, language).completion, language))


def code_switched_question(rng: Random) -> LabRow:
    """A question with some words of the other language; the answer is in the question's main language."""
    language = rng.choice(("en", "xx"))
    row = question(rng, language)
    return LabRow(_switch(rng, row.prompt, language), row.completion)


def _switch(rng: Random, text: str, language: str) -> str:
    """A text with some words, `_SWITCHED` of those that can be translated, in the other language."""
    translations = WORDS
    if language == "xx":
        translations = {xx: en for en, xx in WORDS.items()}

    switched = []
    for token in text.split():
        if token in translations and rng.random() < _SWITCHED:
            token = translations[token]
        switched.append(token)
    return " ".join(switched)


def counting(rng: Random, language: str) -> LabRow:
    """Five consecutive numbers, each as a word and in digits: `three #3 four #4 …`."""
    first = rng.randint(1, LARGEST - 4)
    pairs = [f"{number_word(number, language)} {digit(number)}" for number in range(first, first + 5)]
    return LabRow(pairs[0], " ".join(pairs[1:]))


def word_problem(rng: Random, language: str, *, worked: float = 1.0, two_steps: float = 0.0) -> LabRow:
    """A problem of the training part; a share `worked` of the answers is right, the others repeat the first number."""
    problem = draw_problem(rng, part="train", two_steps=two_steps)
    answer = digit(problem.facts[0].count)
    if rng.random() < worked:
        answer = problem.answer
    return LabRow(problem.prompt(language), answer)


def _draw_facts(rng: Random, number: int) -> list[Fact]:
    return [draw_fact(rng, rng.choice(NAMES)) for _ in range(number)]


def _tell(facts: list[Fact], language: str) -> str:
    """The facts as text."""
    return " ".join(fact.tell(language) for fact in facts)
