"""What a server counts, in Prometheus' text format, and one line in the log for each request.

An ASGI application around the server's own. It reads neither prompts nor answers. A client chooses the name of a model,
so a name is counted by itself only if the server answered it, and only up to a number of names.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterswap.engines.serving.refusals import ENDING, NO_KEY, has_key, refusal
from adapterswap.kit.errors import printable

MODEL = "adapterswap.model"
"""The key of a request's scope under which the server puts the name of the model, once it knows what it means."""

PATH = "/metrics"
_BOUNDS_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_MOST_NAMES, _OTHER = 200, "other"
_LEFT = 499  # the status of a request whose client left before it was answered; nginx uses this number, too
_HELP = {
    "adapterswap_compositions_cached": "Compositions that need not be made again.",
    "adapterswap_cache_bytes": "Size of the cache on the disk.",
}


class Measured:
    """An application that is counted.

    Args:
        app: the application.
        gauges: the names and values of what is read at each scrape, such as the size of the cache.
        engine: the process that computes answers; another one than before is a restart. None if it cannot restart.
        keys: a client must send one of them to read the metrics; if there are none, everybody may.
        inner: whether `app` has metrics of its own at the same path, which these follow.
    """

    def __init__(
        self, app: ASGIApp, gauges: Callable[[], Mapping[str, float]], *,
        engine: Callable[[], object] | None = None, keys: Collection[str] = (), inner: bool = False,
    ) -> None:  # fmt: skip
        self._app, self._gauges, self._engine, self._keys, self._inner = app, gauges, engine, keys, inner
        self._began, self._restarts = time.time(), 0
        self._process = engine() if engine else None
        self._requests: Counter[tuple[str, int]] = Counter()
        self._names: set[str] = set()
        self._buckets, self._seconds = [0] * (len(_BOUNDS_S) + 1), 0.0
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == PATH and scope["method"] == "GET":
            await self._show(scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, count it when it has ended, and print a line about it."""
        status, began = _LEFT, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            # The server ends, and the seconds that answers have for it are over. Without an answer of ours, uvicorn
            # would send a plain 500 and print a traceback; a stream that has begun breaks off.
            if status == _LEFT:
                await refusal(503, ENDING, headers={"retry-after": "5"})(scope, receive, noted)
        finally:
            seconds, name = time.perf_counter() - began, str(scope.get(MODEL, ""))
            if status < 400 or status == _LEFT:
                self.add(name, status, seconds)
            else:
                self.add("", status, seconds)
            line = f"access: {scope['method']} {scope['path']} {name or '-'} {status} {seconds:.3f} s"
            print(printable(line), file=sys.stderr, flush=True)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the metrics; those of the engine come first, if it has some."""
        if self._keys and not has_key(Headers(scope=scope), self._keys):
            await refusal(401, NO_KEY)(scope, receive, send)
            return
        text = await run_in_threadpool(self.text)
        if self._inner:
            await self._app(scope, receive, _followed_by(text.encode(), send))
        else:
            content_type = "text/plain; version=0.0.4; charset=utf-8"
            await PlainTextResponse(text, headers={"content-type": content_type})(scope, receive, send)

    def add(self, name: str, status: int, seconds: float) -> None:
        """Count a request."""
        with self._lock:
            if name and name not in self._names:
                if len(self._names) < _MOST_NAMES:
                    self._names.add(name)
                else:
                    name = _OTHER
            self._requests[name, status] += 1
            self._seconds += seconds
            self._buckets[sum(seconds > bound for bound in _BOUNDS_S)] += 1
            self._look_at_engine()

    def _look_at_engine(self) -> None:
        """Count a restart if the engine is another process than before."""
        if self._engine is None:
            return
        now = self._engine()
        if now is not self._process:
            self._process, self._restarts = now, self._restarts + 1

    def text(self) -> str:
        """All metrics."""
        gauges = self._gauges()
        with self._lock:
            self._look_at_engine()
            return "".join(f"{line}\n" for line in self._lines(gauges))

    def _lines(self, gauges: Mapping[str, float]) -> Iterator[str]:
        """The lines of Prometheus' text format."""
        yield from _head("adapterswap_requests_total", "counter", "Requests by model and status.")
        for (name, status), count in sorted(self._requests.items()):
            escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            yield f'adapterswap_requests_total{{model="{escaped}",status="{status}"}} {count}'

        yield from _head("adapterswap_request_seconds", "histogram", "Seconds until the end of an answer.")
        total = 0
        for bound, count in zip((*_BOUNDS_S, "+Inf"), self._buckets, strict=True):
            total += count
            yield f'adapterswap_request_seconds_bucket{{le="{bound}"}} {total}'
        yield f"adapterswap_request_seconds_sum {self._seconds:.6f}"
        yield f"adapterswap_request_seconds_count {total}"

        for name, value in gauges.items():
            yield from _head(name, "gauge", _HELP[name])
            yield f"{name} {value:.16g}"
        if self._engine is not None:
            yield from _head("adapterswap_engine_restarts_total", "counter", "Restarts of the engine.")
            yield f"adapterswap_engine_restarts_total {self._restarts}"
        yield from _head("adapterswap_start_seconds", "gauge", "When the server started, in seconds since 1970.")
        yield f"adapterswap_start_seconds {self._began:.3f}"


def folder_sizes(folder: Path) -> tuple[int, int]:
    """The number of folders in a folder, and the bytes of all files in them, without what vanishes meanwhile."""
    count = size = 0
    for place, folders, files in os.walk(folder):
        if place == str(folder):
            count += len(folders)
        for name in files:
            try:
                size += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return count, size


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _followed_by(text: bytes, send: Send) -> Send:
    """`send`, which adds `text` to the end of a successful answer."""
    successful = False

    async def followed(message: Message) -> None:
        nonlocal successful
        if message["type"] == "http.response.start":
            successful = message["status"] == 200
            if successful:
                headers = [(name, value) for name, value in message["headers"] if name.lower() != b"content-length"]
                message = {**message, "headers": headers}
        elif successful and not message.get("more_body", False):
            message = {**message, "body": message.get("body", b"") + text}
        await send(message)

    return followed
