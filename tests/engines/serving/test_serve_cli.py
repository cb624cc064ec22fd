"""`adapterswap serve` without vLLM: what it checks, chooses and prints."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from peft import PeftModel
from refusals import refused

import adapterswap
from adapterswap.engines.serving import Cache, Manifest, NamedComposer, plugin
from adapterswap.engines.serving.vllm import Launch, value_of
from adapterswap.engines.serving.vllm_guard import ManifestOnly
from adapterswap.kit.errors import ArgumentError, RunError

from .conftest import load, make_expert

Serve = Callable[..., Result]


def finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread of its own: a browser's loop may be running in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


@pytest.fixture
def serve(run: Callable[..., Result], served_base: Callable[[str], Path], experts: Path, tmp_path: Path) -> Serve:
    """`serve("--", …)` is a dry run for this test's experts."""

    def call(*arguments: object, experts_path: Path = experts) -> Result:
        fixed = ["--base-model", served_base("llama"), "--experts", experts_path, "--cache", tmp_path / "cache"]
        return run("serve", *fixed, "--dry-run", *arguments)

    return call


def output_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_a_dry_run_shows_everything_and_writes_nothing(
    serve: Serve, tmp_path: Path, experts: Path, served_base: Callable[[str], Path]
) -> None:
    output = output_of(serve("--json", "--", "--dtype", "float32"))
    command, environment = output["command"], output["environment"]
    assert command[:4] == [
        sys.executable,
        "-m",
        "adapterswap.engines.serving.start",
        "vllm.entrypoints.openai.api_server",
    ]
    assert command[-2:] == ["--dtype", "float32"]
    for option, value in {
        "--max-lora-rank": "32", "--max-loras": "4", "--max-cpu-loras": "16", "--host": "127.0.0.1",
        "--middleware": "adapterswap.engines.serving.vllm_guard.ManifestOnly",
    }.items():  # fmt: skip
        assert value_of(option, command) == value
    assert environment == {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_PLUGINS": "adapterswap",
        "ADAPTERSWAP_BASE_MODEL": str(served_base("llama")),
        "ADAPTERSWAP_EXPERTS": str(experts),
        "ADAPTERSWAP_CACHE": str(tmp_path / "cache"),
        "ADAPTERSWAP_MAX_LORA_RANK": "32",
    }
    assert output["started"] is False
    assert output["experts"]["code"] == {"source": "code", "rank": 16}
    assert json.loads(output["curl"].split("-d '")[1].rstrip("'"))["model"] == "code"
    assert not (tmp_path / "cache").exists()


def test_the_text_shows_the_command_and_a_call(serve: Serve) -> None:
    result = serve("--", "--port", "8123", "--host=0.0.0.0")
    assert result.exit_code == 0
    command, curl = result.stdout.splitlines()
    assert command.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS=adapterswap ADAPTERSWAP_BASE_MODEL=")
    assert curl.startswith("curl http://0.0.0.0:8123/v1/completions")
    assert "math: math, rank 8" in result.stderr
    assert "at most 256 compositions" in result.stderr
    assert "nothing started" in result.stderr
    assert "Warning" not in result.stderr


@pytest.mark.parametrize(
    ("allow", "rank", "loras"),
    [
        ("[math+swahili@bottom=2]", 8, 1),
        ("[math, swahili, 'math+swahili@method=soup']", 16, 3),
        ("['code+math@bottom=1,top=1,bottom_transition=1']", 32, 1),
    ],
)
def test_an_allow_list_makes_the_ranks_exact(
    serve: Serve, experts: Path, tmp_path: Path, allow: str, rank: int, loras: int
) -> None:
    path = tmp_path / "experts.yaml"
    lines = "".join(f"  {name}: experts/{name}\n" for name in ("math", "swahili", "code"))
    path.write_text(f"experts:\n{lines}allow: {allow}\nmax_compositions: 7\n")
    output = output_of(serve("--json", experts_path=path))
    assert (output["max_lora_rank"], output["max_loras"], output["max_compositions"]) == (rank, loras, 7)
    path.write_text(f"experts:\n{lines}allow: ['math+swahili@method=ties,density=0.5']\n")
    assert "ties is not a weighted sum" in serve(experts_path=path).stderr


