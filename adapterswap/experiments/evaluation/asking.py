"""An evaluation cut in two: which requests its tasks make, and scores from their answers.

So an engine can answer the requests of many compositions at once. Both halves are the harness's own evaluation with its
own model class, HFLM, which here holds no weights: it turns texts into tokens, cuts answers at their stops and adds up
windows as it does for a model in memory. The first half stops at the model; the second looks the answers up.

`Engine` is the protocol of engines; a window of compositions is in flight at any time, each written for a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from adapterswap.core import Form, ModelForm, OpenedBase, Plan, prepare_model
from adapterswap.engines.serving.composer import for_any_engine
from adapterswap.experiments.evaluation.evaluating import as_result, harness, padded, run_harness, tasks_to_evaluate
from adapterswap.experiments.evaluation.harness import EvaluatedModel, seed_of
from adapterswap.experiments.evaluation.results import EvaluationResult, check_texts
from adapterswap.experiments.evaluation.settings import Settings
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import OutputError
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.processes import Processes


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


@dataclass(frozen=True)
class FullWeights:
    """The folder of a checkpoint that takes the place of the base's weights."""

    folder: Path


Subject = Path | FullWeights | None
"""The folder of an adapter; full weights; None for the base itself."""


Output = Mapping[str, Any]
"""How a composition is reduced: `max_rank`, `max_error`, or `full_rank` for full weights; empty if it is not."""


@contextmanager
def written(
    plan: Plan | None,
    output: Output,
    *,
    full: bool,
    base_model: str,
    hashes: Mapping[str, str] | None = None,
    tell: Callable[[float], None] = lambda error: None,
) -> Iterator[Subject]:
    """Write a composition to a temporary folder, which exists inside the block.

    Args:
        plan: the composition; None for the base, which needs no folder.
        hashes: see `Prepared.write`.
        tell: called with the largest relative error of a module if the composition is reduced.
    """
    if plan is None:
        yield None
        return
    with scratch_folder("composition") as place:
        with _room_in_tmpdir(full=full):
            if full:
                subject: Subject = FullWeights(_merged(plan, place / "merged", base_model))
            else:
                prepared = for_any_engine(plan, Form("portable", **output))
                if output:
                    tell(max(prepared.errors.values(), default=0.0))
                subject = prepared.write(place / "composed", hashes=hashes, companions=False)
        yield subject


@contextmanager
def merged_folder(plan: Plan, base_model: str) -> Iterator[Path]:
    """Write the full weights of a composition to a temporary folder, which exists inside the block."""
    with scratch_folder("composition") as place:
        with _room_in_tmpdir(full=True):
            folder = _merged(plan, place / "merged", base_model)
        yield folder


@contextmanager
def _room_in_tmpdir(*, full: bool) -> Iterator[None]:
    """Say where to find more room, if a temporary folder cannot be written."""
    try:
        yield
    except OutputError as error:
        raise OutputError(
            error.problems[0].message,
            "Set TMPDIR to a folder on a disk with enough free space for the base model"
            if full
            else "Set TMPDIR to a folder on a disk with enough free space",
        ) from error


def _merged(plan: Plan, folder: Path, base_model: str) -> Path:
    return prepare_model(plan, ModelForm(), None if plan.is_model else base_model).write(folder)


class Engine(Protocol):
    """Answers requests to several compositions at once.

    Attributes:
        described: everything that answers depend on besides the settings.
    """

    @property
    def described(self) -> Mapping[str, Any]: ...

    def put(self, key: str, subject: Subject) -> None:
        """Make a composition available under a key. Full weights must be alone."""

    def ask(self, key: str, request: Request) -> None:
        """Queue a request to a composition; none that is queued already."""

    def answers(self) -> Iterable[tuple[str, Request, Answer]]:
        """Run the engine for a while; returns the answers that it finished, if any, with their keys and requests."""

    def drop(self, key: str) -> None:
        """Forget a composition and what is still asked of it."""


class _AllAsked(Exception):
    """Ends the first half of an evaluation."""


