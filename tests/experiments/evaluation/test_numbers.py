"""Numbers in text: a table for every rule, and properties over all scripts."""

from __future__ import annotations

import unicodedata
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterswap.experiments.evaluation.answers import find_numbers, format_number, normalize_text, parse_number

# The ten digits of every script in Unicode 15, which has none beyond its second plane: the reference is the character
# database.
ZEROS = [chr(i) for i in range(0x20000) if unicodedata.category(chr(i)) == "Nd" and unicodedata.decimal(chr(i)) == 0]
BENGALI, TELUGU, THAI, DEVANAGARI, FULL_WIDTH = "০", "౦", "๐", "०", "０"


def values(text: str, language: str | None = None) -> list[str]:
    """The values of standalone numbers."""
    result = find_numbers(normalize_text(text), language)
    return [format_number(n.value) for n in result if n.value is not None and n.readable]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("18", None, "18"),
        ("018", None, "18"),
        ("18.00", None, "18"),
        ("18.50", None, "18.5"),
        ("3.5", None, "3.5"),
        ("3,5", None, "3.5"),
        (".5", None, "0.5"),
        ("$.50", None, "0.5"),
        ("0,125", "de", "0.125"),
        ("1,000", None, "1000"),
        ("1,000", "de", "1000"),
        ("1.000", "de", "1000"),
        ("1.000", "en", "1"),
        ("1.000", "sw", "1"),
        ("1.000.000", "en", "1000000"),
        ("1.234,56", "en", "1234.56"),
        ("1,234.56", "de", "1234.56"),
        ("1 000", "fr", "1000"),
        ("1 234 567,8", "ru", "1234567.8"),
        ("1\u00a0000", "en", "1000"),
        ("1\u202f000", None, "1000"),
        ("1'000", None, "1000"),
        ("1{,}000", None, "1000"),
        ("12,34,567", "bn", "1234567"),
        ("১,১৪,২০০", "bn", "114200"),
        ("౧౮", "te", "18"),
        ("๑๘", "th", "18"),
        ("１，０００", "ja", "1000"),
        ("१८", None, "18"),
        ("٣٬٥٠٠٫٥", None, "3500.5"),
        ("1\u200b8", None, "18"),
        ("27万6000", "ja", "276000"),
        ("3万5千円", "ja", "35000"),
        ("1.5億", "ja", "150000000"),
        ("3 万", "zh", "30000"),
        ("5千克", "zh", "5"),
        ("70k", None, "70000"),
        ("70 km", None, "70"),
        ("$1.2M", None, "1200000"),
        ("2 dozen", None, "24"),
        ("18 billion", "en", "18000000000"),
        ("1兆円", "ja", "1000000000000"),
        ("2百円", "ja", "200"),
        ("2百万", "ja", "2000000"),
        ("18 mil millones", "es", "18000000000"),
        ("2 พันล้าน", "th", "2000000000"),
        ("2 শত", "bn", "200"),
        ("২৫ শতাংশ", "bn", "25"),
        ("1.2e6", None, "1200000"),
        ("2 milioni", "sw", "2000000"),
        ("milioni 2 na laki 5", "sw", "2500000"),
        ("hasi 5", "sw", "-5"),
        ("es menos 5", "es", "-5"),
        ("7.5 million", "en", "7500000"),
        ("5 mil 600", "es", "5600"),
        ("5 milímetros", "es", "5"),
        ("57,5 тыс.", "ru", "57500"),
        ("2 миллиона", "ru", "2000000"),
        ("৭০ হাজার", "bn", "70000"),
        ("১ লক্ষ ১৪ হাজার ২০০", "bn", "114200"),
        ("৩ লক্ষ্য", "bn", "3"),
        ("70 వేల", "te", "70000"),
        ("2 లక్షల", "te", "200000"),
        ("7 หมื่น", "th", "70000"),
        ("5 พันธุ์", "th", "5"),
        ("elfu 70", "sw", "70000"),
        ("milioni 2.5", "sw", "2500000"),
        ("elfu 1,500", "sw", "1500"),
        ("负18", "zh", "-18"),
        ("マイナス18", "ja", "-18"),
        ("минус 18", "ru", "-18"),
        ("is minus 18", "en", "-18"),
        ("負責18", "zh", "18"),
        ("5千米", "zh", "5"),
        ("-5", None, "-5"),
        ("−5", None, "-5"),
        ("－５", None, "-5"),
        ("-$5", None, "-5"),
        ("$-5", None, "-5"),
        ("答えは-5です", "ja", "-5"),
        ("it is -5", None, "-5"),
        ("x = -5", None, "-5"),
        ("x = - 5", None, "-5"),
        ("(-5)", None, "-5"),
        ("-.5", None, "-0.5"),
        ("+5", None, "5"),
        ("- 5", None, "5"),
        ("covid-19", None, "19"),
        ("an 18-pack", None, "18"),
        ("$18", None, "18"),
        ("18€", None, "18"),
        ("US$18", None, "18"),
        ("Sh.500", "sw", "500"),
        ("18%", None, "18"),
        ("18 m²", None, "18"),
        ("**18**", None, "18"),
        ("\\$18", None, "18"),
        ("5個", "ja", "5"),
        ("5టి", "te", "5"),
    ],
)
def test_one_number(text: str, language: str | None, expected: str) -> None:
    assert values(text, language) == [expected]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("5-3 = 2", None, ["2"]),
        ("5 - 3 = 2", None, ["2"]),
        ("5 -3 = 2", None, ["2"]),
        ("5–3 = 2", None, ["2"]),
        ("$5 - $3 = $2", None, ["2"]),
        ("5 + -3 = 2", None, ["2"]),
        ("3 +2 = 5", "bn", ["5"]),
        ("3+2で5台", "ja", ["5"]),
        ("5 * 3 = 15", None, ["15"]),
        ("5 × 3 = 15", None, ["15"]),
        ("5 eggs * 3 = 15", None, ["15"]),
        ("36/2 = 18", None, ["18"]),
        ("36 : 2 = 18", "de", ["18"]),
        ("10-12 days", None, []),
        ("1/2", None, []),
        ("½", None, []),
        ("2½", None, []),
        ("2 1/2", None, []),
        ("2又1/2", "zh", []),
        ("2分の1", "ja", []),
        ("20 minus 18", None, []),
        ("20 minus 18 equals 2", None, ["2"]),
        ("al menos 18", "es", ["18"]),
        ("10²", None, []),
        ("3/4/2020", None, []),
        ("2020-04-03", None, []),
        ("7:30", None, []),
        ("1.2.3", None, []),
        ("3,4,5", None, []),
        ("Day 1: 18", None, ["1", "18"]),
        ("3, 4 and 5", None, []),
        ("18 to 20", None, []),
        ("18～20", None, []),
        ("12 marbles and Ann has 15 marbles", None, []),
        ("18 dollars a day, so 126 dollars a week", None, ["18", "126"]),
        ("twice 9", None, []),
        ("more than 9", None, []),
        ("not 9 but 8", None, ["8"]),
        ("9ではなく8", "ja", ["8"]),
        ("9 নয়, 8", "bn", ["8"]),
        ("3 and a half", None, []),
        ("3 hours and 20 minutes", None, []),
        ("March 18, 2021", None, []),
        ("1 000", "en", []),
        ("18 Billionen", "de", []),
        ("1兆", "zh", []),
        ("18 B", None, ["18"]),
        ("18B", None, []),
        ("18\n- 5", None, ["18", "5"]),
        ("① 3 eggs", None, ["3"]),
        ("no number", None, []),
        ("", None, []),
    ],
)
def test_operands_fractions_ranges_dates_and_times_are_not_standalone(
    text: str, language: str | None, expected: list[str]
) -> None:
    assert values(text, language) == expected


