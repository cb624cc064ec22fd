r"""The number that a written solution gives as its answer, in the eleven languages of MGSM.

A solution says "the answer is", "Jibu ni", "答えは", ends in `#### 18` or `\boxed{18}`, or just stops after the last
number. The reader finds the place of the answer and reads exactly one number there. If there are several, or words and
signs that may change the number, the result is no answer, never another number. The phrases of all languages are
searched for in every text, because a model may answer in another language than that of the question.

Numbers are written in the digits of every script, with the thousands separators and decimal marks of both conventions,
minus signs, and words for dozens and powers of ten beside digits (27万6000, 70 হাজার, elfu 70, 70k). A number that is
part of something larger (a calculation, fraction, range, list, date or time, `twice 9`, `more than 9`, `x + 9`) is
marked as such, and `not 9` is left out. Nothing is computed, and number words ("eighteen", 十八) are not read.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from adapterswap.experiments.evaluation import number_words as words
from adapterswap.experiments.evaluation.number_words import AND, EQUALS, THEREFORE, any_word

DECIMAL_COMMA = frozenset({"de", "es", "fr", "ru"})
"""Languages that write 3,5 for three and a half, and 1.000 or 1 000 for a thousand."""

_EXACT = Context(prec=100_000)  # the default context rounds sums to 28 digits
_CURRENCY = "$€£¥₹฿৳₽₩₦"
_WINDOW = 40  # characters around a number whose words can change it

# Before NFKC, which would turn 5 m² into 5 m2, 2½ into 21/2, ①8 into 18, and a no-break space into a plain one.
_SPACE_IN_NUMBER = re.compile(r"(?<=\d)[\u00a0\u2007\u2009\u202f](?=\d{3}(?!\d))")
_FRACTION = re.compile(r"(\d?)([¼-¾⅐-⅞↉])")
_POWER = re.compile(r"(?<=\d)([⁰¹²³⁴-⁹]+)")
_RAISED_OR_LOWERED = re.compile(r"[⁰¹²³⁴-⁹₀-₉]")
_ENUMERATOR = re.compile(r"[①-⒛]")
# After it.
_ONE_FORM = str.maketrans({"−": "-", "–": "-", "‐": "-", "٫": ".", "٬": ",", "⁄": "/", "∕": "/", "〜": "~", "∼": "~"})
_MARKUP = re.compile(  # **18**, \$18, 1,\!000, 1{,}000, Rs. 18/-
    r"\*\*|__|`|\\[!,;]|\\(?=[$%])|\{(?=,\})|(?<=\{,)\}|(?<=\d)/[-=](?!\d)"
)

_TOKEN = re.compile(
    r"(?<![\d.,'])\d{1,3}(?: \d{3})+(?!\d)(?:[.,]\d+)?"  # 1 000
    r"|\d+(?:[.,]\d+|'\d{3}(?!\d))*(?:[eE][+-]?\d{1,2}(?!\w))?"
)
_GROUPED = re.compile(r"[1-9]\d{0,2}([.,'])\d{3}(?:\1\d{3})*|[1-9]\d?(?:,\d\d)+,\d{3}")  # 1,234,567 or 12,34,567
_BEFORE_POINT = re.compile(rf"(?:^|[\s=(:+*/{_CURRENCY}-])\.$")
_MINUS_WORD = re.compile(rf"(?:{any_word(words.MINUS)}|{words.MINUS_AFTER_IS}) ?$", re.IGNORECASE)

# What stands between two numbers that are parts of one calculation (they may have a result), or of something else.
_SIGN_AFTER = rf" *-?[{_CURRENCY}(\[]*"
_CALCULATION = re.compile(
    rf"[{_CURRENCY}%)\]]* *[+*×÷^x·⋅∙]{_SIGN_AFTER}"  # 5 + 6, $5*3
    rf"|[^\d\n=.,;:!?()]{{0,24}} [+*×÷] *[{_CURRENCY}]*"  # 5 eggs + 6
    rf"|[{_CURRENCY}%]*[^\d\n=.,;:!?()]{{0,24}}? ?{any_word(words.OPERATORS)} ?[{_CURRENCY}]*",
    re.IGNORECASE,
)
_PART = re.compile(
    rf"[{_CURRENCY}%)\]]* *[-/~<>≤≥±]{_SIGN_AFTER}"  # 3/4, 2-3, 18~20, 404 > 400
    rf"|[^\d\n=.,;:!?()]{{0,24}} [-/~] *[{_CURRENCY}]*"  # 24 eggs / 12
    r"|:| : "  # 7:30, 36 : 2, but not "Day 1: 18"
    r"|分[之の]|又"  # 2分の1 is a half, 2又1/2 two and a half
    r"|[}\s]*\}\{[{\s]*"  # of a LaTeX command with two arguments
    r"| ?[ap]\.?m\.?,? (?:to|and|-) "
    rf"|[^\d\n]*{any_word(words.ROUNDED)}[^\d\n]*"
    rf"| ?{any_word(words.COMPOUND_UNITS)}\.?,? ?(?:{any_word(words.AND)} )?(?:dakika )?",  # 3 hours and 20 minutes
    re.IGNORECASE,
)
_LIST = re.compile(
    rf"(?P<unit>[^\d\n.;:=,、]{{0,24}}?) ?(?P<joint>(?:[,、] ?)?{any_word(words.RANGES, words.AND)}|[,、]) ?"
    rf"(?! ?{any_word(words.THEREFORE)})(?P<rest>[^\d\n.;,、]{{0,24}})",
    re.IGNORECASE,
)
_NAME = re.compile(rf"(?:[a-z] ?= ?)?[{_CURRENCY}-]*", re.IGNORECASE)  # 3 or x = 3
_LABEL = re.compile(r"[^\d\n:]{0,24}[,、;] ?[^\d\n:=,、]{1,24}: ?")  # Ann: 12, Tom: 15

_BEFORE = re.compile(
    rf"(?:(?P<negated>{any_word(words.BEFORE_NEGATED)})|(?P<term>{any_word(words.BEFORE_MULTIPLE)})"
    rf"|(?P<part>{any_word(words.BEFORE_BOUND)}|(?<![-=])[<≤≥]|\b(?-i:{words.MONTHS})\.?)) *[{_CURRENCY}({{]*$",
    re.IGNORECASE,
)
_AFTER = re.compile(
    rf" ?[^\d\s.,;:!?()=、]{{0,10}}? ?(?:(?P<negated>{any_word(words.AFTER_NEGATED)})"
    rf"|(?P<term>{any_word(words.AFTER_MULTIPLE)})|(?P<part>{any_word(words.AFTER_BOUND)}))",
    re.IGNORECASE,
)
_SLASH = re.compile(" ?/")

# Variables: one letter, such as those of x + 5 and 3n. Not those that are words, or begin one: "5 - a few", "C++ 5".
_LETTER = "A-Za-zÀ-ɏͰ-ӿ"
_X = f"(?<![{_LETTER}])[xyznXYZNα-ω](?![{_LETTER}])"
_CONSONANT = f"(?<![{_LETTER}])[b-df-hj-np-tv-zXYZNα-ω](?![{_LETTER}])"
_VARIABLE = f"(?:{_CONSONANT}|(?<![{_LETTER}])[aeiou](?![{_LETTER}])(?! [{_LETTER}]))"
_SIGN = "[+*×÷·⋅∙^]"
_AFTER_VARIABLE = re.compile(
    rf"(?:{_VARIABLE}\)? ?{_SIGN} ?|{_CONSONANT}\)?(?: [-/<>≤≥] |[/<>≤≥])|{_X}-"
    rf"|{_CONSONANT} ?{any_word(words.OPERATORS)} ?|(?<!\d){_X.removesuffix(f'(?![{_LETTER}])')})[{_CURRENCY}(]*$"
)
_BEFORE_VARIABLE = re.compile(
    rf"[{_CURRENCY}%)\]]*(?: ?{_SIGN} ?\(?{_VARIABLE}| [-/] {_VARIABLE}|[-/]{_X}|/[ab](?![{_LETTER}])"
    rf"|[^\d\n=.,;:!?()]{{0,24}} [+*×÷] {_VARIABLE}| ?{any_word(words.OPERATORS)} ?{_CONSONANT}"
    rf"|[xyznXYZα-ω](?![{_LETTER}])(?! ?[\d{_CURRENCY}(])|\([^()\n=]{{0,20}}?{_VARIABLE}[^()\n=]{{0,20}}\))"
)

Role = Literal["answer", "term", "part"]


@dataclass(frozen=True)
class Number:
    """A number found in a text.

    Attributes:
        value: its exact value; None if it cannot be read, because its marks contradict each other (`1.2.3`) or their
            meaning depends on the language.
        start: its position in the normalised text, without its sign.
        end: its end there, with its scale (万).
        role: `answer` for a number of its own; `term` for a part of a calculation, which may have a result; `part` for
            a part of a fraction, range, list, date, time or expression with a variable, or for a bound.
    """

    value: Decimal | None
    start: int
    end: int
    role: Role = "answer"

    @property
    def readable(self) -> bool:
        """Whether it has a value and is a number of its own."""
        return self.value is not None and self.role == "answer"


def normalize_text(text: str) -> str:
    """`text` in NFKC, with ASCII digits and minus signs, and without marks that only decorate a number."""
    if not text.isascii():
        text = "".join(char for char in text if unicodedata.category(char) != "Cf")  # zero-width characters
        text = _SPACE_IN_NUMBER.sub("'", text)
        text = _FRACTION.sub(lambda match: f"{match[1]}+{match[2]}" if match[1] else match[2], text)
        text = _POWER.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[1]), text)
        text = _ENUMERATOR.sub(" ", _RAISED_OR_LOWERED.sub("", text))
        text = unicodedata.normalize("NFKC", text).translate(_ONE_FORM)
        text = "".join(char if char.isascii() else str(unicodedata.decimal(char, char)) for char in text)
    return _MARKUP.sub("", text)


def find_numbers(text: str, language: str | None = None) -> list[Number]:
    """The numbers of a normalised `text`, in order, except those that it denies (`not 9`).

    Args:
        text: what `normalize_text` returned.
        language: an ISO 639-1 code, for what the text alone leaves open: `1.000` and `1 000` are a thousand in the
            languages of `DECIMAL_COMMA`; in others `1.000` is one, and `1 000` is not read. `1,000` is a thousand and
            `3,5` three and a half everywhere. A billion is read in languages in which it is a thousand millions.
    """
    numbers: list[Number] = []
    position = 0
    while match := _TOKEN.search(text, position):
        numbers.append(_read(text, match, language))
        position = numbers[-1].end
    return _with_roles(text, numbers)


def parse_number(text: str, language: str | None = None) -> Decimal | None:
    """The value of a text that is nothing but a number (`2,125`, `$18.00`, `৭০ হাজার`); None for `Nairobi, 2020`."""
    text = normalize_text(text)
    numbers = find_numbers(text, language)
    if len(numbers) != 1:
        return None
    around = text[: numbers[0].start] + text[numbers[0].end :]
    return None if any(character.isalpha() for character in around) else numbers[0].value


def format_number(value: Decimal) -> str:
    """The shortest plain form of `value`: `18`, `3.5`, `-4`; never an exponent."""
    digits = format(value, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits in ("-0", "") else digits


def _read(text: str, match: re.Match[str], language: str | None) -> Number:
    """The number whose first digits are `match`, with its sign, a bare decimal point before it and its scales."""
    start, end = match.span()
    value = _value(match[0], language in DECIMAL_COMMA)
    before = text[max(0, start - _WINDOW) : start]
    if _BEFORE_POINT.search(before[-2:]) and match[0].isdigit():
        value, start = Decimal(f"0.{match[0]}"), start - 1
    elif value is not None and value < 1000 and (scale := _SCALE_BEFORE.search(before)):
        value, end = _with_scales_before(text, value, end, _factor(scale))
    elif value is not None:
        value, end = _with_scales(text, value, end, language)
    if value is not None and _is_negative(text[max(0, start - _WINDOW) : start]):
        value = value.copy_negate()  # exact, where a unary minus rounds too
    return Number(value, start, end)


def _value(token: str, decimal_comma: bool) -> Decimal | None:
    """The value of digits with marks between them; None if the marks contradict each other or are ambiguous."""
    if " " in token and not decimal_comma:
        return None  # 1 000 may be a thousand, or a one and three zeros
    token = token.replace(" ", "")
    marks = [char for char in token if char in ".,'"]
    if not marks:
        return Decimal(token)
    last_mark = marks[-1]
    before, _, after = token.rpartition(last_mark)
    grouped = _GROUPED.fullmatch(token) is not None
    if len(set(marks)) == 1:
        if grouped and (len(marks) > 1 or last_mark != "." or decimal_comma):
            return Decimal(token.replace(last_mark, ""))
        return Decimal(f"{before}.{after}") if len(marks) == 1 and last_mark != "'" else None
    if marks.count(last_mark) == 1 and last_mark != "'" and _GROUPED.fullmatch(before):
        return Decimal(re.sub(r"[.,']", "", before) + "." + after)
    return None


def _scale_words(spaced: str, unspaced: str) -> str:
    whole_words = f"(?:{spaced})(?!\\w)" if spaced else ""
    return unicodedata.normalize("NFKC", "|".join(filter(None, (whole_words, unspaced))))


_SWAHILI = "|".join(f"(?P<_{factor}>{word})" for factor, word in words.SCALES_BEFORE.items())
_SCALE_BEFORE = re.compile(rf"(?<!\w)(?:{_SWAHILI}) $", re.IGNORECASE)
_NEXT_SCALE_BEFORE = re.compile(rf" (?:na )?(?:{_SWAHILI}) (?=\d{{1,3}}(?![\d ]|[.,]\d))", re.IGNORECASE)


@lru_cache
def _scale_pattern(language: str | None) -> re.Pattern[str]:
    """A scale after digits. The name of its group holds the factor; `unread` means that the number is not read."""
    tables = [words.SCALES] if language in DECIMAL_COMMA or language == "zh" else [words.SCALES, words.SHORT_SCALES]
    scales = "|".join(
        f"(?P<_{factor}_{index}>{_scale_words(*names)})"
        for index, table in enumerate(tables)
        for factor, names in table.items()
    )
    return re.compile(f" ?(?:{scales}|(?P<unread>{_scale_words(*words.UNREAD_SCALES)}))", re.IGNORECASE)


def _factor(scale: re.Match[str]) -> int:
    assert scale.lastgroup is not None
    return int(scale.lastgroup.split("_")[1])


def _with_scales_before(text: str, value: Decimal, end: int, factor: int) -> tuple[Decimal, int]:
    """Read on after Swahili's `milioni 2`: milioni 2 na laki 5 is 2500000."""
    total = _EXACT.multiply(value, Decimal(factor))
    while (following := _NEXT_SCALE_BEFORE.match(text, end)) and (smaller := _factor(following)) < factor:
        digits = _TOKEN.match(text, following.end())
        assert digits
        total, factor, end = _EXACT.add(total, Decimal(digits[0]) * smaller), smaller, digits.end()
    return total, end


