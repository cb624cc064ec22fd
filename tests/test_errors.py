"""How an error reads."""

from __future__ import annotations

import pytest

from adapterswap.errors import AdapterswapError, reason_of


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no such\n  file.", "no such file"),
        ("", "ValueError"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
    ],
)
def test_a_librarys_error_is_one_short_line(message: str, told: str) -> None:
    assert reason_of(ValueError(message)) == told


@pytest.mark.parametrize(
    ("mend", "told"), [("Correct it", "Correct it."), ("Correct it.", "Correct it."), ("Is it 'a'?", "Is it 'a'?")]
)
def test_a_mend_ends_once(mend: str, told: str) -> None:
    assert str(AdapterswapError("it is wrong.", mend)) == f"it is wrong. {told}"
