"""The words of the lab's two languages: English, and a constructed language called `xx`.

Pure data: the words, how each sentence is built in each language, and the vocabulary in a fixed order, which the
shipped base models depend on. Knows nothing of problems, questions or models.
"""

from __future__ import annotations

__all__ = [
    "ADJECTIVES",
    "GAIN_VERBS",
    "LANGUAGES",
    "LARGEST",
    "LOSS_VERBS",
    "NAMES",
    "NUMBERS",
    "OBJECTS",
    "PATTERNS",
    "PLACES",
    "SPECIAL_TOKENS",
    "VOCABULARY",
    "WORDS",
    "digit",
    "word",
]

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
}  # fmt: skip

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
    words: dict[str, None] = dict.fromkeys((*SPECIAL_TOKENS, *TAGS, *SIGNS, *NAMES))
    words.update(dict.fromkeys(digit(number) for number in range(LARGEST + 1)))
    for language in LANGUAGES:
        words.update(dict.fromkeys(en if language == "en" else xx for en, xx in WORDS.items()))
        for pattern in PATTERNS.values():
            words.update(dict.fromkeys(word for word in pattern[language].split() if not word.startswith("{")))
    return tuple(words)


VOCABULARY = _vocabulary()
