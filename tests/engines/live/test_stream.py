"""Answers that arrive token by token are those of PEFT and transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from conftest import load_base
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from adapterswap.engines.live import LiveComposer, stream

PROMPT = [3, 17, 42, 8]
TOKENS = 6


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each of the 96 tokens of a pico model."""
    words = {f"w{number}": number for number in range(96)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0")


@pytest.mark.parametrize("names", [["math"], [None, "math", "swahili"]], ids=["one", "rows"])
def test_a_stream_is_what_peft_generates(
    names: list[str | None],
    base: Callable[[str], Path],
    folders: Callable[..., dict[str, Path]],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = torch.tensor([PROMPT])
    expected = []
    for name in names:
        model = load_base(base("llama"))
        if name is not None:
            model = PeftModel.from_pretrained(model, folders()[name])
        generated = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        end = model.generation_config.eos_token_id
        expected.append([*takewhile(lambda token, end=end: token != end, generated[0, len(PROMPT) :].tolist())])
    assert len({tuple(tokens) for tokens in expected}) == len(names)
    assert len(expected[0]) == TOKENS

    composer = LiveComposer.from_experts(load_base(base("llama")), folders())
    parts = list(stream(composer, tokenizer, PROMPT, names, max_new_tokens=TOKENS))

    # One part when the composition is set, one for each token, and one at the end
    assert [part.done for part in parts] == [False] * (TOKENS + 1) + [True]
    for count, part in zip((*range(TOKENS + 1), TOKENS), parts, strict=True):
        assert list(part.tokens) == [len(tokens[:count]) for tokens in expected]
        assert list(part.texts) == [tokenizer.decode(tokens[:count]) for tokens in expected]


def test_nothing_is_generated_once_it_is_stopped(
    composer: Callable[..., LiveComposer], tokenizer: PreTrainedTokenizerFast
) -> None:
    stopped = threading.Event()
    stopped.set()
    assert list(stream(composer(), tokenizer, PROMPT, ["math"], stopped=stopped)) == []
