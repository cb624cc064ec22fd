"""Rows as conversations: what of a row reaches the chat template, and what the loss is computed on."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from refusals import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.training.data import SourceCounts, load_rows
from adapterswap.experiments.training.recipe import DatasetSource
from adapterswap.experiments.training.texts import Example
from adapterswap.experiments.training.tokens import tokenize
from adapterswap.kit.errors import DataError

from .conftest import write_jsonl

TURNS = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}NOTHINK\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str = TURNS, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token for each byte, and `<s>`, `</s>`."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2}
    vocab |= {sign: 3 + number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": None, "parameters": parameters}}


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# Objects with different keys, which a table would fill up with nulls.
ROWS: list[dict[str, Any]] = [
    {"messages": [turn("user", "q"), turn("assistant", "a")], "tools": [tool("price", x="string")]},
    {
        "messages": [
            turn("user", "q"),
            turn("assistant", None, tool_calls=[{"function": {"name": "sum", "arguments": {"n": 1, "unit": None}}}]),
            turn("tool", "3", name="sum"),
            turn("assistant", "a"),
        ],
        "tools": [tool("sum", n="number"), tool("price", y="string")],
    },
    {"messages": [turn("user", "q"), turn("assistant", "a")], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [turn("user", "q"), turn("assistant", "a")]},
]


def load(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any, *, suffix: str = ".jsonl", **source: Any
) -> tuple[SourceCounts, list[Example]]:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        columns = dict.fromkeys(key for row in rows for key in row)
        datasets.Dataset.from_dict({key: [row.get(key) for row in rows] for key in columns}).to_parquet(str(path))
    else:
        write_jsonl(path, rows)
    described = DatasetSource(path=path.name, **{"messages": "messages", **source})
    [(counts, examples)] = load_rows(
        [described], folder, seed=0, chat=ChatTemplate(tokenizer), chat_prompts=described.messages is None
    )
    return counts, list(examples)


@pytest.mark.parametrize("streamed", [{}, {"streaming": True, "samples": 4}], ids=["read", "streamed"])
def test_tools_and_variables_reach_the_template(tmp_path: Path, streamed: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    counts, examples = load(tmp_path, ROWS, tokenizer, **streamed)
    expected = [
        tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False, **row.get("chat_template_kwargs", {})
        )
        for row in ROWS
    ]
    assert sorted(example.text for example in examples) == sorted(expected)
    assert counts.unread == ["name of messages"]


def test_tables_that_fill_objects_up_with_nulls_give_the_same(tmp_path: Path) -> None:
    """Parquet has one type for all objects of a column; its nulls are keys that a row does not have, as for TRL."""
    rows = json.loads(json.dumps(ROWS).replace('"description": null, ', "").replace(', "unit": null', ""))
    _, written = load(tmp_path, rows, byte_tokenizer())
    _, stored = load(tmp_path, rows, byte_tokenizer(), suffix=".parquet")
    assert stored == written
    as_text = [{**row, "tools": json.dumps(row["tools"])} for row in rows[:2]]
    assert load(tmp_path, as_text, byte_tokenizer())[1] == written[:2]


def test_prompts_and_completions_have_tools_too(tmp_path: Path) -> None:
    tokenizer, tools = byte_tokenizer(), [tool("price", x="string")]
    rows = [{"p": "q", "c": "a", "tools": tools, "id": 7}]
    counts, [example] = load(tmp_path, rows, tokenizer, messages=None, prompt="{p}", completion="{c}")
    expected = [turn("user", "q"), turn("assistant", "a")]
    assert example.text == tokenizer.apply_chat_template(expected, tools=tools, tokenize=False)
    assert counts.unread == ["id"]


def test_what_nothing_reads_is_reported(tmp_path: Path) -> None:
    plain = byte_tokenizer("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    rows = [
        {
            "messages": [turn("user", "q"), turn("assistant", "a", mask=True)],
            "tools": [tool("f")],
            "chat_template_kwargs": {"enable_thinking": False},
            "source": "x",
            "kind": "y",
        }
    ]
    counts, [example] = load(tmp_path, rows, plain, filter={"kind": "y"})
    assert example.text == "q</s>a</s>"
    assert counts.unread == ["tools", "source", "mask of messages", "enable_thinking of chat_template_kwargs"]


@pytest.mark.parametrize("left_out", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": False}])
def test_turns_are_left_out_of_the_loss(tmp_path: Path, left_out: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    messages = [
        turn("user", "q", train=False), turn("assistant", "first", **left_out), turn("user", "r"),
        turn("assistant", "second", weight=1),
    ]  # fmt: skip
    counts, examples = load(tmp_path, [{"messages": messages}], tokenizer)
    tokens, _ = tokenize(examples, tokenizer, max_length=200)
    ids, mask = tokens.row(0)
    shown = [{key: message[key] for key in ("role", "content")} for message in messages]
    assert ids.tolist() == tokenizer.apply_chat_template(shown, return_dict=False)
    assert tokenizer.decode(ids[mask]) == "second</s>\n"
    assert counts.unread == []


def test_a_row_without_a_trained_turn_is_dropped(tmp_path: Path) -> None:
    rows = [{"messages": [turn("user", "q"), turn("assistant", "a", train=False)]}, ROWS[3]]
    counts, examples = load(tmp_path, rows, byte_tokenizer())
    assert (len(examples), counts.empty) == (1, 1)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [turn("user", "q"), turn("assistant", "a", weight=0.5)]},
        {"messages": [turn("user", "q"), turn("assistant", "a", weight="0")]},
        {"messages": [turn("user", "q"), turn("assistant", "a", weight=1, train=False)]},
        {"messages": [turn("user", "q", train=True), turn("assistant", "a")]},
        {"messages": [turn("assistant", "a")]},
        {"messages": [turn("user", "q"), turn("assistant", None)]},
        {**ROWS[3], "tools": "a hammer"},
        {**ROWS[3], "tools": ["a hammer"]},
        {**ROWS[3], "chat_template_kwargs": "x"},
        {**ROWS[3], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    ],
    ids=str,
)
def test_what_cannot_be_trained_on_as_written_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with refused(DataError, "datasets"):
        load(tmp_path, [row], byte_tokenizer())


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_text_has_one_start_token(adds_bos: bool) -> None:
    tokenizer = byte_tokenizer(bos=adds_bos)
    texts = ["<s>hello", "hello", "<s>"]
    tokens, _ = tokenize([Example(text, ((0, len(text)),)) for text in texts], tokenizer, max_length=32)
    letters = tokenizer("hello", add_special_tokens=False)["input_ids"]
    start = [0] * adds_bos
    expected = [[0, *letters, 1], [*start, *letters, 1], [0, 1]]
    assert [tokens.row(row)[0].tolist() for row in range(len(tokens))] == expected


def test_a_prompt_that_begins_with_the_start_token_keeps_its_mask() -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokens, _ = tokenize([Example("<s>ab", ((4, 5),))], tokenizer, max_length=32)
    ids, mask = tokens.row(0)
    assert tokenizer.decode(ids[mask]) == "b</s>"
    assert ids.tolist().count(0) == 1


def test_rows_without_an_end_token_are_counted() -> None:
    """The last trained turn counts: an end token before it teaches nothing about stopping there."""
    tokenizer = byte_tokenizer()
    examples = [
        Example("q</s>a", ((5, 6),), chat=True),
        Example("qa</s>", ((1, 6),), chat=True),
        Example("qa</s>rb", ((1, 6), (7, 8)), chat=True),
        Example("qa", ((1, 2),)),  # gets one
    ]
    _, counts = tokenize(examples, tokenizer, max_length=32, ends={1})
    assert counts.without_end == [True, False, True, False]


def test_the_date_of_a_template_can_be_set() -> None:
    dated = ChatTemplate(
        byte_tokenizer("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"), date=datetime.date(2024, 7, 26)
    )
    assert not dated.asked_date
    assert dated([turn("user", "q")]) == "26 Jul 2024 q"
    assert dated.asked_date
    today = ChatTemplate(byte_tokenizer("{{ strftime_now('%Y') }}"))
    assert today([turn("user", "q")]) == str(datetime.datetime.now().year)
    undated = ChatTemplate(byte_tokenizer())
    undated([turn("user", "q")])
    assert not undated.asked_date


def test_masks_equal_those_of_trl_with_tools(tmp_path: Path) -> None:
    """The completion of a row with tools begins where TRL's does."""
    from trl.data_utils import common_prefix_length

    tokenizer = byte_tokenizer()
    row = ROWS[0]
    _, examples = load(tmp_path, [row], tokenizer)
    tokens, _ = tokenize(examples, tokenizer, max_length=1000)
    ids, mask = tokens.row(0)
    prompt = tokenizer.apply_chat_template(
        row["messages"][:1], tools=row["tools"], add_generation_prompt=True, return_dict=False
    )
    whole = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False)
    assert ids.tolist() == whole
    assert np.flatnonzero(mask).tolist() == list(range(common_prefix_length(prompt, whole), len(whole)))
