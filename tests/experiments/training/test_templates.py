from __future__ import annotations

import pytest
from refusals import refused

from adapterswap.experiments.training.recipe import Template
from adapterswap.kit.errors import DataError, FieldError


def test_fields_are_filled_and_braces_can_be_written() -> None:
    template = Template("Q: {question}\nA: {{{answer}}}")
    assert template.fields == ("question", "answer")
    assert template.fill({"question": "1 + 1?", "answer": 2, "other": None}) == "Q: 1 + 1?\nA: {2}"


def test_values_with_braces_are_kept() -> None:
    assert Template("{x}").fill({"x": "{y} {0.__class__}"}) == "{y} {0.__class__}"


def test_a_null_becomes_empty_text() -> None:
    assert Template("{x} {y}").fill({"x": "a", "y": None}) is None


def test_fields_are_named_once_and_in_order() -> None:
    assert Template("{a} {b} {a} {c}").fields == ("a", "b", "c")


@pytest.mark.parametrize("text", ["{", "}", "{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}"])
def test_only_columns_are_allowed(text: str) -> None:
    with refused(FieldError):
        Template(text)


def test_only_plain_values_make_text() -> None:
    with refused(DataError, "datasets", match="'x' holds a list"):
        Template("{x}").fill({"x": ["a"]})