def _with_scales(text: str, value: Decimal, end: int, language: str | None) -> tuple[Decimal | None, int]:
    """Read on after `value`: 27万6000 is 276000, ১ লক্ষ ১৪ হাজার ২০০ is 114200, 18 mil millones is 18000000000."""
    pattern, total, limit = _scale_pattern(language), Decimal(0), None
    while scale := pattern.match(text, end):
        factor = 1
        while scale and factor < 10**12:
            if scale.lastgroup == "unread":
                return None, scale.end()
            factor, end = factor * _factor(scale), scale.end()
            scale = pattern.match(text, end)
        if limit is not None and factor >= limit:
            return None, end
        total, value, limit = _EXACT.add(total, _EXACT.multiply(value, Decimal(factor))), Decimal(0), factor
        following = _TOKEN.match(text, end + text.startswith(" ", end))
        read = _value(following[0], language in DECIMAL_COMMA) if following else None
        if following is None or read is None or read >= factor:
            break
        value, end = read, following.end()
    return _EXACT.add(total, value), end


def _is_negative(before: str) -> bool:
    """Whether the text `before` a number ends in a minus *sign*, and not a hyphen, dash, bullet or operator."""
    before = before.rstrip(_CURRENCY)
    if word := _MINUS_WORD.search(before):  # "16 minus 3" is a difference
        return not re.search(r"[\d%)\]] ?$", before[: word.start()])
    if before.endswith("- "):  # a bullet or a dash, except in `= - 5`
        return before[:-2].rstrip(" ").endswith("=")
    if not before.endswith("-"):
        return False
    before = before[:-1].rstrip(_CURRENCY)
    glued, neighbour = before[-1:], before.rstrip(" ")[-1:]
    if neighbour and (neighbour.isdigit() or neighbour in f"%)]{_CURRENCY}"):  # 5 -3 and 20$ -3$ are differences
        return False
    if glued and unicodedata.category(glued)[0] in "LM":
        # Scripts without spaces put the sign right after a word; elsewhere it is a hyphen, as in covid-19.
        return unicodedata.name(glued, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "THAI"))
    return not (glued and glued in "-_.,")


