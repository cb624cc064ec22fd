from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.training.data import load_rows
from adapterswap.experiments.training.recipe import DatasetSource
from adapterswap.experiments.training.run import isolated
from adapterswap.experiments.training.texts import Example
from adapterswap.experiments.training.tokens import Tokens, tokenize

from .conftest import WORDS, word_tokenizer, write_jsonl

CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"  # noqa: E501
TEXTS = ["Juma has seven pens. How many pens?", "Swali: jibu ni 42!", "Yes  ", "#### 7\n", "<<48/2=24>>24 clips"]


def pair(prompt: str, completion: str) -> Example:
    return Example(prompt + completion, ((len(prompt), len(prompt + completion)),))


def words(tokens: Tokens, row: int) -> tuple[str, str]:
    """The words of one row that are read, and those that are trained on."""
    ids, mask = tokens.row(row)
    return " ".join(WORDS[i] for i in ids), " ".join(WORDS[i] for i in ids[mask])


def test_the_loss_is_taken_on_exactly_the_completion() -> None:
    tokens, counts = tokenize(
        [pair("w1 w2 ?", " w3 w4"), pair("", "w5"), Example("w6 w7", ((0, 5),))], word_tokenizer(), max_length=32
    )
    assert words(tokens, 0) == ("w1 w2 ? w3 w4 <eos>", "w3 w4 <eos>")
    assert words(tokens, 1) == ("w5 <eos>", "w5 <eos>")
    assert words(tokens, 2) == ("w6 w7 <eos>", "w6 w7 <eos>")
    assert (sum(counts.truncated), counts.cut_off, sum(counts.boundary_moved), counts.longest) == (0, 0, 0, 6)


def test_turns_of_a_chat_are_trimmed_one_by_one() -> None:
    example = Example("w0 w1 w2 w3 w4 w5", ((2, 8), (11, 17)), chat=True)
    tokens, _ = tokenize([example], word_tokenizer(), max_length=32)
    assert words(tokens, 0) == ("w0 w1 w2 w3 w4 w5", "w1 w2 w4 w5")  # without <eos>, which the template would write


def test_rows_are_cut_counted_and_dropped() -> None:
    examples = [pair("w1 w2 ?", " w3 w4"), pair("w1 w2 w3 ?", " w5"), pair("w1", " w2")]
    tokens, counts = tokenize(examples, word_tokenizer(), max_length=4)
    assert [words(tokens, row) for row in range(len(tokens))] == [("w1 w2 ? w3", "w3"), ("w1 w2 <eos>", "w2 <eos>")]
    assert (sum(counts.truncated), counts.cut_off, counts.longest) == (1, 1, 6)


def test_an_existing_end_token_is_not_added_again() -> None:
    tokens, _ = tokenize([pair("w1", " w2 <eos>")], word_tokenizer(), max_length=8)
    assert words(tokens, 0) == ("w1 w2 <eos>", "w2 <eos>")


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, in which words merge with the space before them, as in Llama 3, Qwen and GPT-2."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS * 20, vocab_size=400, min_frequency=1, special_tokens=["<eos>", "<|user|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_and_masks_equal_those_of_trl(
    tmp_path: Path, pico: Any, bpe: PreTrainedTokenizerFast, chat: bool
) -> None:
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    if not chat:
        pairs += [(f"{a} ", b) for a, b in pairs] + [(a, f" {b}") for a, b in pairs]
    write_jsonl(tmp_path / "rows.jsonl", [{"p": p, "c": c} for p, c in pairs])
    source = DatasetSource(path="rows.jsonl", prompt="{p}", completion="{c}")
    [(_, examples)] = load_rows([source], tmp_path, seed=0, chat=ChatTemplate(bpe), chat_prompts=chat)
    max_length = 24 if chat else 8
    tokens, counts = tokenize(examples, bpe, max_length=max_length)

    turns = [
        {"prompt": [{"role": "user", "content": p.strip()}], "completion": [{"role": "assistant", "content": c}]}
        if chat
        else {"prompt": p, "completion": c}
        for p, c in pairs
    ]
    with isolated():
        reference = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(pico("llama")),
            SFTConfig(
                output_dir=str(tmp_path), max_length=max_length, use_cpu=True, bf16=False, report_to="none",
                activation_checkpointing=False,
            ),
            train_dataset=datasets.Dataset.from_list(turns),
            processing_class=bpe,
        ).train_dataset  # fmt: skip
    assert len(tokens) == len(reference) == len(pairs) - counts.cut_off
    assert any(counts.truncated)
    assert counts.cut_off > 0
    assert chat or any(counts.boundary_moved)
    for row, expected in enumerate(reference):
        ids, mask = tokens.row(row)
        assert ids.tolist() == expected["input_ids"]
        assert np.where(mask, ids, -100).tolist() == expected["labels"]


def test_a_boundary_that_merges_is_counted(bpe: PreTrainedTokenizerFast) -> None:
    _, counts = tokenize([pair("Swali: ", "jibu"), pair("Swali:", " jibu")], bpe, max_length=32)
    assert sum(counts.boundary_moved) == 1


rows_strategy = st.lists(
    st.lists(st.tuples(st.integers(0, 90), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=6
)


def _tokens(rows: list[list[tuple[int, bool]]]) -> Tokens:
    flat = [item for row in rows for item in row]
    starts = np.cumsum([0, *(len(row) for row in rows)])
    return Tokens(np.array([i for i, _ in flat], np.int32), np.array([m for _, m in flat], bool), starts)


def _rows(tokens: Tokens) -> list[list[tuple[int, bool]]]:
    return [list(zip(*(part.tolist() for part in tokens.row(row)), strict=True)) for row in range(len(tokens))]


@given(rows_strategy, rows_strategy, st.randoms(use_true_random=False))
def test_join_and_take_keep_rows_whole(one: Any, two: Any, chance: Any) -> None:
    joined = Tokens.join([_tokens(one), _tokens(two)])
    assert _rows(joined) == [*one, *two]
    order = chance.sample(range(len(joined)), chance.randint(1, len(joined)))
    taken = joined.take(np.array(order))
    assert _rows(taken) == [[*one, *two][row] for row in order]
    assert [
        {"input_ids": [i for i, _ in row], "labels": [i if m else -100 for i, m in row]} for row in _rows(taken)
    ] == list(taken.dataset())


def test_the_fingerprint_covers_tokens_masks_and_order() -> None:
    one, other = [(1, True)], [(2, False), (3, True)]
    variants = [[one, other], [other, one], [one, [(2, True), (3, True)]], [[(1, True), (2, False)], [(3, True)]]]
    assert len({_tokens(rows).sha256() for rows in variants}) == 4
    assert _tokens([one, other]).sha256() == _tokens([one, other]).sha256()
