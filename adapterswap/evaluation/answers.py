"""The number that a written solution gives as its answer, in the eleven languages of MGSM.

A solution says "the answer is", "Jibu ni", "答えは", ends in `#### 18` or `\\boxed{18}`, or just stops after the last
number. Every language's phrase is looked for in every text, since a model may answer in another language than it was
asked in. Knows phrases and numbers; knows nothing of models or benchmarks.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from adapterswap.evaluation.numbers import Number, find_numbers, format_number, normalize_text

__all__ = ["answer_text", "extract_answer", "is_correct"]

# Marks that hold nothing but the answer: GSM8K's line `#### 18` (but no Markdown heading), and LaTeX's box.
_MARKS = (r"####(?= *\W{0,4}\d[\d.,]*\W{0,4}$)", r"\\boxed *\{")
# Phrases after which a sentence can only go on with its answer.
_CONCLUSIONS = (
    r"(?<!/)answer(?: to .{1,60}?)?(?: is|=| =)",
    r"antwort (?:lautet|ist|beträgt)",
    r"respuesta(?: final| correcta)? es",
    r"réponse(?: finale| correcte)? est",
    r"ответ(?:ом)?(?: *[—-]| равен| будет| является)",
    r"jibu(?: la mwisho| sahihi)? ni",
    r"উত্তর(?:টি)? (?:হলো|হল|হচ্ছে|হবে)",
    r"(?:సమాధానం|జవాబు)(?= *[^\w\s:]? *-?\d)",
    r"คำตอบ(?:สุดท้าย)? *(?:คือ|เท่ากับ)",
    r"(?:答え?|解答|正解)(?:は|、)",
    r"答案(?:是|为|為)",
)
# Headings, which may also stand over a whole solution: the last one with just one number on its line counts.
_HEADINGS = "answer|antwort|lösung|ergebnis|respuesta|réponse|ответ|jibu|উত্তর|సమాధానం|జవాబు|คำตอบ|答え?|解答|答案"
# What begins a further question, which models go on to ask themselves.
_QUESTIONS = "question|problem|frage|pregunta|задача|вопрос|swali|প্রশ্ন|ప్రశ్న|โจทย์|คำถาม|問題|问题|質問"
_REACH = 60  # characters from a phrase to its number, on one line

_MARK = re.compile("|".join(_MARKS), re.MULTILINE)
_CONCLUSION = re.compile("|".join(map(normalize_text, _CONCLUSIONS)), re.IGNORECASE)
_HEADING = re.compile(normalize_text(f"(?:{_HEADINGS}) *[:ঃ]"), re.IGNORECASE)
_QUESTION = re.compile(normalize_text(rf"(?<=\d)\D*\n *({_QUESTIONS}) *\d* *:"), re.IGNORECASE)
_CLAUSE_END = re.compile(r"[,.;!?\n](?!\d)|[。！？،।、]")
_ASIDE = re.compile(r"(?<!\\)\([^()\n=]*\)")  # (9 eggs at $2 each), but neither (9 * 2 = 18) nor LaTeX's \(18\)


def extract_answer(text: str, language: str | None = None) -> Decimal | None:
    """The answer that `text` gives: the number after an answer phrase where there is one, else the last number.

    Numbers that are parts of an expression, a fraction, a range, a date or a time are passed over, so that
    "The answer is 5 + 6 = 11" gives 11 and "1/2" gives nothing. Of several phrases the last one counts, since models
    correct themselves; what comes after a further question does not.

    Args:
        text: what a model wrote.
        language: ISO 639-1 code, for `1.000` and `1 000` (see `find_numbers`).

    Returns:
        The exact value, or None where no number stands for itself.
    """
    text = normalize_text(text)
    if question := _QUESTION.search(text):
        text = text[: question.start(1)]
    numbers = [number for number in find_numbers(text, language) if number.value is not None and not number.operand]
    for phrases in (_MARK, _CONCLUSION):
        concluded = [
            (phrase, found[0]) for phrase in phrases.finditer(text) if (found := _after(phrase, text, numbers))
        ]
        if concluded:
            # "The answer is 18. The answer is in dollars, and she has 9 eggs": the second says nothing of a number.
            plain = [pair for pair in concluded if not _CLAUSE_END.search(text, pair[0].end(), pair[1].start)]
            return (plain or concluded[:1])[-1][1].value
    for phrase in reversed([*_HEADING.finditer(text)]):
        found = _after(phrase, text, numbers)
        if len(found) == 1:
            return found[0].value
    asides = [match.span() for match in _ASIDE.finditer(text)]
    stated = [number for number in numbers if not any(begin < number.start < end for begin, end in asides)]
    return (stated or numbers)[-1].value if numbers else None


def is_correct(text: str, gold: Decimal, language: str | None = None) -> bool:
    """Whether the answer in `text` equals `gold` as a number: `18.00` is 18; `-18` is not, nor is `1/2` one half."""
    return extract_answer(text, language) == gold


def answer_text(answer: Any) -> str:
    """What a filter took from an output, as text: a number in its plain form, `[invalid]` for none."""
    if answer is None:
        return "[invalid]"
    return format_number(answer) if isinstance(answer, Decimal) else str(answer)


def _after(phrase: re.Match[str], text: str, numbers: list[Number]) -> list[Number]:
    """The numbers within reach of a phrase: on its line, or on the next line that holds anything."""
    begin = len(text) - len(text[phrase.end() :].lstrip())
    line_end = text.find("\n", begin)
    reach = min(begin + _REACH, line_end if line_end >= 0 else len(text))
    return [number for number in numbers if begin <= number.start < reach]
