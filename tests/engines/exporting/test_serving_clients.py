"""`adapterswap serve --engine llama.cpp` and clients that are malicious, broken, slow, or gone; in raw bytes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

import pytest
from click.testing import Result
from refusals import refused

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from gguf import GGUFReader

from adapterswap.engines.serving import Cache, Manifest
from adapterswap.engines.serving.llama_cpp import LlamaLaunch, _answer
from adapterswap.engines.serving.llama_engine import running
from adapterswap.engines.serving.pieces import PieceComposer
from adapterswap.kit.errors import ArgumentError, RunError
from engines.exporting.conftest import Bases, Experts
from engines.exporting.test_serving import command, served

KEY = "sésame"
FILES = 128
ENDLESS = {"model": "math", "prompt": "a", "max_tokens": 10**6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(experts: Experts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate(("math", "swahili"), start=1):
        (folder / name).symlink_to(experts("llama", name, seed=seed))
    return folder


@pytest.fixture(scope="module")
def patient_gguf(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with room for answers that take half a minute."""
    path = tmp_path_factory.mktemp("gguf") / "base.gguf"
    path.write_bytes(bases("llama")[1].read_bytes())
    reader = GGUFReader(path, "r+")
    field = reader.fields["llama.context_length"]
    field.parts[field.data[0]][0] = 100_000
    reader.data.flush()
    return path


Start = Callable[[Path], AbstractContextManager["Server"]]


class Server:
    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.process, self.log = port, process, log

    @property
    def engine(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=900)

    def send(self, request: bytes) -> socket.socket:
        client = self.connect()
        client.sendall(request)
        return client

    def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """The status, the headers and the body of an answer. The connection is closed if the server closes it."""
        with self.send(request) as client:
            return answer_of(client)


