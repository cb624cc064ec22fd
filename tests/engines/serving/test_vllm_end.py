"""SIGTERM while vLLM answers: the server ends within the seconds that answers have, whatever clients do."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .environment import needs_vllm
from .server import serving

pytestmark = [needs_vllm, pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("vllm")]

_LONG = 40_000  # tokens: a minute, even of a pico model


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_ends_with_requests_in_flight(
    served_base: Callable[[str], Path], pristine: Callable[[str], Path], tmp_path: Path, stream: bool
) -> None:
    """Clients that still wait get a 503, or a stream without its end; before, the server waited for them."""
    base = shutil.copytree(served_base("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * _LONG}))
    room = ("--max-model-len", str(2 * _LONG), "--kv-cache-memory-bytes", "512M")
    with serving(base, pristine("llama"), tmp_path, *room) as server:
        body = json.dumps({
            "model": "math", "prompt": [5, 6], "max_tokens": _LONG, "temperature": 0, "ignore_eos": True,
            "stream": stream,
        })  # fmt: skip
        port = int(server.url.rpartition(":")[2])
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            received = client.recv(1) if stream else b""
            while not re.search(
                r"^vllm:num_requests_running\{.*\} 1\.0$", str(server.get("/metrics")[1]), re.MULTILINE
            ):
                time.sleep(0.2)
            server.terminate()
            while part := client.recv(2**20):
                received = received[-1000:] + part
        assert server.wait(300) == 0
    if stream:
        assert not received.endswith(b"0\r\n\r\n")
    else:
        assert received.startswith(b"HTTP/1.1 503"), received
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == 503
