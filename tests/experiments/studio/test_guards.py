"""Requests that the page does not send: of other sites, to unused routes, and with values that no control has."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapterswap.experiments.studio.workspace import Visitors

from .conftest import Served

pytest.importorskip("httpx")
pytest.importorskip("starlette")

import httpx
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from adapterswap.experiments.studio.guards import guards

JSON = {"content-type": "application/json"}
EVIL = {"origin": "https://evil.example"}
DEEP = "[" * 10_000 + "]" * 10_000
HALF = '"\\ud800"'
ODD = [
    "null", HALF, "[[]]", '[["a"]]', '{"a": 1}', "1e308", "1" + "0" * 400, "-5", "true", '"x"', "NaN", "-Infinity",
    '{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}', '{"3.mlp": ["math"]}', '{"three": "math"}',
    '["' + "x" * 30_000 + '"]',
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _gradio() -> None:
    """Its import takes seconds, which only the process that runs these tests should spend."""
    pytest.importorskip("gradio")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "", {"host": "evil.example"}, 400),
        ("GET", "config", EVIL, 403),
        ("GET", "config", {"origin": "null"}, 403),
        ("POST", "gradio_api/queue/join", {**EVIL, **JSON}, 403),
        ("POST", "gradio_api/run/predict", {**EVIL, **JSON}, 403),
        ("POST", "studio/answer", {**EVIL, **JSON}, 403),
        ("POST", "studio/answer", {"content-type": "text/plain"}, 415),
        ("POST", "gradio_api/upload", {}, 404),
        ("POST", "gradio_api/component_server", JSON, 404),
        ("POST", "gradio_api/process_recording", JSON, 404),
        ("GET", "gradio_api/file=/etc/passwd", {}, 403),
        ("GET", "gradio_api/proxy=https://example.hf.space/", {}, 404),
        ("GET", "gradio_api/openapi.json", {}, 404),
        ("GET", "monitoring", {}, 404),
        ("GET", "monitoring/summary", {}, 404),
        ("GET", "gradio_api/runs", {}, 404),
        ("GET", "gradio_api/run-history/buckets", {}, 404),
        ("GET", "gradio_api/deep_link", {}, 404),
        ("GET", "gradio_api/token", {}, 404),
        ("GET", "gradio_api/upload_progress", {}, 404),
        ("GET", "gradio_api/stream/a/b/1/playlist.m3u8", {}, 404),
        ("OPTIONS", "config", {}, 404),
        ("PUT", "studio/answer", JSON, 404),
    ],
)
def test_strangers_cannot_use_the_page(
    served: Served, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """Foreign hosts and origins, uploads, other unused routes, and local paths."""
    files = {"files": ("a.txt", b"a")} if path.endswith("upload") else None
    answer = httpx.request(method, served.url + path, headers=headers, files=files)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_has_a_content_security_policy_and_its_own_origin_is_accepted(served: Served) -> None:
    answer = httpx.get(served.url + "config", headers={"origin": served.url.rstrip("/")})
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["studio/answer", "gradio_api/queue/join", "gradio_api/run/predict"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_request_is_bounded(served: Served, path: str, announced: bool) -> None:
    content = b" " * 5_000_000
    sent = content if announced else iter([content])  # without a content-length
    assert httpx.post(served.url + path, content=sent, headers=JSON).status_code == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7"])
def test_other_hosts_may_have_any_name_but_not_another_origin(host: str) -> None:
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(""))], middleware=guards(host))
    client = TestClient(app, base_url="http://studio.example:7860")
    assert client.get("/", headers={"origin": "http://studio.example:7860"}).status_code == 200
    assert client.get("/", headers=EVIL).status_code == 403
    assert client.get("/", headers={"origin": "http://studio.example:1"}).status_code == 403


@pytest.mark.parametrize(
    "origins",
    [["http://["], ["http://[::1"], ["http://a]b"], ["//"], [""], ["\xff"], ["http://" + "a" * 60_000],
     ["http://studio.example:7860", "https://evil.example"]],
)  # fmt: skip
def test_a_malformed_origin_is_another(origins: list[str]) -> None:
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse(""))], middleware=guards("0.0.0.0"))
    client = TestClient(app, base_url="http://studio.example:7860")
    headers = [(b"origin", origin.encode("latin-1")) for origin in origins]
    assert client.get("/", headers=headers).status_code == 403


def kinds_of(config: dict[str, Any]) -> dict[int, tuple[str, bool | None]]:
    """The kind of each component, to try each kind once."""
    return {part["id"]: (part["type"], part["props"].get("multiselect")) for part in config["components"]}


def test_only_what_the_page_sends_is_answered(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    config = httpx.get(served.url + "config").json()
    known = {part["id"]: part["props"].get("value") for part in config["components"]}
    asking = next(event for event in config["dependencies"] if "'studio:ask'" in str(event["js"]))
    _, *values = (known[part] for part in asking["inputs"])
    valid = {"visitor": "a", "draw": True, "answer": False, "values": values}
    url = served.url + "studio/answer"
    assert "strip" in httpx.post(url, json=valid).json()
    wrong: list[str] = ["", "{", "[]", "null", DEEP, json.dumps({**valid, "values": []})]
    wrong += [json.dumps({**valid, **changed}) for changed in ({"more": 1}, {"visitor": "a" * 101}, {"draw": "x"})]
    wrong += [json.dumps(valid).replace('"a"', odd, 1) for odd in (HALF, "1", "null", "[]")]
    for content in wrong:
        assert httpx.post(url, content=content, headers=JSON).status_code == 400, content[:80]
    kinds = kinds_of(config)
    of_each_kind = {kinds[part]: place for place, part in enumerate(asking["inputs"][1:])}
    with httpx.Client(timeout=900) as client:
        for place in of_each_kind.values():
            for odd in ODD:
                marked = json.dumps({**valid, "values": [*values[:place], "here", *values[place + 1 :]]})
                answer = client.post(url, content=marked.replace('"here"', odd), headers=JSON)
                assert answer.status_code in (200, 400), (place, odd[:80])
                assert "unexpected" not in answer.text, (place, odd[:80])
    assert "Traceback" not in "".join(capfd.readouterr())


def test_events_show_what_is_wrong_with_their_inputs(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    """For every event that answers at once, and an input of each kind; Gradio would answer 500."""
    config = httpx.get(served.url + "config").json()
    known = {part["id"]: part["props"].get("value") for part in config["components"]}
    kinds = kinds_of(config)
    events = [event for event in config["dependencies"] if event["backend_fn"] and event["queue"] is False]
    assert len(events) > 8
    shown = set()
    with httpx.Client(timeout=900) as client:
        for event in events:
            for place in {kinds[part]: place for place, part in enumerate(event["inputs"])}.values():
                for odd in ODD if event is events[0] or len(event["inputs"]) < 5 else ODD[::5]:
                    data: list[Any] = [known[part] for part in event["inputs"]]
                    data[place] = "here"
                    content = json.dumps({"fn_index": event["id"], "data": data, "session_hash": "a"})
                    answer = client.post(
                        served.url + "gradio_api/run/predict", content=content.replace('"here"', odd), headers=JSON
                    )
                    assert answer.status_code in (200, 422), (event["targets"], place, odd[:80], answer.text)
                    shown.add(bool(answer.json().get("error")) == (answer.status_code == 422))
    assert shown == {True}
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_address_that_a_visitor_names_is_not_fetched(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradio import processing_utils

    fetched: list[str] = []

    async def fetch(url: str, cache_dir: str) -> str:
        fetched.append(url)
        return url

    for name in ("async_ssrf_protected_download", "async_save_url_to_cache"):
        monkeypatch.setattr(processing_utils, name, fetch, raising=False)
    config = httpx.get(served.url + "config").json()
    known = {part["id"]: part["props"].get("value") for part in config["components"]}
    event = next(event for event in config["dependencies"] if event["backend_fn"] and event["queue"] is False)
    address = "https://example.com/own"
    for file in (
        {"path": address, "meta": {"_type": "gradio.FileData"}},
        {"path": "", "url": address, "meta": {"_type": "gradio.FileData"}},
        {"3.mlp": [{"path": address, "meta": {"_type": "gradio.FileData"}, "orig_name": "a"}]},
    ):
        for place in range(len(event["inputs"])):
            data: list[Any] = [known[part] for part in event["inputs"]]
            data[place] = file
            content = {"fn_index": event["id"], "data": data, "session_hash": "a"}
            answer = httpx.post(served.url + "gradio_api/run/predict", json=content)
            assert answer.status_code == 422
    assert fetched == []


def test_visitors_are_forgotten_when_their_work_ends() -> None:
    visitors = Visitors()
    with visitors.work("a") as first:
        with visitors.work("a") as second:
            assert (first.is_set(), second.is_set()) == (True, False)
        with visitors.work("a") as third:
            visitors.leave("a")
            assert third.is_set()
    assert second.is_set()
    assert not visitors._ends


@pytest.mark.full
def test_a_terminated_studio_leaves_no_files(lab_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "adapterswap", "studio", "--lab", str(lab_run), "--device", "cpu"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline()
        assert re.match("http://127", url)
        assert len(list(tmp_path.glob("adapterswap-studio-*"))) == 1
        assert httpx.get(url.strip()).status_code == 200  # it serves, however slow the machine is
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("adapterswap-*"))
