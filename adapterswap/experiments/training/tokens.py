"""Render rows as text and tokens, mark those that the loss is computed on, and count rows that were cut.

A rendered row is an `Example`: its whole text, and the prefixes between which the loss is computed. Tokens are kept in
flat arrays, and finally in an Arrow table, because a list for each row would take ten times the memory. As in TRL, a
completion begins at the first token in which the tokens of the prompt alone differ from those of prompt and completion
together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments.training.recipe import DatasetSource, Template
from adapterswap.kit.errors import BaseModelError, DataError
from adapterswap.kit.files.text import shown

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
        chat: the tokenizer's `apply_chat_template`, if it has a template.
        chat_prompts: render prompts and completions as chat turns.
        separator: text between prompt and completion, if they are not chat turns.

    The renderer itself raises a `DataError` for a value that is not text, for a column that does not hold chat
    messages, and for messages that the template refuses.
    """
    if source.messages is not None or (chat_prompts and source.text is None):
        if chat is None:
            raise BaseModelError(
                f"The dataset {source.path} must be rendered as chat, but the tokenizer has no chat template",
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
                f"The column {column!r} does not contain chat messages",
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
        if not turns:
            return None
        try:
            text = chat(messages, tokenize=False)
            trained = []
            for turn in turns:
                before = chat(messages[:turn], tokenize=False, add_generation_prompt=True)
                is_last = turn == len(messages) - 1
                after = None if is_last else _through_turn(text, chat(messages[: turn + 1], tokenize=False))
                end = len(text) if after is None else _common(after, text)
                _check_written(messages[turn]["content"], text[_common(before, text) : end])
                trained.append((before, after))
            return Example(text, tuple(trained), chat=True)
        except TemplateError as error:
            raise DataError(
                f"The tokenizer's chat template rejects the messages: {error}",
                "Put the messages in the order that the template expects",
                parameter="datasets",
            ) from None

    return render


def _through_turn(text: str, alone: str) -> str:
    """The text up to the end of a turn, to compare with that of the conversation; `alone` if nothing follows.

    The two differ inside the turn if a template leaves something out once others follow, as Qwen3's does with the
    reasoning. The turn then ends where the longest end of `alone` does.
    """
    shared = _common(alone, text)
    rest = alone[shared:]
    size = next((size for size in range(len(rest), 0, -1) if text.startswith(rest[-size:], shared)), 0)
    return text[: shared + size] if size else alone


def _check_written(content: str, written: str) -> None:
    """Refuse a template that does not write what the assistant says; it may leave out reasoning before it."""
    last_line = content.rpartition("</think>")[2].strip().rpartition("\n")[2]
    if last_line not in written:
        raise DataError(
            f"The tokenizer's chat template does not write the assistant's turn {shown(content)}",
            "Use `prompt` and `completion` with chat_template: false, or a tokenizer whose template takes plain text",
            parameter="datasets",
        )


_BATCH = 1000
_ALL = (("", None),)  # the whole text is trained on


@dataclass
class TokenCounts:
    """Counts of what tokenising changed.

    Attributes:
        cut_off: how many rows were dropped because max_length left nothing to train on.
        split: how many rows longer than max_length were split into several.
        longest: how many tokens the longest row had before it was cut.
        truncated: for each remaining row, whether it was cut to max_length.
        boundary_moved: for each remaining row, whether its prompt ends in other tokens alone than with its completion.
            The model then trains on a context that it does not see when it answers the prompt.
    """

    cut_off: int = 0
    split: int = 0
    longest: int = 0
    truncated: list[bool] = field(default_factory=list)
    boundary_moved: list[bool] = field(default_factory=list)

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.cut_off + other.cut_off,
            self.split + other.split,
            max(self.longest, other.longest),
            self.truncated + other.truncated,
            self.boundary_moved + other.boundary_moved,
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of all rows, one row after the other.

    Attributes:
        ids: token ids, int32, (tokens,).
        trained: whether the loss is computed on each token, (tokens,).
        starts: where each row begins, and where the last one ends, (rows + 1,).
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids and mask of one row."""
        span = slice(self.starts[index], self.starts[index + 1])
        return self.ids[span], self.trained[span]

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Tokens:
        """The given rows, in that order."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # The index of each token in `ids`: the start of its row, plus its index within the row.
        places = np.repeat(self.starts[:-1][rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Tokens(self.ids[places], self.trained[places], starts)

    def sha256(self) -> str:
        """A fingerprint of the rows and their order."""
        digest = hashlib.sha256()
        for item in fields(self):
            digest.update(np.ascontiguousarray(getattr(self, item.name)).tobytes())
        return digest.hexdigest()

    def dataset(self) -> Any:
        """A datasets.Dataset with the columns input_ids and labels (-100 where no loss is computed)."""
        import datasets
        import pyarrow  # type: ignore[import-untyped]

        labels = np.where(self.trained, self.ids, np.int32(-100))
        columns = {
            name: pyarrow.LargeListArray.from_arrays(self.starts, values)
            for name, values in (("input_ids", self.ids), ("labels", labels))
        }
        return datasets.Dataset(pyarrow.table(columns))

    @staticmethod
    def join(parts: Sequence[Tokens]) -> Tokens:
        """The rows of all `parts`, one after the other."""
        starts = [np.zeros(1, np.int64)]
        for part in parts:
            starts.append(part.starts[1:] + starts[-1][-1])
        return Tokens(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.trained for part in parts]),
            np.concatenate(starts),
        )


def tokenize(
    examples: Iterable[Example], tokenizer: Any, *, max_length: int, split_long: bool = False
) -> tuple[Tokens, TokenCounts]:
    """Tokenise rows, mark the tokens to train on, and cut rows to `max_length`.

    Rows without a chat template get the end-of-sequence token. Rows with nothing left to train on are dropped and
    counted. The first token of a row is never trained on, because nothing predicts it. With `split_long`, a plain text
    that is too long becomes several rows; each begins with the last token of the row before, so no token is lost.
    """
    counts = TokenCounts()
    ids: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    examples = iter(examples)
    while batch := list(islice(examples, _BATCH)):
        encode = _encoder(batch, tokenizer)
        for example in batch:
            row, mask, moved = _row(example, encode, tokenizer.eos_token_id)
            counts.longest = max(counts.longest, len(row))
            if split_long and len(row) > max_length and example.trained == _ALL:
                counts.split += 1
                begins = range(0, len(row) - 1, max_length - 1)
                counts.truncated += [False] * len(begins)
                counts.boundary_moved += [False] * len(begins)
                ids.extend(row[begin : begin + max_length] for begin in begins)
                masks.extend(mask[begin : begin + max_length] for begin in begins)
                continue
            if not mask[1:max_length].any():
                counts.cut_off += 1
                continue
            counts.truncated.append(len(row) > max_length)
            counts.boundary_moved.append(moved)
            ids.append(row[:max_length])
            masks.append(mask[:max_length])
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    return Tokens(
        np.concatenate([np.zeros(0, np.int32), *ids]), np.concatenate([np.zeros(0, bool), *masks]), starts
    ), counts


def _encoder(batch: Sequence[Example], tokenizer: Any) -> dict[tuple[bool, str], list[int]]:
    """(whether it is a chat, text) → ids, for each text and prefix of the batch, tokenised once."""
    encoded: dict[tuple[bool, str], list[int]] = {}
    for chat in (False, True):
        texts: dict[str, None] = {}
        for example in batch:
            if example.chat == chat:
                texts[example.text] = None
                texts.update((prefix, None) for pair in example.trained for prefix in pair if prefix)
        if texts:
            # A chat template writes the special tokens itself.
            result = tokenizer(list(texts), add_special_tokens=not chat, return_attention_mask=False)
            encoded.update(((chat, text), row) for text, row in zip(texts, result["input_ids"], strict=True))
    return encoded


def _row(
    example: Example, encode: dict[tuple[bool, str], list[int]], eos: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
    """The ids and the mask of a row, and whether the boundary of a prompt moved."""
    ids = encode[example.chat, example.text]
    if not example.chat and ids[-1:] != [eos]:
        ids = [*ids, eos]
    mask = np.zeros(len(ids), bool)
    moved = False
    for before, after in example.trained:
        begin = 0
        if before:
            prefix = encode[example.chat, before]
            begin = _common(prefix, ids)
            # Some tokenizers end every text with EOS, also the prompt alone. That is not a moved boundary.
            moved |= begin < len(prefix) and prefix[begin:] != [eos]
        end = len(ids) if after is None else _common(encode[example.chat, after], ids)
        mask[begin:end] = True
    return np.array(ids, np.int32), mask, moved


def _common(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """The length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
