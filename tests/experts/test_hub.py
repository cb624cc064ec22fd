"""Uploading through huggingface_hub, to a Hub that is a small server on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result


class Hub(ThreadingHTTPServer):
    """Takes new repositories and commits as the Hub's API describes them, and remembers them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        repo = {"url": "http://127.0.0.1/org/composed", "name": "org/composed", "id": "org/composed"}
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(repo)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/models/org/composed/preupload/main":
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif self.path.startswith("/api/models/org/composed/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {"commitOid": "0" * 40, "commitUrl": "http://127.0.0.1/org/composed/commit/0", "success": True}
            )
        else:
            self._answer({"error": f"unexpected {self.path}"}, 404)

    def do_GET(self) -> None:
        self._answer({"id": "org/composed", "siblings": [], "error": "none"}, 200 if "api/models" in self.path else 404)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_upload_holds_what_was_written(hub: Hub, math: Path, swahili: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_test"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "adapterswap", "compose", "-t", math, "-l", swahili, "--bottom", "1"]
    command += ["-o", tmp_path / "out", "--push-to-hub", "org/composed"]
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "uploaded: http://127.0.0.1" in done.stderr
    assert hub.created[0]["visibility"] == "private"
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert b"Layers from bottom" in hub.files["README.md"]


def test_offline_is_not_a_matter_of_logging_in(run: Callable[..., Result], math: Path, tmp_path: Path) -> None:
    """The whole suite runs with HF_HUB_OFFLINE=1."""
    pushed = run("compose", "-t", math, "-l", "base", "--bottom", 1, "-o", tmp_path / "out", "--push-to-hub", "org/x")
    opened = run("inspect", "org/absent")
    for result in (pushed, opened):
        assert result.exit_code == 1
        assert "HF_HUB_OFFLINE" in result.stderr
        assert "log in" not in result.stderr.lower()


def test_without_a_hub_the_folder_stays(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    result = run("compose", "-t", math, "-l", swahili, "--bottom", 1, "-o", tmp_path / "out", "--push-to-hub", "org/x")
    assert result.exit_code == 1
    assert "was written, but could not be uploaded to org/x" in result.stderr
    assert (tmp_path / "out" / "README.md").exists()


def test_nothing_is_uploaded_unasked(hub: Hub, run: Callable[..., Result], math: Path, tmp_path: Path) -> None:
    dry = run(
        "compose", "-t", math, "-l", "base", "-o", tmp_path / "x", "--bottom", 1, "--push-to-hub", "a/b", "--dry-run"
    )
    assert dry.exit_code == 0
    assert not hub.created
