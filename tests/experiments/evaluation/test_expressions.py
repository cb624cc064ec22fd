"""An answer that is an expression with a variable is not a number, in any language; nor are ranges and lists."""

from __future__ import annotations

from decimal import Decimal

import pytest

from adapterswap.experiments.evaluation.answers import extract_answer

ANSWERS = {
    "en": "The answer is {}.", "de": "Die Antwort lautet {}.", "es": "La respuesta es {}.", "fr": "La réponse est {}.",
    "ru": "Ответ: {}.", "sw": "Jibu ni {}.", "bn": "উত্তর হলো {}।", "te": "సమాధానం {}.", "th": "คำตอบคือ {}",
    "ja": "答えは{}です。", "zh": "答案是{}。",
}  # fmt: skip

NO_NUMBERS = [
    "x + 5", "5 + x", "x+5", "x＋5", "5x", "2x + 5", "x - 5", "5 - x", "x/5", "5/x", "x × 5", "x·5", "5 * n", "a + 5",
    "5 - a", "3(x + 1)", "(x + 5)", "x > 5", "α + 5", "5 + 2n", "3/4", "3-5", "3, 4, 5", "√5", "2^5",
]  # fmt: skip
NUMBERS = {
    "x = 5": 5,
    "x + 5 = 12": 12,
    "5 km": 5,
    "5%": 5,
    "$5": 5,
    "5 m": 5,
    "5 km/h": 5,
    "5/h": 5,
}

IN_WORDS = {  # x minus 5, 5 times x, x plus 5, between 3 and 5, 3 and 5, 3 or 5
    "en": ["x minus 5", "5 times x", "x plus 5", "between 3 and 5", "3 and 5", "3 or 5"],
    "de": ["x weniger 5", "5 mal x", "x plus 5", "zwischen 3 und 5", "3 und 5", "3 oder 5"],
    "es": ["x menos 5", "5 por x", "x más 5", "entre 3 y 5", "3 y 5", "3 o 5"],
    "fr": ["x moins 5", "5 fois x", "x plus 5", "entre 3 et 5", "3 et 5", "3 ou 5"],
    "ru": ["x минус 5", "5 умножить на x", "x плюс 5", "между 3 и 5", "3 и 5", "3 или 5"],
    "sw": ["x kutoa 5", "5 mara x", "x jumlisha 5", "kati ya 3 na 5", "3 na 5", "3 au 5"],
    "bn": ["x বিয়োগ 5", "5 গুণ x", "x যোগ 5", "3 এবং 5 এর মধ্যে", "3 এবং 5", "3 বা 5"],
    "te": ["x మైనస్ 5", "5 రెట్లు x", "x ప్లస్ 5", "3 మరియు 5 మధ్య", "3 మరియు 5", "3 లేదా 5"],
    "th": ["x ลบ 5", "5 คูณ x", "x บวก 5", "ระหว่าง 3 และ 5", "3 และ 5", "3 หรือ 5"],
    "ja": ["x引く5", "5かけるx", "x足す5", "3から5", "3と5", "3または5"],
    "zh": ["x减5", "5乘x", "x加5", "3到5之间", "3和5", "3或5"],
}
UNITS = {
    "en": "5 apples", "de": "5 Äpfel", "es": "5 manzanas", "fr": "5 pommes", "ru": "5 яблок", "sw": "maembe 5",
    "bn": "5টি আপেল", "te": "5 పండ్లు", "th": "5 ผล", "ja": "5個", "zh": "5个",
}  # fmt: skip
PERCENT = {
    "en": "5 percent", "de": "5 Prozent", "es": "5 por ciento", "fr": "5 pour cent", "ru": "5 процентов",
    "sw": "asilimia 5", "bn": "5 শতাংশ", "te": "5 శాతం", "th": "5 เปอร์เซ็นต์", "ja": "5パーセント", "zh": "百分之5",
}  # fmt: skip


@pytest.mark.parametrize("language", ANSWERS)
def test_what_stands_after_an_answer_phrase(language: str) -> None:
    read = {text: extract_answer(ANSWERS[language].format(text), language) for text in (*NO_NUMBERS, *NUMBERS)}
    assert read == {text: NUMBERS.get(text) for text in (*NO_NUMBERS, *NUMBERS)}
    in_words = [*IN_WORDS[language], UNITS[language], PERCENT[language]]
    expected = [*[None] * 6, Decimal(5), Decimal(5)]
    assert [extract_answer(ANSWERS[language].format(text), language) for text in in_words] == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{x+5}", None),
        (r"\boxed{5x}", None),
        (r"\boxed{\frac{5}{x}}", None),
        (r"\boxed{\frac{x}{5}}", None),
        (r"\boxed{x = 5}", 5),
        (r"\boxed{5\text{ km}}", 5),
        ("#### x + 5", None),
        ("#### 5x", None),
        ("So she has x + 5.", None),
        ("So it is 5 + x eggs", None),
        ("total = x + 5", None),
        ("The answer is 5 + x, where x = 3.", None),
        ("The answer is 5 eggs + x.", None),
        # Letters that are no variables, or have their value beside them.
        ("Let x be the eggs. Then 3x = 15, so x = 5.", 5),
        ("She needs 5 - a few more would not hurt.", 5),
        ("It takes 3 x 5 = 15 eggs.", 15),
        ("Plan B: 5 dollars", 5),
        ("They drive at 5 km/h.", 5),
    ],
)
def test_marks_and_statements(text: str, answer: int | None) -> None:
    assert extract_answer(text, "en") == answer
