"""A real server, started by `adapterswap serve` in vLLM's environment, and its client. It is always stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .environment import environment, vllm_python

_START_S = 300


class Server:
    """A running server.

    Attributes:
        url: where it answers.
        log: everything that it printed.
    """

    def __init__(self, url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.url, self.log, self._process = url, log, process

    def get(self, path: str) -> tuple[int, Any]:
        return _answer(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        return _answer(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def complete(self, model: str, prompt: list[int], length: int) -> tuple[int, Any]:
        body = {
            "model": model, "prompt": prompt, "max_tokens": length, "temperature": 0, "logprobs": 5,
            "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        return self.post("/v1/completions", body)

    def is_alive(self) -> bool:
        return self._process.poll() is None and self.get("/health")[0] == 200

    def status(self) -> int | None:
        """The exit status; None while it is running."""
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended by itself."""
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM to the server's own process, as an operator does."""
        self._process.terminate()

    def stop(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(900)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _answer(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=900) as response:
            status, raw = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
        error.close()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def start(base: Path, experts: Path, folder: Path, *arguments: str) -> Server:
    """Start `adapterswap serve` of these experts, on a free port; its cache and its log lie in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(vllm_python()).with_name("adapterswap"), "serve", "--base-model", base, "--experts", experts,
        "--cache", folder / "cache", "--", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32",
        "--max-model-len", "128", "--enforce-eager", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M",
        *arguments,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, start_new_session=True, env=environment({})
        )
    return Server(f"http://127.0.0.1:{port}", log, process)


@contextmanager
def serving(base: Path, experts: Path, folder: Path, *arguments: str) -> Iterator[Server]:
    """A server that is ready; see `start`."""
    server = start(base, experts, folder, *arguments)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                if server.get("/health")[0] == 200:
                    break
            except OSError:
                pass
            assert server.status() is None, server.log.read_text()[-5000:]
            assert time.monotonic() < deadline, server.log.read_text()[-5000:]
            time.sleep(0.3)
        yield server
    finally:
        server.stop()


def failed_start(base: Path, experts: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and the log of a server that cannot start; see `start`."""
    server = start(base, experts, folder, *arguments)
    try:
        status = server.wait(_START_S)
    finally:
        server.stop()
    return status, server.log.read_text()
