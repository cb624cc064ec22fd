"""Rows of a dataset → text, with or without a chat template, and where the loss is computed.

A rendered row is an `Example`: its whole text, and where in it the loss is computed. The columns `tools` and
`chat_template_kwargs` of a row reach the chat template, as in TRL. A turn of the assistant with `weight: 0` or
`train: false` is left out of the loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.training.recipe import DatasetSource, Template
from adapterswap.experiments.training.turns import render_turns
from adapterswap.kit.errors import BaseModelError, DataError
from adapterswap.kit.files.text import loads, shown


class Example(NamedTuple):
    """A row as text.

    Attributes:
        text: all of it.
        trained: where the loss is computed: pairs of the first character and the one after the last.
        chat: whether a chat template rendered it, which writes the special tokens itself.
        remarks: what the chat template does to the row that a user should know → an example.
    """

    text: str
    trained: tuple[tuple[int, int], ...]
    chat: bool = False
    remarks: Mapping[str, str] = {}


Row = Mapping[str, Any]

Renderer = Callable[[Row], Example | None]
"""Turns a row into an Example; None for a row with nothing to train on."""


Reader = Callable[[Row], list[tuple[str, str]]]
"""Turns a row into prompts and completions, without chat templates; plain text is a completion."""

Message = dict[str, Any]
Conversation = Callable[[Row], list[Message] | None]

SEPARATORS = {".csv": ",", ".tsv": "\t"}  # of the files with tables of text
TOOLS, ARGUMENTS = TEMPLATE_COLUMNS = "tools", "chat_template_kwargs"
_CHOICES = "weight", "train"  # keys of a message that say whether the loss is computed on it
_KEYS = frozenset({"role", "content", *_CHOICES})  # those that a template need not read
_ANSWERS = "assistant"


def is_chat(source: DatasetSource, *, chat_prompts: bool) -> bool:
    """Whether the rows of `source` are rendered by a chat template."""
    return source.messages is not None or (chat_prompts and source.text is None)


def template_columns(columns: Sequence[str], chat: ChatTemplate) -> list[str]:
    """The columns, besides those that the recipe names, that reach a chat template."""
    read = []
    for name in TEMPLATE_COLUMNS:
        if name in columns and (name == ARGUMENTS or chat.reads(name)):
            read.append(name)
    return read


def choose_reader(source: DatasetSource) -> Reader:
    """A reader of the rows of `source`, for code that checks their text, not their form."""
    if source.text is not None:
        template = Template(source.text)
        return lambda row: [("", template.fill(row) or "")]

    if source.messages is not None:
        conversation = _messages(source.messages)

        def exchanges(row: Row) -> list[tuple[str, str]]:
            # Each turn of the assistant, with the messages since its previous turn as the prompt.
            pairs = []
            prompt = ""
            for message in conversation(row) or []:
                content = message.get("content", "")
                if message["role"] == _ANSWERS:
                    pairs.append((prompt, content))
                    prompt = ""
                else:
                    prompt += content + "\n"
            return pairs

        return exchanges

    pair = _pairs(source)

    def read(row: Row) -> list[tuple[str, str]]:
        prompt_and_completion = pair(row)
        if prompt_and_completion is None:
            return []
        return [prompt_and_completion]

    return read


def common_readers() -> dict[tuple[str, ...], Reader]:
    """Readers for the columns of common datasets; the first whose columns a row has is the right one."""
    pairs = {
        ("prompt", "completion"): ("{prompt}", "{completion}"),
        ("question", "answer"): ("{question}", "{answer}"),  # GSM8K
        ("instruction", "input", "output"): ("{instruction}\n\n{input}", "{output}"),  # Alpaca
        ("instruction", "output"): ("{instruction}", "{output}"),
        ("inputs", "targets"): ("{inputs}", "{targets}"),  # Aya
    }
    readers: dict[tuple[str, ...], Reader] = {}
    readers[("text",)] = choose_reader(DatasetSource(path="rows", text="{text}"))
    for columns, (prompt, completion) in pairs.items():
        readers[columns] = choose_reader(DatasetSource(path="rows", prompt=prompt, completion=completion))
    readers[("messages",)] = choose_reader(DatasetSource(path="rows", messages="messages"))
    return readers


def choose_renderer(
    source: DatasetSource,
    chat: ChatTemplate | None,
    *,
    chat_prompts: bool,
    separator: str = "",
    unread: dict[str, None] | None = None,
) -> Renderer:
    """A renderer of the rows of `source`.

    Args:
        chat: the tokenizer's chat template, if it has one.
        chat_prompts: render prompts and completions as chat turns.
        separator: text between prompt and completion, if they are not chat turns.
        unread: gets the keys of messages that the template does not have.

    The renderer itself raises a `DataError` for a value that is not text, for a column that does not hold chat
    messages, tools or arguments, and for messages that the template refuses.
    """
    if not is_chat(source, chat_prompts=chat_prompts):
        return _plain(source, separator)
    if chat is None:
        raise BaseModelError(
            f"The dataset {source.path} must be rendered as chat, but the tokenizer has no chat template",
            "Use the instruct model's tokenizer, or `prompt` and `completion` with chat_template: false",
            parameter="base_model",
        )
    conversation = _turns(source)
    if source.messages is not None:
        conversation = _messages(source.messages)
    if unread is None:
        unread = {}
    return _chat(conversation, chat, unread)


def _pairs(source: DatasetSource) -> Callable[[Row], tuple[str, str] | None]:
    """The prompt and completion of a row; None if a value is missing or the completion is empty."""
    prompts, completions = Template(source.prompt or ""), Template(source.completion or "")

    def pair(row: Row) -> tuple[str, str] | None:
        prompt, completion = prompts.fill(row), completions.fill(row)
        if prompt is None or completion is None or not completion.strip():
            return None
        return prompt, completion

    return pair


def _plain(source: DatasetSource, separator: str) -> Renderer:
    """A renderer without a chat template: the loss is computed on all of a text, or on the completion of a prompt."""
    if source.text is not None:
        template = Template(source.text)

        def render_text(row: Row) -> Example | None:
            text = template.fill(row)
            if not text or not text.strip():
                return None
            return Example(text, ((0, len(text)),))

        return render_text

    pair = _pairs(source)

    def render(row: Row) -> Example | None:
        prompt_and_completion = pair(row)
        if prompt_and_completion is None:
            return None
        prompt, completion = prompt_and_completion
        prompt += separator
        text = prompt + completion
        return Example(text, ((len(prompt), len(text)),))

    return render


def _turns(source: DatasetSource) -> Conversation:
    """Reads a row's prompt and completion as a conversation of two turns."""
    pair = _pairs(source)

    def conversation(row: Row) -> list[Message] | None:
        prompt_and_completion = pair(row)
        if prompt_and_completion is None:
            return None
        prompt, completion = prompt_and_completion
        # A template such as "{instruction}\n\n{input}" ends in newlines if there is no input.
        return [{"role": "user", "content": prompt.strip()}, {"role": _ANSWERS, "content": completion}]

    return conversation


