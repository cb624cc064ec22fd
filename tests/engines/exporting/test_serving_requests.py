"""What of a request reaches llama.cpp, and what happens if llama.cpp ends all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from adapterswap.engines.serving.llama_requests import PASSED, passed_on
from adapterswap.kit.errors import FieldError
from engines.exporting.conftest import Bases, Experts
from engines.exporting.test_serving import Client, served

TEXT, CHAT = PASSED
NESTED = "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "nested": ({"grammar": NESTED}, "grammar"),
    "nested a little": ({"grammar": "root ::= " + "(" * 17 + '"a"' + ")" * 17}, "grammar"),
    "never closed": ({"grammar": "root ::= " + "(" * 17}, "grammar"),
    "after a text": ({"grammar": 'root ::= "(" ' + "(" * 17}, "grammar"),
    "long": ({"grammar": "root ::= " + '"a" ' * 5000}, "grammar"),
    "repeated": ({"grammar": 'root ::= "a"{1000000}'}, "grammar"),
    "repeated repetitions": ({"grammar": 'root ::= (("a"{600}){600})'}, "grammar"),
    "triggers": ({"grammar": 'root ::= "a"', "grammar_triggers": [{"type": 3, "value": "("}]}, "grammar_triggers"),
    "lazy": ({"grammar": 'root ::= "a"', "grammar_lazy": True}, "grammar_lazy"),
    "preserved": ({"preserved_tokens": ["a"]}, "preserved_tokens"),
    "slot": ({"id_slot": 10**9}, "id_slot"),
    "speculative": ({"speculative.n_max": 10**9}, "speculative.n_max"),
    "pattern": ({"json_schema": {"type": "string", "pattern": "^" + "(" * 17 + "a" + ")" * 17 + "$"}}, "json_schema"),
    "quoted pattern": ({"json_schema": {"type": "string", "pattern": '"' + "(" * 17 + '"'}}, "json_schema"),
    "length": ({"json_schema": {"type": "string", "minLength": 10**8}}, "json_schema"),
    "no number": ({"json_schema": {"type": "array", "maxItems": 1e300}}, "json_schema"),
    "many lengths": (
        {"json_schema": {"properties": {str(i): {"type": "string", "maxLength": 100} for i in range(11)}}},
        "json_schema",
    ),
    "format": ({"response_format": {"type": "json_schema", "schema": {"minItems": 2000}}}, "response_format"),
    "reference": ({"json_schema": {"$ref": "https://169.254.169.254/latest"}}, "json_schema"),
    "unknown": ({"temprature": 1}, "temprature"),
}
OF_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({"tools": [{"type": "function", "function": {"parameters": {"maxItems": 10**6}}}]}, "tools"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}]},
        "messages",
    ),
    "sound": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    "no part": ({"messages": [{"role": "user", "content": [1]}]}, "messages"),
    "template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
}
USUAL: dict[str, Any] = {
    "model": "math", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 1, "stream": False,
    "logprobs": 1, "response_format": {"type": "text"}, "user": "somebody", "metadata": {"a": "b"},
    "cache_prompt": True,
}  # fmt: skip
WITHIN_BOUNDS: list[dict[str, Any]] = [  # what llama.cpp has to survive, or be started again after
    {"grammar": 'root ::= "a"{1,20}'},
    {"grammar": "root ::= " + "(" * 16 + '"a"' + ")" * 16},
    {"grammar": "root ::= root"},
    {"grammar": "root ::= "},
    {"grammar": "\x00"},
    {"grammar": "root ::= [" + "a-z" * 3000 + "]"},
    {"grammar": 'root ::= ("a"*)*'},
    {"grammar": 'root ::= "(((((((((((((((((((((((((((((((" [((((((((((((((((((((((((] # (((((((((((((((((((((('},
    {"json_schema": {"type": "string", "pattern": "^" + "(" * 16 + "a" + ")" * 16 + "$", "maxLength": 900}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$ref": "#/none"}},
    {"json_schema": {"type": ["none"], "enum": []}},
    {"n_probs": 10**9, "top_k": -(10**9), "seed": -1, "mirostat": 99, "samplers": ["none"]},
    {"logit_bias": [[10**9, 1e308], ["x" * 1000, False]]},
    {"n": 10**9},
    {"dry_sequence_breakers": [], "dry_multiplier": 1.0},
    {"stop": [""] * 1000},
]


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_not_passed_on(name: str) -> None:
    for path in PASSED:
        content, parameter = ATTACKS[name]
        with refused(FieldError, parameter):
            passed_on(path, {"model": "math", **content})


@pytest.mark.parametrize("name", OF_CHATS)
def test_what_is_not_passed_on_of_a_chat(name: str) -> None:
    content, parameter = OF_CHATS[name]
    with refused(FieldError, parameter):
        passed_on(CHAT, {"model": "math", **content})


def test_what_is_passed_on() -> None:
    parts = [{"type": "text", "text": "a"}]
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "long " * 200}} for i in range(20)]
    grammar = 'root ::= "yes" | ("no" " "? [(] digit{1,3} ")")\ndigit ::= [0-9] # a digit (or two)\n'
    for path, more in (
        (TEXT, {"prompt": "a", "grammar": grammar}),
        (TEXT, {"prompt": [1, 2], "json_schema": {"type": "array", "items": {"$ref": "#/defs/a"}, "maxItems": 20}}),
        (CHAT, {"messages": [{"role": "user", "content": parts}], "tools": tools, "tool_choice": "auto"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}}),
    ):
        passed = passed_on(path, {**USUAL, **more})
        dropped = {"user", "metadata", "cache_prompt"}
        assert passed == {key: value for key, value in {**USUAL, **more}.items() if key not in dropped}


@pytest.fixture(scope="module")
def server(bases: Bases, experts: Experts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Any]]:
    folder, scratch = tmp_path_factory.mktemp("experts"), tmp_path_factory.mktemp("served")
    (folder / "math").symlink_to(experts("llama", "math", seed=1))
    base, gguf = bases("llama")
    with served(base, gguf, folder, scratch, engine=("--ctx-size", "512", "--threads", "1")) as (client, process):
        yield client, process


def engine_of(process: Any) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def answered(client: Client) -> None:
    """Wait until the server answers again."""
    for _ in range(600):
        status, _ = client.ask("/v1/completions", {"model": "math", "prompt": "a", "max_tokens": 1})
        if status == 200:
            return
        assert status == 503
        time.sleep(0.1)
    raise AssertionError


def test_llama_cpp_survives_what_it_gets(server: tuple[Client, Any]) -> None:
    client, process = server
    engine = engine_of(process)
    for content in [*(attack for attack, _ in ATTACKS.values()), *WITHIN_BOUNDS]:
        status, answer = client.ask("/v1/completions", {"model": "math", "prompt": "a", "max_tokens": 2, **content})
        assert status in (200, 400, 500), (content, answer)
        assert engine_of(process) == engine, content
    answered(client)


def test_llama_cpp_is_started_again_with_a_limit(server: tuple[Client, Any]) -> None:
    client, process = server
    for _ in range(3):
        answered(client)
        assert client.ask("/health") == (200, {"status": "ok"})
        os.kill(engine_of(process), signal.SIGKILL)
        time.sleep(0.5)
    answered(client)
    os.kill(engine_of(process), signal.SIGKILL)
    assert process.wait(60) == 3
