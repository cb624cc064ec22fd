"""An OpenAI-compatible server in front of llama.cpp's, which turns the name of a model into the scales of a request.

Forwards only `/v1/completions` and `/v1/chat/completions`, streamed or not: llama.cpp's other paths change scales for
everybody (`/lora-adapters`) or expose files. Uses only the standard library, with a thread for each request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from adapterswap.errors import AdapterswapError
from adapterswap.serving.llama_engine import Engine
from adapterswap.serving.names import UnknownNameError
from adapterswap.serving.pieces import PieceComposer

__all__ = ["Proxy"]

_PATHS = ("/v1/completions", "/v1/chat/completions")
_LARGEST = 64 * 2**20  # bytes of a request
_BUFFER = 2**16


class _Refused(Exception):
    """An error to send as the answer."""

    def __init__(self, status: int, kind: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.parameter = status, kind, parameter


class _Request(NamedTuple):
    model: str
    body: bytes


class Proxy(ThreadingHTTPServer):
    """Listens as soon as it is created; `serve_forever` answers.

    Args:
        address: host and port.
        composer: turns names into scales.
        engine: the server that computes the answers.
        base_name: the name of the base itself.

    Raises:
        OSError: another program listens at the address.
    """

    daemon_threads = True
    request_queue_size = 512  # clients waiting to be accepted

    def __init__(self, address: tuple[str, int], composer: PieceComposer, engine: Engine, base_name: str) -> None:
        self.composer, self.engine, self.base_name = composer, engine, base_name
        super().__init__(address, _Handler)

    def models(self) -> Sequence[str]:
        """The names that are listed: the base, and the allowed names or, if all are allowed, the experts."""
        return [self.base_name, *self.composer.manifest.names]

    def translated(self, raw: bytes) -> _Request:
        """A client's request as it is sent to llama.cpp: with the scales that the model's name means.

        Raises:
            _Refused: it is not a JSON object, names no model, or sets scales itself.
            AdapterswapError: see `PieceComposer.scales`.
        """
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise _Refused(400, "BadRequestError", "The request is not a JSON object.")
        model = content.get("model")
        if not isinstance(model, str) or not model:
            raise _Refused(
                400, "BadRequestError",
                "The request names no model. Set `model` to an expert's name, to TASK+LANGUAGE, or to the base's name "
                "as GET /v1/models lists it.",
                "model",
            )  # fmt: skip
        if "lora" in content:
            raise _Refused(400, "BadRequestError", "`lora` is set from the name of the model. Leave it out.", "lora")
        scales = {} if model == self.base_name else self.composer.scales(model)
        # Name all of them: llama.cpp gives the others the scale with which they were loaded.
        lora = [{"id": place, "scale": scales.get(place, 0.0)} for place in range(len(self.composer.pieces))]
        # llama.cpp reuses the keys and values of earlier prompts for requests with other scales: of 195 answers to 32
        # clients, 23 were wrong (October 2026). So nothing is cached.
        return _Request(model, json.dumps(content | {"lora": lora, "cache_prompt": False}).encode())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v1/models":
            common = {"object": "model", "created": 0, "owned_by": "adapterswap"}
            self._send(200, {"object": "list", "data": [{"id": name, **common} for name in self.server.models()]})
        elif path == "/health":
            alive = self.server.engine.process.poll() is None
            self._send(200 if alive else 503, {"status": "ok" if alive else "llama.cpp has ended"})
        else:
            self._fail(_Refused(404, "NotFoundError", f"There is no {path} here."))

    def do_POST(self) -> None:
        try:
            self._answer()
        except _Refused as refused:
            self._fail(refused)
        except UnknownNameError as error:
            self._fail(_Refused(404, "NotFoundError", str(error), "model"))
        except AdapterswapError as error:
            self._fail(_Refused(400, "BadRequestError", str(error), "model"))

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LARGEST:
            self.close_connection = True  # its body was not read
            raise _Refused(
                413 if length.isdecimal() else 411, "BadRequestError",
                f"A request needs a Content-Length of at most {_LARGEST} bytes.",
            )  # fmt: skip
        raw = self.rfile.read(int(length))
        if path not in _PATHS:
            raise _Refused(404, "NotFoundError", f"There is no {path} here. Send requests to {' or '.join(_PATHS)}.")
        request = self.server.translated(raw)
        headers = {"Content-Type": "application/json"}
        if authorization := self.headers.get("Authorization"):
            headers["Authorization"] = authorization
        connection = self.server.engine.connect()
        try:
            try:
                connection.request("POST", path, request.body, headers)
                response = connection.getresponse()
                streamed = "text/event-stream" in (response.headers.get("Content-Type") or "")
                content = b"" if streamed else response.read()
            except (OSError, HTTPException):
                raise _Refused(503, "ServiceUnavailableError", "llama.cpp does not answer.") from None
            with suppress(BrokenPipeError, ConnectionResetError):  # the client left
                if streamed:
                    self._stream(response, request.model)
                else:
                    self._write(response.status, _with_model_name(content, request.model))
        finally:
            connection.close()  # llama.cpp stops generating when the client is gone

    def _stream(self, response: HTTPResponse, model: str) -> None:
        """Forward events as they arrive, each in a separate chunk."""
        self.send_response(response.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for line in response:
                start, data = line[:6], line[6:]
                if start == b"data: " and data.startswith(b"{"):
                    line = start + _with_model_name(data, model) + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
        except (OSError, HTTPException):
            self.close_connection = True  # without the last chunk, so the client sees that it is incomplete
            return
        self.wfile.write(b"0\r\n\r\n")

    def _fail(self, refused: _Refused) -> None:
        error = {
            "message": str(refused), "type": refused.kind, "param": refused.parameter, "code": refused.status,
        }  # fmt: skip
        self._send(refused.status, {"error": error})

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        self._write(status, json.dumps(content).encode())

    def _write(self, status: int, body: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: llama.cpp writes a log."""


def _with_model_name(raw: bytes, model: str) -> bytes:
    """An answer, or part of one, with the requested name in place of llama.cpp's file name or alias."""
    try:
        content = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(content, dict) or "model" not in content:
        return raw
    return json.dumps(content | {"model": model}, ensure_ascii=False).encode()
