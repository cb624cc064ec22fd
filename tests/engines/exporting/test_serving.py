"""`adapterswap serve --engine llama.cpp` over HTTP: each name answers as PEFT does with that composition's adapter."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

import adapterswap as asw
from engines.serving.cases import COMPOSITIONS, PROMPTS

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from engines.exporting.bases import GATED, adapted, load
from engines.exporting.conftest import Bases, Experts
from engines.exporting.engine import Answer, reference

LENGTH = 6
# Attention and MLP of one layer go to different experts.
DIVIDED = ("math+swahili@partition=A", "math+code@partition=A", "math+telugu@partition=A")
EXPERTS: dict[str, dict[str, Any]] = {
    "math": {"seed": 1},
    "swahili": {"seed": 2},
    "telugu": {"seed": 3, "r": 4, "use_rslora": False, "target_modules": GATED[:4]},
    "code": {"seed": 4, "r": 16, "target_modules": [*GATED, "embed_tokens", "lm_head"]},
}
EXACT: tuple[str, ...] = ("--ctx-size", "1024", "--parallel", "4", "--threads", "1", "--flash-attn", "off")
EXACT += ("--cache-type-k", "f32", "--cache-type-v", "f32")


@pytest.fixture(scope="module")
def world(bases: Bases, experts: Experts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The experts' folders by name, in one folder."""
    folder = tmp_path_factory.mktemp("experts")
    for name, options in EXPERTS.items():
        (folder / name).symlink_to(experts("llama", name, **options))
    return {name: folder / name for name in EXPERTS}


class Client:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: object | None = None) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=900) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def complete(self, model: str, prompt: Sequence[int]) -> Answer:
        body = {"model": model, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "logprobs": 5}
        status, result = self.ask("/v1/completions", body)
        assert status == 200, result
        assert result["model"] == model
        content = result["choices"][0]["logprobs"]["content"]
        return Answer([one["id"] for one in content], np.array([[one["logprob"]] for one in content]))


