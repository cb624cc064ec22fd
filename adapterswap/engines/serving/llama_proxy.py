"""An OpenAI-compatible server in front of llama.cpp's, which turns the name of a model into the scales of a request.

Forwards only `/v1/completions` and `/v1/chat/completions`, streamed or not, and of a request what is in
`llama_requests`: llama.cpp's other paths change scales for everybody (`/lora-adapters`) or expose files. Starlette and
uvicorn speak HTTP with clients, httpx with llama.cpp.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from adapterswap.engines.serving.llama_engine import Engine
from adapterswap.engines.serving.llama_requests import passed_on
from adapterswap.engines.serving.metrics import MODEL
from adapterswap.engines.serving.names import UnknownNameError
from adapterswap.engines.serving.pieces import PieceComposer
from adapterswap.engines.serving.refusals import NO_KEY, NO_MODEL, has_key, refusal
from adapterswap.kit.errors import AdapterswapError, FieldError
from adapterswap.kit.files.text import parse_json

if sys.platform != "win32":
    import resource

_PATHS = ("/v1/completions", "/v1/chat/completions")
_PATIENCE_S = 30.0  # for a request to arrive, and for a client to read
_CLOSE = {"connection": "close"}


class Proxy:
    """The ASGI application.

    Args:
        composer: turns names into scales.
        engine: the server that computes the answers.
        base_name: the name of the base itself.
        keys: a client must send one of them; if there are none, everybody is answered.
        hosts: the names of this server that clients may use; `*` stands for all. Web pages reach a local server by
            names of their own.
        max_bytes: of a request's body.
    """

    def __init__(
        self, composer: PieceComposer, engine: Engine, base_name: str, keys: Collection[str] = (),
        hosts: Collection[str] = ("*",), max_bytes: int = 10**6,
    ) -> None:  # fmt: skip
        self._composer, self._engine, self._base_name = composer, engine, base_name
        self._keys, self._max_bytes = keys, max_bytes
        # An open connection holds one of llama.cpp's few threads, even while nothing is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(**engine.options, timeout=None, limits=limits)
        self._busy = 0
        self._app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/health", self._health),
                *(Route(path, self._answer, methods=["POST"]) for path in _PATHS),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
            exception_handlers=dict.fromkeys(
                [HTTPException, AdapterswapError, httpx.HTTPError, ClientDisconnect, Exception], _failed
            ),
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._busy += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._busy -= 1

    async def _models(self, request: Request) -> Response:
        """The base, and the allowed names or, if all are allowed, the experts."""
        self._check_key(request)
        common = {"object": "model", "created": 0, "owned_by": "adapterswap"}
        names = [self._base_name, *self._composer.manifest.names]
        return JSONResponse({"object": "list", "data": [{"id": name, **common} for name in names]})

    async def _health(self, request: Request) -> Response:
        """Whether llama.cpp runs and answers."""
        alive = self._engine.process.poll() is None and (await self._client.get("/health")).is_success
        if not alive:
            return JSONResponse({"status": "llama.cpp does not answer"}, 503)
        return JSONResponse({"status": "ok"}, 200)

    async def _answer(self, request: Request) -> Response:
        """Translate a request, send it to llama.cpp, and return its answer; stop if the client leaves."""
        self._check_key(request)
        if self._busy > most_at_once():
            raise HTTPException(503, "Too many requests at once. Try again later.", {"retry-after": "1"})
        model, body = await run_in_threadpool(self._translated, request.scope["path"], await self._body(request))
        request.scope[MODEL] = model

        # Whichever comes first: the answer, or the client's leave
        asking = asyncio.create_task(self._ask(request.scope["path"], body, model))
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait([asking, leaving], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise ClientDisconnect
        finally:
            asking.cancel()
            leaving.cancel()

    async def _ask(self, path: str, body: bytes, model: str) -> Response:
        """Send a request to llama.cpp, and return its answer under the model's name."""
        response = await self._client.send(self._client.build_request("POST", path, content=body), stream=True)
        if "text/event-stream" in response.headers.get("content-type", ""):
            return _Events(response, model)
        content = _with_model_name(await response.aread(), model)
        return Response(content, response.status_code, media_type="application/json")

    def _check_key(self, request: Request) -> None:
        if self._keys and not has_key(request.headers, self._keys):
            raise HTTPException(401, NO_KEY)

    async def _body(self, request: Request) -> bytes:
        """The body of a request, unless it is too long, in doubt, from a web page elsewhere, or does not arrive."""
        if request.headers.get("sec-fetch-site") == "cross-site" or not _is_own(request.headers):
            raise HTTPException(403, "Pages of other sites are not answered.")
        length = request.headers.get("content-length")
        if length is not None and "transfer-encoding" in request.headers:
            raise HTTPException(400, "Send Content-Length or Transfer-Encoding, but not both.", _CLOSE)
        try:
            announced = int(length or 0)
        except ValueError:
            raise HTTPException(400, "Content-Length is not a number of bytes.", _CLOSE) from None

        body = bytearray()
        too_long = HTTPException(413, f"A request has at most {self._max_bytes} bytes here.")
        if announced > self._max_bytes:
            raise too_long
        try:
            async with asyncio.timeout(_PATIENCE_S):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_bytes:
                        raise too_long
        except TimeoutError:
            raise HTTPException(408, "The request did not arrive in time.", _CLOSE) from None
        return bytes(body)

    def _translated(self, path: str, raw: bytes) -> tuple[str, bytes]:
        """The model that a client names, and the request as llama.cpp gets it: with the scales that this means."""
        content = parse_json(raw, "the request", "Correct it", kind=FieldError)
        model = content.get("model")
        if not isinstance(model, str) or not model:
            raise FieldError(*NO_MODEL, parameter="model")
        if "lora" in content:
            raise FieldError("`lora` is set from the name of the model", "Leave it out", parameter="lora")
        scales: Mapping[int, float] = {}
        if model != self._base_name:
            try:
                scales = self._composer.scales(model)
            except AdapterswapError as error:
                raise error.recast(parameter="model") from None

        # Name all of them: llama.cpp gives the others the scale with which they were loaded.
        lora = [{"id": place, "scale": scales.get(place, 0.0)} for place in range(len(self._composer.pieces))]
        # llama.cpp reuses the keys and values of earlier prompts for requests with other scales: of 195 answers to 32
        # clients, 23 were wrong (October 2026). So nothing is cached.
        try:
            passed = passed_on(path, content) | {"lora": lora, "cache_prompt": False}
            return model, json.dumps(passed, allow_nan=False).encode()
        except ValueError:
            raise FieldError("The request contains NaN or infinity", "Leave them out") from None


