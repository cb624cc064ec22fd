"""What the servers answer to a request that they refuse, in the form of OpenAI's errors, and who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

NO_KEY = "This server needs a key. Send it as `Authorization: Bearer KEY`."
NO_MODEL = (
    "The request names no model",
    "Set `model` to an expert's name, to TASK+LANGUAGE, or to the base's name as GET /v1/models lists it",
)
ENDING = "The server is shutting down. Try again later."
_KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def refusal(
    status: int, message: str, parameter: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The answer; `parameter` is the field of the request that is at fault."""
    kind = _KINDS.get(status, "BadRequestError")
    error = {"message": message, "type": kind, "param": parameter, "code": status}
    return JSONResponse({"error": error}, status, headers)


def has_key(headers: Headers, keys: Iterable[str]) -> bool:
    """Whether a request has one of the keys."""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    known = [key.encode() for key in keys]
    return scheme.lower() == "bearer" and any(hmac.compare_digest(sent.encode("latin-1"), key) for key in known)
