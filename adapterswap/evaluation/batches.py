"""How the requests of an evaluation are divided into batches, which do not depend on the number of processes.

Processes share whole batches. Padding, and with it every bit of an answer, is therefore the same for any number of
processes. Knows nothing of models and processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["in_batches", "request_key", "seed_of"]


def request_key(prompt: str, gen_kwargs: dict[str, Any]) -> str:
    """A key for a generation request: equal keys mean equal outputs."""
    return json.dumps([prompt, gen_kwargs], sort_keys=True)


def in_batches(requests: Sequence[Any], size: int, measured: Callable[[list[str]], Sequence[int]]) -> list[list[int]]:
    """The indices of the requests, in batches of texts of about equal length, the longest first.

    Requests with the same text stay together, because a model may read it once for all of them: the choices of a
    question, or several samples of one prompt. A batch has one set of generation settings.

    Args:
        requests: the harness's instances of one kind: a prompt with settings, a context with a continuation, or a text.
        size: texts in a batch, at most.
        measured: returns the lengths of texts in tokens.
    """
    kinds: dict[str, dict[str, list[int]]] = {}
    longest: dict[tuple[str, str], str] = {}
    for place, request in enumerate(requests):
        text, *more = request.args
        generated = bool(more) and isinstance(more[0], dict)
        kind = request_key("", more[0]) if generated else ""
        full_text = text if generated else "".join(request.args)
        text = text or full_text  # a continuation without a context is a text of its own
        kinds.setdefault(kind, {}).setdefault(text, []).append(place)
        longest[kind, text] = max(longest.get((kind, text), ""), full_text, key=len)
    lengths = dict(zip(longest, measured(list(longest.values())), strict=True))
    batches = []
    for kind, places in kinds.items():
        texts = sorted(places, key=lambda text: (-lengths[kind, text], text))
        for begin in range(0, len(texts), size):
            batches.append([place for text in texts[begin : begin + size] for place in places[text]])
    return batches


def seed_of(seed: int, batch: int) -> int:
    """The seed for sampling a batch, from 0 to 2⁶⁴ - 1, unrelated to those of other batches and seeds."""
    import numpy

    return int(numpy.random.SeedSequence((seed, batch)).generate_state(1, numpy.uint64)[0])
