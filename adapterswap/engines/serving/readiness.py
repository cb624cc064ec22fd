"""Check whether vLLM can decode with the base that it loaded, and find the reason if it cannot.

vLLM loads some models that its attention kernels do not support, and fails only at the first request: it answers 500
and stops. So a token is decoded before the server listens. The reason is in the log of vLLM's worker, which is another
process. The plugin runs in every process and writes the exceptions that vLLM logs into a file, which `start` reads.
Imports vLLM only to decode.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

FAILURES = "ADAPTERSWAP_FAILURES"  # the file for exceptions that vLLM logs; `start` sets it
_WAIT_S = 600.0  # for the first token; vLLM has warmed up by then

_MOST = 800  # characters of a reason: vLLM says at the end of its messages what to do

_ready = False
_failure: str | None = None


def is_ready() -> bool:
    """Whether this process has announced that it is ready."""
    return _ready


def failure() -> str | None:
    """Why `check` failed in this process; None if it did not."""
    return _failure


def announce() -> None:
    """Print that the server is ready."""
    global _ready
    _ready = True
    print("adapterswap: ready (one token was decoded)", file=sys.stderr, flush=True)


async def check(state: Any) -> str | None:
    """Decode with vLLM's engine, which is `state.engine_client` of its FastAPI application.

    Returns:
        The reason why it failed; None if it worked or the base does not generate text.
    """
    global _failure
    engine = state.engine_client
    if "generate" not in await engine.get_supported_tasks() or engine.model_config.is_encoder_decoder:
        return None
    # Exceptions logged earlier did not keep the engine from starting.
    if path := os.environ.get(FAILURES):
        Path(path).write_text("", encoding="utf-8")
    try:
        await asyncio.wait_for(_decode(engine), _WAIT_S)
    except TimeoutError:
        _failure = f"no token was decoded within {_WAIT_S:.0f} seconds"
    except Exception as error:  # vLLM, its kernels and its transports raise various errors
        _failure = await _reason(error)
    return _failure


async def _decode(engine: Any) -> None:
    """Generate two tokens, which goes through all that answering needs."""
    from vllm import SamplingParams

    # Only the second token is decoded from cached keys and values.
    length = min(2, engine.model_config.max_model_len - 1)
    sampling = SamplingParams(max_tokens=max(length, 1), temperature=0, ignore_eos=True, detokenize=False)
    async for _ in engine.generate({"prompt_token_ids": [0]}, sampling, "adapterswap-readiness"):
        pass


async def _reason(error: Exception) -> str:
    """The worker's own exception if it was recorded; otherwise `error`, which only points to a log."""
    for _ in range(20):
        if failure := first_failure():
            return failure
        await asyncio.sleep(0.05)  # the worker may still be writing it
    return _described(error)


def record_failures() -> None:
    """Write every exception that vLLM logs in this process into the file that FAILURES names, if it is set."""
    logger = logging.getLogger("vllm")
    if os.environ.get(FAILURES) and not any(isinstance(handler, _Recorder) for handler in logger.handlers):
        logger.addHandler(_Recorder(logging.ERROR))


def first_failure() -> str | None:
    """The first exception recorded, which is the cause of the others; None if there is none."""
    if not (path := os.environ.get(FAILURES)):
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return lines[0] if lines else None


class _Recorder(logging.Handler):
    """Appends one line per logged exception."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info or record.exc_info[1] is None:
            return
        try:
            with open(os.environ[FAILURES], "a", encoding="utf-8", errors="replace") as file:
                file.write(f"{_described(record.exc_info[1])}\n")
        except OSError:
            self.handleError(record)


def _described(error: BaseException) -> str:
    from adapterswap.kit.errors import reason_of

    return reason_of(error, _MOST)
