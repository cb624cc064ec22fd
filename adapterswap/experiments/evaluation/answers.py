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
        text = "".join(str(unicodedata.decimal(char, char)) for char in text)
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
    if any(character.isalpha() for character in around):
        return None
    return numbers[0].value


def format_number(value: Decimal) -> str:
    """The shortest plain form of `value`: `18`, `3.5`, `-4`; never an exponent."""
    digits = format(value, "f")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits in ("-0", "") else digits


def _read(text: str, match: re.Match[str], language: str | None) -> Number:
    """The number whose first digits are `match`, with its sign, a bare decimal point before it and its scales."""
    start, end = match.span()
    value = _value(match[0], language in DECIMAL_COMMA)
    before = text[max(0, start - _WINDOW) : start]

    if _BEFORE_POINT.search(before[-2:]) and match[0].isdigit():  # .5
        value = Decimal(f"0.{match[0]}")
        start -= 1
    elif value is not None:
        scale = None
        if value < 1000:
            scale = _SCALE_BEFORE.search(before)
        if scale:
            value, end = _with_scales_before(text, value, end, _factor(scale))
        else:
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
    may_be_decimal = marks.count(last_mark) == 1 and last_mark != "'"

    # Marks of one kind: 1,234,567 and 12,34,567 are grouped; 1.234 is, in languages with decimal commas.
    if len(set(marks)) == 1:
        grouped = _GROUPED.fullmatch(token) is not None
        if grouped and (len(marks) > 1 or last_mark != "." or decimal_comma):
            return Decimal(token.replace(last_mark, ""))
        return Decimal(f"{before}.{after}") if may_be_decimal else None

    # Of several kinds, the last one is the decimal mark, and the others group: 1.234,5.
    if may_be_decimal and _GROUPED.fullmatch(before):
        return Decimal(re.sub(r"[.,']", "", before) + "." + after)
    return None


def _scale_words(spaced: str, unspaced: str) -> str:
    """A pattern of words that must end where they do, and of others that may be followed by letters."""
    alternatives = []
    if spaced:
        alternatives.append(f"(?:{spaced})(?!\\w)")
    if unspaced:
        alternatives.append(unspaced)
    return unicodedata.normalize("NFKC", "|".join(alternatives))


_SWAHILI = "|".join(f"(?P<_{factor}>{word})" for factor, word in words.SCALES_BEFORE.items())
_SCALE_BEFORE = re.compile(rf"(?<!\w)(?:{_SWAHILI}) $", re.IGNORECASE)
_NEXT_SCALE_BEFORE = re.compile(rf" (?:na )?(?:{_SWAHILI}) (?=\d{{1,3}}(?![\d ]|[.,]\d))", re.IGNORECASE)


@lru_cache
def _scale_pattern(language: str | None) -> re.Pattern[str]:
    """A scale after digits. The name of its group holds the factor; `unread` means that the number is not read."""
    tables = [words.SCALES]
    if language not in DECIMAL_COMMA and language != "zh":
        tables.append(words.SHORT_SCALES)

    groups = []
    for index, table in enumerate(tables):
        for factor, names in table.items():
            groups.append(f"(?P<_{factor}_{index}>{_scale_words(*names)})")
    groups.append(f"(?P<unread>{_scale_words(*words.UNREAD_SCALES)})")
    return re.compile(f" ?(?:{'|'.join(groups)})", re.IGNORECASE)


def _factor(scale: re.Match[str]) -> int:
    """The factor in the name of a match's group: 1000 of `_1000`, and of `_1000_0`."""
    assert scale.lastgroup is not None
    return int(scale.lastgroup.split("_")[1])


def _with_scales_before(text: str, value: Decimal, end: int, factor: int) -> tuple[Decimal, int]:
    """Read on after Swahili's `milioni 2`: milioni 2 na laki 5 is 2500000."""
    total = _EXACT.multiply(value, Decimal(factor))
    while True:
        following = _NEXT_SCALE_BEFORE.match(text, end)
        if following is None or _factor(following) >= factor:
            return total, end

        factor = _factor(following)
        digits = _TOKEN.match(text, following.end())
        assert digits
        total = _EXACT.add(total, Decimal(digits[0]) * factor)
        end = digits.end()


