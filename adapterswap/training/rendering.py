"""Render rows as text with templates or a tokenizer's chat template, and mark the parts that the loss is computed on.

A rendered row is an `Example`: its whole text, and the prefixes between which the loss is computed. Knows nothing of
tokens or of where rows come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from adapterswap.errors import BaseModelError, DataError
from adapterswap.training.recipe import DatasetSource
from adapterswap.training.templates import Template

__all__ = ["ChatTemplate", "Example", "Reader", "Renderer", "choose_reader", "choose_renderer"]

ChatTemplate = Callable[..., str]
"""A tokenizer's `apply_chat_template`."""


class Example(NamedTuple):
    """A row as text.

    Attributes:
        text: all of it.
        trained: pairs of prefixes of `text`; the loss is computed on the text between the end of the first and the end
            of the second (None: the end of the text).
        chat: whether a chat template rendered it, which writes the special tokens itself.
    """

    text: str
    trained: tuple[tuple[str, str | None], ...]
    chat: bool = False


Renderer = Callable[[Mapping[str, Any]], Example | None]
"""Turns a row into an Example; None for a row with nothing to train on."""


Reader = Callable[[Mapping[str, Any]], list[tuple[str, str]]]
"""Turns a row into prompts and completions, without chat templates; plain text is a completion."""


def choose_reader(source: DatasetSource) -> Reader:
    """A reader of the rows of `source`, for code that checks their text, not their form."""
    if source.text is not None:
        template = Template(source.text)
        return lambda row: [("", template.fill(row) or "")]
    if source.messages is not None:
        conversation = _messages(source.messages)
        return lambda row: _exchanges(conversation(row) or [])
    pair = _pairs(source)

    def read(row: Mapping[str, Any]) -> list[tuple[str, str]]:
        prompt_and_completion = pair(row)
        return [prompt_and_completion] if prompt_and_completion else []

    return read


def _exchanges(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Each turn of the assistant, with the messages since its previous turn as the prompt."""
    exchanges, prompt = [], ""
    for message in messages:
        if message["role"] == "assistant":
            exchanges.append((prompt, message["content"]))
            prompt = ""
        else:
            prompt += message["content"] + "\n"
    return exchanges


def choose_renderer(
    source: DatasetSource, chat: ChatTemplate | None, *, chat_prompts: bool, separator: str = ""
) -> Renderer:
    """A renderer of the rows of `source`.

    Args:
        source: the source of the rows.
        chat: the tokenizer's `apply_chat_template`, if it has a template.
        chat_prompts: render prompts and completions as chat turns.
        separator: text between prompt and completion, if they are not chat turns.

    Raises:
        BaseModelError: a chat template is needed, but the tokenizer has none.

    The renderer itself raises a `DataError` for a value that is not text, for a column that does not hold chat
    messages, and for messages that the template refuses.
    """
    if source.messages is not None or (chat_prompts and source.text is None):
        if chat is None:
            raise BaseModelError(
                f"the dataset {source.path} must be rendered as chat, but the tokenizer has no chat template",
                "Use the instruct model's tokenizer, or `prompt` and `completion` with chat_template: false",
                parameter="base_model",
            )
        return _chat(_messages(source.messages) if source.messages is not None else _turns(source), chat)
    return _plain(source, separator) if source.text is None else _text(Template(source.text))


def _text(template: Template) -> Renderer:
    def render(row: Mapping[str, Any]) -> Example | None:
        filled = template.fill(row)
        return Example(filled, (("", None),)) if filled and filled.strip() else None

    return render


def _pairs(source: DatasetSource) -> Callable[[Mapping[str, Any]], tuple[str, str] | None]:
    """The prompt and completion of a row; None if a value is missing or the completion is empty."""
    prompts, completions = Template(source.prompt or ""), Template(source.completion or "")

    def pair(row: Mapping[str, Any]) -> tuple[str, str] | None:
        prompt, completion = prompts.fill(row), completions.fill(row)
        if prompt is None or completion is None or not completion.strip():
            return None
        return prompt, completion

    return pair


def _plain(source: DatasetSource, separator: str) -> Renderer:
    pair = _pairs(source)

    def render(row: Mapping[str, Any]) -> Example | None:
        if (prompt_and_completion := pair(row)) is None:
            return None
        prompt, completion = prompt_and_completion[0] + separator, prompt_and_completion[1]
        return Example(prompt + completion, ((prompt, None),))

    return render


Conversation = Callable[[Mapping[str, Any]], list[dict[str, str]] | None]


def _turns(source: DatasetSource) -> Conversation:
    pair = _pairs(source)

    def conversation(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
        if (prompt_and_completion := pair(row)) is None:
            return None
        prompt, completion = prompt_and_completion
        # A template such as "{instruction}\n\n{input}" ends in newlines if there is no input.
        return [{"role": "user", "content": prompt.strip()}, {"role": "assistant", "content": completion}]

    return conversation


def _messages(column: str) -> Conversation:
    def conversation(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
        messages = row[column]
        if messages is None:
            return None
        if isinstance(messages, list) and all(_is_pair(item) for item in messages):
            roles = ("user", "assistant")
            messages = [
                {"role": role, "content": text} for pair in messages for role, text in zip(roles, pair, strict=True)
            ]
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise DataError(
                f"the column {column!r} does not contain chat messages",
                "Use a list of {role: system, user or assistant, content: text}, or of [prompt, answer]",
                parameter="datasets",
            )
        return messages

    return conversation


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _chat(conversation: Conversation, chat: ChatTemplate) -> Renderer:
    """A renderer of conversations; the loss is computed on what the template writes for each assistant turn."""
    from jinja2 import TemplateError

    def render(row: Mapping[str, Any]) -> Example | None:
        messages = conversation(row) or []
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            trained = tuple(
                (
                    chat(messages[:turn], tokenize=False, add_generation_prompt=True),
                    None if turn == len(messages) - 1 else chat(messages[: turn + 1], tokenize=False),
                )
                for turn in turns
            )
            return Example(chat(messages, tokenize=False), trained, chat=True) if trained else None
        except TemplateError as error:
            raise DataError(
                f"the tokenizer's chat template rejects the messages: {error}",
                "Put the messages in the order that the template expects",
                parameter="datasets",
            ) from None

    return render
