"""How often each scorer agrees with `answer_labels.json`: the figures in docs/evaluate.md."""

from __future__ import annotations

from collections import Counter

import pytest

from adapterswap.experiments.evaluation.mgsm import LANGUAGES

from .answer_forms import FORMS
from .answer_labels import READERS, Labelled, count, read_labels
from .answer_table import TABLE
from .answer_witness import WITNESS


@pytest.fixture(scope="module")
def rows() -> list[Labelled]:
    return read_labels()


def test_every_language_has_distinct_rows(rows: list[Labelled]) -> None:
    assert len(rows) == len({(row.language, row.output) for row in rows}) == 405
    assert {row.language for row in rows} == set(LANGUAGES)


# Languages in the order of LANGUAGES: bn de en es fr ja ru sw te th zh.
@pytest.mark.parametrize(
    ("reader", "wrong", "unread"),
    [
        ("strict-match", [0, 1, 23, 3, 4, 1, 0, 8, 19, 6, 0], [38, 10, 65, 10, 9, 29, 12, 30, 16, 9, 12]),
        ("flexible-extract", [0, 9, 61, 8, 9, 24, 8, 29, 27, 8, 11], [36, 0, 7, 0, 1, 2, 0, 2, 1, 1, 0]),
        ("normalized", [0] * 11, [9, 1, 14, 2, 1, 4, 1, 5, 4, 1, 1]),
    ],
)
def test_how_many_answers_each_scorer_reads_wrongly(
    rows: list[Labelled], reader: str, wrong: list[int], unread: list[int]
) -> None:
    counts = count(READERS[reader](), rows)
    assert [counts[code]["wrong"] for code in LANGUAGES] == wrong
    assert [counts[code]["unread"] for code in LANGUAGES] == unread


def test_no_row_is_in_an_older_collection(rows: list[Labelled]) -> None:
    older = {(language, output) for language, output, _, _ in TABLE}
    older |= {(code, row[0]) for table in (FORMS, WITNESS) for code, labelled in table.items() for row in labelled}
    assert not older & {(row.language, row.output) for row in rows}


@pytest.mark.parametrize(
    ("reader", "wrong", "unread"), [("strict-match", 2, 25), ("flexible-extract", 32, 4), ("normalized", 2, 8)]
)
def test_outputs_that_no_scorer_was_changed_for(reader: str, wrong: int, unread: int) -> None:
    rows = read_labels("answer_labels_after.json")
    counts = sum(count(READERS[reader](), rows).values(), Counter())
    assert len(rows) == 54
    assert (counts["wrong"], counts["unread"]) == (wrong, unread)
