"""Render a conversation and know of every character which message it came from.

`trace` runs the tokenizer's own chat template, in transformers' own environment, on texts that remember where they come
from: a `TracedText` is a `str` whose methods (`strip`, `split`, `+`, …) return texts that remember it too. A template
cannot tell them from other texts, so every branch is the one that it takes in earnest.

What no method here follows (such as `'%s' % content`) is a text like any other, so a character may be from a message
and not be traced. A traced character always is from its message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, SupportsIndex

from adapterswap.experiments.chat import ChatTemplate

TOOLS = -1  # the `message` of what comes from the tools
_TAGS = -2  # and of what the template itself marks as the assistant's


class Leaf(NamedTuple):
    """A text in the input of a template.

    Attributes:
        message: the number of the message that it is part of, or `TOOLS`.
        path: the keys under which it stands, such as ("content",) or ("tool_calls", 0, "function", "name").
        text: the text; None for a list or an object, which is written as a whole.
    """

    message: int
    path: tuple[str | int, ...]
    text: str | None


class Piece(NamedTuple):
    """The characters `begin` to `end` of a text, which are `first` to `last` of a leaf.

    Where both have the same length, they correspond one to one. Elsewhere they do as a whole, such as a text in JSON.
    A piece without characters says where an empty text stands.
    """

    begin: int
    end: int
    leaf: Leaf
    first: int
    last: int

    def cut(self, begin: int, end: int) -> Piece | None:
        """The piece in a slice of its text, which begins at `begin`; None if it is outside."""
        low, high = max(self.begin, begin), min(self.end, end)
        if low > high or (low == high and begin < end and self.begin < self.end):
            return None
        first, last = self.first, self.last
        if self.end - self.begin == last - first:
            first, last = first + low - self.begin, last - (self.end - high)
        return Piece(low - begin, high - begin, self.leaf, first, last)


class TracedText(str):
    """A text that knows where its characters come from.

    A template reads attributes of texts, but none that begins with an underscore.
    """

    _pieces: tuple[Piece, ...]

    def __new__(cls, text: str, pieces: Iterable[Piece] = ()) -> TracedText:
        traced = super().__new__(cls, text)
        traced._pieces = tuple(pieces)
        return traced

    def _slice(self, begin: int, end: int) -> TracedText:
        pieces = (piece.cut(begin, end) for piece in self._pieces)
        return TracedText(str.__getitem__(self, slice(begin, end)), (piece for piece in pieces if piece is not None))

    def _parts(self, parts: Sequence[str], separator: str | None) -> list[str]:
        """Parts of this text that follow each other in it, traced; None for any space between them."""
        result: list[str] = []
        position = 0
        for part in parts:
            begin = str.index(self, part, position) if separator is None else position
            result.append(self._slice(begin, begin + len(part)))
            position = begin + len(part) + len(separator or "")
        return result

    def _recased(self, text: str) -> TracedText:
        """The same text with other letters, if there are as many."""
        return TracedText(text, self._pieces if len(text) == len(self) else ())

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return joined([self] * times.__index__())

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return self._slice(index, index + 1)
        indices = range(len(self))[key]
        if indices.step == 1:
            return self._slice(indices.start, max(indices.start, indices.stop))
        return joined(self._slice(index, index + 1) for index in indices)

    def __iter__(self) -> Iterator[str]:
        return (self._slice(index, index + 1) for index in range(len(self)))

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._slice(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._slice(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._slice(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._slice(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._parts(str.splitlines(self, keepends=True), "")
        if keepends:
            return lines
        return [line[: len(plain)] for line, plain in zip(lines, str.splitlines(self), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._parts(str.partition(self, sep), "")
        return before, middle, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._parts(str.rpartition(self, sep), "")
        return before, middle, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return joined(self.split(old, count), new)

    def join(self, parts: Iterable[str], /) -> str:
        return joined(parts, self)

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))


class _Object(dict[Any, Any]):
    """An object of the input, which is traced if it is written as a whole."""

    _leaf: Leaf

    def __str__(self) -> str:
        return _whole(dict.__repr__(self), [self._leaf])


class _List(list[Any]):
    """A list of the input, which is traced if it is written as a whole."""

    _leaf: Leaf

    def __str__(self) -> str:
        return _whole(list.__repr__(self), [self._leaf])


class Trace(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: all of it.
        pieces: what comes from the input, in order; they do not overlap.
        cuts: where the template went on to its next piece of text.
        leaves: the texts of the input.
        blocks: where the template's `{% generation %}` tags begin and end.
    """

    text: str
    pieces: tuple[Piece, ...]
    cuts: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    blocks: tuple[tuple[int, int], ...]


