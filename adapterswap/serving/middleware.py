"""Closes the doors that vLLM opens beside the resolver.

Runtime LoRA updating, which resolvers need, also lets any client load an adapter from any path of the server
(`POST /v1/load_lora_adapter`, `POST /adapters`). Here such requests are answered with 403, so that nothing outside the
manifest can be reached. Unloading by `POST /v1/unload_lora_adapter` stays: it is how a name is composed anew after an
expert changed. A plain ASGI application; imports nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["ManifestOnly"]

_Message = MutableMapping[str, Any]
_Application = Callable[
    [_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]
]

_BODY = (
    b'{"error": {"message": "Adapters are composed by name, from the experts of this server: ask for TASK+LANGUAGE. '
    b'Loading others is switched off.", "type": "PermissionDeniedError", "param": null, "code": 403}}'
)


class ManifestOnly:
    """ASGI middleware: refuses requests that name a path to load, and hands all others on."""

    def __init__(self, app: _Application) -> None:
        self._app = app

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http" or not _loads(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})


def _loads(path: str) -> bool:
    parts = [part for part in path.split("/") if part]
    return "load_lora_adapter" in parts or "adapters" in parts
