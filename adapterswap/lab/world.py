"""The lab's world: small facts and word problems, written in English or in the constructed language `xx`.

Pure Python, seeded, without torch. A meaning (a `Fact`, a `WordProblem`) is drawn first and then put into words, so the
same problem exists in both languages. Knows nothing of training mixtures, tokenizers or models.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from adapterswap.lab.lexicon import (
    ADJECTIVES,
    GAIN_VERBS,
    LARGEST,
    LOSS_VERBS,
    NAMES,
    NUMBERS,
    OBJECTS,
    PATTERNS,
    PLACES,
    digit,
    word,
)

__all__ = ["Fact", "WordProblem", "draw_fact", "draw_problem", "number_word"]

_NUMBERS = tuple(NUMBERS)
_OBJECTS = tuple(OBJECTS)
_VERBS = (*GAIN_VERBS, *LOSS_VERBS)
_PARTS = ("test", "development", *("train",) * 8)


def number_word(number: int, language: str) -> str:
    """The word for 1…12 in `language`."""
    return word(_NUMBERS[number - 1], language)


@dataclass(frozen=True)
class Fact:
    """One sentence of `PATTERNS`, a statement or a question, as a meaning: all words but the name are English."""

    pattern: str
    who: str = ""
    object: str = ""
    count: int = 0
    adjective: str = ""
    verb: str = ""
    place: str = ""

    def tell(self, language: str) -> str:
        """The sentence in `language`, its words separated by spaces."""
        noun = word(self.object, language)
        thing = PATTERNS["thing"][language].format(
            count=number_word(self.count, language) if self.count else "",
            adjective=word(self.adjective, language),
            object=noun,
        )
        sentence = PATTERNS[self.pattern][language].format(
            who=self.who, verb=word(self.verb, language), place=word(self.place, language), object=noun, thing=thing
        )
        return " ".join(sentence.split())


@dataclass(frozen=True)
class WordProblem:
    """`who` has some objects (`facts[0]`), then gains or loses some (the other facts).

    Attributes:
        facts: the facts that the answer depends on, in order.
        aside: a fact about another person, or None.
        aside_place: how many of `facts` come before it.
    """

    facts: tuple[Fact, ...]
    aside: Fact | None = None
    aside_place: int = 0

    @property
    def part(self) -> str:
        """`train`, `development` or `test`: a function of `facts` alone, not of the aside or the language.

        So a problem of one part is in no other part, in any language and for any seed.
        """
        return _PARTS[zlib.crc32(self.story("en", aside=False).encode()) % len(_PARTS)]

    @property
    def signs(self) -> tuple[str, ...]:
        """`+` for each gain and `-` for each loss, in order."""
        return tuple("+" if fact.verb in GAIN_VERBS else "-" for fact in self.facts[1:])

    @property
    def answer(self) -> str:
        """The answer, an expression such as `#7 + #5 - #2`, and not its value."""
        steps = (f" {sign} {digit(fact.count)}" for sign, fact in zip(self.signs, self.facts[1:], strict=True))
        return digit(self.facts[0].count) + "".join(steps)

    @property
    def key_words(self) -> frozenset[str]:
        """The meanings of the verbs and number words that the answer depends on."""
        verbs = {fact.verb for fact in self.facts[1:]}
        return frozenset(verbs | {_NUMBERS[fact.count - 1] for fact in self.facts})

    def story(self, language: str, *, aside: bool = True) -> str:
        """The facts as text, with or without the aside."""
        facts = list(self.facts)
        if aside and self.aside is not None:
            facts.insert(self.aside_place, self.aside)
        return " ".join(fact.tell(language) for fact in facts)

    def prompt(self, language: str) -> str:
        """The story and the question, with the tag for an expression."""
        query = Fact("how many now", self.facts[0].who, self.facts[0].object)
        return f"{self.story(language)} {query.tell(language)} <calc>"


def draw_problem(rng: Random, *, part: str, two_steps: float = 0.0, aside: float = 0.4) -> WordProblem:
    """A random problem of `part`; `two_steps` and `aside` are the shares with a second change and with an aside.

    The first number is 2…12, the changes are 1…12, and the result is never negative.
    """
    while True:
        who, other = rng.sample(NAMES, 2)
        thing = rng.choice(_OBJECTS)
        remaining = rng.randint(2, LARGEST)
        facts = [Fact("has", who, thing, remaining)]
        for _ in range(2 if rng.random() < two_steps else 1):
            verb = rng.choice(_VERBS)
            count = rng.randint(1, LARGEST if verb in GAIN_VERBS else max(1, min(remaining, LARGEST)))
            remaining += count if verb in GAIN_VERBS else -count
            facts.append(Fact("changes", who, thing, count, verb=verb))
        with_aside = rng.random() < aside
        place = rng.randint(0, len(facts))
        aside_fact = draw_fact(rng, other, ("has", "likes", "is in"))
        problem = WordProblem(tuple(facts), aside_fact if with_aside else None, place if with_aside else 0)
        if remaining >= 0 and problem.part == part:
            return problem


def draw_fact(rng: Random, who: str, patterns: Sequence[str] = ("has", "changes", "likes", "is in")) -> Fact:
    """A statement about `who`: what they have, gain or lose, what they like, or where they are."""
    pattern = rng.choice(patterns)
    if pattern == "is in":
        return Fact(pattern, who, place=rng.choice(tuple(PLACES)))
    thing, adjective = rng.choice(_OBJECTS), rng.choice(tuple(ADJECTIVES))
    if pattern == "likes":
        return Fact(pattern, who, thing, adjective=adjective)
    count, adjective = rng.randint(1, LARGEST), adjective if rng.random() < 0.3 else ""
    return Fact(pattern, who, thing, count, adjective, verb=rng.choice(_VERBS) if pattern == "changes" else "")