class _Paper(EvaluatedModel):
    """A model without weights. It notes requests, or looks their answers up.

    Attributes:
        requests: those of this evaluation, in order; equal ones once.
    """

    def __init__(
        self, base: OpenedBase, loaded: Any, settings: Settings, answers: Mapping[Request, Answer] | None = None
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
            check=lambda: check_texts(loaded["tasks"]),
            on_begin=None,
            on_progress=None,
        )
        self._tasks, self._lookup = loaded["tasks"].values(), answers
        self._kinds: set[str] = set()
        self.requests: dict[Request, None] = {}
        self._sampled = 0

    def _answers(self, requests: list[Any], batches: list[list[int]], answer: Callable[..., list[Any]]) -> list[Any]:
        answers = super()._answers(requests, batches, answer)
        self._kinds.add(requests[0].request_type)
        if self._lookup is None and self._kinds >= {one.request_type for task in self._tasks for one in task.instances}:
            raise _AllAsked
        return answers

    def _tokens(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        prompt = tuple(context[0].tolist())
        settings = _sampling(kwargs, self._generation_config)
        seed = seed_of(self._seed, self._sampled) if settings.get("do_sample") else None
        self._sampled += 1
        ends = self._generation_config.eos_token_id
        ends = (ends,) if isinstance(ends, int) else tuple(ends or ())
        request = Generation(prompt, max_length - len(prompt), tuple(stop), ends, tuple(sorted(settings.items())), seed)
        answer = self._answered(request, ends[:1])
        return torch.cat([context, torch.tensor([answer], dtype=context.dtype).reshape(1, -1)], dim=1)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        longest = self.max_length + 1  # the last token is only predicted
        return [
            self._answered(Likelihood(tuple((context + continuation)[-longest:]), len(continuation)), (0.0, False))
            for _, context, continuation in requests
        ]

    def _answered(self, request: Request, nothing: Answer) -> Answer:
        self.requests[request] = None
        return nothing if self._lookup is None else self._lookup[request]


_BESIDE = {
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
    """The settings of one request, the model's own included, that are not off; tokens and lengths are apart."""
    settings = {**config.to_diff_dict(), **kwargs}
    beside = _BESIDE if settings.get("do_sample") and settings.get("temperature") != 0 else _BESIDE | _OF_SAMPLING
    return {
        name: value
        for name, value in settings.items()
        if name not in beside and value is not False and value is not None
    }


@dataclass(frozen=True)
class Questions:
    """Tasks and documents, whose requests and scores are the same for every composition.

    Attributes:
        base: its config and tokenizer.
        tasks, settings, documents: see `evaluating.evaluate`.
    """

    base: OpenedBase
    tasks: LoadedTasks
    settings: Settings
    documents: Mapping[str, Collection[int]] | None = None

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """What the tasks ask a model, equal requests once; raises the errors of `evaluating.evaluate`."""
        loaded = tasks_to_evaluate(self.base.tokenizer, self.tasks, self.settings)
        with harness(loaded["tasks"], self.settings):
            model = _Paper(self.base, loaded, self.settings)
            with suppress(_AllAsked):
                run_harness(model, loaded, self.settings, self.documents)
        return tuple(model.requests)

    def scores(self, answers: Mapping[Request, Answer], around: Mapping[str, Any]) -> EvaluationResult:
        """The scores of a model that gave these answers; `around` is what they depend on besides the settings."""
        loaded = tasks_to_evaluate(self.base.tokenizer, self.tasks, self.settings)
        with harness(loaded["tasks"], self.settings):
            model = _Paper(self.base, loaded, self.settings, answers)
            results = run_harness(model, loaded, self.settings, self.documents)
        return as_result(results, model, loaded["tasks"], self.settings, around)


@dataclass(frozen=True)
class Job:
    """A composition to evaluate.

    Attributes:
        key: its name, another for each job.
        opened: yields what to put into the engine, which exists inside the block.
        questions: what it is asked.
        alone: nothing else may be in flight with it.
    """

    key: str
    opened: Callable[[], AbstractContextManager[Subject]]
    questions: Questions
    alone: bool = False

    @staticmethod
    def of_plan(
        key: str, plan: Plan | None, output: Output, questions: Questions, *, full: bool, **options: Any
    ) -> Job:
        """A job for a composition; see `written`. Full weights are alone."""
        return Job(key, partial(written, plan, output, full=full, **options), questions, alone=full)


@dataclass
class _Flight:
    """A job in flight, or landed, with its answers so far."""

    job: Job
    place: ExitStack
    answers: dict[Request, Answer] = field(default_factory=dict)

    @property
    def landed(self) -> bool:
        return len(self.answers) == len(self.job.questions.requests)


_AHEAD = 4  # finished jobs per job in flight that wait for an earlier one; killing this process loses them


def evaluated(
    engine: Engine, jobs: Iterable[Job], *, in_flight: int = 1, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[EvaluationResult, dict[str, float]]]:
    """Evaluate jobs, several at once, and return their results in order.

    Args:
        engine: answers the requests.
        jobs: taken when there is room for another.
        in_flight: how many are put into the engine at once.
        on_progress: called with the numbers of answered and of all requests of the first unfinished job.

    Returns:
        For each job its result, and the seconds spent on writing (`switch`) and on everything else since the result
        before (`evaluate`), which add up to the time that passed.
    """
    waiting, window = deque(jobs), deque[_Flight]()
    flying: dict[str, _Flight] = {}
    began, writing = time.perf_counter(), 0.0
    try:
        while waiting or window:
            while _may_start(waiting, flying) and len(flying) < in_flight and len(window) < in_flight * _AHEAD:
                before = time.perf_counter()
                window.append(flight := _started(engine, waiting.popleft()))
                flying[flight.job.key] = flight
                writing += time.perf_counter() - before
            if (first := window[0]).landed:
                window.popleft()
                result = first.job.questions.scores(first.answers, engine.described)
                now = time.perf_counter()
                yield result, {"switch": writing, "evaluate": now - began - writing}
                began, writing = now, 0.0
                continue
            for key, request, answer in engine.answers():
                flying[key].answers[request] = answer
                if flying[key].landed:
                    _end(engine, flying.pop(key))
            if on_progress is not None:
                on_progress(len(first.answers), len(first.job.questions.requests))
    finally:
        for flight in list(flying.values()):
            _end(engine, flight)


def _may_start(waiting: deque[Job], flying: Mapping[str, _Flight]) -> bool:
    return bool(waiting) and not (flying and (waiting[0].alone or any(one.job.alone for one in flying.values())))


def _started(engine: Engine, job: Job) -> _Flight:
    with ExitStack() as place:
        engine.put(job.key, place.enter_context(job.opened()))
        for request in job.questions.requests:
            engine.ask(job.key, request)
        return _Flight(job, place.pop_all())


def _end(engine: Engine, flight: _Flight) -> None:
    with flight.place:  # its folder goes last
        engine.drop(flight.job.key)
