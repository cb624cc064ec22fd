"""Run llama.cpp's server as a process: a `llama-server` binary, or xllamacpp's server with the same command line.

Run as a module, this is a small `llama-server` built on xllamacpp, with the options of `_OPTIONS`. Imported, it starts
either server, waits until a token has been decoded, and stops it.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, DependencyError, RunError, reason_of

KEY = "LLAMA_API_KEY"  # llama-server's own variable: unlike its command line, other users cannot read it
_START_S = 1800.0  # a large base from a slow disk
_END_S = 10.0


class Engine:
    """A server, which listens on 127.0.0.1 only, and can be started again if it ends.

    Attributes:
        options: of an httpx client that reaches it, with the key that only this process knows.
        process: the server.
        stopped: whether it was ended on purpose.
    """

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._command, self._key = command, secrets.token_urlsafe()
        headers = {
            "authorization": f"Bearer {self._key}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        # With `trust_env`, HTTP_PROXY would apply.
        self.options: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "headers": headers, "trust_env": False}
        self.stopped = False
        self.launch()

    def launch(self) -> None:
        """Start the process; `wait` returns when it answers."""
        self.process = subprocess.Popen(
            self._command,
            env={**os.environ, KEY: self._key},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=_end_with_parent(),
        )

    def wait(self) -> None:
        """Return when the server has decoded two tokens; raise a RunError if it ends or does not answer."""
        _wait(self.process, self.options)

    def stop(self) -> None:
        """End the process."""
        self.stopped = True
        self.process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
        finally:
            self.process.kill()
            self.process.wait()


def find_program(llama_server: str | None) -> tuple[str, ...]:
    """How to call llama.cpp's server: `llama_server` if it is passed, the one on the PATH, or xllamacpp's."""
    require("gguf")
    if llama_server is not None:
        binary = shutil.which(llama_server)
        if binary is None:
            raise DependencyError(
                f"{llama_server} is not an executable program", "Check the path", parameter="llama_server"
            )
        return (binary,)

    binary = shutil.which("llama-server")
    if binary is not None:
        return (binary,)
    if find_spec("xllamacpp") is not None:
        return (sys.executable, "-m", "adapterswap.engines.serving.llama_engine")
    raise DependencyError(
        "There is no llama-server on the PATH, and the package xllamacpp is not installed",
        "Install one of them (`pip install xllamacpp`), or pass `llama_server`",
        parameter="llama_server",
    )


def engine_command(
    program: Sequence[str], base: str, adapters: Sequence[str], alias: str, port: int, arguments: Sequence[str]
) -> list[str]:
    """The command line of a server that loads a base and adapters with scale 0, until a request scales them."""
    unusable = next((path for path in adapters if ":" in path), None)
    if unusable:
        raise ArgumentError(
            f"The path {unusable} has a colon, which llama.cpp reads as the start of a scale",
            "Choose another folder for `cache`",
            parameter="cache",
        )

    scaled = []
    for path in adapters:
        entry = f"{path}:0"
        if "," in path:  # which separates the entries
            entry = f'"{entry}"'
        scaled.append(entry)
    return [
        *program, "-m", base, "--alias", alias, "--host", "127.0.0.1", "--port", str(port),
        "--lora-scaled", ",".join(scaled), *arguments,
    ]  # fmt: skip


def free_cores() -> int | None:
    """The physical cores that this process may use and that nothing else keeps busy, at least 1; None if unknown."""
    if sys.platform != "linux":
        return None
    usable = os.sched_getaffinity(0)
    siblings: set[str] = set()
    for core in usable:
        try:
            path = f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            siblings.add(Path(path).read_text(encoding="ascii"))
        except OSError:
            siblings.add(str(core))
    busy = round(os.getloadavg()[0])
    return max(1, min(len(siblings), len(usable) - busy))


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Engine]:
    """Start a server, wait until it has decoded two tokens, and stop it at the end of the block."""
    engine = Engine(command, port)
    try:
        engine.wait()
        yield engine
    finally:
        engine.stop()


def _end_with_parent() -> Callable[[], object] | None:
    """What a child of this process calls so that it ends when this process is killed; only Linux has it."""
    if sys.platform != "linux":
        return None
    prctl, set_signal_of_parents_death = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_signal_of_parents_death, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], options: dict[str, Any]) -> None:
    """Return when the server has decoded two tokens."""
    end = time.monotonic() + _START_S
    with httpx.Client(**options, timeout=_START_S) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise RunError(
                    f"llama.cpp could not load the base or an expert: it ended with status {process.returncode}",
                    "See its messages above for the reason",
                )
            with suppress(httpx.HTTPError):
                if client.get("/health").is_success:
                    break
            time.sleep(0.05)

        reason = None
        try:
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "temperature": 0})
            if not answer.is_success:
                reason = f"{answer.status_code}: {answer.text}"
        except httpx.HTTPError as error:
            reason = reason_of(error)
    if reason is not None:
        raise RunError(
            f"llama.cpp loaded the base, but did not answer a request for two tokens: {reason}",
            "Check the base's GGUF file and the options after `--`",
        )


_PLAIN = {
    "port": ["--port"],
    "n_ctx": ["-c", "--ctx-size"],
    "n_parallel": ["-np", "--parallel"],
    "n_gpu_layers": ["-ngl", "--n-gpu-layers"],
    "cache_ram_mib": ["-cram", "--cache-ram"],
}
_OPTIONS = argparse.ArgumentParser(prog="xllamacpp's llama-server", allow_abbrev=False)
_OPTIONS.add_argument("-m", "--model", required=True)
_OPTIONS.add_argument("--lora-scaled", default="")
_OPTIONS.add_argument("-a", "--alias", default="")
_OPTIONS.add_argument("--host", default="127.0.0.1")
for _name, _flags in _PLAIN.items():
    _OPTIONS.add_argument(*_flags, dest=_name, type=int)
_OPTIONS.add_argument("-t", "--threads", type=int)
_OPTIONS.add_argument("-ctk", "--cache-type-k", choices=["f16", "f32"], default="f16")
_OPTIONS.add_argument("-ctv", "--cache-type-v", choices=["f16", "f32"], default="f16")
_OPTIONS.add_argument("-fa", "--flash-attn", choices=["on", "off", "auto"], default="auto")
_OPTIONS.add_argument("--chat-template")


def _serve(arguments: Sequence[str]) -> None:
    """Run xllamacpp's server until the process that started this one stops it or ends."""
    options = _OPTIONS.parse_args(arguments)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    params.warmup, params.verbosity = False, 1
    params.fit_params = False
    types = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "f32": xllamacpp.ggml_type.GGML_TYPE_F32}
    params.cache_type_k, params.cache_type_v = types[options.cache_type_k], types[options.cache_type_v]
    flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[options.flash_attn]
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    if options.alias:
        params.model_alias = {options.alias}
    params.api_keys = [key for key in [os.environ.get(KEY)] if key]
    if options.chat_template:
        params.chat_template = options.chat_template
    for name in _PLAIN:
        if (number := getattr(options, name)) is not None:
            setattr(params, name, number)
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
    _serve(sys.argv[1:])