def _messages(column: str) -> Conversation:
    """Reads a column of messages, or of pairs of a prompt and an answer."""

    def conversation(row: Row) -> list[Message] | None:
        value = read_value(row[column])
        if value is None:
            return None

        messages: list[Message] = []
        is_list = isinstance(value, list)
        if is_list and all(_is_pair(item) for item in value):
            for prompt, answer in value:
                messages.append({"role": "user", "content": prompt})
                messages.append({"role": _ANSWERS, "content": answer})
        elif is_list and all(_is_message(item) for item in value):
            # transformers takes `content: null` beside tool calls as no content.
            for item in value:
                messages.append({key: part for key, part in item.items() if part is not None})
        else:
            raise DataError(
                f"The column {column!r} does not contain chat messages",
                "Use a list of {role: system, user or assistant, content: text}, or of [prompt, answer]",
                parameter="datasets",
            )
        return messages

    return conversation


def store_value(value: Any) -> Any:
    """A list or an object as text: a table gives all objects of a column the same keys."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return value


def read_value(value: Any) -> Any:
    """What `store_value` stored, or a table's own value, without the nulls that tables fill missing keys with."""
    if isinstance(value, str):
        try:
            return loads(value)
        except ValueError:
            return value
    return _filled(value)


def _filled(value: Any) -> Any:
    """A value without keys that are null."""
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return value


