"""Numbers in text of any script: find them, and read their values exactly.

Reads the digits of every script, thousands separators and decimal marks of both conventions, minus signs, and words for
powers of ten beside digits (27万6000, 70 হাজার, 70k). Tells a number that stands for itself from an operand: a part of
a sum, a fraction, a range, a date or a clock time. Fractions and sums are not computed, and number words ("eighteen",
十八) are not read. Knows nothing of questions, answers or benchmarks.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Context, Decimal
from itertools import pairwise

__all__ = ["DECIMAL_COMMA", "Number", "find_numbers", "format_number", "normalize_text", "parse_number"]

DECIMAL_COMMA = frozenset({"de", "es", "fr", "ru"})
"""Languages that write 3,5 for three and a half, and 1.000 or 1 000 for a thousand."""

_EXACT = Context(prec=100_000)  # the default context rounds sums to 28 digits
_CURRENCY = "$€£¥₹฿৳₽₩₦"

# Before NFKC, which would turn 5 m² into 5 m2, 2½ into 21/2, ①8 into 18, and a no-break space into a plain one.
_SPACE_IN_NUMBER = re.compile(r"(?<=\d)[\u00a0\u2007\u2009\u202f](?=\d{3}(?!\d))")
_FRACTION = re.compile(r"(\d?)([¼-¾⅐-⅞↉])")
_POWER = re.compile(r"(?<=\d)([⁰¹²³⁴-⁹]+)")
_RAISED_OR_LOWERED = re.compile(r"[⁰¹²³⁴-⁹₀-₉]")
_ENUMERATOR = re.compile(r"[①-⒛]")
# After it.
_ONE_FORM = str.maketrans({"−": "-", "–": "-", "‐": "-", "٫": ".", "٬": ",", "⁄": "/", "∕": "/"})
_MARKUP = re.compile(r"\*\*|__|`|\\[!,;]|\\(?=[$%])|\{(?=,\})|(?<=\{,)\}")  # **18**, \$18, 1,\!000, 1{,}000

_TOKEN = re.compile(r"\d+(?:[.,]\d+|'\d{3}(?!\d))*")
_TOKEN_OR_SPACED = re.compile(r"(?<![\d.,'])\d{1,3}(?: \d{3})+(?!\d)(?:[.,]\d+)?|" + _TOKEN.pattern)
_GROUPED = re.compile(r"[1-9]\d{0,2}([.,'])\d{3}(?:\1\d{3})*|[1-9]\d?(?:,\d\d)+,\d{3}")  # 1,234,567 or 12,34,567
_BEFORE_POINT = re.compile(rf"(?:^|[\s=(:+*/{_CURRENCY}-])\.$")

# Words for 10 to the power of the key, after digits; 千米 is a kilometre, 千克 a kilogram, লক্ষ্য an aim, พันธุ์ a breed.
_POWERS = {
    3: r"千(?![米克瓦卡焦帕赫伏])|(?<=\d)k(?!\w)|(?:thousand|tausend|mil|тыс(?:яч[аи]?)?)(?!\w)|হাজার|వేల(?!ం)|พัน(?!ธ)",
    4: "[万萬]|หมื่น",
    5: "লক্ষ(?!্)|লাখ|లక్ష(?!్)|แสน",
    6: r"(?:million(?:en|s)?|mill(?:ón|ones)|mio|млн|миллион(?:а|ов)?)(?!\w)|ล้าน",
    7: "কোটি|కోట్ల|కోటి",
    8: "[億亿]",
}
_UNIT = re.compile(
    " ?(?:" + "|".join(f"(?P<_{zeros}>{words})" for zeros, words in _POWERS.items()) + ")", re.IGNORECASE
)
_UNIT_BEFORE = re.compile(r"\b(?:(?P<_3>elfu)|(?P<_5>laki)|(?P<_6>milioni)) $", re.IGNORECASE)  # Swahili: elfu 70
_MINUS_WORD = re.compile(r"(?:\b(?:minus|минус)|负|負|マイナス|ลบ|মাইনাস|ঋণাত্মক|మైనస్) ?$", re.IGNORECASE)

# What stands between two numbers that are parts of one expression, range, fraction, date or time.
_LINK = re.compile(
    rf"[{_CURRENCY}%)\]]* *[-+*×÷/^x·⋅∙] *-?[{_CURRENCY}(\[]*"  # 5 + 6, $5*3, 3/4, 2-3
    rf"|[^\d\n=.,;:!?()]{{0,24}} [+*×÷] *[{_CURRENCY}]*"  # 5 eggs + 6
    r"|分[之の]"  # 2分の1 is a half
    r"|:| : "  # 7:30, 36 : 2, but not "Day 1: 18"
)


@dataclass(frozen=True)
class Number:
    """A number found in a text.

    Attributes:
        value: its exact value; None where its marks contradict each other (`1.2.3`).
        start: where it begins in the normalised text, its sign left out.
        end: where it ends there, its unit (万) included.
        operand: it is a part of something larger (`3/4`, `5 + 6`, `2-3`, `7:30`), so it is no answer by itself.
    """

    value: Decimal | None
    start: int
    end: int
    operand: bool = False


def normalize_text(text: str) -> str:
    """`text` in NFKC, with ASCII digits and minus signs, and without the marks that only decorate a number."""
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")  # zero-width characters
    text = _SPACE_IN_NUMBER.sub("'", text)
    text = _FRACTION.sub(lambda match: f"{match[1]}+{match[2]}" if match[1] else match[2], text)
    text = _POWER.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[1]), text)
    text = _ENUMERATOR.sub(" ", _RAISED_OR_LOWERED.sub("", text))
    text = unicodedata.normalize("NFKC", text).translate(_ONE_FORM)
    text = "".join(str(unicodedata.decimal(char, char)) for char in text)
    return _MARKUP.sub("", text)


def find_numbers(text: str, language: str | None = None) -> list[Number]:
    """The numbers of a normalised `text`, in order.

    Args:
        text: what `normalize_text` returned.
        language: an ISO 639-1 code. It settles what the text alone cannot: `1.000` and `1 000` are a thousand in the
            languages of `DECIMAL_COMMA`, and one, or a one and a zero, elsewhere. `1,000` is a thousand and `3,5` three
            and a half everywhere.
    """
    pattern = _TOKEN_OR_SPACED if language in DECIMAL_COMMA else _TOKEN
    numbers: list[Number] = []
    position = 0
    while match := pattern.search(text, position):
        number = _read(text, match, pattern, decimal_comma=language in DECIMAL_COMMA)
        numbers.append(number)
        position = number.end
    return _mark_operands(text, numbers)


def parse_number(text: str, language: str | None = None) -> Decimal | None:
    """The value of the one number in `text` (`2,125`, `$18.00`, `১৮টি`); None where there is none, or more than one."""
    numbers = find_numbers(normalize_text(text), language)
    return numbers[0].value if len(numbers) == 1 else None


def format_number(value: Decimal) -> str:
    """The shortest plain form of `value`: `18`, `3.5`, `-4`; never an exponent."""
    digits = format(value, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits in ("-0", "") else digits


def _read(text: str, match: re.Match[str], pattern: re.Pattern[str], *, decimal_comma: bool) -> Number:
    """The number whose first digits are `match`, with its sign, a bare decimal point before it and its units."""
    start, end = match.span()
    value = _value(match[0], decimal_comma)
    if _BEFORE_POINT.search(text, max(0, start - 2), start) and match[0].isdigit():
        value, start = Decimal(f"0.{match[0]}"), start - 1
    elif value is not None:
        value, end = _with_units(text, value, end, pattern, decimal_comma)
        if value < 1000 and (unit := _UNIT_BEFORE.search(text, max(0, start - 9), start)):
            value = _shift(value, _zeros(unit))
    if value is not None and _is_negative(text, start):
        value = value.copy_negate()  # exact, where a unary minus rounds too
    return Number(value, start, end)


def _value(token: str, decimal_comma: bool) -> Decimal | None:
    """The value of digits with marks between them; None where the marks contradict each other."""
    token = token.replace(" ", "")
    marks = [char for char in token if not char.isdigit()]
    if not marks:
        return Decimal(token)
    last = marks[-1]
    whole, _, rest = token.rpartition(last)
    grouped = _GROUPED.fullmatch(token) is not None
    if len(set(marks)) == 1:
        if grouped and (len(marks) > 1 or last != "." or decimal_comma):
            return Decimal(token.replace(last, ""))
        return Decimal(f"{whole}.{rest}") if len(marks) == 1 and last != "'" else None
    if marks.count(last) == 1 and last != "'" and _GROUPED.fullmatch(whole):
        return Decimal(re.sub(r"[.,']", "", whole) + "." + rest)
    return None


def _with_units(
    text: str, value: Decimal, end: int, pattern: re.Pattern[str], decimal_comma: bool
) -> tuple[Decimal, int]:
    """Read on after `value`: 27万6000 is 276000, 3万5千 is 35000, ১ লক্ষ ১৪ হাজার ২০০ is 114200."""
    total, limit = Decimal(0), None
    while unit := _UNIT.match(text, end):
        zeros = _zeros(unit)
        if limit is not None and zeros >= limit:
            break
        total, value, end, limit = _EXACT.add(total, _shift(value, zeros)), Decimal(0), unit.end(), zeros
        following = pattern.match(text, end + text.startswith(" ", end))
        read = _value(following[0], decimal_comma) if following else None
        if following is None or read is None or read >= 10**zeros:
            break
        value, end = read, following.end()
    return _EXACT.add(total, value), end


def _zeros(unit: re.Match[str]) -> int:
    assert unit.lastgroup is not None
    return int(unit.lastgroup[1:])


def _shift(value: Decimal, zeros: int) -> Decimal:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    return Decimal((sign, digits, exponent + zeros))


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus *sign* stands before the number at `start`: no hyphen, dash of a range, bullet or operator."""
    before = text[:start].rstrip(_CURRENCY)
    if word := _MINUS_WORD.search(before):  # "16 minus 3" is a difference
        return not re.search(r"[\d%)\]] ?$", before[: word.start()])
    if before.endswith("- "):  # a bullet or a dash, but for `= - 5`
        return before[:-2].rstrip(" ").endswith("=")
    if not before.endswith("-"):
        return False
    before = before[:-1].rstrip(_CURRENCY)
    glued, neighbour = before[-1:], before.rstrip(" ")[-1:]
    if neighbour and (neighbour.isdigit() or neighbour in f"%)]{_CURRENCY}"):  # 5 -3 and 20$ -3$ are differences
        return False
    if glued and unicodedata.category(glued)[0] in "LM":
        # Scripts without spaces put the sign right after a word; in the others it is the hyphen of covid-19.
        return unicodedata.name(glued, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "THAI"))
    return not (glued and glued in "-_.,")


def _mark_operands(text: str, numbers: list[Number]) -> list[Number]:
    """`numbers`, with those that an operator, a slash, a dash or a colon ties to a neighbour marked as operands."""
    gaps = [text[left.end : right.start] for left, right in pairwise(numbers)]
    linked = [_LINK.fullmatch(gap) is not None for gap in gaps]
    for index, gap in enumerate(gaps[:-1]):  # 2 3/4, 2又3/4
        linked[index] |= gap in (" ", "又") and gaps[index + 1].strip(" ") == "/"
    tied = {index + side for index, link in enumerate(linked) if link for side in (0, 1)}
    return [
        Number(number.value, number.start, number.end, operand=index in tied) for index, number in enumerate(numbers)
    ]
