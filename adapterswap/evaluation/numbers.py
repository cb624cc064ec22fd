"""Numbers in text of any script: find them, and read their values exactly.

Reads the digits of every script, thousands separators and decimal marks of both conventions, minus signs, and words for
dozens and powers of ten beside digits (27万6000, 70 হাজার, elfu 70, 70k). A number that is part of something larger (a
calculation, fraction, range, list, date or time, `twice 9`, `more than 9`) is marked as such, and `not 9` is left out.
Nothing is computed, and number words ("eighteen", 十八) are not read. Knows nothing of questions or benchmarks.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from adapterswap.evaluation import number_words as words
from adapterswap.evaluation.number_words import any_word

__all__ = ["DECIMAL_COMMA", "Number", "find_numbers", "format_number", "normalize_text", "parse_number"]

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
            a part of a fraction, range, list, date or time, or for a bound.
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
    """The value of the only number in `text` (`2,125`, `$18.00`, `১৮টি`); None if there are none or several."""
    numbers = find_numbers(normalize_text(text), language)
    return numbers[0].value if len(numbers) == 1 else None


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
        with_roles.append(replace(number, role=role))
    for index, (left, right) in enumerate(pairwise(with_roles)):
        if left.role != "term" and right.role != "term" and _is_list(text, left, right):
            with_roles[index], with_roles[index + 1] = replace(left, role="part"), replace(right, role="part")
    return with_roles


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
