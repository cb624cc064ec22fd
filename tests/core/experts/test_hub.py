"""Uploading through huggingface_hub to a small local server in place of the Hub."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from conftest import LAYERS
from huggingface_hub import constants

from adapterswap.cli.upload import check_repository
from adapterswap.kit.errors import ArgumentError

Run = Callable[..., Result]


class Hub(ThreadingHTTPServer):
    """Accepts repositories, branches and commits as the Hub's API does, and records them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.branches: list[str] = []
        self.commits: list[tuple[str, str]] = []  # branch, message
        self.files: dict[str, bytes] = {}
        self.is_private = True


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        repo = {"url": "http://127.0.0.1/org/composed", "name": "org/composed", "id": "org/composed"}
        _, _, action = self.path.partition("/api/models/org/composed/")
        what, _, branch = action.partition("?")[0].partition("/")
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(repo)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif what == "branch":
            self.server.branches.append(branch)
            self._answer({})
        elif what == "preupload":
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                if line["key"] == "header":
                    self.server.commits.append((branch, line["value"]["summary"]))
            self._answer(
                {"commitOid": "0" * 40, "commitUrl": "http://127.0.0.1/org/composed/commit/0", "success": True}
            )
        else:
            self._answer({"error": f"unexpected {self.path}"}, 404)

    def do_GET(self) -> None:
        found = {"id": "org/composed", "siblings": [], "private": self.server.is_private, "error": "none"}
        self._answer(found, 200 if "api/models" in self.path else 404)

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
    thread = threading.Thread(target=server.serve_forever, args=[0.01])  # seconds between looks for `shutdown`
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def online(hub: Hub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`online("compose", …)` runs the command line in this process, and its Hub is `hub`."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    return lambda *arguments, **more: run(*arguments, "--push-to-hub", "org/composed", **more)


ONE = ("--bottom", 1, "--num-layers", LAYERS)


def on_the_hub(adapter: Path, out: Path) -> Path:
    """A copy of an adapter that names its base by a Hub id, as those that are published do."""
    shutil.copytree(adapter, out)
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
    return out


@pytest.fixture
def math(math: Path, tmp_path: Path) -> Path:
    return on_the_hub(math, tmp_path / "math")


@pytest.fixture
def swahili(swahili: Path, tmp_path: Path) -> Path:
    return on_the_hub(swahili, tmp_path / "swahili")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_upload_contains_the_written_files(hub: Hub, math: Path, swahili: Path, tmp_path: Path) -> None:
    """In a process of its own, which reads the Hub's address and token from the environment as a user's does."""
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_test"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    options = [
        "-t",
        math,
        "-l",
        swahili,
        "--bottom",
        "1",
        "--num-layers",
        LAYERS,
        "-o",
        tmp_path / "out",
        "--push-to-hub",
        "org/composed",
    ]
    command = [sys.executable, "-m", "adapterswap", "compose", *map(str, options)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "uploaded: http://127.0.0.1" in result.stderr
    assert hub.created[0]["visibility"] == "private"
    assert hub.files == contents(tmp_path / "out")
    assert b"Layers from bottom" in hub.files["README.md"]
    assert [branch for branch, _ in hub.commits] == ["main"]


@pytest.mark.parametrize("command", ["slice", "merge", "extract", "merge of a checkpoint"])
def test_every_command_that_writes_an_expert_uploads_it(
    command: str, hub: Hub, online: Run, base: Callable[[str], Path], math: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "out", base("llama")
    more = ("--revision", "trial", "--commit-message", "Try this", "--public")
    if command == "slice":
        result = online("slice", math, "--layers", "0-1", "--num-layers", LAYERS, "-o", out, *more)
    elif command == "merge":
        result = online("merge", math, "--base-model", folder, "-o", out, *more)
    else:
        online("merge", math, "--base-model", folder, "-o", tmp_path / "full", exit_code=0)
        hub.created.clear()
        hub.files.clear()
        hub.commits.clear()
        cut = ("extract", tmp_path / "full", "--base-model", folder, "--rank", 2, "-o", out)
        composed = ("compose", "-t", tmp_path / "full", "-l", math, "--base-model", folder, "--bottom", 1, "-o", out)
        result = online(*(cut if command == "extract" else composed), *more)
    if command == "extract":  # its base is a folder
        assert result.exit_code == 3
        assert f"by a path of this machine, {folder}" in result.stderr
        assert not hub.files

        rehearsed = online(*cut, "--overwrite", "--dry-run", exit_code=3)
        assert f"by a path of this machine, {folder}" in rehearsed.stderr
        return
    assert result.exit_code == 0, result.stderr
    assert hub.files == contents(out)
    assert hub.branches == ["trial"]
    assert hub.commits == [("trial", "Try this")]
    assert hub.created[0]["visibility"] == "public"


def test_nothing_private_goes_to_a_public_repository(hub: Hub, online: Run, math: Path, tmp_path: Path) -> None:
    hub.is_private = False
    result = online("slice", math, "--layers", "0-1", "--num-layers", LAYERS, "-o", tmp_path / "out", "--private")
    assert result.exit_code == 3
    assert "org/composed is public" in result.stderr
    assert not hub.files
    assert (tmp_path / "out" / "README.md").exists()


def test_an_upload_is_checked_before_composing(run: Run, math: Path, tmp_path: Path) -> None:
    run("slice", math, "--layers", "0-1", "--num-layers", LAYERS, "-o", tmp_path / "out", "--private", exit_code=2)
    odd = run(
        "slice",
        math,
        "--layers",
        "0-1",
        "--num-layers",
        LAYERS,
        "-o",
        tmp_path / "out",
        "--push-to-hub",
        "a/b/c",
        exit_code=2,
    )
    assert "--push-to-hub" in odd.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArgumentError) as caught:
        check_repository("org/name@main")
    assert caught.value.parameter == "push_to_hub"


def test_offline_errors_do_not_suggest_logging_in(run: Run, math: Path, tmp_path: Path) -> None:
    """The whole suite runs with HF_HUB_OFFLINE=1."""
    pushed = run("compose", "-t", math, "-l", "base", *ONE, "-o", tmp_path / "out", "--push-to-hub", "org/x")
    opened = run("inspect", "org/absent")
    for result in (pushed, opened):
        assert result.exit_code == 3
        assert "HF_HUB_OFFLINE" in result.stderr
        assert "log in" not in result.stderr.lower()


def test_without_a_hub_the_folder_stays(run: Run, math: Path, swahili: Path, tmp_path: Path) -> None:
    result = run(
        "compose",
        "-t",
        math,
        "-l",
        swahili,
        *ONE,
        "-o",
        tmp_path / "out",
        "--push-to-hub",
        "org/x",
        exit_code=3,
    )
    assert "was written, but could not be uploaded to org/x" in result.stderr
    assert (tmp_path / "out" / "README.md").exists()


def test_nothing_is_uploaded_without_push(hub: Hub, run: Run, math: Path, tmp_path: Path) -> None:
    result = run(
        "compose",
        "-t",
        math,
        "-l",
        "base",
        "-o",
        tmp_path / "x",
        *ONE,
        "--push-to-hub",
        "a/b",
        "--dry-run",
        exit_code=0,
    )
    assert not hub.created
    assert "would be uploaded to a/b (private if it is new). Not checked: the login" in result.stderr


@pytest.mark.parametrize("command", ["compose", "slice"])
def test_a_dry_run_refuses_what_the_upload_would_refuse(
    command: str, hub: Hub, run: Run, math: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Here the config would name the base by its folder: the line `would be uploaded` was untrue."""
    folder, out = base("llama"), tmp_path / "x"
    config = json.loads((math / "adapter_config.json").read_text())
    (math / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(folder)}))
    arguments: tuple[object, ...] = ("compose", "-t", math, "-l", "base", *ONE)
    if command == "slice":
        arguments = ("slice", math, "--layers", "0-1")

    result = run(*arguments, "-o", out, "--push-to-hub", "a/b", "--dry-run", exit_code=3)

    assert f"by a path of this machine, {folder}" in result.stderr
    assert "would be uploaded to" not in result.stderr
    assert not out.exists()
    assert not hub.created
