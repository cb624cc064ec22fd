"""The lab's world: word problems about small facts, written in English or in the constructed language.

The words, how each sentence is built in each language, and the vocabulary in a fixed order, which the shipped base
models depend on. A meaning (a `Fact`, a `WordProblem`) is drawn first and then put into words, so the same problem
exists in both languages. Pure Python, seeded, without torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

LANGUAGES = ("en", "xx")

# English word -> xx word. The English word is also the name of the meaning.
OBJECTS = {
    "pens": "zudis", "books": "buga", "apples": "mode", "coins": "gubus", "cups": "magas",
    "shells": "zeko", "stones": "paris", "keys": "selas", "eggs": "taras", "hats": "gosuk",
}  # fmt: skip
GAIN_VERBS = {
    "finds": "vinuk", "buys": "lige", "gets": "dukuk", "wins": "loku", "makes": "dumen", "borrows": "foma",
}  # fmt: skip
LOSS_VERBS = {
    "loses": "vurin", "sells": "tiros", "breaks": "vodan", "drops": "nabis", "lends": "sokon", "burns": "boles",
}  # fmt: skip
NUMBERS = {
    "one": "doben", "two": "femok", "three": "denos", "four": "kezos", "five": "kolo", "six": "fafe",
    "seven": "sebos", "eight": "fika", "nine": "mulus", "ten": "letus", "eleven": "sanuk", "twelve": "momak",
}  # fmt: skip
ADJECTIVES = {"red": "sobe", "blue": "gofan", "green": "radas", "small": "fudis", "big": "bazes", "old": "mesin"}
PLACES = {"house": "rina", "garden": "zonok", "market": "kafan", "school": "tines", "river": "bepi"}
ANSWERS = {"more": "tubun", "fewer": "satis"}

WORDS = OBJECTS | GAIN_VERBS | LOSS_VERBS | NUMBERS | ADJECTIVES | PLACES | ANSWERS

NAMES = ("Anna", "Ben", "Cara", "Dan", "Eva", "Finn", "Gita", "Hugo")

# Every sentence of the world, in both languages. xx marks the subject with `ka`, puts an adjective after its noun and a
# place before its postposition `du`, and ends a question with `qo`.
PATTERNS = {
    "has": {"en": "{who} has {thing} .", "xx": "{who} ka leles {thing} ."},
    "changes": {"en": "{who} {verb} {thing} .", "xx": "{who} ka {verb} {thing} ."},
    "likes": {"en": "{who} likes {thing} .", "xx": "{who} ka pules {thing} ."},
    "is in": {"en": "{who} is in the {place} .", "xx": "{who} ka {place} du vevek ."},
    "how many": {"en": "how many {object} does {who} have ?", "xx": "{who} ka leles teguk {object} qo ?"},
    "how many now": {"en": "how many {object} does {who} have now ?", "xx": "{who} ka leles teguk {object} labik qo ?"},
    "who has": {"en": "who has {object} ?", "xx": "ketun ka leles {object} qo ?"},
    "where is": {"en": "where is {who} ?", "xx": "{who} ka nila vevek qo ?"},
    "which": {"en": "{who} likes which {object} ?", "xx": "{who} ka pules {object} denen qo ?"},
    "more or fewer": {"en": "more or fewer {object} now ?", "xx": "tubun goru satis {object} labik qo ?"},
    "thing": {"en": "{count} {adjective} {object}", "xx": "{count} {object} {adjective}"},
}

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
TAGS = ("<calc>", "<en>", "<xx>")
SIGNS = (".", "?", "+", "-")
LARGEST = 12


def digit(number: int) -> str:
    """The token of a number in digits, shared by both languages: `#7`."""
    return f"#{number}"


def word(meaning: str, language: str) -> str:
    """The word for `meaning` (an English word, or empty) in `language`; a shared word stays the same."""
    return meaning if language == "en" else WORDS.get(meaning, meaning)


def _vocabulary() -> tuple[str, ...]:
    """All tokens, each once. Their order gives their ids, which the shipped base models depend on."""
    tokens = [*SPECIAL_TOKENS, *TAGS, *SIGNS, *NAMES]
    tokens += [digit(number) for number in range(LARGEST + 1)]
    for language in LANGUAGES:
        tokens += [word(meaning, language) for meaning in WORDS]
        for pattern in PATTERNS.values():
            tokens += [token for token in pattern[language].split() if not token.startswith("{")]
    return tuple(dict.fromkeys(tokens))


VOCABULARY = _vocabulary()


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
        count = ""
        if self.count:
            count = number_word(self.count, language)
        thing = PATTERNS["thing"][language].format(count=count, adjective=word(self.adjective, language), object=noun)

        # A field without a value leaves a double space.
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
        first, *changes = self.facts
        expression = digit(first.count)
        for sign, fact in zip(self.signs, changes, strict=True):
            expression += f" {sign} {digit(fact.count)}"
        return expression

    @property
    def key_words(self) -> frozenset[str]:
        """The meanings of the verbs and number words that the answer depends on."""
        verbs = {fact.verb for fact in self.facts[1:]}
        numbers = {number_word(fact.count, "en") for fact in self.facts}
        return frozenset(verbs | numbers)

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

        changes = 2 if rng.random() < two_steps else 1
        for _ in range(changes):
            verb = rng.choice(_VERBS)
            if verb in GAIN_VERBS:
                count = rng.randint(1, LARGEST)
                remaining += count
            else:
                count = rng.randint(1, max(1, min(remaining, LARGEST)))
                remaining -= count
            facts.append(Fact("changes", who, thing, count, verb=verb))

        # Always drawn, so that a problem takes the same number of random numbers with and without an aside.
        has_aside = rng.random() < aside
        place = rng.randint(0, len(facts))
        aside_fact = draw_fact(rng, other, ("has", "likes", "is in"))
        problem = WordProblem(tuple(facts))
        if has_aside:
            problem = WordProblem(tuple(facts), aside_fact, place)
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
    count = rng.randint(1, LARGEST)
    if rng.random() >= 0.3:
        adjective = ""
    if pattern == "has":
        return Fact(pattern, who, thing, count, adjective)
    return Fact(pattern, who, thing, count, adjective, verb=rng.choice(_VERBS))
