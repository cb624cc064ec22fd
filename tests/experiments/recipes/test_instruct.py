"""The shipped recipes for Llama 3.1 8B Instruct run, on a small base and rows like theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapterswap.kit.files.yaml import RecipeFile, shipped_recipes

from .standins import Base, check_that_it_trains, train_recipes

_CHATS = {
    str(content["base_model"]): bool(content["chat_template"])
    for name, path in shipped_recipes().items()
    if name.startswith("models/") and (content := RecipeFile.read(path).content)
}


_SWEEPS = {name: RecipeFile.read(path).content for name, path in shipped_recipes().items() if name.startswith("sweep/")}


@pytest.mark.parametrize("name", [name for name, content in _SWEEPS.items() if content["base_model"] in _CHATS])
def test_a_sweep_asks_in_the_form_of_training(name: str) -> None:
    """Other sweeps are over released experts, which no recipe of ours trains."""
    content = _SWEEPS[name]
    assert content["settings"].get("apply_chat_template", False) is _CHATS[content["base_model"]]


@pytest.mark.parametrize("page", ["reproducing.md", "evaluate.md"])
def test_the_pages_ask_in_the_form_of_training(page: str) -> None:
    """MGSM's answers are written; where choices are compared, no turn is answered."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        base = re.search(r"adapterswap evaluate .*--base-model (\S+)", line)
        if base and base[1] in _CHATS and "mgsm" in line:
            assert ("--apply-chat-template" in line) is _CHATS[base[1]], line


@pytest.mark.sampled(3)  # test_commands.py reads them all
@pytest.mark.parametrize("name", train_recipes("llama-3.1-8b-instruct"))
def test_it_trains(name: str, standin: Base, tmp_path: Path) -> None:
    check_that_it_trains(name, standin, tmp_path)
