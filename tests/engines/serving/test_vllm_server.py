"""A real server over HTTP: many clients, bad names, experts that break or change. Needs `make vllm`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiers import ALL
from tolerances import tolerance

from .cases import COMPOSITIONS, LENGTH, PROMPTS
from .conftest import LAYERS, Reference, make_expert
from .environment import needs_vllm
from .server import Server, serving

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")]

_ROUNDS, _PROMPTS = 2, PROMPTS if ALL else PROMPTS[1:2]  # × 20 compositions: 200 requests, or 40


@pytest.fixture(scope="module")
def folder(pristine: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts, some of which are damaged or changed while the server is running."""
    folder = tmp_path_factory.mktemp("serving")
    shutil.copytree(pristine("llama"), folder / "experts")
    for name in ("torn", "sick", "changing", "fading", "untouched"):
        shutil.copytree(pristine("llama") / "math", folder / "experts" / name)
    return folder


@pytest.fixture(scope="module")
def server(served_base: Callable[[str], Path], folder: Path) -> Iterator[Server]:
    with serving(served_base("llama"), folder / "experts", folder, "--max-lora-rank", "16") as server:
        yield server


@pytest.fixture(scope="module")
def reference(served_base: Callable[[str], Path], pristine: Callable[[str], Path]) -> Reference:
    return Reference(served_base("llama"), pristine("llama"))


@pytest.fixture(autouse=True)
def _alive(server: Server) -> Iterator[None]:
    """The server keeps running and answers after every test."""
    yield
    assert server.is_alive()
    assert server.complete("math", PROMPTS[0], 1)[0] == 200


def tokens(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def difference(answer: Any, steps: list[dict[int, float]]) -> float:
    """The largest difference of log-probabilities between an answer and the reference, as a share of the tolerance."""
    told = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert len(told) == len(steps)
    return max(
        abs(value - expected[int(token.removeprefix("token_id:"))]) / tolerance(expected, depth=LAYERS)
        for step, expected in zip(told, steps, strict=True)
        for token, value in step.items()
    )


def test_many_requests_over_20_compositions_are_all_right(server: Server, reference: Reference) -> None:
    requests = [(name, prompt) for _ in range(_ROUNDS) for prompt in _PROMPTS for name in COMPOSITIONS]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda request: server.complete(*request, LENGTH), requests))
    assert {status for status, _ in answers} == {200}
    expected = {
        (name, tuple(prompt)): reference.answer(zones, prompt, LENGTH)
        for name, zones in COMPOSITIONS.items()
        for prompt in _PROMPTS
    }
    worst = 0.0
    for (name, prompt), (_, answer) in zip(requests, answers, strict=True):
        best, steps = expected[name, tuple(prompt)]
        assert answer["model"] == name
        assert tokens(answer) == best, name
        worst = max(worst, difference(answer, steps))
    assert worst < 1
    status, models = server.get("/v1/models")
    assert status == 200
    assert {"tiny", *COMPOSITIONS} <= {model["id"] for model in models["data"]}
    log = server.log.read_text()
    for name in COMPOSITIONS:
        assert len(re.findall(rf" {re.escape(name)}: composed in \d+ ms", log)) == 1, name


def test_the_experts_are_listed_before_any_request(server: Server, folder: Path) -> None:
    """`untouched` is never asked for in this module."""
    models = {model["id"]: model for model in server.get("/v1/models")[1]["data"]}
    assert {"tiny", "math", "untouched"} <= models.keys()
    assert (models["untouched"]["parent"], models["untouched"]["root"]) == ("tiny", None)


@pytest.mark.parametrize(
    ("name", "status", "expected"),
    [
        ("nosuch", 404, "There is no expert 'nosuch'. The experts here are: changing, code, fading, math"),
        ("math+nosuch", 404, "'math+nosuch': there is no expert 'nosuch'"),
        ("../../../etc/passwd", 404, "There is no expert"),
        ("/etc", 404, "There is no expert"),
        ("math+../swahili", 400, "is not the short name of a composition"),
        ("math+swahili@", 400, "is not the short name of a composition"),
        ("math+swahili@bottom=two", 400, "bottom"),
        ("math+swahili@bottom=5,top=5", 400, "The zones overlap"),
        ("math+swahili@bottom=1,bottom=2", 400, "bottom is set twice"),
        ("math+swahili@num_layers=6", 400, "unknown setting 'num_layers'"),
        ("math+swahili@method=ties,density=0.5", 400, "ties is not a weighted sum"),
        ("math+swahili@task_weight=nan", 400, "weight"),
        ("code+math@method=soup", 400, "has rank 24, and this server takes up to 16"),
        ("math+swahili" + "+x" * 5000, 400, "is longer than 300 characters"),
        ("mäth+swahili\x1b[31m", 400, "is not the short name of a composition"),
    ],
)
def test_bad_names_are_answered(server: Server, name: str, status: int, expected: str) -> None:
    result, answer = server.complete(name, PROMPTS[0], 2)
    assert result == status
    assert expected in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1000
    assert "\x1b" not in answer["error"]["message"]


