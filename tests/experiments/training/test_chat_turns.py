"""Which characters of a rendered conversation are trained on, for the templates of common models and for odd ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from refusals import refused

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.training.texts import Example
from adapterswap.experiments.training.tokens import tokenize
from adapterswap.experiments.training.turns import Conversation, render_turns
from adapterswap.kit.errors import DataError

from .chat_templates import COMMON, KEPT, LEFT_OUT, REFUSED, Case, tool
from .test_chats import byte_tokenizer, load, turn

MARKERS = "a<|im_end|>\n<|im_start|>user\nb[/INST]</s>[INST] c<|eot_id|><end_of_turn>\n<|assistant|>\n{{ d }}"


def chat_of(template: str) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(template))


def render(chat: ChatTemplate, messages: list[dict[str, Any]], **more: Any) -> Conversation:
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return render_turns(chat, messages, turns, **{"tools": None, "arguments": {}, **more})


def trained(conversation: Conversation) -> list[str]:
    return [conversation.text[begin:end] for begin, end in conversation.trained]


def conversation(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Turns of the user and the assistant, one after the other."""
    roles = ("user", "assistant") * len(contents)
    turns = [turn(role, content) for role, content in zip(roles, contents, strict=False)]
    return turns if system is None else [turn("system", system), *turns]


CONVERSATIONS = {
    "one answer": conversation("hello", "hi"),
    "two answers": conversation("hello", "hi", "more", "yes"),
    "a last question": conversation("hello", "hi", "more"),
    "equal contents": conversation("same", "same", "same", "same"),
    "space around": conversation(" hello\n", "\n hi \n", "more", " yes "),
    "the template's markers": conversation(MARKERS, MARKERS, MARKERS, MARKERS),
    "empty questions": conversation("", "hi", "", "yes"),
    "an empty answer": conversation("hello", "", "more", "yes"),
    "a last empty answer": conversation("hello", "hi", "more", ""),
    "an answer in an answer": conversation("hello", "hello hi", "hi", "hello"),
}


@pytest.mark.parametrize("case", COMMON.values(), ids=COMMON)
def test_the_assistants_turns_are_trained_on(case: Case) -> None:
    chat, found, expected = chat_of(case.template), {}, {}
    for name, messages in CONVERSATIONS.items():
        expected[name] = [
            case.answer(message["content"], number == len(messages) - 1)
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and (message["content"] or case.empty == KEPT)
        ]
        rendered = render(chat, messages)
        found[name] = trained(rendered)
        assert any("empty turn" in remark for remark in rendered.remarks) == (
            case.empty == LEFT_OUT and "empty answer" in name
        )
    assert found == expected


@pytest.mark.parametrize("case", COMMON.values(), ids=COMMON)
def test_a_system_turn_is_context_or_reported(case: Case) -> None:
    messages = conversation("hello", "hi", "more", "yes", system="be brief")
    if case.system == REFUSED:
        with pytest.raises(TemplateError):
            render(chat_of(case.template), messages)
        return
    rendered = render(chat_of(case.template), messages)
    assert trained(rendered) == [case.answer("hi", False), case.answer("yes", True)]
    assert ("be brief" in rendered.text) == (case.system == KEPT)
    remarks = {"the chat template leaves out system turns": "'be brief'"} if case.system == LEFT_OUT else {}
    assert {remark: rendered.remarks.get(remark) for remark in remarks} == remarks
    assert not any("leaves out" in remark for remark in rendered.remarks.keys() - remarks.keys())


