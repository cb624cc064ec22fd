"""Run llama.cpp's server as a process: a `llama-server` binary, or xllamacpp's server with the same command line.

Run as a module, this is a small `llama-server` built on xllamacpp, with the options of `_OPTIONS`. Imported, it starts
either server, waits until a token has been decoded, and stops it. Knows nothing of compositions.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from adapterswap.errors import ArgumentError, DependencyError, RunError, reason_of

__all__ = ["Engine", "engine_command", "find_program", "free_port", "running"]

_START_S = 1800.0  # a large base from a slow disk
_END_S = 10.0


@dataclass(frozen=True)
class Engine:
    """A running server, which listens on 127.0.0.1 only."""

    port: int
    process: subprocess.Popen[bytes]

    def connect(self) -> http.client.HTTPConnection:
        """A connection to it."""
        return http.client.HTTPConnection("127.0.0.1", self.port)


def find_program(llama_server: str | None) -> tuple[str, ...]:
    """How to call llama.cpp's server: `llama_server` if it is passed, the one on the PATH, or xllamacpp's.

    Raises:
        DependencyError: none of them is installed.
    """
    if llama_server is not None:
        binary = shutil.which(llama_server)
        if binary is None:
            raise DependencyError(
                f"{llama_server} is not an executable program", "Check the path", parameter="llama_server"
            )
        return (binary,)
    if (binary := shutil.which("llama-server")) is not None:
        return (binary,)
    if find_spec("xllamacpp") is not None:
        return (sys.executable, "-m", "adapterswap.serving.llama_engine")
    raise DependencyError(
        "there is no llama-server on the PATH, and the package xllamacpp is not installed",
        "Install one of them (`pip install xllamacpp`), or pass `llama_server`",
        parameter="llama_server",
    )


def engine_command(
    program: Sequence[str], base: str, adapters: Sequence[str], alias: str, port: int, arguments: Sequence[str]
) -> list[str]:
    """The command line of a server that loads a base and adapters with scale 0, until a request scales them.

    Raises:
        ArgumentError: an adapter's path has a colon, which llama.cpp reads as the start of a scale.
    """
    if unusable := next((path for path in adapters if ":" in path), None):
        raise ArgumentError(
            f"the path {unusable} has a colon, which llama.cpp reads as the start of a scale",
            "Choose another folder for `cache`",
            parameter="cache",
        )
    line = ",".join(f'"{path}:0"' if "," in path else f"{path}:0" for path in adapters)
    return [
        *program, "-m", base, "--alias", alias, "--host", "127.0.0.1", "--port", str(port),
        "--lora-scaled", line, *arguments,
    ]  # fmt: skip


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int, headers: dict[str, str], stop: threading.Event) -> Iterator[Engine]:
    """Start a server, wait until it has decoded a token, and stop it at the end of the block.

    If `stop` is set, the block begins at once.

    Raises:
        RunError: the server ended, or cannot decode.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    engine = Engine(port, process)
    try:
        _wait(engine, headers, stop)
        yield engine
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(engine: Engine, headers: dict[str, str], stop: threading.Event) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if engine.process.poll() is not None:
            raise RunError(
                f"llama.cpp could not load the base or an expert: it ended with status {engine.process.returncode}",
                "See its messages above for the reason",
            )
        if _answer(engine, "GET", "/health", None, headers)[0] == 200:
            break
        if stop.wait(0.05):
            return
    body = json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 0})
    status, answer = _answer(engine, "POST", "/v1/completions", body, {**headers, "Content-Type": "application/json"})
    if status != 200:
        raise RunError(
            f"llama.cpp loaded the base, but answered a request for two tokens with {status or 'nothing'}: {answer}",
            "Check the base's GGUF file and the options after `--`",
        )


def _answer(
    engine: Engine, method: str, path: str, body: str | None, headers: dict[str, str]
) -> tuple[int | None, str]:
    """The status of an answer and its text; the status is None if there is no answer."""
    connection = engine.connect()
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return None, reason_of(error)
    finally:
        connection.close()


_OPTIONS = argparse.ArgumentParser(prog="xllamacpp's llama-server", allow_abbrev=False)
_OPTIONS.add_argument("-m", "--model", required=True)
_OPTIONS.add_argument("--lora-scaled", default="")
_OPTIONS.add_argument("-a", "--alias", default="")
_OPTIONS.add_argument("--host", default="127.0.0.1")
_OPTIONS.add_argument("--port", type=int, default=8080)
_OPTIONS.add_argument("-c", "--ctx-size", type=int)
_OPTIONS.add_argument("-np", "--parallel", type=int)
_OPTIONS.add_argument("-t", "--threads", type=int)
_OPTIONS.add_argument("-cram", "--cache-ram", type=int)
_OPTIONS.add_argument("-ngl", "--n-gpu-layers", type=int)
_OPTIONS.add_argument("-ctk", "--cache-type-k", choices=["f16", "f32"], default="f16")
_OPTIONS.add_argument("-ctv", "--cache-type-v", choices=["f16", "f32"], default="f16")
_OPTIONS.add_argument("-fa", "--flash-attn", choices=["on", "off", "auto"], default="auto")
_OPTIONS.add_argument("--chat-template")
_OPTIONS.add_argument("--api-key")


def _serve(arguments: Sequence[str]) -> None:
    """Run xllamacpp's server until the process that started this one stops it or ends."""
    options = _OPTIONS.parse_args(arguments)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames, params.port = [options.host], options.port
    params.warmup, params.verbosity = False, 1
    params.fit_params = False
    types = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "f32": xllamacpp.ggml_type.GGML_TYPE_F32}
    params.cache_type_k, params.cache_type_v = types[options.cache_type_k], types[options.cache_type_v]
    flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[options.flash_attn]
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    if options.alias:
        params.model_alias = {options.alias}
    if options.api_key:
        params.api_keys = [options.api_key]
    if options.chat_template:
        params.chat_template = options.chat_template
    numbers = {
        "n_ctx": options.ctx_size,
        "n_parallel": options.parallel,
        "n_gpu_layers": options.n_gpu_layers,
        "cache_ram_mib": options.cache_ram,
    }
    for name, value in numbers.items():
        if value is not None:
            setattr(params, name, value)
    if options.threads is not None:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    loaded = []
    for entry in next(csv.reader([options.lora_scaled]), []):
        path, _, scale = entry.rpartition(":")
        loaded.append(xllamacpp.CommonAdapterLoraInfo(path, float(scale)))
    params.lora_adapters = loaded
    parent = os.getppid()
    server = xllamacpp.Server(params)
    while os.getppid() == parent:
        time.sleep(1)
    del server


if __name__ == "__main__":
    threading.current_thread().name = "llama-server"
    _serve(sys.argv[1:])
