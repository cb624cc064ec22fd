"""The number that a written solution gives as its answer, in the eleven languages of MGSM.

A solution says "the answer is", "Jibu ni", "答えは", ends in `#### 18` or `\\boxed{18}`, or just stops after the last
number. The reader finds the place of the answer and reads exactly one number there. If there are several, or words and
signs that may change the number, the result is no answer, never another number. The phrases of all languages are
searched for in every text, because a model may answer in another language than that of the question. Knows phrases and
numbers; knows nothing of models or benchmarks.
"""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import pairwise
from typing import Any

from adapterswap.evaluation.number_words import AND, EQUALS, THEREFORE, any_word
from adapterswap.evaluation.numbers import Number, find_numbers, format_number, normalize_text

__all__ = ["answer_text", "extract_answer", "is_correct"]

_LATEX = [
    (re.compile(r"\\[dt]?frac *(\d)(\d)"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac *\{([^{}]{1,40})\} *\{([^{}]{1,40})\}"), r" \1/\2"),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-z])"), "×"),
    (re.compile(r"\\div(?![a-z])"), "÷"),
    (re.compile(r"\\sqrt(?![a-z])"), "√"),
    (re.compile(r"\\(?:text|math)[a-z]*(?=\{)|\\ "), " "),
    (re.compile(r"(?<=\d)\^\{(-?\d+)\}"), r"^\1"),
    (re.compile(r"(?<=[a-zA-Z])\^\{?\d\}?"), ""),  # 48 m^2
]