@contextmanager
def served(
    base: Path, gguf: Path, experts: Path, folder: Path, *options: str, engine: Sequence[str] = EXACT, **settings: Any
) -> Iterator[tuple[Client, Any]]:
    """A server in a separate process, once it is ready. It is always stopped. `settings` are those of Popen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "adapterswap", "serve", "--engine", "llama.cpp", "--base-model", base, "--gguf", gguf,
        "--experts", experts, "--cache", folder / "cache", *options, "--", "--port", str(port), *engine,
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output, **settings)
    try:
        for _ in range(9000):
            if b"adapterswap: ready" in log.read_bytes():
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield Client(port), process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(900) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_two_hundred_requests_at_once_over_twenty_names(world: dict[str, Path], bases: Bases, tmp_path: Path) -> None:
    base, gguf = bases("llama")
    expected: dict[tuple[str, int], Answer] = {}
    for place, name in enumerate(COMPOSITIONS):
        folder = world[name] if name in world else asw.compose(name, world).write(tmp_path / f"composed-{place}")
        model = adapted(base, folder)
        expected |= {(name, number): reference(model, prompt, LENGTH) for number, prompt in enumerate(PROMPTS[:2])}
    requested = [(name, number) for _ in range(5) for name in COMPOSITIONS for number in range(2)]
    np.random.default_rng(0).shuffle(requested)
    for place, name in enumerate(DIVIDED):
        composed = asw.compose(name, world).write(tmp_path / f"divided-{place}")
        expected[name, 0] = reference(adapted(base, composed), PROMPTS[0], LENGTH)
    with served(base, gguf, world["math"].parent, tmp_path) as (client, _):
        with ThreadPoolExecutor(len(requested)) as pool:
            result = list(pool.map(lambda one: client.complete(one[0], PROMPTS[int(one[1])]), requested))
        plain = client.complete("llama", PROMPTS[0])
        requested += [(name, 0) for name in DIVIDED]
        result += [client.complete(name, PROMPTS[0]) for name in DIVIDED]
    for (name, number), answer in zip(requested, result, strict=True):
        right = expected[name, int(number)]
        assert answer.tokens == right.tokens[: len(answer.tokens)], (name, number)
        likely = [row[token] for row, token in zip(right.logprobs, answer.tokens, strict=False)]
        assert np.abs(answer.logprobs[:, 0] - likely).max() < 1e-3, (name, number)
    assert plain.tokens == reference(load(base), PROMPTS[0], LENGTH).tokens[: len(plain.tokens)]


def test_a_quantized_base_gets_a_warning(tmp_path: Path) -> None:
    import gguf

    from adapterswap.engines.serving.llama_cpp import rounding_of

    for kind in ("Q4_1", "Q8_0", "F16", "F32"):
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "llama")
        quantized = gguf.quants.quantize(np.ones((4, 32), np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor("blk.0.attn_q.weight", quantized, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert rounding_of(tmp_path / "F16.gguf") is None
    assert rounding_of(tmp_path / "F32.gguf") is None
    for kind in ("Q4_1", "Q8_0"):
        assert f"of the type {kind}" in (rounding_of(tmp_path / f"{kind}.gguf") or "")


@pytest.mark.slow
def test_what_clients_see(world: dict[str, Path], bases: Bases, tmp_path: Path) -> None:
    """Chat, streams, models, and the table of refusals, behind a llama-server that `llama_server` names."""
    base, gguf = bases("llama")
    binary = tmp_path / "llama-server"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m adapterswap.engines.serving.llama_engine "$@"\n')
    binary.chmod(0o755)
    manifest = tmp_path / "experts.yaml"
    allowed = ["math", "swahili", "math+swahili", "math+swahili@bottom=2,top=1"]
    manifest.write_text(json.dumps({"experts": {name: str(path) for name, path in world.items()}, "allow": allowed}))
    with served(base, gguf, manifest, tmp_path, "--llama-server", str(binary)) as (client, _):
        status, models = client.ask("/v1/models")
        assert [one["id"] for one in models["data"]] == ["llama", *allowed]
        body = {"model": "math+swahili", "temperature": 0, "max_tokens": LENGTH}
        status, whole = client.ask("/v1/completions", body | {"prompt": PROMPTS[0]})
        assert status == 200
        assert streamed(client, "/v1/completions", body | {"prompt": PROMPTS[0]}) == whole["choices"][0]["text"]
        chat = body | {"messages": [{"role": "user", "content": "abc"}]}
        status, whole = client.ask("/v1/chat/completions", chat)
        assert status == 200
        assert streamed(client, "/v1/chat/completions", chat) == whole["choices"][0]["message"]["content"]
        prompt = {"prompt": "a"}
        refused: list[tuple[str, object, int, str | None]] = [
            ("/v1/completions", {"model": "hindi", **prompt}, 404, "model"),
            ("/v1/completions", {"model": "math+hindi", **prompt}, 404, "model"),
            ("/v1/completions", {"model": "code", **prompt}, 404, "model"),  # not allowed
            ("/v1/completions", {"model": "../math", **prompt}, 404, "model"),
            ("/v1/completions", {"model": "math+swahili@bottm=2", **prompt}, 400, "model"),
            ("/v1/completions", prompt, 400, "model"),
            ("/v1/completions", {"model": None, **prompt}, 400, "model"),
            ("/v1/completions", {"model": "math", "lora": [], **prompt}, 400, "lora"),
            ("/v1/completions", b"{", 400, None),
            ("/v1/completions", [], 400, None),
            ("/lora-adapters", [{"id": 0, "scale": 1}], 404, None),
            ("/v1/load_lora_adapter", {"lora_path": "/"}, 404, None),
        ]
        for path, content, expected, parameter in refused:
            status, answer = client.ask(path, content)
            assert (status, answer["error"]["param"]) == (expected, parameter), (path, content, answer)
            assert str(tmp_path) not in json.dumps(answer)
        assert client.ask("/lora-adapters")[0] == 404
        assert client.ask("/health") == (200, {"status": "ok"})


def streamed(client: Client, path: str, body: dict[str, Any]) -> str:
    """The text of an answer that comes in events."""
    request = urllib.request.Request(
        client.url + path, json.dumps(body | {"stream": True}).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=900) as response:
        lines = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"[DONE]"
    for line in lines[:-1]:
        event = json.loads(line)
        assert event["model"] == body["model"]
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def command(base: Path, gguf: Path, experts: Path, folder: Path) -> tuple[object, ...]:
    return (
        "serve", "--engine", "llama.cpp", "--base-model", base, "--gguf", gguf, "--experts", experts,
        "--cache", folder / "cache",
    )  # fmt: skip


def test_a_dry_run_starts_and_writes_nothing(
    run: Callable[..., Result], world: dict[str, Path], bases: Bases, tmp_path: Path
) -> None:
    base, gguf = bases("llama")
    options = ("--dry-run", "--json", "--", "--port", "8123", "--ctx-size", "64")
    result = run(*command(base, gguf, world["math"].parent, tmp_path), *options)
    assert result.exit_code == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["pieces"] == 6 * (3 * 2 + 1) + 1  # one expert has LoRA on attention only, one outside the layers too
    assert output["url"] == "http://127.0.0.1:8123"
    threads = output["command"].index("--threads")
    assert output["command"][threads + 2 :] == ["--ctx-size", "64"]
    assert 1 <= int(output["command"][threads + 1]) <= len(os.sched_getaffinity(0))
    own = run(*command(base, gguf, world["math"].parent, tmp_path), *options, "-t", "3")
    assert "--threads" not in json.loads(own.stdout)["command"]
    shown = run(*command(base, gguf, world["math"].parent, tmp_path), "--dry-run")
    assert max(map(len, shown.stdout.splitlines())) < 2000
    whole = run(*command(base, gguf, world["math"].parent, tmp_path), "--dry-run", "--verbose")
    assert ",".join(output["command"][output["command"].index("--lora-scaled") + 1].split(",")) in whole.stdout
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize("wrong", ["architecture", "depth", "truncated", "text", "absent"])
def test_a_base_file_that_does_not_fit(
    wrong: str, run: Callable[..., Result], world: dict[str, Path], bases: Bases, tmp_path: Path
) -> None:
    base, gguf = bases("llama")
    other = tmp_path / "other.gguf"
    if wrong == "architecture":
        other = bases("qwen2")[1]
    elif wrong == "depth":
        other = bases("llama", num_hidden_layers=8)[1]
    elif wrong == "truncated":
        other.write_bytes(gguf.read_bytes()[:-5000])
    elif wrong == "text":
        other.write_text("no model")
    result = run(*command(base, other, world["math"].parent, tmp_path), "--dry-run")
    assert result.exit_code == 3
    assert str(other) in result.stderr


def test_options_of_the_other_engine_and_of_adapterswap(
    run: Callable[..., Result], world: dict[str, Path], bases: Bases, tmp_path: Path
) -> None:
    base, gguf = bases("llama")
    experts = world["math"].parent
    whole = command(base, gguf, experts, tmp_path)
    assert run("serve", "--base-model", base, "--experts", experts, "--gguf", gguf).exit_code == 2
    assert run(*whole[:5], "--experts", experts).exit_code == 2  # without --gguf
    for option in (["--lora", "x"], ["-m", "x"], ["--port", "high"]):
        assert run(*whole, "--dry-run", "--", *option).exit_code == 2

    # Our own small llama-server takes no shortened options, as llama.cpp's does not.
    own = [sys.executable, "-m", "adapterswap.engines.serving.llama_engine", "-m", str(gguf)]
    shortened = subprocess.run([*own, "--thr", "1"], capture_output=True, text=True)
    assert shortened.returncode == 2
    assert "--thr" in shortened.stderr

    missing = run(*whole, "--dry-run", "--llama-server", tmp_path / "gone")
    assert missing.exit_code == 3
    assert "gone" in missing.stderr


def test_compositions_that_scales_cannot_express(
    run: Callable[..., Result], world: dict[str, Path], bases: Bases, tmp_path: Path
) -> None:
    """TIES is not linear, and rows are no modules. In `allow` they stop the start."""
    base, gguf = bases("llama")
    for name in ("math+swahili@method=ties,density=0.5", "math+swahili@row_threshold=0.01"):
        manifest = tmp_path / "experts.yaml"
        experts = {expert: str(path) for expert, path in world.items()}
        manifest.write_text(json.dumps({"experts": experts, "allow": [name]}))
        result = run(*command(base, gguf, manifest, tmp_path), "--dry-run")
        assert result.exit_code in (2, 3), name
        assert "math+swahili" in result.stderr