def test_vllms_own_arguments_win(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "my_platform")
    output = output_of(serve("--json", "--", "--max_lora_rank=64", "--max-loras", "20", "--served-model-name", "tiny"))
    assert (output["max_lora_rank"], output["max_loras"], output["base"]["name"]) == (64, 20, "tiny")
    assert value_of("--max-cpu-loras", output["command"]) == "20"
    assert output["environment"]["ADAPTERSWAP_MAX_LORA_RANK"] == "64"
    assert output["environment"]["VLLM_PLUGINS"] == "my_platform,adapterswap"


def test_a_base_of_the_hub_keeps_its_revision(
    run: Callable[..., Result],
    served_base: Callable[[str], Path],
    experts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A base in the Hub's cache, laid out as huggingface_hub does."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--base"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v2").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copy(served_base("llama") / "config.json", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    output = output_of(run("serve", "--base-model", "org/base@v2", "--experts", experts, "--dry-run", "--json"))
    assert value_of("--model", output["command"]) == "org/base"
    assert value_of("--revision", output["command"]) == "v2"
    assert output["environment"]["ADAPTERSWAP_BASE_MODEL"] == "org/base@v2"
    assert output["base"] == {"name": "org/base", "num_layers": 6}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "other"], "--base-model"),
        (["--model=other"], "--model=other"),
        (["--no_enable_lora"], "--no_enable_lora"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["--served-model-name", "math"], "'math'"),
        (["--max-lora-rank", "many"], "--max-lora-rank many"),
        (["--max-loras", "0"], "--max-loras 0"),
        (["--api-key", "secret"], "VLLM_API_KEY"),
        (["--api_key=secret"], "VLLM_API_KEY"),
    ],
)
def test_arguments_that_would_undo_the_setup_are_refused(
    serve: Serve, arguments: list[str], named: str, served_base: Callable[[str], Path], experts: Path, tmp_path: Path
) -> None:
    result = serve("--", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    composer = NamedComposer(Manifest.read(experts), str(served_base("llama")), Cache(tmp_path / "cache"), None)
    with refused(ArgumentError, "vllm_args"):
        Launch.plan(composer, {name: composer.open(name) for name in composer.manifest.experts}, experts, arguments)
    assert result.stdout == ""


def test_all_broken_experts_are_reported_before_anything_starts(
    serve: Serve, experts: Path, served_base: Callable[[str], Path]
) -> None:
    weights = experts / "math" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    make_expert(served_base("llama"), experts / "telugu", seed=1, use_dora=True)
    result = serve()
    assert result.exit_code == 3
    assert str(experts / "math") in result.stderr  # the operator sees the path
    assert "DoRA" in result.stderr


def test_ranks_beyond_vllms_are_refused(
    serve: Serve, experts: Path, served_base: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "experts.yaml"
    for number, rank in enumerate((300, 520)):
        make_expert(served_base("llama"), experts / f"e{number}", seed=1, r=rank, target_modules=["q_proj"])
    path.write_text("experts: {e0: experts/e0, math: experts/math}\n")
    assert output_of(serve("--json", experts_path=path))["max_lora_rank"] == 320
    path.write_text("experts: {e0: experts/e0, e1: experts/e1}\n")
    result = serve(experts_path=path)
    assert result.exit_code == 3
    assert "520" in result.stderr
    assert "512" in result.stderr


def test_an_expert_that_names_the_base_differently_causes_a_warning(serve: Serve, experts: Path) -> None:
    path = experts / "math" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "org/other"}))
    for result in (serve(), serve("--json")):
        assert result.exit_code == 0
        assert "Warning: math says that its base is org/other" in result.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_how_to_install_it(
    run: Callable[..., Result], served_base: Callable[[str], Path]
) -> None:
    result = run("serve", "--base-model", served_base("llama"), "--experts", "nowhere")
    assert result.exit_code == 3
    assert "pip install 'adapterswap[vllm]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["--port", "8001"], "-- --port 8001"), (["--host=0.0.0.0"], "-- --host=0.0.0.0"), (["-tp", "2"], "-- -tp 2"),
        (["--enforce-eager"], "-- --enforce-eager"), (["--expert", "x"], "-- --expert x"),
    ],
)  # fmt: skip
def test_options_of_vllm_belong_after_two_dashes(
    run: Callable[..., Result], arguments: list[str], example: str
) -> None:
    result = run("serve", "--base-model", "b", "--experts", "e", *arguments)
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(example)


