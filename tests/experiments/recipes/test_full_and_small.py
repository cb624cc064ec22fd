"""The shipped recipes for Llama 3.1 8B in full and for a small card run, on a small base and rows like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .standins import Base, check_that_it_trains, train_recipes


@pytest.mark.sampled(3)  # test_commands.py reads them all
@pytest.mark.parametrize("name", train_recipes("llama-3.1-8b", "qwen3-1.7b"))
def test_it_trains(name: str, standin: Base, tmp_path: Path) -> None:
    check_that_it_trains(name, standin, tmp_path)