def answer_of(client: socket.socket) -> tuple[int, bytes, bytes]:
    with client.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = b"".join(iter(file.readline, b"\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", headers)
        return status, headers, file.read(int(length[1])) if length else b""


def request(
    body: object, *headers: str, path: str = "/v1/completions", host: str = "127.0.0.1", key: str = KEY
) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {key}", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        head.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*head, "", ""]).encode() + content


@pytest.fixture(scope="module")
def start(bases: Bases, patient_gguf: Path, folder: Path) -> Start:
    @contextmanager
    def start(scratch: Path) -> Iterator[Server]:
        with served(
            bases("llama")[0], patient_gguf, folder, scratch, engine=("--ctx-size", "100000", "--parallel", "1"),
            env={**os.environ, "LLAMA_API_KEY": f"other,{KEY}"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        ) as (client, process):  # fmt: skip
            yield Server(int(client.url.rpartition(":")[2]), process, scratch / "log")

    return start


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("served")) as server:
        yield server


SMALL = {"model": "math+swahili@bottom=2", "prompt": "a", "max_tokens": 2}
DEEP = b'{"model": "math", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(SMALL), 200),
        (request(SMALL, host="localhost:1"), 200),
        (request(SMALL, host="evil.example"), 400),
        (request(SMALL, host="evil.example/"), 400),
        (request(SMALL, "Host: evil.example"), 400),
        (request(SMALL, "Sec-Fetch-Site: cross-site", "Content-Type: text/plain"), 403),
        (request(SMALL, key="wrong"), 401),
        (request(SMALL, key=""), 401),
        (request(SMALL, "Content-Length: 57000000", key="wrong"), 401),  # the body never comes
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 401),
        (request(b"", "Content-Length: 57000000"), 413),
        (request(b"100000\r\n" + b" " * 2**20 + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 413),
        (request(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
        (request(b"0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"), 400),
        (request(b"", "Content-Length: " + "1" * 5000), 400),
        (request(SMALL, "Content-Length: 5", "Content-Length: 6"), 400),
        (request(b'{"model": "math", "model": "swahili", "prompt": "a"}'), 400),
        (request(b'{"model": "math", "prompt": "a", "temperature": NaN}'), 400),
        (request(b'{"model": "math", "prompt": "a", "temperature": 1e999}'), 400),
        (request(DEEP), 400),
        (request(b"\xff\xfe"), 400),
        (request({"model": "math", "prompt": "a", "max_tokens": "many"}), 400),  # llama.cpp's own answer
        (request({"model": "\ud800", "prompt": "a"}), 404),
        (request({"model": "mäth\x1b[31m", "prompt": "a"}), 404),
        (request({"model": "math+" + "x" * 500_000, "prompt": "a"}), 400),
        (request(SMALL, path="/v1/../lora-adapters"), 404),
        (request(SMALL, path="/v1/completions/"), 404),
        (request(SMALL, path="/%6cora-adapters"), 404),
        (request(SMALL, path="/v1/models"), 405),
        (request(SMALL).replace(b"POST", b"OPTIONS", 1), 405),
    ],
)  # fmt: skip
def test_what_raw_requests_get(server: Server, sent: bytes, status: int) -> None:
    result, headers, body = server.ask(sent)
    assert (result, status) == (status, status), body
    assert len(body) < 2000
    assert b"access-control" not in headers
    if b"application/json" in headers and result != 200:
        assert json.loads(body)["error"]["code"] == status


@pytest.mark.slow
def test_metrics_and_a_line_for_each_request(server: Server) -> None:
    asked = request({"model": "math", "prompt": "aaaaaaaaaa", "max_tokens": 1})
    assert server.ask(asked)[0] == 200
    get = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    status, _, _ = server.ask(get.replace(KEY, "wrong").encode())
    assert status == 401
    status, _, body = server.ask(get.encode())
    assert status == 200
    text = body.decode()
    assert re.search(r'^adapterswap_requests_total\{model="math",status="200"\} [1-9]', text, re.MULTILINE)
    assert re.search(r"^adapterswap_cache_bytes [1-9]", text, re.MULTILINE)
    assert "adapterswap_engine_restarts_total 0" in text
    log = server.log.read_text()
    assert re.search(r"^access: POST /v1/completions math 200 \d+\.\d{3} s$", log, re.MULTILINE)
    assert "aaaaaaaaaa" not in log


@pytest.mark.slow
def test_the_key_is_neither_in_the_log_nor_in_the_list_of_processes(server: Server) -> None:
    shown = server.log.read_bytes()
    for process in (server.process.pid, server.engine):
        shown += Path(f"/proc/{process}/cmdline").read_bytes()
    lines = [line for line in shown.split(b"\n") if line.startswith(b"serving ")]
    assert len(lines) == 1
    assert b"serving 2 experts of llama" in lines[0]
    assert b".gguf" not in server.log.read_bytes().partition(lines[0])[0]  # not the paths of all pieces
    assert KEY.encode() not in shown


@pytest.mark.slow
def test_idle_connections_lock_nobody_out(server: Server) -> None:
    with ExitStack() as stack:
        for place in range(140):
            idle = stack.enter_context(server.connect())
            if place % 2:
                idle.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert server.ask(request(SMALL))[0] == 200


@pytest.mark.slow
def test_too_many_requests_at_once(server: Server) -> None:
    """Some are answered, and the others get a 503 or a reset. Once the clients have left, there is room again."""
    with ExitStack() as stack:
        clients = [stack.enter_context(server.send(request(ENDLESS))) for _ in range(FILES)]
        told = 0
        while len(clients) > (FILES - 64) // 4:
            answered = select(clients, [], [], 900)[0]
            assert answered
            for client in answered:
                clients.remove(client)
                with suppress(ConnectionResetError):
                    assert answer_of(client)[0] == 503
                    told += 1
        assert told
    while server.ask(request(SMALL))[0] == 503:
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(server: Server, stream: bool) -> None:
    """The engine answers one request at a time, and this one would take half a minute, or longer on a busy machine."""
    start = time.monotonic()
    assert server.ask(request(SMALL))[0] == 200
    usual = time.monotonic() - start
    with server.send(request(ENDLESS | {"stream": stream})) as client:
        if stream:
            assert client.recv(1)
        else:
            time.sleep(1)
    start = time.monotonic()
    assert server.ask(request(SMALL))[0] == 200
    assert time.monotonic() - start < 10 + 10 * usual


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "number", "status"),
    [("engine", signal.SIGKILL, None), ("proxy", signal.SIGTERM, 0), ("proxy", signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_answer_that_was_interrupted_does_not_seem_complete(
    start: Start, tmp_path: Path, whom: str, number: int, status: int | None
) -> None:
    """If the proxy ends, llama.cpp does too; if llama.cpp ends, it is started again."""
    with start(tmp_path) as server:
        engine = server.engine
        with server.send(request(ENDLESS | {"stream": True})) as client:
            received = client.recv(1000)
            os.kill(engine if whom == "engine" else server.process.pid, number)
            with suppress(ConnectionResetError):
                while part := client.recv(2**20):
                    received = received[-100:] + part
        assert not received.endswith(b"0\r\n\r\n")
        if status is None:
            while server.ask(request(SMALL))[0] == 503:
                time.sleep(0.1)
            assert server.engine != engine
            return
        assert server.process.wait(900) == status
        for _ in range(9000):
            if not Path(f"/proc/{engine}/cmdline").exists():
                break
            time.sleep(0.1)
        assert not Path(f"/proc/{engine}/cmdline").exists()


@pytest.mark.slow
def test_a_client_that_waits_while_the_server_ends_gets_a_503(start: Start, tmp_path: Path) -> None:
    with start(tmp_path) as server:
        with server.send(request(ENDLESS)) as client:
            # Answered after the request above has arrived, which then is running.
            assert server.ask(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")[0] in (200, 503)
            os.kill(server.process.pid, signal.SIGTERM)
            assert answer_of(client)[0] == 503
        assert server.process.wait(900) == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture
def impatient(
    bases: Bases, patient_gguf: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """The port of a server in this process that waits for half a second only."""
    monkeypatch.setattr("adapterswap.engines.serving.llama_proxy._PATIENCE_S", 0.5)
    monkeypatch.setenv("LLAMA_API_KEY", KEY)
    composer = PieceComposer(Manifest.read(folder), str(bases("llama")[0]), Cache(tmp_path / "cache"))
    composer.write()
    options = ("--ctx-size", "100000", "--parallel", "1", "--threads", "1")
    launch = LlamaLaunch.plan(composer, patient_gguf, options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with running(launch.command, launch.engine_port) as engine:
            thread = threading.Thread(target=_answer_until_the_engine_ends, args=(launch, composer, engine, listener))
            thread.start()
            yield listener.getsockname()[1]
        thread.join()


def _answer_until_the_engine_ends(*arguments: Any) -> None:
    with refused(RunError):
        _answer(*arguments)


@pytest.mark.slow
def test_slow_clients_are_not_waited_for(impatient: int) -> None:
    def client(*parts: bytes) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", impatient))
        for part in parts:
            connection.sendall(part)
        return connection

    whole = request(SMALL)
    for begun in (b"", b"P", whole[:-40]):
        with client(begun) as connection:
            received = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(1000):
                    received += part
            assert received.startswith(b"HTTP/1.1 408 ") if begun == whole[:-40] else not received
    with client(whole) as connection:  # answered, and then idle
        assert answer_of(connection)[0] == 200
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with client(request(ENDLESS | {"stream": True})), client(whole) as connection:  # the first does not read
        assert answer_of(connection)[0] == 200


def test_a_taken_port_is_found_before_anything_is_written(
    run: Callable[..., Result], bases: Bases, folder: Path, tmp_path: Path
) -> None:
    base, gguf = bases("llama")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run(*command(base, gguf, folder, tmp_path), "--", "--port", port)
    assert result.exit_code == 3
    assert str(port) in result.stderr
    assert not list(tmp_path.rglob("*.gguf"))


def test_keys_come_from_a_file_or_the_environment(
    run: Callable[..., Result], bases: Bases, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, gguf = bases("llama")
    composer = PieceComposer(Manifest.read(folder), str(base), Cache(tmp_path / "cache"))
    path = tmp_path / "keys"
    path.write_text("first\n\nsecond\n")
    monkeypatch.setenv("LLAMA_API_KEY", "third")
    launch = LlamaLaunch.plan(composer, gguf, ["--api-key-file", str(path)])
    assert set(launch.keys) == {"first", "second", "third"}
    assert not {"first", str(path)} & set(launch.command)
    assert "first" not in repr(launch)
    result = run(*command(base, gguf, folder, tmp_path), "--dry-run", "--json", "--", f"--api-key-file={path}")
    assert result.exit_code == 0
    assert "first" not in result.stdout + result.stderr
    # llama.cpp reads underscores in options as dashes.
    underscored = LlamaLaunch.plan(composer, gguf, ["--api_key_file", str(path), "--ctx_size", "64"])
    assert set(underscored.keys) == {"first", "second", "third"}
    assert underscored.command[-2:] == ("--ctx-size", "64")

    path.write_text("\n")
    keys = (["--api-key-file", str(path)], ["--api-key", "first"], ["--api-key=first"], ["--api_key", "first"])
    for options in (*keys, ["--lora_scaled", "x.gguf:1"], ["--port"]):
        with refused(ArgumentError, "arguments"):
            LlamaLaunch.plan(composer, gguf, options)