@pytest.mark.parametrize(
    "arguments",
    [["--api-key", "foo"], ["--api_key=foo"], ["--engine", "llama.cpp", "--gguf", "x", "--api-key", "foo"]],
)
def test_a_key_is_refused_at_once(run: Callable[..., Result], arguments: list[str]) -> None:
    """Not first in one place and then in the other; the engine decides which variable holds keys."""
    result = run("serve", "--base-model", "b", "--experts", "e", *arguments)
    assert result.exit_code == 2
    assert ("LLAMA_API_KEY" if "--engine" in arguments else "VLLM_API_KEY") in result.stderr
    assert "-- --api" not in result.stderr


def test_one_file_is_a_service(
    run: Callable[..., Result], served_base: Callable[[str], Path], experts: Path, tmp_path: Path
) -> None:
    """The base, the experts, and the engine's options; what follows `--` comes later, and so wins."""
    path = tmp_path / "experts.yaml"
    engine = "{port: 8123, enforce_eager: true, lora-target-modules: [q_proj, k_proj], hf-overrides: {a: 1}}"
    path.write_text(f"experts: {{math: {experts}/math}}\nbase_model: base\nengine: {engine}\n")
    (tmp_path / "base").symlink_to(served_base("llama"))
    fixed = ["serve", "--experts", path, "--cache", tmp_path / "cache", "--dry-run", "--json"]
    output = output_of(run(*fixed))
    assert output["url"] == "http://127.0.0.1:8123"
    given = ["--port", "8123", "--enforce-eager", "--lora-target-modules", "q_proj", "k_proj"]
    assert output["command"][-8:] == [*given, "--hf-overrides", '{"a": 1}']
    assert output["environment"]["ADAPTERSWAP_BASE_MODEL"] == str(tmp_path / "base")
    assert output_of(run(*fixed, "--", "--port", "8124"))["url"] == "http://127.0.0.1:8124"
    for wrong in ("{api-key: secret}", "{--port: 8123}", "{port: null}", "{enforce-eager: false}"):
        path.write_text(f"experts: {{math: {experts}/math}}\nbase_model: base\nengine: {wrong}\n")
        result = run(*fixed)
        assert (result.exit_code, result.stdout) == (2, ""), wrong
    path.write_text(f"experts: {{math: {experts}/math}}\n")
    assert run(*fixed).exit_code == 2


def test_usage_errors_exit_with_2(run: Callable[..., Result]) -> None:
    assert run("serve", "--base-model", "x").exit_code == 2


def test_the_plugin_is_registered_and_cheap_if_unused() -> None:
    """vLLM calls it in every process wherever adapterswap is installed."""
    (entry,) = entry_points(group="vllm.general_plugins", name="adapterswap")
    module, _, function = entry.value.partition(":")
    script = (
        f"import sys; from {module} import {function} as register; register()\n"
        "heavy = {'vllm', 'torch', 'transformers', 'numpy', 'adapterswap.engines.serving.resolver'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ADAPTERSWAP_")}
    process = subprocess.run([sys.executable, "-c", script], env=plain, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/load_lora_adapter", 403), ("/v1//load_lora_adapter/", 403), ("/adapters", 403), ("/adapters/math", 403),
        ("/prefix/v1/load_lora_adapter", 403), ("/v1/unload_lora_adapter", 200), ("/v1/completions", 200),
    ],
)  # fmt: skip
def test_other_ways_to_load_adapters_are_blocked(path: str, status: int) -> None:
    sent, handed_on = ask(path, b'{"model": "math"}')
    assert sent[0]["status"] == status
    assert (handed_on is None) == (status == 403)
    if status == 403:
        assert json.loads(sent[1]["body"])["error"]["code"] == 403
        assert int(dict(sent[0]["headers"])[b"content-length"]) == len(sent[1]["body"])