def _with_roles(text: str, numbers: list[Number]) -> list[Number]:
    """`numbers` with their roles, by the words and signs around them; denied ones are left out."""
    roles: list[Role] = ["answer"] * len(numbers)
    for index, (left, right) in enumerate(pairwise(numbers)):
        gap = text[left.end : right.start]
        if link := _link(gap) or ("part" if gap == " " and _SLASH.match(text, right.end) else None):  # 2 3/4
            roles[index] = "part" if "part" in (roles[index], link) else link
            roles[index + 1] = link
    with_roles = []
    for number, role in zip(numbers, roles, strict=True):
        before = _BEFORE.search(text[max(0, number.start - _WINDOW) : number.start])
        after = _AFTER.match(text, number.end)
        cues = {match.lastgroup for match in (before, after) if match}
        if role == "answer" and "negated" in cues:
            continue
        if role == "answer" and cues:
            role = "part" if "part" in cues else "term"
        if role == "answer" and _is_with_a_variable(text, number):
            role = "part"
        with_roles.append(replace(number, role=role))
    for index, (left, right) in enumerate(pairwise(with_roles)):
        if left.role != "term" and right.role != "term" and _is_list(text, left, right):
            with_roles[index], with_roles[index + 1] = replace(left, role="part"), replace(right, role="part")
    return with_roles


