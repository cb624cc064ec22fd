"""The log-likelihoods of several continuations of one text, which the model reads once for all of them.

The harness reads a question again for every choice. On a CPU, where time goes with the tokens, a question with four
short choices takes a quarter of the time in this way. The results are the same up to rounding.

A text is read into the model's cache, the cache is repeated for every choice, and the choices are read on top of it.
Texts of equal length are read together, so nothing is padded before a choice and no mask is needed. This holds for a
plain cache of keys and values; `SharedContexts` leaves everything else to the harness.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

Tokens = tuple[int, ...]
Asked = tuple[Tokens, Tokens]
"""A context and a continuation."""
Likelihoods = list[tuple[float, bool]]
"""For each request its log-likelihood in nats, and whether the continuation is greedy."""


def shared_contexts(requests: Sequence[Asked], longest: int) -> dict[Tokens, list[int]]:
    """Contexts that are worth reading once, with the indices of their requests.

    Continuations that differ in their last token only are left out: the harness reads those together already.

    Args:
        longest: tokens of a context with its continuation, at most.
    """
    by_context: dict[Tokens, list[int]] = {}
    for index, (context, _) in enumerate(requests):
        by_context.setdefault(context, []).append(index)

    worth = {}
    for context, indices in by_context.items():
        continuations = [requests[index][1] for index in indices]
        beginnings = {continuation[:-1] for continuation in continuations}
        if len(beginnings) > 1 and len(context) + max(map(len, continuations)) <= longest:
            worth[context] = indices
    return worth


class SharedContexts:
    """Reads contexts once for all of their continuations.

    Args:
        model: a causal model of transformers, on a CPU, or a PeftModel.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        parameters = inspect.signature(inner.forward).parameters
        self._possible = {"past_key_values", "logits_to_keep"} <= set(parameters)

    def read(self, contexts: Sequence[Tokens]) -> tuple[Any, torch.Tensor] | None:
        """The cache and the last logits (contexts, vocabulary) of contexts of equal length; None for other caches."""
        if not self._possible:
            return None
        output = self._model(input_ids=torch.tensor(contexts), use_cache=True, logits_to_keep=1)
        cache: Any = getattr(output, "past_key_values", None)  # RecurrentGemma keeps its state in its layers
        plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
        if not plain or cache.get_seq_length() != len(contexts[0]):
            self._possible = False
            return None
        return cache, output.logits[:, -1]

    def answers(
        self, contexts: Sequence[Tokens], continuations: Sequence[Sequence[Tokens]]
    ) -> list[Likelihoods] | None:
        """The likelihoods of each context's continuations; None if the model's cache cannot be shared.

        Args:
            contexts: of equal length.
            continuations: those of each context.
        """
        read = self.read(contexts)
        if read is None:
            return None
        cache, last = read

        # One row for each continuation: its context's place, and its tokens.
        places: list[int] = []
        flat: list[Tokens] = []
        for place, texts in enumerate(continuations):
            places += [place] * len(texts)
            flat += texts
        selected = torch.tensor(places)
        width = max(map(len, flat))

        # The context's last logits predict the first token. The last token is only predicted, so it is not read.
        logits = last[selected][:, None]
        if width > 1:
            cache.batch_select_indices(selected)
            ids = torch.tensor([[*text[:-1], *[0] * (width - len(text))] for text in flat])
            further = self._model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            logits = torch.cat([logits, further], dim=1)

        scored = list(_scored(logits, flat))
        answers = []
        for texts in continuations:
            answers.append(scored[: len(texts)])
            scored = scored[len(texts) :]
        return answers


def _scored(logits: torch.Tensor, continuations: Sequence[Tokens]) -> Iterator[tuple[float, bool]]:
    """The likelihood of each continuation from its logits (continuations, width, vocabulary), padded on the right.

    In float32: in bfloat16, a log-likelihood of -10 is rounded to a sixteenth, and equal choices would be frequent.
    """
    for row, text in zip(logits, continuations, strict=True):
        tokens = torch.tensor(text)
        own = torch.log_softmax(row[: len(text)], dim=-1, dtype=torch.float32)
        yield float(own.gather(1, tokens[:, None]).sum()), bool((own.argmax(-1) == tokens).all())


def answer_shared(
    model: SharedContexts,
    requests: Sequence[Asked],
    shared: dict[Tokens, list[int]],
    *,
    size: int,
    on_answer: Callable[[int, tuple[float, bool]], None],
) -> bool:
    """Answer the requests of `shared`, `size` contexts of equal length at once; False if the model's cache forbids it.

    Args:
        on_answer: called with the index of a request and its answer.
    """
    by_length: dict[int, list[Tokens]] = {}
    for context in shared:
        by_length.setdefault(len(context), []).append(context)

    for alike in by_length.values():
        for begin in range(0, len(alike), size):
            contexts = alike[begin : begin + size]
            continuations = []
            for context in contexts:
                continuations.append([requests[index][1] for index in shared[context]])
            answers = model.answers(contexts, continuations)
            if answers is None:
                return False
            for context, likelihoods in zip(contexts, answers, strict=True):
                for index, likelihood in zip(shared[context], likelihoods, strict=True):
                    on_answer(index, likelihood)
    return True
