"""Where the assistant's turns are in a rendered conversation, and which parts of it the chat template leaves out.

The rule: a character is trained on only if the template wrote it for a turn of the assistant. What comes from the
messages is known from the rendering itself (`traced`). What the template writes around it, between the text of one turn
and that of the next, is divided by two further renderings:

* of the conversation before the turn, with the generation prompt: what it ends in is what the model sees before it
  answers. The turn begins after it.
* of the conversation up to the turn: what it ends in is what ends the turn.

Where the conversation has something else there, the turn begins or ends earlier or later; see `_Rendering.begin` and
`_Rendering.end`. Where nothing proves it, the row is an error. A template with `{% generation %}` tags says it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.training.traced import TOOLS, Leaf, Piece, Trace, trace
from adapterswap.kit.errors import DataError
from adapterswap.kit.files.text import shown

Message = Mapping[str, Any]
Span = tuple[int, int]

_REMEDY = "Use another chat template, or `prompt` and `completion` with chat_template: false"
# Keys of a message, or of a call in it, that say what it belongs to. Many templates need none of them.
_LABELS = frozenset({"role", "name", "id", "type", "tool_call_id", "index"})


class Conversation(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: all of it.
        trained: where the loss is computed: pairs of the first character and the one after the last.
        remarks: what the template does to it that a user should know → an example.
    """

    text: str
    trained: tuple[Span, ...]
    remarks: dict[str, str]


