"""What a client's request may hold before llama.cpp sees it: the parameters that are passed on, and their bounds.

llama.cpp reads grammars and schemas by recursion and unrolls repetitions, without bounds: 100 kB of nested brackets end
its process, and so do some parameters that only its own chat templates should set. So what is passed on is a list, and
what becomes a grammar is small, flat, and repeats little.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from adapterswap.kit.errors import FieldError, Problems, did_you_mean
from adapterswap.kit.files.text import shown

_BOTH = (
    "model stream stream_options max_tokens max_completion_tokens n_predict n stop seed temperature dynatemp_range"
    " dynatemp_exponent top_k top_p min_p top_n_sigma typical_p xtc_probability xtc_threshold repeat_last_n"
    " repeat_penalty presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n"
    " dry_sequence_breakers mirostat mirostat_tau mirostat_eta samplers min_keep ignore_eos logit_bias logprobs"
    " top_logprobs n_probs post_sampling_probs return_tokens timings_per_token t_max_predict_ms response_format"
    " json_schema grammar"
)
PASSED = {
    "/v1/completions": frozenset(f"{_BOTH} prompt echo suffix best_of".split()),
    "/v1/chat/completions": frozenset(
        f"{_BOTH} messages tools tool_choice parallel_tool_calls chat_template_kwargs add_generation_prompt"
        " reasoning_format reasoning_effort".split()
    ),
}
"""Path → the parameters that llama.cpp gets."""

DROPPED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_prompt",
}  # fmt: skip
"""Parameters of OpenAI's clients that change no answer. They are accepted, and not passed on."""

_MOST_GRAMMAR, _MOST_SCHEMA = 10_000, 100_000  # characters; of a schema as JSON, which may describe many tools
_MOST_DEPTH = 16  # brackets within brackets
_MOST_REPEATS = 1000  # of all bounds of repetitions together
_BRACKETS = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[()]'
)  # of a grammar, and what may hold them as text
_REPEATS = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SIMPLER = "Use a smaller grammar or schema"


def passed_on(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request that llama.cpp gets.

    Raises:
        FieldError: a parameter is not known, a part of a message is not text, or a grammar is beyond the bounds.
    """
    known, problems = PASSED[path], Problems(FieldError)
    for name in content.keys() - known - DROPPED:
        remedy = did_you_mean(name, known, "Leave it out")
        problems.add(f"{shown(name)} is not a parameter that is passed on", remedy, parameter=name)
    _check_messages(content.get("messages"), problems)
    for name, grammar in _grammars(content):
        reason = _excess(grammar)
        if reason is not None:
            problems.add(f"`{name}` {reason}", _SIMPLER, parameter=name)
    problems.raise_if_any()
    return {name: value for name, value in content.items() if name in known}


def _check_messages(messages: Any, problems: Problems) -> None:
    """Refuse parts of messages that name images, sound or files, which llama.cpp would fetch or open."""
    if not isinstance(messages, list):
        return
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            continue
        for part in message["content"]:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                problems.add(
                    f"a part of a message is of type {shown(kind)}, and only text is answered",
                    "Send text",
                    parameter="messages",
                )


def _grammars(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What llama.cpp makes a grammar of: the parameter, and the grammar or schema."""
    for name in ("grammar", "json_schema", "response_format", "tools"):
        if content.get(name) is not None:
            yield name, content[name]


def _excess(grammar: Any) -> str | None:
    """Why a grammar or a schema is not passed on; None if it is."""
    is_text = isinstance(grammar, str)
    if is_text:
        length, most = len(grammar), _MOST_GRAMMAR
    else:
        length, most = len(json.dumps(grammar)), _MOST_SCHEMA
    if length > most:
        return f"has {length:,} characters; at most {most:,} are passed on"

    repeats = sum(_counts_in(grammar))
    for part in _texts_in(grammar):
        symbols: Iterable[str] = part
        if is_text:
            symbols = _BRACKETS.findall(part)
        if _depth(symbols) > _MOST_DEPTH:
            return f"nests more than {_MOST_DEPTH} brackets"
        for bounds in _REPEATS.findall(part):
            for bound in bounds:
                if bound:
                    repeats += int(bound[:9])

    if any(not reference.startswith("#") for reference in _references_in(grammar)):
        return "refers to a schema elsewhere"
    if repeats > _MOST_REPEATS:
        return f"repeats {repeats:,} times; at most {_MOST_REPEATS:,} are passed on"
    return None


def _depth(symbols: Iterable[str]) -> int:
    """How deep round brackets are nested, also where they are never closed."""
    depth = deepest = 0
    for symbol in symbols:
        depth += {"(": 1, ")": -1}.get(symbol, 0)
        deepest = max(deepest, depth)
    return deepest


def _items(value: Any) -> Iterable[Any]:
    """What a JSON value holds."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def _texts_in(value: Any) -> Iterator[str]:
    """All texts in a schema: its regexes are among them."""
    if isinstance(value, str):
        yield value
    for item in _items(value):
        yield from _texts_in(item)


def _references_in(value: Any) -> Iterator[str]:
    """What a schema refers to by `$ref`."""
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for item in _items(value):
        yield from _references_in(item)


def _counts_in(value: Any) -> Iterator[int]:
    """The bounds of repetitions in a schema, each of which llama.cpp writes out."""
    if isinstance(value, dict):
        for key in _COUNTS:
            if isinstance(value.get(key), int | float):
                yield int(min(value[key], 10**9))
    for item in _items(value):
        yield from _counts_in(item)
