"""Render conversations with a tokenizer's chat template, as transformers does, and say what the template reads."""

from __future__ import annotations

import datetime
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

from adapterswap.kit.errors import AdapterswapError, reason_of

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag, which only marks text

# Arguments of `apply_chat_template` that are no variables of a template's own.
_NO_VARIABLES = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "sanitize_control_tokens", "tokenizer_kwargs",
})  # fmt: skip


_Result = TypeVar("_Result")

_SECONDS = 10.0  # of processor time for one text; real templates take milliseconds
_LONGEST = 2**24  # characters of one text


def bounded(call: Callable[[], _Result], seconds: float | None = None) -> _Result:
    """Call what runs a template or a regex of somebody else, and end it after these seconds of processor time.

    Only the main thread can be interrupted, and only where the system has timers; elsewhere Ctrl-C is the only end.

    Raises:
        jinja2.TemplateError: it took too long, wrote a very long text, or failed with an error of Python's own.
    """
    from jinja2 import TemplateError, TemplateRuntimeError

    most = _SECONDS if seconds is None else seconds

    def end(number: int, frame: Any) -> None:
        raise TemplateRuntimeError(f"it ran for {most:g} seconds, which is the most that it may")

    # If the caller has set a timer, it continues afterwards.
    may_end = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    before: Any = None
    left = 0.0
    if may_end:
        before = signal.signal(signal.SIGVTALRM, end)
        left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, most)
    try:
        result = call()
    except (TemplateError, AdapterswapError):
        raise
    except Exception as error:
        raise TemplateRuntimeError(reason_of(error)) from None
    finally:
        if may_end:
            signal.setitimer(signal.ITIMER_VIRTUAL, left)
            signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
    if isinstance(result, str) and len(result) > _LONGEST:
        raise TemplateRuntimeError(f"it wrote {len(result):,} characters, and may write {_LONGEST:,}")
    return result


class ChatTemplate:
    """Renders conversations as text with a tokenizer's chat template.

    Args:
        tokenizer: a tokenizer of transformers with one or several chat templates.
        arguments: variables that every conversation gets, such as `enable_thinking`.
        date: the template's `today`, such as 2026-11-27; None for the real one.

    Attributes:
        asked_date: whether the template has asked for today's date so far.
    """

    def __init__(
        self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, *, date: datetime.date | None = None
    ) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        self._date = date
        self.asked_date = False

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation.

        Raises:
            jinja2.TemplateError: the template refuses the messages, fails, or takes too long.
        """
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._arguments,
            **(arguments or {}),
        )
        with self._today():
            return str(bounded(render))

    def render_by(
        self,
        render: Callable[[str, dict[str, Any]], _Result],
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> _Result:
        """What `render` makes of the template and the variables that transformers would give it.

        Raises:
            jinja2.TemplateError: `render` fails, or takes too long.
        """
        from transformers.utils import chat_template_utils

        # transformers leaves nulls out, and gives reasoning all the names that templates know.
        alias = getattr(chat_template_utils, "_alias_reasoning_fields", list)
        conversation = []
        for message in messages:
            conversation.append({key: value for key, value in message.items() if value is not None})
        variables = {
            **self._tokenizer.special_tokens_map,
            "documents": None,
            **self._arguments,
            **(arguments or {}),
            "messages": alias(conversation),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._tokenizer.get_chat_template(None, tools)
        with self._today():
            return bounded(partial(render, source, variables))

    def reads(self, name: str) -> bool:
        """Whether a template reads a variable of this name, such as `tools`; true of a broken template."""
        from jinja2 import TemplateError

        try:
            return bounded(lambda: any(name in _variables(text) for text in self._texts))
        except TemplateError:
            return True

    @property
    def today(self) -> datetime.date:
        """The date that a template sees."""
        return self._date or datetime.date.today()

    @staticmethod
    def may_set(name: str) -> bool:
        """Whether a row may set a variable of this name: nothing else of transformers' own."""
        return name not in _NO_VARIABLES

    def names(self, word: str) -> bool:
        """Whether a template contains a word, such as the key of a message."""
        return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for text in self._texts)

    @property
    def _texts(self) -> list[str]:
        templates = self._tokenizer.chat_template
        return list(templates.values()) if isinstance(templates, dict) else [templates]

    @contextmanager
    def _today(self) -> Iterator[None]:
        """Have templates see the chosen date, and note whether one asks for it. transformers calls `datetime.now`."""
        from transformers.utils import chat_template_utils

        template, before = self, chat_template_utils.datetime

        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> Any:
                template.asked_date = True
                if template._date is None:
                    return datetime.datetime.now(tz)
                return datetime.datetime.combine(template._date, datetime.time())

        chat_template_utils.datetime = Clock
        try:
            yield
        finally:
            chat_template_utils.datetime = before


def as_date(value: Any) -> Any:
    """A date as text such as 2026-11-27, which YAML reads as a date; a ValueError for another form of text."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        raise ValueError(f"{value!r} is not a date in the form 2026-11-27")
    return datetime.date.fromisoformat(value).isoformat()


@lru_cache(maxsize=16)
def _variables(text: str) -> frozenset[str]:
    """The variables that a template reads and does not set before."""
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", text))))