@pytest.mark.sampled(5)  # test_serve_cli.py sends them to our part of the server
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}, {"model": "", "stream": True}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "w5"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 1}),
        ("/v1/completions/render", {"prompt": "w5"}),
        ("/invocations", {"prompt": PROMPTS[0], "max_tokens": 1}),
        ("/generative_scoring", {"query": "w5", "items": ["w6"], "label_token_ids": [5, 6]}),
        ("/tokenize", {"prompt": "w5"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_a_request_without_a_model_does_not_get_the_base(
    server: Server, path: str, body: dict[str, Any], model: dict[str, Any]
) -> None:
    status, answer = server.post(path, body | model)
    assert status == 400
    assert answer["error"]["param"] == "model"


def test_the_base_answers_to_its_own_name(server: Server) -> None:
    assert server.complete("tiny", PROMPTS[0], 1)[0] == 200
    assert server.post("/tokenize", {"model": "tiny", "prompt": "w5"}) == (
        200, {"count": 1, "max_model_len": 128, "tokens": [5], "token_strs": None},
    )  # fmt: skip


def test_it_reports_ready_after_a_token_and_before_it_answers(server: Server) -> None:
    log = server.log.read_text()
    assert log.index("adapterswap: ready") < log.index("GET /health")


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/adapters"])
def test_no_client_loads_from_a_path(server: Server, folder: Path, path: str) -> None:
    place = str(folder / "experts" / "math")
    result, answer = server.post(path, {"lora_name": "mine", "lora_path": place, "name": "mine", "src": place})
    assert result == 403
    assert "switched off" in answer["error"]["message"]
    assert "mine" not in {model["id"] for model in server.get("/v1/models")[1]["data"]}


def test_damaged_experts_are_reported(server: Server, folder: Path, reference: Reference) -> None:
    torn = folder / "experts" / "torn" / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:5000])
    sick = folder / "experts" / "sick" / "adapter_model.safetensors"
    content = bytearray(sick.read_bytes())
    content[-4:] = b"\xff\xff\xff\x7f"  # a NaN
    sick.write_bytes(content)
    for name, expected in (("torn+swahili", "torn"), ("sick", "NaN"), ("math+sick@bottom=0,top=6", "NaN")):
        result, answer = server.complete(name, PROMPTS[0], 2)
        assert result == 400
        assert expected in answer["error"]["message"]
        assert str(folder) not in answer["error"]["message"]
        assert str(folder) in server.log.read_text()  # the operator sees the path
    shutil.rmtree(folder / "experts" / "fading")
    result, answer = server.complete("fading", PROMPTS[0], 2)
    assert result == 400
    assert "does not exist" in answer["error"]["message"]


def test_a_name_keeps_its_meaning_until_it_is_unloaded(
    server: Server, folder: Path, reference: Reference, served_base: Callable[[str], Path], tmp_path: Path
) -> None:
    name, zones = "changing+swahili@bottom=2,top=1", ("math", "swahili", 2, 1)
    before, _ = reference.answer(zones, PROMPTS[0], LENGTH)
    assert tokens(server.complete(name, PROMPTS[0], LENGTH)[1]) == before
    old_folder = _root(server, name)

    make_expert(served_base("llama"), folder / "experts" / "changing", seed=77)
    other = shutil.copytree(folder / "experts" / "changing", tmp_path / "experts" / "changing")
    shutil.copytree(folder / "experts" / "swahili", tmp_path / "experts" / "swahili")
    changed = Reference(served_base("llama"), other.parent)
    after, steps = changed.answer(("changing", "swahili", 2, 1), PROMPTS[0], LENGTH)
    assert after != before

    for evicting in list(COMPOSITIONS)[:17]:  # more than the engine keeps, so that it reloads the old folder
        assert server.complete(evicting, PROMPTS[1], 1)[0] == 200
    assert tokens(server.complete(name, PROMPTS[0], LENGTH)[1]) == before
    fresh, _ = changed.answer(("changing", "swahili", 1, 1), PROMPTS[0], LENGTH)
    assert tokens(server.complete("changing+swahili@bottom=1,top=1", PROMPTS[0], LENGTH)[1]) == fresh

    assert server.post("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    status, answer = server.complete(name, PROMPTS[0], LENGTH)
    assert status == 200
    assert tokens(answer) == after
    assert difference(answer, steps) < 1
    assert _root(server, name) != old_folder
    assert Path(old_folder).is_dir()


def _root(server: Server, name: str) -> str:
    return next(model["root"] for model in server.get("/v1/models")[1]["data"] if model["id"] == name)


def test_the_example_client_asks_for_several_at_once(server: Server, reference: Reference) -> None:
    client = Path(__file__).parents[3] / "examples" / "serving" / "ask.py"
    names = ["math+swahili", "math+telugu", "nosuch"]
    command = [sys.executable, client, "--url", server.url, "--prompt", "w9 w14", "--max-tokens", "4", *names]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout.splitlines()
    for line, name in zip(lines, names[:2], strict=False):
        best, _ = reference.answer(COMPOSITIONS[name], [9, 14], 4)
        assert line == f"{name}:  {' '.join(f'w{token}' for token in best)}"
    assert lines[2].startswith("nosuch: [404] There is no expert 'nosuch'")
