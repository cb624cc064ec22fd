"""A sample of `make answering`: types that the probe of padding, of causality or of lengths decides on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXPECTED = {
    "rwkv": ("equal one by one", "equal"),
    "recurrent_gemma": ("equal one by one", "equal"),
    "qwen3_5": ("equal", "equal"),
    "opt": ("equal", "equal"),
    "mpt": ("equal", "equal"),
    "bart": ("equal to generate alone, which differs without its cache one by one", "equal"),
    "bert": ("equal to generate alone, which differs without its cache", "refused, true"),
    "blip-2": ("refused, true", "refused, true"),
    "paligemma": ("equal to generate alone, which differs without its cache one by one", "refused, true"),
    "llama4": ("equal", "equal"),
}


@pytest.fixture(scope="module")
def answering() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "answering.py"
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("answering", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("model_type", EXPECTED)
def test_a_type_is_answered_as_plain_torch_answers(model_type: str, answering: ModuleType) -> None:
    outcomes = answering.examine(model_type)
    assert tuple(answering.kind_of(outcomes[way]) for way in answering.WAYS) == EXPECTED[model_type], outcomes
