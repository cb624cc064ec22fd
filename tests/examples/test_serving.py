"""The clients of SGLang and LoRAX send what these projects document, to a server that records it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"


class _Server(HTTPServer):
    """Records the path and body of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, dict[str, Any]]] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        one = {"choices": [{"text": "hi"}], "generated_text": "hi", "text": "hi"}
        answer = json.dumps([one] * len(body["text"]) if "text" in body else one).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(server: _Server, name: str, *arguments: str) -> str:
    url = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, EXAMPLES / name, "--url", url, "--prompt", "Bei ya", "--max-tokens", "4", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout


def test_sglang(server: _Server) -> None:
    shown = run(server, "sglang.py", "--base", "org/base", "math-swahili", "math-telugu")
    assert server.seen[0] == (
        "/v1/completions",
        {"model": "org/base:math-swahili", "prompt": "Bei ya", "max_tokens": 4, "temperature": 0},
    )
    assert server.seen[2] == (
        "/generate",
        {
            "text": ["Bei ya", "Bei ya"], "sampling_params": {"max_new_tokens": 4, "temperature": 0},
            "lora_path": ["math-swahili", "math-telugu"],
        },
    )  # fmt: skip
    assert shown.splitlines()[2:] == ["math-swahili, in one batch: hi", "math-telugu, in one batch: hi"]


def test_lorax(server: _Server) -> None:
    assert run(server, "lorax.py", "/data/served/math-swahili") == "/data/served/math-swahili: hi\n"
    parameters = {
        "adapter_id": "/data/served/math-swahili", "adapter_source": "local", "max_new_tokens": 4, "do_sample": False,
    }  # fmt: skip
    assert server.seen == [("/generate", {"inputs": "Bei ya", "parameters": parameters})]
