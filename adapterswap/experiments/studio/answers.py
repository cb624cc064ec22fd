"""A route that streams answers outside Gradio's queue: one request, answered by lines of JSON while the model writes.

Gradio's queue delivers updates in steps and over several requests, which takes longer than a small model's first token.
Reads what the page's controls send and calls the workspace's functions. Generation stops when the visitor leaves or
asks again.
"""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from adapterswap.core import BASE
from adapterswap.experiments.studio.choice import Choice, check_values
from adapterswap.experiments.studio.controls import Controls
from adapterswap.experiments.studio.html import (
    COLUMNS,
    answers_html,
    columns,
    error_html,
    meaning_html,
    score_html,
    timing_text,
    waiting_html,
)
from adapterswap.experiments.studio.workspace import Visitors, Workspace
from adapterswap.kit.errors import AdapterswapError, ArgumentError, RunError
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.readers import field
from adapterswap.kit.files.text import parse_json

Draw = Callable[[Choice], Mapping[str, str]]

_MOST_AT_ONCE = 200
_MOST_TOKENS = 512


class _Body(Declared):
    """What the page sends."""

    visitor: str = field(max_length=100)
    draw: bool
    answer: bool
    values: list[Any]


@dataclass(frozen=True)
class _Request:
    """A request of the page."""

    visitor: str
    draw: bool
    answer: bool
    shown: tuple[str, ...]
    tokens: int
    chat: bool
    choice: Choice


class Answering:
    """Draws a composition and streams its answers.

    `route` accepts `{"visitor": …, "draw": …, "answer": …, "values": [compared kinds, tokens, chat, clicked layers,
    prompt, and the controls' values in their order]}`.

    Args:
        workspace: the model and its experts.
        names: all experts, in the order of their colours; the list may grow.
        controls: the controls whose values are sent.
        draw: returns the parts of the page that show a choice, by name.
    """

    def __init__(self, workspace: Workspace, names: Sequence[str], controls: Controls, draw: Draw) -> None:
        self._workspace = workspace
        self._names = names
        self._controls = controls
        self._draw = draw
        self._visitors = Visitors()
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)

    @property
    def route(self) -> Route:
        return Route("/studio/answer", self._respond, methods=["POST"])

    async def _respond(self, request: Request) -> Response:
        """Stream answers, or say what is wrong with the request."""
        if request.headers.get("content-type") != "application/json":  # pages of other sites cannot send this type
            return PlainTextResponse("Send application/json", 415)
        try:
            parsed = self._read(await request.body())
        except AdapterswapError as error:
            return PlainTextResponse(str(error), 400)
        except (ArithmeticError, LookupError, TypeError, ValueError, ClientDisconnect):
            return PlainTextResponse("The request is not valid. Reload the page", 400)
        return StreamingResponse(
            self._stream(parsed), media_type="application/x-ndjson", headers={"cache-control": "no-store"}
        )

    def _read(self, content: bytes) -> _Request:
        """The request that a page sent."""
        sent = parse_json(content, "The request", "Reload the page", kind=ArgumentError)
        check_values(sent)
        read = _Body.read_content(sent, where="the request")
        shown, tokens, chat, painted, prompt, *values = read.values
        named = dict(zip(self._controls.components, values, strict=True))
        choice = self._controls.choice(named, painted or {}, str(prompt or ""))
        return _Request(
            read.visitor,
            read.draw,
            read.answer,
            tuple(kind for kind in COLUMNS if kind in shown),
            max(1, min(int(tokens), _MOST_TOKENS)),
            bool(chat),
            choice,
        )

    async def _stream(self, request: _Request) -> AsyncIterator[bytes]:
        """A line of JSON for each update of the page. The model answers in a thread."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Mapping[str, str] | None] = asyncio.Queue()

        def tell(item: Mapping[str, str] | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.put_nowait, item)

        def work() -> None:
            try:
                for item in self._answer(request, left):
                    tell(item)
            except Exception:
                traceback.print_exc()
                unexpected = RunError("An unexpected error occurred", "See the terminal where the studio runs")
                tell({"written": error_html(unexpected)})
            finally:
                self._free.release()
                tell(None)

        if not self._free.acquire(blocking=False):
            busy = RunError("Too many visitors are waiting for an answer", "Try again later")
            yield json.dumps({"written": error_html(busy)}).encode() + b"\n"
            return
        with self._visitors.work(request.visitor) as left:
            threading.Thread(target=work, daemon=True, name="adapterswap-answer").start()
            while (item := await news.get()) is not None:
                yield json.dumps(item).encode() + b"\n"

    def _answer(self, request: _Request, left: threading.Event) -> Iterator[Mapping[str, str]]:
        """Updates of the page: the drawn parts, `meaning`, `written`, `timing`, and `scores` on the lab's problems."""
        workspace, names, choice = self._workspace, self._names, request.choice
        if request.draw:
            yield self._draw(choice)

        if not request.answer:
            return
        if not choice.prompt.strip():
            yield {"written": '<p class="timing">Enter a prompt to see answers.</p>', "timing": ""}
            return
        try:
            compared = columns(workspace, choice, request.shown)
            lab = workspace.lab
            yield {"meaning": meaning_html(lab, choice.prompt), "written": waiting_html(compared, names)}

            # The answers as they grow, marked if the prompt is one of the lab's problems
            right_answer = None
            if lab and choice.prompt in lab.place_of:
                _, place = lab.place_of[choice.prompt]
                right_answer = lab.problems[place].answer
            for answers in workspace.answers(
                choice.prompt,
                [column.composition for column in compared],
                max_new_tokens=request.tokens,
                chat=request.chat,
                stopped=left,
            ):
                if left.is_set():
                    return
                if answers.first_seconds is not None:
                    yield {
                        "written": answers_html(compared, answers, names, right=right_answer),
                        "timing": timing_text(answers, rows=len(compared)),
                    }

            # The score on the lab's problems, and then those of the base and the task expert beside it
            if lab is not None and not left.is_set():
                scores = workspace.scores(workspace.composition(choice), stopped=left)
                if scores is None:
                    return
                yield {"scores": score_html(scores, {}, names)}
                others = {}
                for name in (BASE, *choice.task[:1]):
                    alone = workspace.scores_alone(name, stopped=left)
                    if alone is not None:
                        others[name] = alone
                yield {"scores": score_html(scores, others, names)}
        except AdapterswapError as error:
            yield {"written": error_html(error), "timing": "", "scores": ""}