def _is_pair(value: Any) -> bool:
    """Whether a value is a prompt and an answer."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _is_message(value: Any) -> bool:
    """Whether a value is a message: a role, and text or tool calls."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if content is None:
        return bool(value.get("tool_calls"))
    return isinstance(content, str)


def _is_trained(message: Message) -> bool:
    """Whether the loss is computed on a message: on the assistant's, unless its `weight` or `train` says otherwise."""
    answers = message["role"] == _ANSWERS
    choices = {key: message[key] for key in _CHOICES if key in message}
    for key, value in choices.items():
        if value not in (0, 1):
            raise DataError(
                f"A message has {key}: {json.dumps(value)}, but the loss is computed on a turn or it is not",
                "Use `weight` 0 or 1, or `train` true or false",
                parameter="datasets",
            )

    # `weight` and `train` may not contradict each other, nor ask for a turn that is not the assistant's.
    chosen = {bool(value) for value in choices.values()}
    if len(chosen) > 1 or (chosen == {True} and not answers):
        said = " and ".join(f"{key}: {json.dumps(value)}" for key, value in choices.items())
        raise DataError(
            f"A message of the role {shown(message['role'])} has {said}",
            "Set one of them; the loss is computed on the assistant's turns only",
            parameter="datasets",
        )
    return answers and chosen != {False}


class _OtherColumns:
    """What a row's columns give the chat template besides the messages.

    Attributes:
        unread: keys of messages and of variables that the template does not read, in order.
    """

    def __init__(self, chat: ChatTemplate, unread: dict[str, None]) -> None:
        self._chat, self.unread = chat, unread
        self._seen = set(_KEYS)

    def read(self, row: Row, messages: list[Message]) -> dict[str, Any]:
        """Arguments for the template; notes keys that it does not read."""
        keys: set[str] = set().union(*messages)
        for key in sorted(keys - self._seen):
            self._seen.add(key)
            if not self._chat.names(key):
                self.unread[f"{key} of messages"] = None

        tools = read_value(row.get(TOOLS))
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise DataError(
                f"The column {TOOLS!r} does not contain a list of tools: {shown(tools)}",
                "Use a list of objects, as transformers takes them, or leave the column out",
                parameter="datasets",
            )

        variables = read_value(row.get(ARGUMENTS))
        if variables is not None and not (isinstance(variables, dict) and all(map(self._chat.may_set, variables))):
            raise DataError(
                f"The column {ARGUMENTS!r} does not contain variables of the chat template: {shown(variables)}",
                "Use an object with variables that the template reads, such as {enable_thinking: false}",
                parameter="datasets",
            )
        arguments = {}
        for key, value in (variables or {}).items():
            if self._chat.reads(key):
                arguments[key] = value
            else:
                self.unread[f"{key} of {ARGUMENTS}"] = None
        return {"tools": tools, "arguments": arguments}


def _chat(conversation: Conversation, chat: ChatTemplate, unread: dict[str, None]) -> Renderer:
    """A renderer of conversations; the loss is computed on the assistant's turns, as `turns` finds them."""
    from jinja2 import TemplateError

    columns = _OtherColumns(chat, unread)

    def render(row: Row) -> Example | None:
        messages = conversation(row) or []
        turns = [turn for turn, message in enumerate(messages) if _is_trained(message)]
        if not turns:
            return None

        # What says where the loss is computed is not for the template.
        for message in messages:
            for key in _CHOICES:
                message.pop(key, None)
        inputs = columns.read(row, messages)
        if not turns[0]:
            raise DataError(
                "The conversation begins with the assistant's turn, before which there is nothing to answer",
                "Put a turn of the user before it, or set `train: false` in it",
                parameter="datasets",
            )

        try:
            rendered = render_turns(chat, messages, turns, **inputs)
        except TemplateError as error:
            raise DataError(
                f"The tokenizer's chat template rejects the messages: {error}",
                "Put the messages in the order that the template expects, or use another template",
                parameter="datasets",
            ) from None
        if not rendered.trained:
            return None
        return Example(rendered.text, rendered.trained, chat=True, remarks=rendered.remarks)

    return render
