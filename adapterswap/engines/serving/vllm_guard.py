"""The middleware around vLLM's OpenAI server, a plain ASGI application; imports vLLM only to check that it can decode.

* Runtime LoRA updating, which resolvers need, also lets any client load an adapter from any path of the server
  (`POST /v1/load_lora_adapter`, `POST /adapters`). Such requests get a 403, so clients cannot reach anything else.
  Unloading (`POST /v1/unload_lora_adapter`) is allowed, because a name is composed anew only after it was unloaded. An
  unloaded name does not count towards `max_compositions`.
* vLLM answers as the base if a request names no model. Here every request for a model must name one, or gets a 400.
* vLLM lists a composition under `/v1/models` only after it was requested. Here the experts are listed from the start,
  or the names in `allow`.
* The key in VLLM_API_KEY is checked before the body is read: vLLM itself checks it after this middleware.
* When the server ends, running answers have the seconds of vLLM's `--shutdown-timeout`; then their connections are
  closed, for which uvicorn would otherwise wait as long as clients do.
* The server starts to listen only after it has decoded a token; see `readiness`.
* Requests are counted, and each has a line in the log; see `metrics`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterswap.engines.serving import plugin, readiness
from adapterswap.engines.serving.metrics import MODEL, Measured
from adapterswap.engines.serving.refusals import NO_KEY, NO_MODEL, has_key, refusal

_NO_LOADING = "Loading adapters is switched off. This server composes its own experts by name: request TASK+LANGUAGE."
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # paths for which vLLM 0.32 requires its key
_CLOSE_S = 1  # for connections to close once vLLM's engine has ended
_INPUTS = {"prompt", "messages", "input", "token_ids", "query"}  # of endpoints that declare no request schema


class ManifestOnly:
    """Refuses requests that load from a path or name no model, and forwards all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._measured = Measured(self._guard, plugin.gauges, inner=True)
        self._paths: tuple[dict[str, bool], Any] | None = None  # POST path -> whether its request has a `model`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._measured(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer requests that vLLM must not see, and pass on the others."""
        if scope["type"] == "lifespan" and "app" in scope:
            await self._app(scope, receive, _checked(scope["app"], send))
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or forward it."""
        method, path = scope.get("method"), scope["path"]
        if _loads(path):
            await refusal(403, _NO_LOADING)(scope, receive, send)
        elif method != "OPTIONS" and _lacks_key(scope):
            await refusal(401, NO_KEY)(scope, receive, send)
        elif method == "GET" and path.endswith("/v1/models"):
            await self._app(scope, receive, _listing(send))
        elif method == "POST":
            await self._forward(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request with a body, unless the body has no model where the endpoint wants one."""
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        if _lacks_model(body, self._declares_model(scope)):
            await refusal(400, f"{'. '.join(NO_MODEL)}.", "model")(scope, receive, send)
            return

        scope[MODEL] = _named(body)
        if "unload_lora_adapter" in scope["path"].split("/"):
            send = _unloading(body, send)
        await self._app(scope, _replay(body, receive), send)

    def _declares_model(self, scope: Scope) -> bool | None:
        """Whether the endpoint's request has a `model`; None if the endpoint does not declare its request."""
        app = scope.get("app")
        if self._paths is None or self._paths[1] is not app:
            self._paths = (_paths_with_model(app.openapi() if app is not None else {}), app)
        path = "/" + "/".join(part for part in scope["path"].split("/") if part)
        declared = [has_model for suffix, has_model in self._paths[0].items() if path.endswith(suffix)]
        if not declared:
            return None
        return any(declared)


def _checked(app: Any, send: Send) -> Send:
    """`send`, which reports a successful start only after the engine has decoded a token."""

    async def checked(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            failure = await readiness.check(app.state)
            if failure is not None:
                message = {"type": "lifespan.startup.failed", "message": failure}
        if message["type"] == "lifespan.startup.complete":
            app.state.server.config.timeout_graceful_shutdown = _CLOSE_S
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            readiness.announce()

    return checked


def _loads(path: str) -> bool:
    parts = [part for part in path.split("/") if part]
    return "load_lora_adapter" in parts or "adapters" in parts


def _unloading(body: bytes, send: Send) -> Send:
    """`send`, which reports successful unloading to the composer."""
    from adapterswap.engines.serving.plugin import unloaded

    async def reported(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                unloaded(str(json.loads(body)["lora_name"]))
        await send(message)

    return reported


def _listing(send: Send) -> Send:
    """`send`, which adds the served names to vLLM's list of models."""
    from adapterswap.engines.serving.plugin import offered

    messages: list[Message] = []

    async def listed(message: Message) -> None:
        messages.append(message)
        if message["type"] == "http.response.start" or message.get("more_body", False):
            return
        start, *parts = messages
        body = b"".join(part.get("body", b"") for part in parts)
        if start["status"] == 200:
            with suppress(ValueError, TypeError, KeyError, IndexError):  # not the list that vLLM 0.32 sends
                body = json.dumps(_with_names(json.loads(body), offered())).encode()
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return listed


def _with_names(models: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """vLLM's list, whose first entry is the base, with an entry added for each missing name."""
    base, listed = models["data"][0], {model["id"] for model in models["data"]}
    card = {"object": "model", "created": base["created"], "owned_by": "adapterswap", "root": None}
    entries = [*models["data"]]
    for name in names:
        if name not in listed:
            entries.append({"id": name, **card, "parent": base["id"]})
    return {**models, "data": entries}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns the body that was already read."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        if waiting:
            return waiting.pop()
        return await receive()

    return replayed


def _lacks_model(body: bytes, declared: bool | None) -> bool:
    """Whether vLLM would answer this request as the base because it names no model."""
    if declared is False:
        return False
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM refuses it
    if not isinstance(content, dict) or (declared is None and not _INPUTS & content.keys()):
        return False
    return content.get("model") is None or content["model"] == ""


def _named(body: bytes) -> str:
    """The model that a request names; empty if there is none."""
    with suppress(ValueError, RecursionError):
        content = json.loads(body)
        if isinstance(content, dict) and isinstance(content.get("model"), str):
            return str(content["model"])
    return ""


def _paths_with_model(openapi: MutableMapping[str, Any]) -> dict[str, bool]:
    """POST path -> whether one of the schemas of its JSON request has a `model`, from an OpenAPI document."""
    schemas = openapi.get("components", {}).get("schemas", {})
    declared = {}
    for path, methods in openapi.get("paths", {}).items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        form = content.get("application/json", {}).get("schema")
        if form:
            names = [option.get("$ref", "").rpartition("/")[2] for option in form.get("anyOf", [form])]
            declared[path] = any("model" in schemas.get(name, {}).get("properties", {}) for name in names)
    return declared


def _lacks_key(scope: Scope) -> bool:
    """Whether vLLM would refuse this request because of its key, if the key is in the environment."""
    key = os.environ.get("VLLM_API_KEY")
    guarded = scope["path"].removeprefix(scope.get("root_path", "")).startswith(_GUARDED)
    return bool(key) and guarded and not has_key(Headers(scope=scope), [str(key)])