def _with_scales(text: str, value: Decimal, end: int, language: str | None) -> tuple[Decimal | None, int]:
    """Read on after `value`: 27万6000 is 276000, ১ লক্ষ ১৪ হাজার ২০০ is 114200, 18 mil millones is 18000000000."""
    pattern = _scale_pattern(language)
    total = Decimal(0)
    limit: int | None = None  # the factor of the part before, below which that of the next must be
    while True:
        scale = pattern.match(text, end)
        if not scale:
            break

        # Scales that follow each other multiply: mil millones.
        factor = 1
        while scale and factor < 10**12:
            if scale.lastgroup == "unread":
                return None, scale.end()
            factor *= _factor(scale)
            end = scale.end()
            scale = pattern.match(text, end)
        if limit is not None and factor >= limit:
            return None, end
        total = _EXACT.add(total, _EXACT.multiply(value, Decimal(factor)))
        value = Decimal(0)
        limit = factor

        # The digits of the next part, which must be smaller than this scale: 6000 of 27万6000.
        following = _TOKEN.match(text, end + text.startswith(" ", end))
        if following is None:
            break
        rest = _value(following[0], language in DECIMAL_COMMA)
        if rest is None or rest >= factor:
            break
        value = rest
        end = following.end()
    return _EXACT.add(total, value), end


def _is_negative(before: str) -> bool:
    """Whether the text `before` a number ends in a minus *sign*, and not a hyphen, dash, bullet or operator."""
    before = before.rstrip(_CURRENCY)
    word = _MINUS_WORD.search(before)
    if word:  # "16 minus 3" is a difference
        return not re.search(r"[\d%)\]] ?$", before[: word.start()])
    if before.endswith("- "):  # a bullet or a dash, except in `= - 5`
        return before[:-2].rstrip(" ").endswith("=")
    if not before.endswith("-"):
        return False

    # A minus right before the number, perhaps with a currency between them: -$5.
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
    # What stands between two neighbors.
    roles: list[Role] = ["answer"] * len(numbers)
    for index, (left, right) in enumerate(pairwise(numbers)):
        gap = text[left.end : right.start]
        link: Role
        if len(gap) > _WINDOW:
            continue
        if _CALCULATION.fullmatch(gap):
            link = "term"
        elif _PART.fullmatch(gap) or (gap == " " and _SLASH.match(text, right.end)):  # 2 3/4
            link = "part"
        else:
            continue
        roles[index] = "part" if "part" in (roles[index], link) else link
        roles[index + 1] = link

    # What stands before and after each of the others.
    with_roles = []
    for number, role in zip(numbers, roles, strict=True):
        if role == "answer":
            around = text[max(0, number.start - _WINDOW) : number.start]
            cues = set()
            for match in (_BEFORE.search(around), _AFTER.match(text, number.end)):
                if match:
                    cues.add(match.lastgroup)
            if "negated" in cues:
                continue
            if "part" in cues:
                role = "part"
            elif cues:
                role = "term"
            elif _BEFORE_VARIABLE.match(text, number.end) or _AFTER_VARIABLE.search(around):
                role = "part"  # 5 in x + 5, 5x, 5/x, and 3 in 3(x + 1)
        with_roles.append(replace(number, role=role))

    # Ranges and lists.
    for index, (left, right) in enumerate(pairwise(with_roles)):
        if left.role != "term" and right.role != "term" and _is_list(text, left, right):
            with_roles[index] = replace(left, role="part")
            with_roles[index + 1] = replace(right, role="part")
    return with_roles


