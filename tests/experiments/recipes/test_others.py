"""The shipped recipes for the second paper's other bases run, on a small base and rows like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .standins import Base, check_that_it_trains, train_recipes


@pytest.mark.sampled(3)  # the rows of their data are those of the recipes for Llama
@pytest.mark.parametrize("name", train_recipes("qwen2.5-7b-instruct", "aya-expanse-8b", "falcon3-7b-instruct"))
def test_it_trains(name: str, standin: Base, tmp_path: Path) -> None:
    check_that_it_trains(name, standin, tmp_path)
