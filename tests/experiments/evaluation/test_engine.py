"""An evaluation cut in two, answered by plain torch, equals the evaluation of the model in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import choices
import pytest
import torch
from tolerances import near
from transformers import AutoModelForCausalLM

from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.experiments.evaluation import EvaluationResult, Settings, evaluate_model
from adapterswap.experiments.evaluation.engine import Engine, Job, Loadable
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.requests import Answer, Generation, Likelihood, Request
from adapterswap.kit.errors import ArgumentError

WRITE, CHOOSE = "mgsm_direct_sw", choices.TASK


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = choices.write_task(tmp_path_factory.mktemp("choices"))
    return Settings(num_fewshot=1, limit=3, max_gen_toks=12, include_path=folder)


def answer(model: Any, tokenizer: Any, request: Request) -> Answer:
    """The answer by plain torch, one token after the other."""
    tokens = list(request.tokens)
    if isinstance(request, Likelihood):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        scored = list(enumerate(tokens))[-request.scored :]
        total = sum(float(logits[place - 1, token]) for place, token in scored)
        return total, all(int(logits[place - 1].argmax()) == token for place, token in scored)
    new: list[int] = []
    while len(new) < request.limit and not any(word in tokenizer.decode(new) for word in request.stop):
        with torch.no_grad():
            new.append(int(model(torch.tensor([tokens + new])).logits[0, -1].argmax()))
        if new[-1] in request.ends:
            break
    return tuple(new)


class Torch(Engine):
    """An engine that answers the newest request first, with models that differ by their last norm."""

    def __init__(self, base: Path) -> None:
        self.tokenizer = OpenedBase.open(str(base)).tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.norm = self.model.model.norm.weight.data.clone()
        self.queued: list[tuple[str, Request]] = []
        self.keys: set[str] = set()
        self.most = 0

    @property
    def described(self) -> dict[str, Any]:
        return {}

    def put(self, key: str, subject: Loadable) -> None:
        self.keys.add(key)
        self.most = max(self.most, len(self.keys))

    def ask(self, key: str, request: Request) -> None:
        self.queued.append((key, request))

    def answers(self) -> Iterator[tuple[str, Request, Answer]]:
        key, request = self.queued.pop()
        assert key in self.keys
        yield key, request, answer(self.as_named(key), self.tokenizer, request)

    def drop(self, key: str) -> None:
        self.keys.remove(key)
        self.queued = [one for one in self.queued if one[0] != key]

    def as_named(self, key: str) -> Any:
        generator = torch.Generator().manual_seed(int(key))
        self.model.model.norm.weight.data = self.norm + torch.randn(self.norm.shape, generator=generator)
        return self.model


@pytest.fixture
def engine(byte_base: Path) -> Torch:
    return Torch(byte_base)


@contextmanager
def nothing(places: list[str], key: str) -> Iterator[Loadable]:
    places.append(key)
    yield None
    places.remove(key)


def jobs(base: Path, task: str, settings: Settings, places: list[str], *, alone: str = "") -> list[Job]:
    exam = Exam.load((task,), settings, OpenedBase.open(str(base)))

    def opened(key: str) -> AbstractContextManager[Loadable]:
        return nothing(places, key)

    return [Job(key, partial(opened, key), exam, alone=alone == key) for key in "01234"]


def same(one: EvaluationResult, other: EvaluationResult) -> None:
    assert [sample.prompt for sample in one.samples] == [sample.prompt for sample in other.samples]
    for ours, theirs in zip(one.samples, other.samples, strict=True):
        assert (ours.cut, ours.answers.keys()) == (theirs.cut, theirs.answers.keys())
        if isinstance(ours.output, str):
            assert ours.output == theirs.output
        else:
            for (value, greedy), (reference, is_greedy) in zip(ours.output, theirs.output, strict=True):
                assert greedy == is_greedy
                assert value == near(reference, depth=6)


@pytest.mark.parametrize("tasks", [(WRITE, CHOOSE), (CHOOSE, WRITE)])
def test_cut_outputs_are_counted_beside_likelihoods(
    tasks: tuple[str, ...], engine: Torch, byte_base: Path, settings: Settings
) -> None:
    """In both engines, for each request; the reference is the number of tokens that plain torch wrote."""
    exam = Exam.load(tasks, settings, OpenedBase.open(str(byte_base)))
    job = Job("0", partial(nothing, [], "0"), exam)
    ((result, _),) = engine.evaluate([job])
    written = [one for one in exam.requests if isinstance(one, Generation)]
    lengths = [len(answer(engine.as_named("0"), engine.tokenizer, one)) for one in written]
    cut = [length == one.limit for length, one in zip(lengths, written, strict=True)]
    assert any(cut)
    in_memory = evaluate_model(engine.as_named("0"), engine.tokenizer, tasks, settings)
    for one in (result, in_memory):
        assert [sample.cut for sample in one.samples if sample.task == WRITE] == cut
        assert (one.tasks[WRITE].cut, one.tasks[CHOOSE].cut) == (sum(cut), None)
        assert all(type(sample.output) in (str, list) for sample in one.samples)


def test_sampled_outputs_of_equal_prompts_are_cut_one_by_one(
    engine: Torch, byte_base: Path, settings: Settings
) -> None:
    """Two tasks with the same prompts, whose answers are drawn: each is counted by its own answer."""
    tasks, limit = (WRITE, f"{WRITE}@1"), 6
    drawn = replace(settings, max_gen_toks=limit, gen_kwargs={"do_sample": True, "temperature": 0.5})
    exam = Exam.load(tasks, drawn, OpenedBase.open(str(byte_base)))
    lengths = [limit, 2, 2, limit, 2, limit]  # tokens of each answer
    word, end = engine.tokenizer("a")["input_ids"][0], exam.requests[0].ends[0]
    answers = {
        request: (word,) * limit if length == limit else (word, end)
        for request, length in zip(exam.requests, lengths, strict=True)
    }
    result = exam.scores(answers, {})
    assert sorted(sample.cut for sample in result.samples) == [False] * 3 + [True] * 3
    assert sum(task.cut or 0 for task in result.tasks.values()) == 3
    for sample in result.samples:
        assert sample.cut == (len(sample.output) == limit)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", [WRITE, CHOOSE])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_halves_give_the_whole(
    task: str, in_flight: int, engine: Torch, byte_base: Path, settings: Settings
) -> None:
    places: list[str] = []
    work = jobs(byte_base, task, settings, places)
    results = list(engine.evaluate(work, in_flight=in_flight))
    assert (engine.keys, places, engine.most) == (set(), [], in_flight)
    for job, (result, seconds) in zip(work, results, strict=True):
        same(result, evaluate_model(engine.as_named(job.key), engine.tokenizer, [task], settings))
        assert set(seconds) == {"switch", "evaluate"}
    assert len({str([sample.output for sample in result.samples]) for result, _ in results}) > 2


def test_a_job_that_must_be_alone_is(byte_base: Path, settings: Settings) -> None:
    beside: dict[str, set[str]] = {}

    class Watched(Torch):
        def put(self, key: str, subject: Loadable) -> None:
            super().put(key, subject)
            for one in self.keys:
                beside.setdefault(one, set()).update(self.keys)

    list(Watched(byte_base).evaluate(jobs(byte_base, CHOOSE, settings, [], alone="2"), in_flight=4))
    assert beside["2"] == {"2"}
    assert beside["0"] == {"0", "1"}


def test_what_is_abandoned_is_dropped(engine: Torch, byte_base: Path, settings: Settings) -> None:
    places: list[str] = []
    results = engine.evaluate(jobs(byte_base, CHOOSE, settings, places), in_flight=3)
    next(results)
    results.close()
    assert (engine.keys, engine.queued, places) == (set(), [], [])


def test_equal_requests_are_asked_once_unless_sampled(byte_base: Path, settings: Settings) -> None:
    base = OpenedBase.open(str(byte_base))
    greedy = Exam.load((WRITE, f"{WRITE}@1"), settings, base).requests
    assert len(greedy) == 3
    drawn = replace(settings, gen_kwargs={"do_sample": True, "temperature": 0.5})
    sampled = Exam.load((WRITE,), drawn, base).requests
    seeds = [one.seed for one in sampled if isinstance(one, Generation)]
    assert len(set(seeds)) == 3
    assert all(isinstance(one, Generation) and dict(one.sampling)["temperature"] == 0.5 for one in sampled)


def test_what_does_not_fit_is_refused_before_an_engine_is_asked(byte_base: Path) -> None:
    exam = Exam.load((WRITE,), Settings(limit=1, max_gen_toks=20000), OpenedBase.open(str(byte_base)))
    with pytest.raises(ArgumentError) as refusal:
        assert exam.requests
    assert refusal.value.found[0].parameter == "max_gen_toks"


def test_compositions_are_written_without_the_packages_of_servers() -> None:
    """The `eval` extra is enough for a sweep in transformers that merges cells with `full_rank`."""
    code = "import sys\nsys.modules['starlette'] = None\nfrom adapterswap.experiments.evaluation.engine import written"
    subprocess.run([sys.executable, "-c", code], check=True)