# Marks that hold only the answer: GSM8K's line `#### 18` (not a Markdown heading), and LaTeX's box.
_MARK = re.compile(r"####(?= *\W{0,4}\d[\d.,]*\W{0,4}$)|\\boxed", re.MULTILINE)
# Phrases after which a sentence can only continue with its answer.
_CONCLUSIONS = (
    r"(?<!/)answers?(?: to .{1,60}?)?(?: (?:is|are)(?!\w)| ?=)",
    r"antwort (?:lautet|ist|beträgt|liegt)",
    r"respuesta(?: final| correcta)? es(?:tá)?",
    r"réponse(?: finale| correcte)? (?:n')?est",
    r"ответ(?:ом)?(?: *[—-]| равен| будет| является)",
    r"jibu(?: la mwisho| sahihi)? ni(?!\w)",
    r"উত্তর(?:টি)? (?:হলো|হল|হচ্ছে|হবে)",
    r"(?:సమాధానం|జవాబు)(?= *[^\w\s:]? *-?\d| *$)",
    r"คำตอบ(?:สุดท้าย)? *(?:คือ|เท่ากับ)",
    r"(?:答え?|解答|正解)(?:は|、)",
    r"答案(?:是|为|為|在)",
)
# Headings, of an answer or of a whole solution.
_HEADINGS = "answer|antwort|lösung|ergebnis|respuesta|réponse|ответ|jibu|উত্তর|సమాధానం|జవాబు|คำตอบ|答え?|解答|答案"
# The start of a further question: models often continue with one.
_QUESTIONS = "question|problem|frage|pregunta|задача|вопрос|swali|প্রশ্ন|ప్రశ్న|โจทย์|คำถาม|問題|问题|質問"
# The start of a sentence that takes back the one before.
_CORRECTIONS = (
    r"(?:wait|hold on|actually|correction|sorry|oops|hmm|moment|entschuldigung|korrektur|perdón|lo siento|"
    r"corrección|pardon|désolé|attendez|извините|простите|подождите|samahani)(?!\w)|"
    r"(?:no|nein|non|нет|hapana|না)[,.!]|দুঃখিত|ভুল|క్షమించండి|కాదు|すみません|いや|違い|訂正|抱歉|不对|更正|ขอโทษ"
)
_CONCLUSION = re.compile("|".join(map(normalize_text, _CONCLUSIONS)), re.IGNORECASE)
_HEADING = re.compile(normalize_text(f"(?:{_HEADINGS}) *[:ঃ]"), re.IGNORECASE)
_QUESTION = re.compile(normalize_text(rf"(?<=\d)\D*\n *({_QUESTIONS}) *\d* *:"), re.IGNORECASE)
_CORRECTION = re.compile(normalize_text(rf"[.!?\n।。] *(?={_CORRECTIONS})"), re.IGNORECASE)
_SPACE = ' \t\n:*_"'
_REACH = 300  # characters after a phrase or a heading that may hold the answer
_END = r"(?<![\s.][^\s\d])(?<!\s[^\s\d]{2})\.(?!\d)|[!?\n](?!\d)|[。！？।]"  # of a sentence, but not after Sh. or p.m.
_SENTENCE_END = re.compile(normalize_text(_END))
_STATEMENT_END = re.compile(normalize_text(rf"{_END}|;|(?={any_word(THEREFORE)})"), re.IGNORECASE)
_CLAUSE_END = re.compile(normalize_text(rf"{_END}|[,;](?!\d)|[،、]|(?={any_word(THEREFORE)})"), re.IGNORECASE)
_EQUALS = re.compile(rf"[=≈]|{any_word(EQUALS)}", re.IGNORECASE)
_AND = re.compile(any_word(AND), re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_WORD = re.compile(r"[^\W\d]")
_ASIDE = re.compile(r"(?<!\\)\([^()\n=]*\)")  # (9 eggs at $2 each), but neither (9 * 2 = 18) nor LaTeX's \(18\)
_UNFINISHED = re.compile(r"(?:[=:(+×÷/-]|\d \*)\W*$")  # cut off before a result


def extract_answer(text: str, language: str | None = None) -> Decimal | None:
    """The answer that `text` gives, or None if none can be read with certainty.

    It is the number in a box, in a line `#### 18`, or after an answer phrase or a heading; without these, the number of
    the last statement that has one. Of several places the last one counts, because models correct themselves, but
    nothing after a further question does. If that place holds several numbers, or part of a range, a fraction, a date
    or an unfinished calculation, the result is None; no other place is tried.

    Args:
        text: what a model wrote.
        language: ISO 639-1 code, for `1.000` and `1 000` (see `find_numbers`).

    Returns:
        The exact value.
    """
    text = normalize_text(_plain_latex(text))
    if question := _QUESTION.search(text):
        text = text[: question.start(1)]
    if corrections := [*_CORRECTION.finditer(text)]:
        text = text[corrections[-1].end() :]
    if marks := [*_MARK.finditer(text)]:
        return _only_answer(_marked(text[marks[-1].start() :]), language)
    for phrase in reversed(phrases := [*_CONCLUSION.finditer(text)]):
        # "The answer is 18. The answer is in dollars, and she has 9 eggs": the second says nothing of a number.
        sentence = _up_to(_SENTENCE_END, _after(text, phrase))
        if _DIGIT.search(_up_to(_CLAUSE_END, sentence)) and (numbers := find_numbers(sentence, language)):
            return _stated_answer(sentence, numbers)
    if phrases:  # the answer is in words, or comes later
        return _last_answer(text[phrases[-1].end() :], language)
    for heading in reversed([*_HEADING.finditer(text)]):
        line = _after(text, heading).partition("\n")[0]
        if _DIGIT.search(line):
            answer = _headed_answer(line, language)
            return _last_answer(text[heading.end() :], language) if answer is None else answer
    return _last_answer(text, language)


def is_correct(text: str, gold: Decimal, language: str | None = None) -> bool:
    """Whether the answer in `text` equals `gold` as a number: `18.00` is 18; `-18` is not, nor is `1/2` one half."""
    return extract_answer(text, language) == gold


def answer_text(answer: Any) -> str:
    """A filter's answer as text: a number in its plain form, `[invalid]` for None."""
    if answer is None:
        return "[invalid]"
    return format_number(answer) if isinstance(answer, Decimal) else str(answer)


def _plain_latex(text: str) -> str:
    for pattern, plain in _LATEX if "\\" in text or "^" in text else ():
        text = pattern.sub(plain, text)
    return text


def _after(text: str, phrase: re.Match[str]) -> str:
    """The text after a phrase or a heading, on the same line or the next one that is not empty."""
    begin = phrase.end()
    while begin < len(text) and text[begin] in _SPACE:
        begin += 1
    return text[begin : begin + _REACH]


def _up_to(end: re.Pattern[str], text: str) -> str:
    """`text` up to the first `end` in it."""
    match = end.search(text, 1)
    return text[: match.start()] if match else text


def _marked(text: str) -> str:
    """The content of the mark at the start of `text`: the rest of its line, or its box. An open box has none."""
    if text.startswith("####"):
        return text.partition("\n")[0]
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth <= 0:
            return text[: brace.start()]
    return ""


def _stated_answer(sentence: str, numbers: list[Number]) -> Decimal | None:
    """The answer after an answer phrase: `18 dollars, 2 more than 16`, `twice 9, or 18`, `not 15 but 18`."""
    clauses = [0, *(end.end() for end in _CLAUSE_END.finditer(sentence)), len(sentence)]
    for begin, end in pairwise(clauses):
        in_clause = [number for number in numbers if begin <= number.start < end]
        if not in_clause:
            continue
        first, *others = in_clause
        if (
            first.readable
            and not _WORD.search(sentence[: first.start])
            and not _EQUALS.search(sentence[first.end : end])
        ):
            # Right after the phrase. The rest is a remark, unless it is a second answer.
            return None if others and _AND.search(sentence[first.end : others[0].start]) else first.value
        answer = _answer_among(in_clause, sentence[:end])
        if answer is not None or any(number.role != "term" for number in in_clause):
            return answer
    return None


def _headed_answer(line: str, language: str | None) -> Decimal | None:
    """The answer in a line after a heading: `18 dollars`, `18. Each egg costs 2`; None if a whole solution follows."""
    sentence = _up_to(_SENTENCE_END, line)
    return _only_answer(sentence if not _WORD.search(sentence) else line, language)


def _last_answer(text: str, language: str | None) -> Decimal | None:
    """The answer in the last statement of `text` with a number. Brackets are read only if nothing else has one."""
    if _UNFINISHED.search(text[-40:]):
        return None
    plain = _ASIDE.sub(" ", text)
    statements = _STATEMENT_END.split(plain if _DIGIT.search(plain) else text)
    return next(
        (_only_answer(statement, language) for statement in reversed(statements) if _DIGIT.search(statement)), None
    )


def _only_answer(statement: str, language: str | None) -> Decimal | None:
    """The one answer in a statement."""
    plain = _ASIDE.sub(" ", statement)
    statement = plain if _DIGIT.search(plain) else statement
    return _answer_among(find_numbers(statement, language), statement)


def _answer_among(numbers: list[Number], statement: str) -> Decimal | None:
    """The result after the last equals sign; without a sign, the only value that is not part of something else.

    In GSM8K's training solutions, 7,200 last statements have a sign, and in 7,170 the number right after it is the
    answer. Of 78 with several values and no sign, the last value is the answer in 49.
    """
    equals = [*_EQUALS.finditer(statement)]
    if equals and (results := [number for number in numbers if number.start >= equals[-1].end()]):
        return results[0].value if results[0].readable else None
    values = {number.value for number in numbers if number.readable}
    return values.pop() if len(values) == 1 and numbers[-1].readable else None