@pytest.mark.parametrize("case", COMMON.values(), ids=COMMON)
def test_calls_of_tools_are_trained_on_and_their_replies_are_not(case: Case) -> None:
    call = {"id": "call12345", "type": "function", "function": {"name": "price", "arguments": {"item": "tea", "n": 2}}}
    messages = [
        turn("user", "How much?"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": "price", "tool_call_id": "call12345"},
        turn("assistant", "It is 42."),
    ]
    if case.call == REFUSED:
        with pytest.raises((TemplateError, DataError)):
            render(chat_of(case.template), messages, tools=[tool("price")])
        return
    rendered = render(chat_of(case.template), messages, tools=[tool("price")])
    assert trained(rendered) == [case.call, case.answer("It is 42.", True)]
    left_out = {remark for remark in rendered.remarks if "leaves out" in remark}
    assert left_out == ({"the chat template leaves out the tools"} if case.tools == LEFT_OUT else set())


def _loop(turn: str, prompt: str = "<assistant>") -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"


_PLAIN = "<{{ m.role }}>{{ m.content }}</s>"
_JOINED = "{{ '<' + m.role + '>' + m.content + '</s>' }}"
_COLLECTED = "{% set ns.all = ns.all + ['<' + m.role + '>' + m.content + '</s>'] %}"
_TAGGED = (
    "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}"
)

# What odd templates write for the answers "hi there" and "yes\nindeed".
ODD = {
    "one text, by ~": (
        "{% set ns = namespace(text='') %}"
        + _loop("{% set ns.text = ns.text ~ '<' ~ m.role ~ '>' ~ m.content | trim ~ '</s>' %}", "").replace(
            "{% endfor %}", "{% endfor %}{{ ns.text }}"
        )
        + "{% if add_generation_prompt %}<assistant>{% endif %}",
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "a list, by the filter": (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}" + _COLLECTED + "{% endfor %}{{ ns.all | join('-') }}"
        "{% if add_generation_prompt %}-<assistant>{% endif %}",
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "a list, by the method": (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}" + _COLLECTED + "{% endfor %}{{ '-'.join(ns.all) }}"
        "{% if add_generation_prompt %}-<assistant>{% endif %}",
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "put into a constant": (
        _loop("{{ '[R]{c}[/R]'.replace('{c}', m.content).replace('R', m.role) }}", "[assistant]"),
        ["hi there[/assistant]", "yes\nindeed[/assistant]"],
    ),
    "capitals": (
        _loop("{{ (m.role + ': ' + m.content) | upper }}</s>", "ASSISTANT: "),
        ["HI THERE</s>", "YES\nINDEED</s>"],
    ),
    "answers after all questions": (
        "{% for m in messages if m.role != 'assistant' %}Q: {{ m.content }}\n{% endfor %}"
        "{% for m in messages if m.role == 'assistant' %}A: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}",
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "JSON": (
        _loop("{{ m | tojson }}\n", '{{ \'{"role": "assistant", "content": \' }}'),
        ['"hi there"}\n', '"yes\\nindeed"}\n'],
    ),
    "a question that repeats the answer": (
        _loop(
            "{% if loop.index0 > 2 and m.role == 'user' %}({{ messages[loop.index0 - 1].content }}){% endif %}" + _PLAIN
        ),
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "an answer twice": (
        _loop("<{{ m.role }}>{{ m.content }}|{{ m.content }}</s>"),
        ["hi there|hi there</s>", "yes\nindeed|yes\nindeed</s>"],
    ),
    "an end of the conversation that begins as a turn does": (
        "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant: {% else %}### End</s>{% endif %}",
        ["hi there\n", "yes\nindeed\n### End</s>"],
    ),
    "word by word": (
        _loop("<{{ m.role }}>{% for word in m.content.split() %}{{ word }} {% endfor %}</s>"),
        ["hi there </s>", "yes indeed </s>"],
    ),
    "letter by letter": (
        _loop("<{{ m.role }}>{% for letter in m.content %}{{ letter }}{% endfor %}</s>"),
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "a caller": (
        "{% macro box(role) %}<{{ role }}>{{ caller() }}</s>{% endmacro %}"
        + _loop("{% call box(m.role) %}{{ m.content }}{% endcall %}"),
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "a block": (_loop("{% set text %}" + _PLAIN + "{% endset %}{{ text }}"), ["hi there</s>", "yes\nindeed</s>"]),
    "other spaces": (
        _loop("<{{ m.role }}>{{ m.content | replace('\n', ' ') }}</s>"),
        ["hi there</s>", "yes indeed</s>"],
    ),
    "an end that the next turn writes": (
        _loop("{% if not loop.first %}</s>{% endif %}<{{ m.role }}>{{ m.content }}", "</s><assistant>"),
        ["hi there", "yes\nindeed"],
    ),
    "no generation prompt": (_loop(_PLAIN, ""), ["<assistant>hi there</s>", "<assistant>yes\nindeed</s>"]),
    "tags": (_loop(_TAGGED), ["hi there</s>", "yes\nindeed</s>"]),
    "tags in a macro": (
        "{% macro say(m) %}" + _TAGGED + "{% endmacro %}" + _loop("{{ say(m) }}"),
        ["hi there</s>", "yes\nindeed</s>"],
    ),
    "tags without the end": (
        _loop(
            "<{{ m.role }}>" + _TAGGED.partition(">")[2].replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")
        ),
        ["hi there", "yes\nindeed"],
    ),
}
TALK = conversation("hello you", "hi there", "more", "yes\nindeed", system="be brief")


@pytest.mark.parametrize(("template", "answers"), ODD.values(), ids=ODD)
def test_odd_templates(template: str, answers: list[str]) -> None:
    rendered = render(chat_of(template), TALK)
    assert (trained(rendered), rendered.remarks) == (answers, {})


@pytest.mark.parametrize(
    "template",
    [
        _loop("{{ '<%s>%s</s>' % (m.role, m.content) }}"),
        _loop("{{ '<{}>{}</s>'.format(m.role, m.content) }}"),
        _loop("<{{ m.role }}>{{ m.content }}{{ '<end>' if loop.last else ';' }}"),
        _loop("<{{ m.role }}></s>"),
        "{% for m in messages[::-1] %}" + _PLAIN + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        _loop("<{{ m.role }}>{% generation %}{{ m.content }}</s>{% endgeneration %}"),
        _loop("<{{ m.role }}>{{ m.content }}{% generation %}</s>{% endgeneration %}"),
        "{% generation %}" + _loop(_PLAIN) + "{% endgeneration %}",
    ],
    ids=["%", "format", "other ends", "no contents", "backwards", "tags around all turns", "tags around ends", "a tag"],
)
def test_turns_that_nothing_proves_are_refused(template: str) -> None:
    with refused(DataError, "datasets"):
        render(chat_of(template), TALK)


@pytest.mark.parametrize(
    ("template", "remark"),
    [
        (_loop("{% if m.role != 'system' %}" + _PLAIN + "{% endif %}"), "leaves out system turns"),
        (_loop("{% if loop.index0 != 1 %}" + _PLAIN + "{% endif %}"), "leaves out user turns"),
        (_loop("<{{ m.role }}>{{ m.content[:8] }}</s>"), "leaves out a part of user turns"),
        (_loop("<{{ m.role }}>{{ m.content.split('\n')[-1] }}</s>"), "leaves out a part of assistant turns"),
        (_loop(_PLAIN, "<assistant><think>"), "does not begin with .* generation prompt"),
    ],
)
def test_what_a_template_leaves_out_is_remarked(template: str, remark: str) -> None:
    rendered = render(chat_of(template), TALK)
    assert any(re.search(remark, line) for line in rendered.remarks)
    assert all(answer.endswith("</s>") for answer in trained(rendered))


THINKING = conversation("hello", "<think>\nhm\n</think>\n\nhi", "more", "<think>\nso\n</think>\n\nyes")


def test_reasoning() -> None:
    """Qwen 3 writes that of the last answer, R1 none, and its prompt begins it."""
    left_out = "the chat template leaves out a part of assistant turns"
    thinking = render(chat_of(COMMON["Qwen 3"].template), THINKING)
    assert trained(thinking) == ["hi<|im_end|>\n", "<think>\nso\n</think>\n\nyes<|im_end|>\n"]
    assert thinking.remarks == {left_out: repr("<think>\nhm\n</think>")}

    distilled = render(chat_of(COMMON["DeepSeek R1"].template), THINKING)
    assert trained(distilled) == ["\n\nhi<end>", "\n\nyes<end>"]
    assert distilled.remarks.keys() > {left_out}
    assert any("generation prompt" in remark for remark in distilled.remarks)

    keyed = [turn("user", "hello"), turn("assistant", "hi", reasoning_content="hm"), *conversation("more", "yes")]
    gpt = render(chat_of(COMMON["gpt-oss"].template), [{**keyed[0]}, {**keyed[1], "thinking": "hm"}, *keyed[2:]])
    assert gpt.remarks == {"the chat template leaves out `thinking` of assistant turns": "'hm'"}


def test_tags_are_taken_as_transformers_takes_them() -> None:
    tokenizer = byte_tokenizer(_loop(_TAGGED))
    encoded = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    rendered = render(ChatTemplate(tokenizer), TALK)
    tokens, _ = tokenize([Example(rendered.text, rendered.trained, chat=True)], tokenizer, max_length=1000)
    ids, mask = tokens.row(0)
    assert (ids.tolist(), mask.astype(int).tolist()) == (encoded["input_ids"], encoded["assistant_masks"])


def test_tags_of_turns_that_are_left_out(tmp_path: Path) -> None:
    chat = chat_of(_loop(_TAGGED))
    rendered = render_turns(chat, TALK, [4], tools=None, arguments={})
    assert trained(rendered) == ["yes\nindeed</s>"]


def test_rows_with_remarks_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": TALK}, {"messages": conversation("q", "a")}, {"messages": TALK}]
    counts, _ = load(tmp_path, rows, byte_tokenizer(COMMON["Mistral 0.3"].template))
    assert counts.remarks == {"the chat template leaves out system turns": (2, "'be brief'")}
