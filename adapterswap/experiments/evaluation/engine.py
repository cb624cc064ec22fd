"""Evaluate many compositions in one engine: each is written for a while, and several are in flight at any time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from adapterswap.core import Form, ModelForm, Plan, prepare_model
from adapterswap.engines.serving.composer import for_any_engine
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.requests import Answer, Request
from adapterswap.experiments.evaluation.results import EvaluationResult
from adapterswap.kit.errors import OutputError
from adapterswap.kit.files.folders import scratch_folder


@dataclass(frozen=True)
class FullWeights:
    """The folder of a checkpoint that takes the place of the base's weights."""

    folder: Path


Loadable = Path | FullWeights | None
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
) -> Iterator[Loadable]:
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
                subject: Loadable = FullWeights(_merged(plan, place / "merged", base_model))
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
        remedy = "Set TMPDIR to a folder on a disk with enough free space"
        if full:
            remedy += " for the base model"
        raise OutputError(error.problems[0].message, remedy) from error


def _merged(plan: Plan, folder: Path, base_model: str) -> Path:
    base = None if plan.is_model else base_model
    return prepare_model(plan, ModelForm(), base).write(folder)


@dataclass(frozen=True)
class Job:
    """A composition to evaluate.

    Attributes:
        key: its name, another for each job.
        opened: yields what to put into the engine, which exists inside the block.
        exam: the requests to answer.
        alone: whether nothing else may be in flight with it.
    """

    key: str
    opened: Callable[[], AbstractContextManager[Loadable]]
    exam: Exam
    alone: bool = False

    @staticmethod
    def of_plan(key: str, plan: Plan | None, output: Output, exam: Exam, *, full: bool, **options: Any) -> Job:
        """A job for a composition; see `written`. Full weights are alone."""
        return Job(key, partial(written, plan, output, full=full, **options), exam, alone=full)


@dataclass
class _Flight:
    """A job in flight, or landed, with its answers so far."""

    job: Job
    place: ExitStack
    answers: dict[Request, Answer] = field(default_factory=dict)

    @property
    def landed(self) -> bool:
        return len(self.answers) == len(self.job.exam.requests)


_AHEAD = 4  # finished jobs per job in flight that wait for an earlier one; killing this process loses them


class Engine(ABC):
    """Answers requests to several compositions at once.

    Attributes:
        described: everything that answers depend on besides the settings.
    """

    @property
    @abstractmethod
    def described(self) -> Mapping[str, Any]: ...

    @abstractmethod
    def put(self, key: str, subject: Loadable) -> None:
        """Make a composition available under a key. Full weights must be alone."""

    @abstractmethod
    def ask(self, key: str, request: Request) -> None:
        """Queue a request to a composition; none that is queued already."""

    @abstractmethod
    def answers(self) -> Iterable[tuple[str, Request, Answer]]:
        """Run the engine for a while; returns the answers that it finished, if any, with their keys and requests."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forget a composition and what is still asked of it."""

    def evaluate(
        self, jobs: Iterable[Job], *, in_flight: int = 1, on_progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[EvaluationResult, dict[str, float]]]:
        """Evaluate jobs, several at once, and return their results in order.

        Args:
            jobs: taken when there is room for another.
            in_flight: how many are put into the engine at once.
            on_progress: called with the numbers of answered and of all requests of the first unfinished job.

        Returns:
            For each job its result, and the seconds spent on writing (`switch`) and on everything else since the result
            before (`evaluate`), which add up to the time that passed.
        """
        waiting = deque(jobs)
        window: deque[_Flight] = deque()  # in flight, or waiting for an earlier one to land
        flying: dict[str, _Flight] = {}
        began, writing = time.perf_counter(), 0.0
        try:
            while waiting or window:
                # Start what may be in flight together; full weights only alone.
                while waiting and len(flying) < in_flight and len(window) < in_flight * _AHEAD:
                    if flying and (waiting[0].alone or any(flight.job.alone for flight in flying.values())):
                        break
                    before = time.perf_counter()
                    flight = self._start(waiting.popleft())
                    window.append(flight)
                    flying[flight.job.key] = flight
                    writing += time.perf_counter() - before

                # Results are returned in the order of the jobs.
                first = window[0]
                if first.landed:
                    window.popleft()
                    result = first.job.exam.scores(first.answers, self.described)
                    now = time.perf_counter()
                    yield result, {"switch": writing, "evaluate": now - began - writing}
                    began, writing = now, 0.0
                    continue

                for key, request, answer in self.answers():
                    flying[key].answers[request] = answer
                    if flying[key].landed:
                        self._end(flying.pop(key))
                if on_progress is not None:
                    on_progress(len(first.answers), len(first.job.exam.requests))
        finally:
            for flight in list(flying.values()):
                self._end(flight)

    def _start(self, job: Job) -> _Flight:
        """Open a job's model and ask all of its requests."""
        with ExitStack() as place:
            self.put(job.key, place.enter_context(job.opened()))
            for request in job.exam.requests:
                self.ask(job.key, request)
            return _Flight(job, place.pop_all())

    def _end(self, flight: _Flight) -> None:
        with flight.place:  # its folder goes last
            self.drop(flight.job.key)
