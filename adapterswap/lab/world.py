"""The lab's world: small facts and word problems, told in English or in the constructed language `xx`.

Pure Python, seeded, no torch. A meaning (a `Fact`, a `WordProblem`) is drawn first and told in a language afterwards,
so the same problem exists in both. Knows nothing of training mixes, tokenizers or models.
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
    """`who` has some objects (`facts[0]`), then gains or loses some (the others).

    Attributes:
        facts: what the answer depends on, in order.
        aside: what somebody else has or likes, or where they are, or None.
        aside_place: how many of `facts` come before it.
    """

    facts: tuple[Fact, ...]
    aside: Fact | None = None
    aside_place: int = 0

    @property
    def part(self) -> str:
        """`train`, `development` or `test`: a fixed function of `facts`, whatever the aside and the language.

        So no problem of one part can stand in another, in any language, whichever seed draws it.
        """
        return _PARTS[zlib.crc32(self.story("en", aside=False).encode()) % len(_PARTS)]

    @property
    def signs(self) -> tuple[str, ...]:
        """`+` for a gain and `-` for a loss, change by change."""
        return tuple("+" if fact.verb in GAIN_VERBS else "-" for fact in self.facts[1:])

    @property
    def answer(self) -> str:
        """The expression that is asked for, such as `#7 + #5 - #2`; working it out is not asked for."""
        steps = (f" {sign} {digit(fact.count)}" for sign, fact in zip(self.signs, self.facts[1:], strict=True))
        return digit(self.facts[0].count) + "".join(steps)

    @property
    def key_words(self) -> frozenset[str]:
        """The verbs and number words, as meanings, that must be understood to answer."""
        verbs = {fact.verb for fact in self.facts[1:]}
        return frozenset(verbs | {_NUMBERS[fact.count - 1] for fact in self.facts})

    def story(self, language: str, *, aside: bool = True) -> str:
        """The facts as text, with the aside in its place unless it is to be left out."""
        facts = list(self.facts)
        if aside and self.aside is not None:
            facts.insert(self.aside_place, self.aside)
        return " ".join(fact.tell(language) for fact in facts)

    def prompt(self, language: str) -> str:
        """The story and the question, with the tag that asks for an expression."""
        asked = Fact("how many now", self.facts[0].who, self.facts[0].object)
        return f"{self.story(language)} {asked.tell(language)} <calc>"


def draw_problem(rng: Random, *, part: str, two_steps: float = 0.0, aside: float = 0.4) -> WordProblem:
    """A random problem of `part`; `two_steps` and `aside` are the shares that have a second change, an aside.

    The first number is 2…12, the changes are 1…12, and nobody ever has less than nothing.
    """
    while True:
        who, other = rng.sample(NAMES, 2)
        thing = rng.choice(_OBJECTS)
        left = rng.randint(2, LARGEST)
        facts = [Fact("has", who, thing, left)]
        for _ in range(2 if rng.random() < two_steps else 1):
            verb = rng.choice(_VERBS)
            count = rng.randint(1, LARGEST if verb in GAIN_VERBS else max(1, min(left, LARGEST)))
            left += count if verb in GAIN_VERBS else -count
            facts.append(Fact("changes", who, thing, count, verb=verb))
        with_aside = rng.random() < aside
        place = rng.randint(0, len(facts))
        told = draw_fact(rng, other, ("has", "likes", "is in"))
        problem = WordProblem(tuple(facts), told if with_aside else None, place if with_aside else 0)
        if left >= 0 and problem.part == part:
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