def render_turns(
    chat: ChatTemplate,
    messages: Sequence[Message],
    turns: Sequence[int],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> Conversation:
    """Render a conversation, and find those of its turns that are trained on.

    Args:
        chat: the chat template.
        messages: the conversation.
        turns: the numbers of the messages that are trained on, each of the assistant.
        tools: the tools of the row.
        arguments: variables of the template.

    Raises:
        DataError: a turn is not written, or nothing proves where it stands.
        jinja2.TemplateError: the template refuses the messages, fails, or takes too long.
    """
    rendering = _Rendering(chat, messages, {"tools": tools, "arguments": arguments})
    remarks: dict[str, str] = {}
    for turn in turns:
        rendering.check_written(turn)

    if rendering.whole.blocks:
        spans = rendering.blocks(turns)
    else:
        spans = tuple(span for turn in turns if (span := rendering.span(turn, remarks)) is not None)
    remarks |= rendering.left_out()
    return Conversation(rendering.whole.text, spans, remarks)


class _Rendering:
    """A conversation as its template writes it.

    Attributes:
        whole: the trace of all of it.
        firsts: those pieces of it that write a part of a message for the first time. Some templates repeat one, such as
            the name of a tool before its answer.
    """

    def __init__(self, chat: ChatTemplate, messages: Sequence[Message], inputs: dict[str, Any]) -> None:
        self._chat, self._messages, self._inputs = chat, messages, inputs
        self.whole = trace(chat, messages, **inputs)
        if self.whole.text != chat(messages, **inputs):
            raise DataError(
                "What the tokenizer's chat template writes cannot be traced back to the messages", _REMEDY,
                parameter="datasets",
            )  # fmt: skip
        self._written = _Written()
        self.firsts = self._written.add(self.whole)

    def check_written(self, turn: int) -> None:
        """Refuse a template that does not write what the assistant says, or whom it calls with what."""
        for leaf in self.whole.leaves:
            is_call = leaf.path[-1] == "name" or "arguments" in leaf.path
            if leaf.message != turn or not (leaf.path[0] == "content" or (leaf.path[0] == "tool_calls" and is_call)):
                continue
            if self._written.any_of(leaf) or not (leaf.text or "").strip():
                continue
            if self._is_elsewhere(leaf.text or ""):
                self._refuse(turn, "changes the text of the assistant's turn {}, so that it cannot be found again")
            self._refuse(turn, "does not write the assistant's turn {}")

    def span(self, turn: int, remarks: dict[str, str]) -> Span | None:
        """Where a turn of the assistant is, with the token that ends it; None for an empty one without a place."""
        own = [piece for piece in self.firsts if piece.leaf.message == turn]
        others = [piece for piece in self.whole.pieces if piece.leaf.message != turn]
        if not own:
            remarks["an empty turn of the assistant is not trained on"] = shown(dict(self._messages[turn]))
            return None

        # From the first to the last character of the turn, and what other messages write around it
        first, last = own[0].begin, max(piece.end for piece in own)
        before = max((piece.end for piece in others if piece.end <= first), default=0)
        after = min((piece.begin for piece in others if piece.begin >= last), default=len(self.whole.text))
        if any(first < piece.end and piece.begin < last for piece in others):
            self._refuse(turn, "writes other messages inside the assistant's turn {}")

        begin = self.begin(turn, before, first, remarks)
        end = self.end(turn, last, after)
        if begin < end:
            return begin, end
        remarks["an empty turn of the assistant has no end and is not trained on"] = shown(dict(self._messages[turn]))
        return None

    def begin(self, turn: int, before: int, first: int, remarks: dict[str, str]) -> int:
        """Where a turn begins, between the end of what another message says and the first that this one does.

        It begins after the generation prompt. A turn that is written differently from the prompt begins where the two
        differ, if the turn before it is known to end before that, and a remark says so.
        """
        written = self.whole.text[before:first]
        prompt = _after_the_last_piece(
            trace(self._chat, self._messages[:turn], add_generation_prompt=True, **self._inputs)
        )
        if written.startswith(prompt):
            return before + len(prompt)

        shared = common_length(written, prompt)
        if shared < len(written):
            ended = _after_the_last_piece(trace(self._chat, self._messages[:turn], **self._inputs))
            if not written.startswith(ended):
                self._refuse(turn, "writes the beginning of the assistant's turn {} otherwise than as a prompt")
            shared = max(self._last_cut(before + len(ended), before + shared) - before, len(ended))
        remarks[
            "a turn of the assistant does not begin with the chat template's generation prompt, after which the expert "
            "will answer"
        ] = f"the prompt {shown(prompt)}, the row {shown(written)}"
        return before + shared

    def end(self, turn: int, last: int, after: int) -> int:
        """Where a turn ends, between the last that it says and the first that another message does.

        It ends with what the template writes at the end of a conversation that ends here. If other text follows here,
        it ends with the last of the template's pieces of text that is the same in both, before the next turn begins.
        """
        from jinja2 import TemplateError

        text = self.whole.text
        if turn == len(self._messages) - 1:
            if after < len(text):
                self._refuse(turn, "writes other messages after the assistant's last turn {}")
            return after

        written = text[last:after]
        shorter = trace(self._chat, self._messages[: turn + 1], **self._inputs)
        said = max((piece.end for piece in _Written().add(shorter) if piece.leaf.message == turn), default=0)
        ending = shorter.text[said:]
        if written.startswith(ending):
            return last + len(ending)

        # What both begin with may reach into the beginning of the next turn, so that is left out.
        try:
            later = trace(self._chat, self._messages[turn + 1 :], **self._inputs)
        except TemplateError:
            return last
        heading = later.text[: min((piece.begin for piece in later.pieces), default=0)]
        shared = min(common_length(written, ending), len(written) - common_length(written[::-1], heading[::-1]))
        return self._last_cut(last, last + shared)

    def blocks(self, turns: Sequence[int]) -> tuple[Span, ...]:
        """What the template's own `{% generation %}` tags mark, of the turns that are trained on."""
        answers = {turn for turn, message in enumerate(self._messages) if message["role"] == "assistant"}
        spans: list[Span] = []
        for begin, end in self.whole.blocks:
            inside: set[int] = set()
            before: list[int] = []
            for piece in self.whole.pieces:
                if piece.begin < end and piece.end > begin:
                    inside.add(piece.leaf.message)
                if piece.end <= begin:
                    before.append(piece.leaf.message)
            if not inside:  # the end of the turn whose text comes before, or of an empty one
                inside.update(before[-1:])
            if not inside <= answers:
                self._refuse(min(inside), "marks with {{% generation %}} what is not the assistant's: the turn {}")
            if inside <= set(turns):
                spans.append((begin, end))
            elif inside & set(turns):
                self._refuse(max(turns), "marks with {{% generation %}} the turn {} together with others")

        spans = [(begin, end) for begin, end in spans if begin < end]
        if not spans:
            self._refuse(max(turns), "marks with {{% generation %}} nothing of the assistant's turn {}")
        return tuple(spans)

    def left_out(self) -> dict[str, str]:
        """What the template leaves out, in words → an example."""
        remarks = {}
        for leaf in self.whole.leaves:
            if leaf.message == TOOLS or not self._should_be_written(leaf):
                continue
            role = self._messages[leaf.message]["role"]
            texts = [text for text in self._written.rest_of(leaf) if not self._is_elsewhere(text)]
            if not texts:
                continue

            key = ""
            if leaf.path[0] != "content":
                key = f"`{leaf.path[0]}` of "
            part = ""
            if self._written.any_of(leaf):
                part = "a part of "
            remarks[f"the chat template leaves out {part}{key}{role} turns"] = shown(texts[0])

        tools = [leaf for leaf in self.whole.leaves if leaf.message == TOOLS and leaf.path[-1] == "name"]
        if tools and not any(piece.leaf.message == TOOLS for piece in self.whole.pieces):
            remarks["the chat template leaves out the tools"] = shown(tools[0].text)
        return remarks

    def _should_be_written(self, leaf: Leaf) -> bool:
        """Whether a text is what somebody says: a message's content, and what else the template names of an answer."""
        message, key = self._messages[leaf.message], leaf.path[0]
        if key == "content":
            return True
        if message["role"] != "assistant" or key not in message or not self._chat.names(str(key)):
            return False
        if _LABELS.intersection(map(str, leaf.path)):
            return False

        # The same text may be elsewhere in the message, and written there.
        for other in self.whole.leaves:
            if other.message == leaf.message and other.text == leaf.text and self._written.any_of(other):
                return False
        return True

    def _is_elsewhere(self, text: str) -> bool:
        """Whether the template writes a text itself, such as the tags around reasoning that it has taken apart."""
        is_long = len(text.strip()) > 2  # single letters are everywhere
        return is_long and any(text.strip() in written for written in _between(self.whole))

    def _last_cut(self, least: int, most: int) -> int:
        """The last place between two others at which the template went on to its next piece of text, or `least`."""
        return max([cut for cut in self.whole.cuts if least <= cut <= most], default=least)

    def _refuse(self, turn: int, what: str) -> NoReturn:
        """Raise the error of a turn; `what` says what the template does, with {} for the turn's text."""
        raise DataError(
            f"The tokenizer's chat template {what.format(shown(dict(self._messages[turn])))}",
            _REMEDY,
            parameter="datasets",
        )


class _Written:
    """Which parts of the messages have been written."""

    def __init__(self) -> None:
        self._parts: dict[Leaf, list[Span]] = {}

    def add(self, trace: Trace) -> list[Piece]:
        """The pieces of a trace that write something for the first time."""
        firsts = []
        for piece in trace.pieces:
            parts = self._parts.setdefault(piece.leaf, [])
            if not any(first <= piece.first and piece.last <= last for first, last in parts):
                parts.append((piece.first, piece.last))
                firsts.append(piece)
        return firsts

    def any_of(self, leaf: Leaf) -> bool:
        """Whether anything of a text was written, by itself or in a list or an object."""
        if leaf.text is not None:
            for first, last in self._parts.get(leaf, ()):
                if leaf.text[first:last].strip():
                    return True

        around = [Leaf(leaf.message, leaf.path[:length], None) for length in range(len(leaf.path))]
        return any(each in self._parts for each in around)

    def rest_of(self, leaf: Leaf) -> Iterator[str]:
        """The parts of a text, other than space, that were not written."""
        if leaf.text is None or (self.any_of(leaf) and leaf not in self._parts):
            return
        position = 0
        for first, last in [*sorted(self._parts.get(leaf, ())), (len(leaf.text), len(leaf.text))]:
            rest = leaf.text[position:first].strip()
            if rest:
                yield rest
            position = max(position, last)


def _after_the_last_piece(trace: Trace) -> str:
    """What a template writes after all that comes from the messages."""
    return trace.text[max((piece.end for piece in trace.pieces), default=0) :]


def _between(trace: Trace) -> Iterator[str]:
    """What a template writes itself."""
    position = 0
    for piece in trace.pieces:
        yield trace.text[position : piece.begin]
        position = piece.end
    yield trace.text[position:]


def common_length(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """The length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