def _is_list(text: str, left: Number, right: Number) -> bool:
    """Whether the two numbers are the ends of a range, or two of several answers."""
    gap = text[left.end : right.start]
    if len(gap) > 2 * _WINDOW:
        return False
    if _LABEL.fullmatch(gap):
        return True
    match = _LIST.fullmatch(gap)
    if match is None:
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
    if "\\" in text or "^" in text:
        for pattern, plain in _LATEX:
            text = pattern.sub(plain, text)
    text = normalize_text(text)

    # Only what precedes a further question and follows the last correction counts.
    question = _QUESTION.search(text)
    if question:
        text = text[: question.start(1)]
    corrections = list(_CORRECTION.finditer(text))
    if corrections:
        text = text[corrections[-1].end() :]

    # A line `#### 18`, or a box.
    marks = list(_MARK.finditer(text))
    if marks:
        return _only_answer(_marked(text[marks[-1].start() :]), language)

    # "The answer is 18. The answer is in dollars, and she has 9 eggs": the second says nothing of a number.
    phrases = list(_CONCLUSION.finditer(text))
    for phrase in reversed(phrases):
        sentence = _up_to(_SENTENCE_END, _after(text, phrase))
        if _DIGIT.search(_up_to(_CLAUSE_END, sentence)):
            numbers = find_numbers(sentence, language)
            if numbers:
                return _stated_answer(sentence, numbers)
    if phrases:  # the answer is in words, or comes later
        return _last_answer(text[phrases[-1].end() :], language)

    # `18 dollars`, or `18. Each egg costs 2`; or the heading of a whole solution.
    for heading in reversed(list(_HEADING.finditer(text))):
        line = _after(text, heading).partition("\n")[0]
        if _DIGIT.search(line):
            stated = _up_to(_SENTENCE_END, line)
            if _WORD.search(stated):
                stated = line
            answer = _only_answer(stated, language)
            if answer is None:
                answer = _last_answer(text[heading.end() :], language)
            return answer

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
    if isinstance(answer, Decimal):
        return format_number(answer)
    return str(answer)


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
    ends = [end.end() for end in _CLAUSE_END.finditer(sentence)]
    for begin, end in pairwise([0, *ends, len(sentence)]):
        in_clause = [number for number in numbers if begin <= number.start < end]
        if not in_clause:
            continue

        # Right after the phrase. The rest is a remark, unless it is a second answer.
        first, *others = in_clause
        follows_phrase = not _WORD.search(sentence[: first.start])
        if first.readable and follows_phrase and not _EQUALS.search(sentence[first.end : end]):
            if others and _AND.search(sentence[first.end : others[0].start]):
                return None
            return first.value

        answer = _answer_among(in_clause, sentence[:end])
        if answer is not None or any(number.role != "term" for number in in_clause):
            return answer
    return None


def _last_answer(text: str, language: str | None) -> Decimal | None:
    """The answer in the last statement of `text` with a number."""
    if _UNFINISHED.search(text[-40:]):
        return None
    for statement in reversed(_STATEMENT_END.split(_without_asides(text))):
        if _DIGIT.search(statement):
            return _only_answer(statement, language)
    return None


def _without_asides(text: str) -> str:
    """`text` without what is in brackets, unless only brackets hold a number."""
    plain = _ASIDE.sub(" ", text)
    return plain if _DIGIT.search(plain) else text


def _only_answer(statement: str, language: str | None) -> Decimal | None:
    """The one answer in a statement."""
    statement = _without_asides(statement)
    return _answer_among(find_numbers(statement, language), statement)


def _answer_among(numbers: list[Number], statement: str) -> Decimal | None:
    """The result after the last equals sign; without a sign, the only value that is not part of something else.

    In GSM8K's training solutions, 7,200 last statements have a sign, and in 7,170 the number right after it is the
    answer. Of 78 with several values and no sign, the last value is the answer in 49.
    """
    equals = list(_EQUALS.finditer(statement))
    if equals:
        for number in numbers:
            if number.start >= equals[-1].end():
                return number.value if number.readable else None

    values = {number.value for number in numbers if number.readable}
    if len(values) == 1 and numbers[-1].readable:
        return values.pop()
    return None