def test_a_gold_answer_is_one_number() -> None:
    assert parse_number("2,125") == 2125
    assert parse_number("৭০ হাজার") == 70_000
    assert parse_number("১৮টি") is None
    assert parse_number("18 or 19") is None
    assert parse_number("none") is None


@pytest.mark.parametrize(
    ("value", "text"), [("1E+3", "1000"), ("-0.0", "0"), ("1.50", "1.5"), ("100", "100"), ("0", "0")]
)
def test_the_plain_form_has_no_exponent_and_no_spare_zeros(value: str, text: str) -> None:
    assert format_number(Decimal(value)) == text


def in_script(number: str, zero: str) -> str:
    return "".join(chr(ord(zero) + int(char)) if char.isdigit() else char for char in number)


def test_unicode_has_the_scripts_of_mgsm() -> None:
    assert {BENGALI, TELUGU, THAI, DEVANAGARI, FULL_WIDTH} <= set(ZEROS)


@given(st.integers(min_value=0, max_value=10**30), st.sampled_from(ZEROS))
def test_the_digits_of_every_script_are_read(number: int, zero: str) -> None:
    assert parse_number(in_script(str(number), zero)) == number


@given(
    st.integers(min_value=-(10**15), max_value=10**15),
    st.sampled_from(["", ".00", ".25"]),
    st.sampled_from([BENGALI, TELUGU, THAI, FULL_WIDTH, "0"]),
    st.sampled_from(["{}", "${}", "{} dollars", "({})", "= {}", "{}.", "{}%", "**{}**", "is {}, and"]),
)
def test_grouping_decimals_sign_script_and_marks_do_not_change_a_value(
    number: int, decimals: str, zero: str, frame: str
) -> None:
    text = frame.format(in_script(f"{number:,}{decimals}", zero))
    sign = -1 if number < 0 else 1
    expected = sign * (abs(Decimal(number)) + Decimal(decimals or 0))
    (found,) = find_numbers(normalize_text(text), "en")
    assert found.value == expected


@given(st.integers(min_value=1000, max_value=10**12), st.sampled_from([".", " ", "\u202f", "'"]))
def test_grouping_as_written_in_german_french_and_russian(number: int, mark: str) -> None:
    text = f"{number:,}".replace(",", mark)
    for language in ("de", "es", "fr", "ru"):
        assert parse_number(f"{text},50", language) == number + Decimal("0.5")
        assert parse_number(text, language) == number


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.sampled_from(["-", " - ", " -", "–", "+", " * ", "/", "×"]))
def test_an_operator_between_two_numbers_is_not_a_sign(left: int, right: int, operator: str) -> None:
    assert values(f"{left}{operator}{right}") == []
    assert values(f"{left}{operator}{right} = 7") == ["7"]


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    normal = normalize_text(text)
    for number in find_numbers(normal, "de"):
        assert any(char.isdigit() for char in normal[number.start : number.end])


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_written_numbers_are_read_back(value: Decimal) -> None:
    assert parse_number(format_number(value)) == value
