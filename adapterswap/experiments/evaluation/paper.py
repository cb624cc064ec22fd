"""The harness's model class without weights: it notes what a model would be asked, or looks the answers up.

It turns texts into tokens, cuts answers at their stops and adds up windows as the harness does for a model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch

from adapterswap.core import OpenedBase
from adapterswap.experiments.evaluation.evaluator import padded
from adapterswap.experiments.evaluation.harness import EvaluatedModel, ends_of, seed_of
from adapterswap.experiments.evaluation.requests import Answer, Generation, Likelihood, Request
from adapterswap.experiments.evaluation.results import check_texts
from adapterswap.experiments.evaluation.settings import Settings
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.processes import Processes


class AllAsked(Exception):
    """Ends the first half of an evaluation."""


class Paper(EvaluatedModel):
    """A model without weights. It notes requests, or looks their answers up.

    Attributes:
        requests: those of this evaluation, in order; equal ones once.
    """

    def __init__(
        self, base: OpenedBase, loaded: LoadedTasks, settings: Settings, answers: Mapping[Request, Answer] | None = None
    ) -> None:
        self._generation_config = base.generation_config()
        stand_in = SimpleNamespace(
            config=base.config, generation_config=self._generation_config, device=torch.device("cpu"), eval=lambda: None
        )
        super().__init__(
            stand_in,
            padded(base.tokenizer),
            settings=settings,
            batch_size=1,
            processes=Processes(),
            check=lambda: check_texts(loaded.tasks),
            on_begin=None,
            on_progress=None,
        )

        self._tasks, self._lookup = loaded.tasks.values(), answers
        self._kinds: set[str] = set()
        self.requests: dict[Request, None] = {}
        self._sampled = 0

    def _positions(self) -> None:
        """Without weights only the config tells."""

    def _check_causal(self) -> None:
        """Without weights nothing tells."""

    def _choose_size(self, kind: str, side: Literal["left", "right"]) -> None:
        """An engine makes its own batches."""

    def _answers(self, requests: list[Any], batches: list[list[int]], answer: Callable[..., list[Any]]) -> list[Any]:
        """Note which kinds of requests were asked; after the last kind, end the evaluation."""
        answers = super()._answers(requests, batches, answer)
        self._kinds.add(requests[0].request_type)

        # The harness asks all requests of one kind at a time; after the last kind there is nothing more to note.
        if self._lookup is None:
            kinds = set()
            for task in self._tasks:
                kinds |= {request.request_type for request in task.instances}
            if self._kinds >= kinds:
                raise AllAsked
        return answers

    def _tokens(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        prompt = tuple(context[0].tolist())
        settings = _sampling(kwargs, self._generation_config)
        seed = None
        if settings.get("do_sample"):
            seed = seed_of(self._seed, self._sampled)
        self._sampled += 1

        ends = ends_of(self._generation_config)
        request = Generation(prompt, max_length - len(prompt), tuple(stop), ends, tuple(sorted(settings.items())), seed)
        answer = self._answered(request, ends[:1])
        return torch.cat([context, torch.tensor([answer], dtype=context.dtype).reshape(1, -1)], dim=1)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        longest = self.max_length + 1  # the last token is only predicted
        answers = []
        for _, context, continuation in requests:
            request = Likelihood(tuple((context + continuation)[-longest:]), len(continuation))
            answers.append(self._answered(request, (0.0, False)))
        return answers

    def _answered(self, request: Request, nothing: Answer) -> Answer:
        """Note a request, and look its answer up; `nothing` as long as there are no answers."""
        self.requests[request] = None
        if self._lookup is None:
            return nothing
        return self._lookup[request]


_ELSEWHERE = {
    "transformers_version",
    "use_cache",
    "max_length",
    "max_new_tokens",
    "attention_mask",
    "_from_model_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p"}


def _sampling(kwargs: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The settings of one request, the model's own included, that are not off; without tokens and lengths."""
    settings = {**config.to_diff_dict(), **kwargs}
    left_out = set(_ELSEWHERE)
    if not settings.get("do_sample") or settings.get("temperature") == 0:
        left_out |= _OF_SAMPLING

    kept = {}
    for name, value in settings.items():
        is_off = value is False or value is None
        if name not in left_out and not is_off:
            kept[name] = value
    return kept
