"""Requests of an evaluation to an engine: answers and log-likelihoods, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generation:
    """A request for an answer.

    Attributes:
        tokens: the prompt.
        limit: tokens of the answer, at most.
        stop: texts that end it.
        ends: tokens that end it.
        sampling: names and values of the other generation settings, sorted; none of transformers' defaults.
        seed: for sampling; None if it is greedy.
    """

    tokens: tuple[int, ...]
    limit: int
    stop: tuple[str, ...]
    ends: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Likelihood:
    """A request for the log-likelihood of the last `scored` tokens, and whether each of them is the likeliest."""

    tokens: tuple[int, ...]
    scored: int


Request = Generation | Likelihood
Answer = tuple[int, ...] | tuple[float, bool]
"""The tokens of an answer; or a log-likelihood in nats and whether the tokens are greedy."""