def _is_own(headers: Headers) -> bool:
    """Whether a request is from a page of this server, or from no page: browsers name a page's origin."""
    return all(origin.partition("://")[2] == headers.get("host") for origin in headers.getlist("origin"))


async def _left(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _failed(request: Request, error: Exception) -> Response:
    """The response to a request that raised an error."""
    if isinstance(error, HTTPException):
        message = error.detail
        if error.status_code == 404:
            message = f"There is no such path here. Send requests to {' or '.join(_PATHS)}."
        return refusal(error.status_code, message, headers=error.headers)
    if isinstance(error, UnknownNameError):
        return refusal(404, str(error), error.parameter)
    if isinstance(error, AdapterswapError):
        return refusal(400, str(error), error.parameter)
    if isinstance(error, httpx.HTTPError):
        return refusal(503, "llama.cpp does not answer. Try again later.", headers={"retry-after": "5"})
    return refusal(500, "An unexpected error occurred.")


class _Events(StreamingResponse):
    """llama.cpp's events as they arrive. If it ends in between, the last chunk is missing, so the client sees it."""

    def __init__(self, response: httpx.Response, model: str) -> None:
        super().__init__(_lines(response, model), response.status_code, {"content-type": "text/event-stream"})
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(httpx.HTTPError):
                await super().__call__(scope, receive, send)
        finally:
            await self._response.aclose()  # llama.cpp stops generating when the client is gone


async def _lines(response: httpx.Response, model: str) -> AsyncIterator[bytes]:
    """The whole lines that have arrived, with the model's name. (httpx also breaks lines at U+2028 and others.)"""
    rest = b""
    async for part in response.aiter_raw():
        *lines, rest = (rest + part).split(b"\n")
        for place, line in enumerate(lines):
            if line.startswith(b"data: {"):
                lines[place] = b"data: " + _with_model_name(line[6:], model)
        if lines:
            yield b"\n".join([*lines, b""])
    if rest:
        yield rest


def _with_model_name(raw: bytes, model: str) -> bytes:
    """An answer, or part of one, with the requested name in place of llama.cpp's file name or alias."""
    try:
        content = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(content, dict) or "model" not in content:
        return raw
    return json.dumps(content | {"model": model}, ensure_ascii=False).encode()


class Connection(H11Protocol):
    """A client's connection. By itself, uvicorn waits for ever for requests, and for clients to read.

    If there are too many connections, the one that has waited for a request the longest is closed.
    """

    waiting_since: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request(None)
        if len(self.connections) > 2 * most_at_once():
            ours = [one for one in self.connections if isinstance(one, Connection)]
            waiting = [one for one in ours if one.cycle is None or one.cycle.response_complete]
            oldest = min(waiting, key=lambda one: one.waiting_since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        self._expect_request(cycle)

    def _expect_request(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if nothing has followed the `last` request for long."""
        self.waiting_since = self.loop.time()

        def close_if_idle() -> None:
            if self.cycle is last:
                self.transport.abort()

        self.loop.call_later(_PATIENCE_S, close_if_idle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(_PATIENCE_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stuck.cancel()
        super().resume_writing()


def most_at_once() -> int:
    """The most requests: each takes two files, and as many may have been accepted, and as many be waiting."""
    if sys.platform == "win32":  # which limits files otherwise
        return 1000
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return 1000
    return max(1, min(1000, (files - 64) // 4))