class Application:
    """Answers every request with 200; its OpenAPI document has the forms of requests that vLLM's has."""

    def openapi(self) -> dict[str, Any]:
        def post(*names: str) -> dict[str, Any]:
            references = [{"$ref": f"#/components/schemas/{name}"} for name in names]
            schema = {"anyOf": references} if len(references) > 1 else references[0]
            return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}

        with_model = {"properties": {"model": {}, "prompt": {}}}
        return {
            "components": {"schemas": {"Complete": with_model, "Chat": with_model, "Unload": {"properties": {}}}},
            "paths": {
                "/v1/completions": post("Complete"), "/tokenize": post("Complete", "Chat"),
                "/v1/unload_lora_adapter": post("Unload"), "/invocations": {"post": {}}, "/health": {"get": {}},
            },
        }  # fmt: skip


def ask(path: str, *parts: bytes, status: int = 200, key: bytes = b"") -> tuple[list[Any], bytes | None]:
    """The middleware's response to a POST with these parts of a body, and the body that it passed on."""
    sent: list[Any] = []
    handed_on: list[bytes] = []
    waiting = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        handed_on.append(body)
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    headers = [(b"authorization", b"Bearer " + key)]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": Application()}
    finish(ManifestOnly(application)(scope, receive, send))
    return sent, handed_on[0] if handed_on else None


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/completions", b"", 401), ("/v1/completions", b"wrong", 401), ("/v1/completions", "gehéim".encode(), 200),
        ("/tokenize", b"", 200),
    ],
)  # fmt: skip
def test_the_key_is_checked_before_the_body_is_read(
    path: str, key: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "gehéim")
    sent, handed_on = ask(path, b"no", b"JSON", key=key)
    assert sent[0]["status"] == status
    assert handed_on == (b"noJSON" if status == 200 else None)


def test_an_unloaded_name_no_longer_counts(
    served_base: Callable[[str], Path], experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "experts.yaml"
    lines = "".join(f"  {name}: {experts / name}\n" for name in ("math", "swahili"))
    manifest.write_text(f"experts:\n{lines}max_compositions: 1\n")
    monkeypatch.setattr(plugin, "_composer", None)
    monkeypatch.setattr(plugin, "_manifest", None)
    unload = b'{"lora_name": "math"}'
    ask("/v1/unload_lora_adapter", unload)  # nothing was served yet
    monkeypatch.setenv(plugin.EXPERTS, str(manifest))
    monkeypatch.setenv(plugin.CACHE, str(tmp_path / "cache"))
    composer = plugin._start(str(served_base("llama")))
    composer.folder("math")
    for path, body, status in (
        ("/v1/unload_lora_adapter", unload, 404), ("/v1/unload_lora_adapter", b'{"lora_name": "swahili"}', 200),
        ("/v1/unload_lora_adapter", b"[]", 200), ("/v1/completions", b'{"lora_name": "math", "model": "math"}', 200),
    ):  # fmt: skip
        ask(path, body, status=status)
        with refused(RunError, "max_compositions"):
            composer.folder("swahili")
    ask("/v1/unload_lora_adapter", unload[:5], unload[5:])
    assert composer.folder("swahili").is_dir()


@pytest.mark.parametrize("path", ["/v1/completions", "/prefix//v1/completions/", "/tokenize", "/invocations"])
@pytest.mark.parametrize(
    "body", [b'{"prompt": "a"}', b'{"model": "", "prompt": "a"}', b'{"model": null, "prompt": "a", "stream": true}']
)
def test_a_request_without_a_model_is_refused(path: str, body: bytes) -> None:
    sent, handed_on = ask(path, body[:5], body[5:])
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["param"] == "model"
    assert handed_on is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model": "math", "prompt": "a"}'), ("/v1/completions", b"not JSON"),
        ("/v1/unload_lora_adapter", b'{"lora_name": "math"}'), ("/invocations", b""), ("/invocations", b'{"a": 1}'),
        ("/v1/new", b"[]"),
    ],
)  # fmt: skip
def test_other_requests_are_passed_on_unchanged(path: str, body: bytes) -> None:
    sent, handed_on = ask(path, body[:3], body[3:])
    assert sent[0]["status"] == 200
    assert handed_on == body


