"""llama.cpp with exported adapters answers as PEFT does: same greedy tokens, same log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adapterswap as asw
from exporting.bases import PICOS, load
from exporting.conftest import Bases, Experts, adapted
from exporting.engine import Answer, Engine, reference

PROMPTS = ([1, 140, 150, 5, 160, 170, 180, 40], [1, 33, 34, 35, 36, 180])

# ggml looks GELU up in a table of half-precision numbers, with and without adapters; SiLU it computes.
GELU = ("gemma2", "gemma3", "falcon-7b", "falcon-40b", "gpt2", "neox")


def same(found: Answer, expected: Answer, name: str = "llama") -> None:
    __tracebackhide__ = True
    assert found.tokens == expected.tokens[: len(found.tokens)]
    apart = np.abs(found.logprobs - expected.logprobs[: len(found.tokens)]).max()
    assert apart <= (3e-3 if name in GELU else 5e-5), apart


def differ(found: Answer, expected: Answer) -> float:
    """By how much the log-probabilities of the first token differ: the prompts are the same there."""
    return float(np.abs(found.logprobs[0] - expected.logprobs[0]).max())


@pytest.mark.parametrize("name", PICOS)
def test_an_expert_of_each_architecture(name: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    base, gguf = bases(name)
    expert = experts(name)
    exported = asw.export(expert, tmp_path / "math.gguf", base_model=base)
    assert len(exported.files) == 1
    engine, plain, model = Engine(gguf, [exported.path]), Engine(gguf), adapted(base, expert)
    for prompt in PROMPTS:
        expected = reference(model, prompt)
        same(plain.answer(prompt), reference(load(base), prompt), name)  # the test's own base is right
        same(engine.answer(prompt), expected, name)
        assert differ(plain.answer(prompt), expected) > 0.1