def trace(
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
) -> Trace:
    """Render a conversation with its chat template, and trace it.

    Raises:
        jinja2.TemplateError: the template refuses the messages, fails, or takes too long.
    """
    leaves: list[Leaf] = []

    def render(source: str, variables: dict[str, Any]) -> Trace:
        template = _compiled(source)
        traced = [_traced(message, index, (), leaves) for index, message in enumerate(variables["messages"])]
        tool_list = variables["tools"]
        if tool_list is not None:
            tool_list = _traced(tool_list, TOOLS, (), leaves)
        context = template.new_context({**variables, "messages": traced, "tools": tool_list})

        parts = list(template.root_render_func(context))
        text = joined(parts)
        cuts = [0]
        for part in parts:
            cuts.append(cuts[-1] + len(part))
        pieces = tuple(piece for piece in text._pieces if piece.leaf.message != _TAGS)
        blocks = tuple((piece.begin, piece.end) for piece in text._pieces if piece.leaf.message == _TAGS)
        return Trace(str.__str__(text), pieces, tuple(cuts), tuple(leaves), blocks)

    return chat.render_by(
        render, messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
    )


def joined(parts: Iterable[str], separator: str = "") -> TracedText:
    """`separator.join(parts)`, traced."""
    texts: list[str] = []
    for part in parts:
        if texts and separator:
            texts.append(separator)
        texts.append(part)

    pieces: list[Piece] = []
    length = 0
    for text in texts:
        if isinstance(text, TracedText):
            pieces += [piece._replace(begin=piece.begin + length, end=piece.end + length) for piece in text._pieces]
        length += len(text)
    return TracedText("".join(texts), pieces)


def _whole(text: str, leaves: Sequence[Leaf]) -> str:
    """A text that was made of a leaf as a whole; plain if it was made of several."""
    if len(set(leaves)) != 1:
        return text
    return TracedText(text, [Piece(0, len(text), leaves[0], 0, len(leaves[0].text or ""))])


def _traced(value: Any, message: int, path: tuple[str | int, ...], leaves: list[Leaf]) -> Any:
    """A copy of a part of the input whose texts, lists and objects are traced; their leaves are added to `leaves`.

    A message itself is a plain object, and its role a plain text.
    """
    if isinstance(value, str):
        leaf = Leaf(message, path, value)
        leaves.append(leaf)
        return TracedText(value, [Piece(0, len(value), leaf, 0, len(value))])
    if isinstance(value, list):
        items = _List(_traced(item, message, (*path, number), leaves) for number, item in enumerate(value))
        items._leaf = Leaf(message, path, None)
        return items
    if not isinstance(value, dict):
        return value

    is_message = message != TOOLS and not path
    copy = {}
    for key, item in value.items():
        copy[key] = item if is_message and key == "role" else _traced(item, message, (*path, key), leaves)
    if is_message:
        return copy
    written = _Object(copy)
    written._leaf = Leaf(message, path, None)
    return written


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """A template, compiled in an environment like transformers' own whose texts keep their traces."""
    from jinja2.compiler import CodeGenerator
    from jinja2.runtime import Context
    from transformers.utils.chat_template_utils import _compile_jinja_template

    class Generator(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:  # `~`, by which jinja makes a plain text
            self.write("concat(map(str, (")
            for operand in node.nodes:
                self.visit(operand, frame)
                self.write(", ")
            self.write(")))")

    environment = _compile_jinja_template(source).environment.overlay()
    call = environment.call

    def traced_call(context: Context, method: Any, *values: Any, **named: Any) -> Any:
        owner = getattr(method, "__self__", None)
        if type(owner) is str:  # a text of the template's own, such as the separator of a join
            method = getattr(TracedText(owner), method.__name__)
        return call(context, method, *values, **named)

    def join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            values = (environment.getitem(value, attribute) for value in values)
        return joined(map(str, values), str(separator))

    def marked(caller: Callable[[], str]) -> str:
        text = joined([caller()])
        return TracedText(text, [Piece(0, len(text), Leaf(_TAGS, (), None), 0, 0), *text._pieces])

    [tags] = [extension for extension in environment.extensions.values() if "generation" in extension.tags]
    tags._generation_support = marked  # transformers' own does not know where a macro's text will stand
    environment.code_generator_class = Generator
    environment.concat = joined
    environment.call = traced_call
    environment.filters = {
        **environment.filters, "join": join, "tojson": partial(_to_json, environment.filters["tojson"])
    }  # fmt: skip
    return environment.from_string(source)


def _to_json(dumps: Callable[..., str], value: Any, *options: Any, **named: Any) -> str:
    """`dumps(value)`, traced: as a whole if it is a text, a list or an object of the input, else text by text."""
    text = dumps(value, *options, **named)
    if isinstance(value, TracedText):
        return _whole(text, [piece.leaf for piece in value._pieces])
    if isinstance(value, _Object | _List):
        return _whole(text, [value._leaf])

    # Texts are replaced by names that occur nowhere, and put back into the JSON.
    name = "traced-"
    while name in text:
        name += "-"
    texts: list[TracedText] = []

    def renamed(item: Any) -> Any:
        if isinstance(item, TracedText):
            texts.append(item)
            return f"{name}{len(texts) - 1}"
        if isinstance(item, dict):
            return {key: renamed(value) for key, value in item.items()}
        if isinstance(item, list | tuple):
            return [renamed(value) for value in item]
        return item

    parts = re.split(f'"{name}([0-9]+)"', dumps(renamed(value), *options, **named))
    written: list[str] = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            written.append(part)
            continue
        original = texts[int(part)]
        written.append(_whole(dumps(original, *options, **named), [piece.leaf for piece in original._pieces]))
    return joined(written)
