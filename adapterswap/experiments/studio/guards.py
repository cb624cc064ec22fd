"""What stands between the network and the page: requests of other sites, unused routes and long ones are refused.

A content security policy prevents the browser from fetching from or sending to other sites.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REFUSED = "adapterswap.refused"
"""Set in the scope of a request whose values are not valid."""

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
_MOST_BYTES = 4_000_000  # of a request: a file for Evaluate, as JSON
_FETCHED = {"/", "/config", "/theme.css", "/favicon.ico", "/manifest.json"}
_FETCHED |= {f"/gradio_api/{name}" for name in ("info", "info/", "app_id", "queue/data", "startup-events")}
_BELOW = ("/assets/", "/static/", "/svelte/", "/gradio_api/heartbeat/", "/gradio_api/file=")
_POSTED = {"/studio/answer", *(f"/gradio_api/{name}" for name in ("run/predict", "queue/join", "cancel", "reset"))}


def guards(host: str, framed_by: str | None = None) -> list[Middleware]:
    """The middleware for a page that listens on `host`, and that pages of the site `framed_by` may show in a frame."""
    policy = _POLICY
    if framed_by:
        policy += f" {framed_by}"  # the policy ends with the sites that may show the page
    middleware = [
        Middleware(_Guarded, policy=policy),
        Middleware(RequestBodyLimitMiddleware, max_body_size=_MOST_BYTES),
    ]

    # Refuse other host names that resolve to this machine.
    if _is_loopback(host):
        own_names = ["127.0.0.1", "localhost", "[::1]", host]
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=own_names))
    return middleware


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_used(method: str, path: str) -> bool:
    """Whether the page sends such a request. Gradio has more routes: some fetch addresses that a visitor names."""
    if method in ("GET", "HEAD"):
        return path in _FETCHED or path.startswith(_BELOW)
    return method == "POST" and path in _POSTED


class _Guarded:
    """ASGI middleware that refuses other sites and unused routes, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self.app = app
        self._headers = {"content-security-policy": policy, **_HEADERS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
                if REFUSED in scope:  # Gradio's status is 500
                    message["status"] = 422
            await send(message)

        app, headers = self.app, Headers(scope=scope)

        # An origin is a scheme and a host. It is not parsed further, since anybody may send anything.
        origins = headers.getlist("origin")
        if any(origin.partition("://")[2] != headers.get("host") for origin in origins):
            app = PlainTextResponse("Open the studio by its own address", 403)
        elif not _is_used(scope["method"], scope["path"]):
            app = PlainTextResponse("The studio's page does not send this", 404)
        await app(scope, receive, sent)