VLLMS_LIST = {"object": "list", "data": [{"id": "tiny", "created": 7, "root": "/base"}, {"id": "math", "root": "/a"}]}


def listed(status: int, *parts: bytes) -> tuple[Any, Any]:
    """The start and the body that the middleware sends if vLLM sends these parts for GET /v1/models."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(sum(map(len, parts))).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, part in enumerate(parts, start=1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/prefix/v1/models"}
    finish(ManifestOnly(application)(scope, None, send))  # type: ignore[arg-type]
    start, body = sent
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    return start, body["body"]


@pytest.mark.parametrize("allow", [None, ["math", "math+swahili@bottom=2,top=1"]], ids=str)
def test_the_list_of_models_has_the_allowed_names(
    allow: list[str] | None, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "experts.yaml"
    content = {"experts": {name: str(experts / name) for name in ("math", "swahili")}}
    manifest.write_text(json.dumps(content | ({} if allow is None else {"allow": allow})))  # JSON is YAML
    monkeypatch.setattr(plugin, "_manifest", None)
    monkeypatch.setenv(plugin.EXPERTS, str(manifest))
    raw = json.dumps(VLLMS_LIST).encode()
    for parts in ((raw,), (raw[:20], raw[20:])):
        output = json.loads(listed(200, *parts)[1])
        assert output["data"][:2] == VLLMS_LIST["data"]
        assert [model["id"] for model in output["data"]] == ["tiny", "math", (allow or ["", "swahili"])[1]]
        assert output["data"][2]["parent"] == "tiny"


@pytest.mark.parametrize(("status", "body"), [(401, b'{"error": "Unauthorized"}'), (200, b"[]"), (200, b"not JSON")])
def test_other_answers_to_the_list_of_models_are_unchanged(status: int, body: bytes) -> None:
    start, sent = listed(status, body)
    assert (start["status"], sent) == (status, body)


@pytest.mark.parametrize("order", [("math", "top"), ("top", "math")])
def test_a_chain_is_checked_when_the_server_starts(
    serve: Serve, served_base: Callable[[str], Path], experts: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    """What no record says is a note; an order that contradicts a record is an error before any request."""
    base = served_base("llama")
    PeftModel.from_pretrained(load(base), experts / "math").merge_and_unload().save_pretrained(tmp_path / "merged")
    make_expert(tmp_path / "merged", tmp_path / "unrecorded", seed=9, r=2)
    make_expert(adapterswap.merge(experts / "math", base, out_path=tmp_path / "ours"), tmp_path / "top", seed=9, r=2)
    places = {"math": str(experts / "math"), "top": str(tmp_path / "top")}
    manifest = tmp_path / "experts.yaml"
    manifest.write_text(json.dumps({"experts": {"tutor": {"chain": [places[name] for name in order]}}}))
    result = serve(experts_path=manifest)
    assert (result.exit_code, "not trained on top" in result.stderr) == (
        (0, False) if order[0] == "math" else (3, True)
    )
    manifest.write_text(json.dumps({"experts": {"tutor": {"chain": [places["math"], str(tmp_path / "unrecorded")]}}}))
    result = serve(experts_path=manifest)
    assert (result.exit_code, result.stderr.count("Not checked whether")) == (0, 1)
    assert "is assumed to be the same" not in result.stderr  # the upper adapter's base is not meant to be the same
