"""Metrics and the line for each request, around a small application, read by an independent parser of the format."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from adapterswap.engines.serving.metrics import _MOST_NAMES, MODEL, Measured, folder_sizes

SAMPLE = re.compile(r"(?P<name>[a-z_]+)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


async def answer(request: Request) -> Response:
    name = request.query_params.get("model")
    if name is None:
        return PlainTextResponse("no model", 400)
    request.scope[MODEL] = name
    if request.query_params.get("stream"):
        return StreamingResponse(iter([b"one ", b"two"]))
    return PlainTextResponse("secret answer", int(request.query_params.get("status", 200)))


async def own_metrics(request: Request) -> Response:
    return PlainTextResponse("# TYPE engine_up gauge\nengine_up 1\n")


def measured(**options: Any) -> Measured:
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"]), Route("/metrics", own_metrics)])
    return Measured(app, lambda: {"adapterswap_compositions_cached": 3, "adapterswap_cache_bytes": 4096}, **options)


def asked(app: Measured, *requests: tuple[str, str], headers: dict[str, str] | None = None) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return [
                await client.request(method, path, content="my prompt", headers=headers) for method, path in requests
            ]

    return asyncio.run(ask())


def samples(text: str) -> dict[tuple[str, str], float]:
    """Every sample; each must follow its own HELP and TYPE."""
    result, typed = {}, set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match["name"] in typed or re.sub("_(bucket|sum|count)$", "", match["name"]) in typed
            result[match["name"], match["labels"] or ""] = float(match["value"])
    return result


def test_requests_are_counted_by_model_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    app = measured()
    post = [("POST", f"/v1/completions?{query}") for query in (
        "model=math", "model=math", "model=math&stream=1", "model=sw%22x", "model=nosuch&status=404", "",
    )]  # fmt: skip
    *_, last = asked(app, *post, ("GET", "/metrics"))
    values = samples(last.text)
    assert last.headers["content-type"].startswith("text/plain; version=0.0.4")
    requests = {labels: value for (name, labels), value in values.items() if name == "adapterswap_requests_total"}
    assert requests == {
        'model="math",status="200"': 3, 'model="sw\\"x",status="200"': 1,
        'model="",status="404"': 1, 'model="",status="400"': 1,
    }  # fmt: skip
    buckets = [value for (name, _), value in values.items() if name == "adapterswap_request_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == values["adapterswap_request_seconds_count", ""] == 6
    assert values["adapterswap_compositions_cached", ""] == 3
    assert values["adapterswap_start_seconds", ""] > 1.7e9
    assert ("adapterswap_engine_restarts_total", "") not in values
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6  # reading the metrics writes none
    assert re.fullmatch(r"access: POST /v1/completions math 200 \d\.\d{3} s", lines[0])
    assert "prompt" not in " ".join(lines)


def test_clients_cannot_make_up_more_and_more_labels(capsys: pytest.CaptureFixture[str]) -> None:
    app = measured()
    for number in range(_MOST_NAMES + 50):
        app.add(f"math+swahili@bottom={number}", 200, 0.01)
    values = samples(app.text())
    requests = {labels: value for (name, labels), value in values.items() if name == "adapterswap_requests_total"}
    assert len(requests) == _MOST_NAMES + 1
    assert requests['model="other",status="200"'] == 50


def test_an_engine_that_is_another_process_was_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    processes = [object(), object()]
    app = measured(engine=lambda: processes[0])
    assert samples(app.text())["adapterswap_engine_restarts_total", ""] == 0
    del processes[0]
    assert samples(app.text())["adapterswap_engine_restarts_total", ""] == 1
    assert samples(app.text())["adapterswap_engine_restarts_total", ""] == 1


def test_metrics_follow_those_of_the_application_and_need_its_key() -> None:
    (own,) = asked(measured(inner=True), ("GET", "/metrics"))
    assert samples(own.text)["engine_up", ""] == 1
    assert samples(own.text)["adapterswap_cache_bytes", ""] == 4096
    app = measured(keys=["k"])
    assert [each.status_code for each in asked(app, ("GET", "/metrics"))] == [401]
    assert [each.status_code for each in asked(app, ("GET", "/metrics"), headers={"authorization": "Bearer k"})] == [
        200
    ]


def test_the_size_of_a_folder_of_folders(tmp_path: Path) -> None:
    assert folder_sizes(tmp_path / "none") == (0, 0)
    for name, size in (("one", 10), ("two", 20)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_bytes(bytes(size))
    assert folder_sizes(tmp_path) == (2, 30)


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_the_end_of_the_server_cancels(begun: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As uvicorn cancels it: a client that still waits gets a 503, and a stream that has begun just ends."""
    sent: list[Any] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        running.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def ended() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        task = asyncio.create_task(Measured(endless, dict)(scope, send, send))
        await running.wait()
        task.cancel()
        await task

    running = asyncio.Event()
    asyncio.run(ended())
    assert [message.get("status") for message in sent] == ([200] if begun else [503, None])
    assert f" {sent[0]['status']} " in capsys.readouterr().err
