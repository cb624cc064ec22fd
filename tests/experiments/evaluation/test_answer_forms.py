"""How often each scorer agrees with labels written before it saw the rows: the figures in docs/evaluate.md."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest

from adapterswap.experiments.evaluation.answers import is_correct
from adapterswap.experiments.evaluation.harness import build_mgsm_task
from adapterswap.experiments.evaluation.mgsm import LANGUAGES

from .answer_forms import FORMS
from .answer_table import TABLE
from .answer_witness import WITNESS
from .test_answers import verdicts

# Rows on which our score is wrong. All are right answers that it does not read: number words, and statements with
# several numbers of which nothing says which one is meant.
UNREAD = {
    "উত্তর হলো আঠারো।",
    "Antwort: achtzehn",
    "The answer is eighteen.",
    "La respuesta es dieciocho.",
    "La réponse est dix-huit.",
    "答えは十八です。",
    "Ответ: восемнадцать.",
    "Jibu ni kumi na nane.",
    "సమాధానం పద్దెనిమిది.",
    "คำตอบคือสิบแปด",
    "答案是七万美元。",
    "答案是十八。",
    "Au 3ᵉ jour, il en reste 7.",
    "Jibu: Jumla ya glasi 16 zitamgharimu $64.",
    "16 గ్లాసుల మొత్తం ధర $64.",
}
UNREAD_WITNESS = {
    "উত্তর: ০.২৫ বা ২৫%",
    "Sie haben insgesamt 1.430 g Zucker verbraucht, also 1,43 kg.",
    "To solve this, let x be the number of glasses: 8x + 8(0.6x) = 12.8x, and with x = 5 it is $64.",
    "It takes him 4 hours, so he gets home at 8:00 PM. He drove for 45 miles in the last 1.5 hours.",
    "Le total s'élève à 1 430 grammes, soit environ 1,4 kg.",
    "彼女は25歳です。10年後は35歳になります。",
}
Rows = dict[str, list[tuple[str, int, bool]]]


@pytest.mark.parametrize(("rows", "unread"), [(FORMS, UNREAD), (WITNESS, UNREAD_WITNESS)])
def test_where_our_score_is_wrong(rows: Rows, unread: set[str]) -> None:
    wrong = {
        output
        for language, labelled in rows.items()
        for output, gold, right in labelled
        if is_correct(output, Decimal(gold), language) is not right
    }
    assert wrong == unread


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (FORMS, {"normalized": 176, "flexible-extract": 102, "strict-match": 38}),
        (WITNESS, {"normalized": 49, "flexible-extract": 34, "strict-match": 7}),
    ],
)
def test_how_often_each_scorer_agrees(rows: Rows, expected: dict[str, int]) -> None:
    assert set(rows) == set(LANGUAGES)
    agreed: Counter[str] = Counter()
    for language, labelled in rows.items():
        task = build_mgsm_task(f"mgsm_native_cot_{language}")
        for output, gold, right in labelled:
            result = verdicts(task, output, gold)
            agreed.update(name for name, verdict in result.items() if verdict is right)
    assert agreed == expected


def test_no_row_is_in_two_collections() -> None:
    rows = [(language, output, gold) for language, output, gold, _ in TABLE]
    rows += [
        (language, *row[:2]) for table in (FORMS, WITNESS) for language, labelled in table.items() for row in labelled
    ]
    assert len(rows) == 342
    assert len(set(rows)) == 342