def _is_with_a_variable(text: str, number: Number) -> bool:
    """Whether a number is a part of an expression with a variable: 5 in x + 5, 5x, 5/x, 3 in 3(x + 1)."""
    if _BEFORE_VARIABLE.match(text, number.end):
        return True
    return _AFTER_VARIABLE.search(text[max(0, number.start - _WINDOW) : number.start]) is not None


def _link(gap: str) -> Role | None:
    """The role that the text between two numbers gives them: terms of a calculation, parts, or None."""
    if len(gap) > _WINDOW:
        return None
    return "term" if _CALCULATION.fullmatch(gap) else "part" if _PART.fullmatch(gap) else None


def _is_list(text: str, left: Number, right: Number) -> bool:
    """Whether the two numbers are the ends of a range, or two of several answers."""
    gap = text[left.end : right.start]
    if len(gap) > 2 * _WINDOW:
        return False
    if _LABEL.fullmatch(gap):
        return True
    if (match := _LIST.fullmatch(gap)) is None:
        return False
    unit, more_words = match["unit"].split(), match["rest"].split()
    if not unit and _NAME.fullmatch("".join(more_words)):  # 18 to 20; x = 3 or x = 4
        return True
    if unit and text.startswith(unit[0], right.end + text.startswith(" ", right.end)):  # 18個または20個
        return True
    before = text[max(0, left.start - _WINDOW) : left.start].split()
    return bool(more_words) and more_words[-1:] == before[-1:]  # maembe 12 na maembe 15


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
# (9 eggs at $2 each), but neither (9 * 2 = 18) nor LaTeX's \(18\), nor the brackets of 3(x + 1).
_ASIDE = re.compile(rf"(?<!\\)(?!(?<=\d)\([^()\n=]*{_VARIABLE})\([^()\n=]*\)")
_UNFINISHED = re.compile(r"(?:[=:(+×÷/-]|\d \*)\W*$")  # cut off before a result


def extract_answer(text: str, language: str | None = None) -> Decimal | None:
    """The answer that `text` gives, or None if none can be read with certainty.

    It is the number in a box, in a line `#### 18`, or after an answer phrase or a heading; without these, the number of
    the last statement that has one. Of several places the last one counts, because models correct themselves, but
    nothing after a further question does. If that place holds several numbers, or part of a range, a fraction, a date
    or an unfinished calculation, the result is None; no other place is tried.

    Args:
        language: ISO 639-1 code, for `1.000` and `1 000` (see `find_numbers`).
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


def is_right(written: str, answer: str) -> bool:
    """Whether a text is the answer, or gives the same number if the answer is nothing but a number."""
    number = parse_number(answer)
    return written.strip() == answer or (number is not None and is_correct(written, number))


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
