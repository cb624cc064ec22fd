"""The answer in an output, where the end of the reasoning and what ends the answer may be special tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapterswap.experiments.evaluation.outputs import OutputReader

THINK, STOP = "</think>", "<|im_end|>"


def tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """One token for each byte, two of several letters, and these special tokens."""
    vocab = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"ab": 256, "</": 257, "<unk>": 258}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("<", "/")], unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<unk>")


SPECIAL = {"plain": (), "special": (THINK, STOP)}


def read(special: tuple[str, ...], output: str, prompt: str = "Q", *, end: Any = THINK) -> tuple[str, bool]:
    """The answer that is scored, after what the harness does to it, and whether it is ended."""
    from lm_eval.models.utils import postprocess_generated_text

    words = tokenizer(*special)
    reader = OutputReader(words, end)
    ids, stops = words(output)["input_ids"], [STOP, "\nQ:"]
    reasons = reader.reasons_after(words(prompt)["input_ids"])
    answer = reader.answer(ids, stops, reasons=reasons)
    written = end if isinstance(end, str) else None
    return postprocess_generated_text(answer, stops, written), reader.is_stopped(ids, stops, reasons=reasons)


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize(
    ("output", "prompt", "answer", "ended"),
    [
        ("It is 5.</think>It is 7.", "Q", "It is 7.", False),
        ("It is 5.</think>\n\nIt is 7.<|im_end|>It is 9.", "Q", "It is 7.", True),
        ("5<|im_end|>6\nQ: 8</think>7\nQ: 9", "Q", "7", True),
        ("It is 5. Wait, 5 or", "Q", "", False),  # the limit came first
        ("It is 5.<|im_end|>", "Q", "", False),
        ("5</think>6</think>7", "Q", "7", False),
        ("5</think>", "Q", "", False),
        ("", "Q", "", False),
        ("It is 7.", "Q<think>\n\n</think>\n\n", "It is 7.", False),  # the template closed it
        ("It is 7.", "Q</think>A", "", False),  # a shot's
        ("ab</think>ab<|im_end|>ab", "Q", "ab", True),
    ],
)
def test_only_what_follows_the_reasoning_is_the_answer(
    special: tuple[str, ...], output: str, prompt: str, answer: str, ended: bool
) -> None:
    assert read(special, output, prompt) == (answer, ended)


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize(
    ("output", "answer"),
    [("It is 7.<|im_end|>It is 9.", "It is 7."), ("<|im_end|>9", ""), ("7\nQ: 9<|im_end|>", "7"), ("7", "7")],
)
def test_stops_without_reasoning(special: tuple[str, ...], output: str, answer: str) -> None:
    assert read(special, output, end=None)[0] == answer


def test_marks_of_several_tokens() -> None:
    """A mark that a special token is a part of, and one that ends inside a token."""
    words = tokenizer("<|end|>")
    assert OutputReader(words, None).answer(words("ab.<|end|>\nab")["input_ids"], ["b.<|end|>\n"], reasons=False) == "a"
    ids = words("5 so:ab")["input_ids"]
    assert OutputReader(words, "so:a").answer(ids, [], reasons=True) == "b"


def test_a_tokens_id_ends_the_reasoning() -> None:
    words = tokenizer(THINK)
    end = words.convert_tokens_to_ids(THINK)
    assert read((THINK,), "5</think>7", end=end)[0] == "7"
    assert read((THINK,), "5", end=end)[0] == ""
    assert read((THINK,), "7", "Q</think>\n", end=end)[0] == "7"
    assert read((THINK,), "7", "Q</think>A", end=end)[0] == ""
