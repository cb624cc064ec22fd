"""Evaluate a loaded model on tasks, any number of times, and leave the model and the process unchanged.

Only the tasks' data are cached between calls, so a PeftModel can be evaluated again whenever its composition changes. A
preview of prompts and lengths needs a tokenizer and a config, but no weights.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from adapterswap.core import ModelConfig
from adapterswap.experiments.evaluation.documents import check_documents, check_prompt
from adapterswap.experiments.evaluation.prompts import Vocabulary, chat_prompts
from adapterswap.experiments.evaluation.results import EvaluationResult, Sample, Score, TaskResult, check_texts
from adapterswap.experiments.evaluation.settings import Settings
from adapterswap.experiments.evaluation.stock_tasks import (
    bounded_filters,
    code_allowed,
    explained_task_errors,
    rendering,
)
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, RunError
from adapterswap.kit.processes import Processes

if TYPE_CHECKING:
    from adapterswap.experiments.evaluation.harness import EvaluatedModel


@contextmanager
def restored_modes(model: Any) -> Iterator[None]:
    """Restore the modes of a model's modules; the harness leaves them in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def silenced() -> Iterator[None]:
    """Silence the harness's bars, prints and warnings (it warns of models passed as objects); errors stay."""
    import tqdm  # type: ignore[import-untyped]
    from lm_eval.api import metrics, task

    class NoBar(tqdm.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    logger, bar = logging.getLogger("lm_eval"), tqdm.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    task.tqdm = tqdm.tqdm = NoBar  # bootstrapped standard errors have a bar of their own, and print
    metrics.print = lambda *_: None
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = tqdm.tqdm = bar
        vars(metrics).pop("print", None)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Compile each template of a task once; the harness compiles it for every field of every document."""
    from lm_eval.utils import env

    env.from_string = lru_cache(maxsize=256)(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # makes the class's own method visible again


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch inside the block, and restore their states afterwards."""
    import numpy
    import torch

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@dataclass(frozen=True)
class TaskPreview:
    """One task, before it is run.

    Attributes:
        name: the task.
        num_docs: how many documents would be evaluated.
        num_requests: how many requests they make: one per choice if likelihoods are compared.
        num_fewshot: shots before each document.
        prompt: the first document's prompt.
        longest: the longest prompt in tokens.
        room: tokens that the model's context leaves for an output after the longest prompt; None for tasks that
            generate nothing, and for models without a limit.
        max_gen_toks: the longest output in tokens, by the task's own limit if it has one; None for tasks that generate
            nothing.
        overlong: how many prompts do not fit in the model's context with their continuations, for tasks that compare
            likelihoods.
    """

    name: str
    num_docs: int
    num_requests: int
    num_fewshot: int
    prompt: str
    longest: int
    room: int | None
    max_gen_toks: int | None = None
    overlong: int = 0


def preview(
    tokenizer: Any,
    config: Any,
    tasks: Sequence[str] | LoadedTasks,
    settings: Settings | None = None,
) -> list[TaskPreview]:
    """Build the prompts that `evaluate` would send to a model with this config; the arguments are `evaluate`'s."""
    settings = (settings or Settings()).dated(tokenizer)
    loaded = tasks_to_evaluate(tokenizer, tasks, settings)  # it also says if lm_eval is missing

    from lm_eval.evaluator_utils import get_sample_size
    from lm_eval.models.utils import has_bos_prefix

    from adapterswap.experiments.evaluation.harness import output_limit

    context = settings.max_length or ModelConfig(config.get_text_config().to_dict()).lengths.longest
    vocabulary = Vocabulary(config, tokenizer)
    previews = []
    with (
        silenced(),
        rendering(sandboxed=settings.sandboxed),
        seeded(settings.seed),
        explained_task_errors(loaded.tasks),
    ):
        for name, task in loaded.tasks.items():
            chat_template = None
            if settings.apply_chat_template:
                chat_template = chat_prompts(tokenizer, settings)
            task.set_fewshot_seed(settings.seed)
            task.build_all_requests(
                limit=get_sample_size(task, settings.limit),
                system_instruction=settings.system_instruction,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.apply_chat_template,
                chat_template=chat_template,
            )
            check_texts({name: task})
            requests = task.instances
            task._instances = None
            prompts = [str(request.args[0]) for request in requests]

            # A chat template writes the special tokens itself; elsewhere the harness adds the start token once.
            rendered = settings.apply_chat_template and task.OUTPUT_TYPE != "loglikelihood_rolling"
            begun = rendered or has_bos_prefix(prompts[0], getattr(tokenizer, "bos_token", None))
            encoded = tokenizer(prompts, add_special_tokens=not begun)["input_ids"]
            longest = max(map(len, encoded))

            # Where outputs are generated, how long they may be and what the context leaves for them.
            room = most = None
            if task.OUTPUT_TYPE == "generate_until":
                for request, ids in zip(requests, encoded, strict=True):
                    check_prompt(name, request.doc_id, len(ids))
                most = output_limit(requests[0].args[1], settings.max_gen_toks)
                if context is not None:
                    room = context - longest

            # Where likelihoods are compared, the prompts with their continuations. The last token of one is not read.
            scored = []
            for request in requests:
                if request.request_type == "loglikelihood":
                    scored.append("".join(request.args))
            whole: list[list[int]] = []
            if scored:
                whole = tokenizer(scored, add_special_tokens=not begun)["input_ids"]
            overlong = 0
            if context is not None:
                overlong = sum(len(ids) > context + 1 for ids in whole)

            for ids in (*encoded, *whole):
                vocabulary.check(ids)
            previews.append(
                TaskPreview(
                    name=name,
                    num_docs=len({request.doc_id for request in requests}),
                    num_requests=len(requests),
                    num_fewshot=task.get_config("num_fewshot"),
                    prompt=prompts[0],
                    longest=longest,
                    room=room,
                    max_gen_toks=most,
                    overlong=overlong,
                )
            )
    return previews


def evaluate_model(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] | LoadedTasks,
    settings: Settings | None = None,
    *,
    documents: Mapping[str, Collection[int]] | None = None,
    processes: Processes | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Run lm-evaluation-harness on a causal language model in memory.

    Args:
        model: a transformers model or a PeftModel, on its device. It is evaluated in eval mode; afterwards the modes of
            its modules and the global random generators are restored.
        tokenizer: its tokenizer. It is not changed.
        tasks: see `LoadedTasks.load`.
        settings: see `Settings`, whose defaults apply otherwise.
        documents: task → the numbers of the documents to evaluate, at least one; by default all within
            `settings.limit`. Random shots are drawn for these documents alone.
        processes: the processes that evaluate together, from `Processes.joined`; by default only
            this one.
            All call this function with the same model and arguments, and each answers its share of the batches.
        on_progress: called with the number of finished requests and the total; first with 0, when the prompts are
            built. It assumes that other processes are as far as this one.

    Returns:
        Scores with standard errors, and every sample: the same in each process, for any number of processes.

    Raises:
        AdapterswapError: see `LoadedTasks.load`, `Settings.check` and `check_texts`.
        ArgumentError: a prompt and its output do not fit into the model's context, or `max_length` does not.
        BaseModelError: the model cannot read a text alone, or reads texts in both directions where likelihoods are
            compared.
        DataError: a task cannot make a prompt of a document, or cannot score it.
        RunError: the device runs out of memory.
    """
    import torch

    settings = (settings or Settings()).dated(tokenizer)
    loaded = tasks_to_evaluate(tokenizer, tasks, settings)
    processes = processes or Processes()
    finished = 0

    def report(newly_finished: int) -> None:
        nonlocal finished
        assert on_progress is not None
        total = sum(len(task.instances or ()) for task in loaded.tasks.values())
        finished = min(finished + newly_finished, total)
        on_progress(finished, total)

    def begin() -> None:
        if finished == 0:
            report(0)

    def step() -> None:
        report(processes.count)

    from adapterswap.experiments.evaluation.harness import EvaluatedModel

    with restored_modes(model), harness(loaded.tasks, settings):
        harness_model = EvaluatedModel(
            model,
            padded(tokenizer),
            settings=settings,
            batch_size=settings.batch_size,
            processes=processes,
            check=lambda: check_texts(loaded.tasks),
            on_begin=begin if on_progress else None,
            on_progress=step if on_progress else None,
        )
        try:
            harness_results = run_harness(harness_model, loaded, settings, documents)
        except torch.OutOfMemoryError:
            raise RunError(
                f"The device ran out of memory at batch_size {settings.batch_size}",
                "Lower `batch_size`, or load the base in a smaller dtype",
                parameter="batch_size",
            ) from None

    around = surroundings(model)
    if harness_model.alone:
        around["one_by_one"] = sorted(harness_model.alone)
    # All processes have the same results, unless a task runs generated code: the main process decides.
    return processes.from_main(as_result(harness_results, harness_model, loaded.tasks, settings, around))


def padded(tokenizer: Any) -> Any:
    """A tokenizer that the harness may change: it sets a token for padding if there is none."""
    return tokenizer if tokenizer.pad_token_id is not None else copy.deepcopy(tokenizer)


def tasks_to_evaluate(tokenizer: Any, tasks: Sequence[str] | LoadedTasks, settings: Settings) -> LoadedTasks:
    """The harness's tasks, when everything that needs no model has been checked."""
    require("eval")
    settings.check(tokenizer)
    loaded = LoadedTasks.load(tasks, settings)
    if not isinstance(tasks, LoadedTasks):  # an exam's have been checked
        check_scorable(loaded, settings)
    if settings.language_fidelity:
        require("languages")
    if settings.enable_thinking:
        scored = [name for name, task in loaded.tasks.items() if task.OUTPUT_TYPE != "generate_until"]
        if scored:
            raise ArgumentError(
                f"`enable_thinking` is for answers that are generated, but {', '.join(scored)} compares likelihoods",
                "Evaluate such tasks without it",
                parameter="enable_thinking",
            )
    return loaded


def check_scorable(loaded: LoadedTasks, settings: Settings) -> None:
    """Refuse tasks with documents that cannot be scored: see `check_documents`."""
    with (
        silenced(),
        rendering(sandboxed=settings.sandboxed),
        compiled_once(),
        explained_task_errors(loaded.tasks),
    ):
        check_documents(loaded.tasks, settings.limit)


@contextmanager
def harness(tasks: Mapping[str, Any], settings: Settings) -> Iterator[None]:
    """The harness as it runs here: silent, seeded, and with explained errors."""
    with ExitStack() as stack:
        stack.enter_context(silenced())
        stack.enter_context(rendering(sandboxed=settings.sandboxed))
        stack.enter_context(compiled_once())
        stack.enter_context(seeded(settings.seed))
        stack.enter_context(code_allowed(settings.confirm_run_unsafe_code))
        stack.enter_context(explained_task_errors(tasks))
        if settings.sandboxed:
            stack.enter_context(bounded_filters(tasks))
        yield


def run_harness(
    model: EvaluatedModel, loaded: LoadedTasks, settings: Settings, documents: Mapping[str, Collection[int]] | None
) -> Mapping[str, Any]:
    """The harness's results; for `documents` see `evaluate_model`."""
    from lm_eval import evaluator

    # The harness numbers the documents in the given order, and takes an empty list to mean all.
    limit, requested_documents = settings.limit, None
    if documents is not None:
        limit = None
        requested_documents = {name: sorted(documents[name]) for name in loaded.tasks}

    for task in loaded.tasks.values():
        task.set_fewshot_seed(settings.seed)
    try:
        results: Mapping[str, Any] = evaluator.evaluate(
            model,
            {"tasks": loaded.tasks, "groups": loaded.groups},
            limit=limit,
            samples=requested_documents,
            apply_chat_template=settings.apply_chat_template,
            fewshot_as_multiturn=settings.apply_chat_template,
            system_instruction=settings.system_instruction,
            confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
        )
    finally:
        for task in loaded.tasks.values():
            task._instances = None  # the tasks are kept, their outputs need not be
    return results


def as_result(
    harness_results: Mapping[str, Any],
    model: EvaluatedModel,
    tasks: Mapping[str, Any],
    settings: Settings,
    around: Mapping[str, Any],
) -> EvaluationResult:
    """The harness's nested dictionaries as an `EvaluationResult`; `around` is what outputs depend on besides the
    settings.
    """
    from adapterswap.experiments.evaluation.harness import request_key

    # A task has a row for each document and filter. A document counts as truncated once, however many filters read it.
    samples: dict[str, dict[int, Sample]] = {}
    truncated: dict[str, int] = {}
    for name, rows in harness_results["samples"].items():
        by_document = samples[name] = {}
        cut_prompts = set()
        for row in rows:
            doc_id = row["doc_id"]
            if doc_id not in by_document:
                by_document[doc_id] = _sample(name, row)
                for arguments in row["arguments"]:
                    if len(arguments) > 1 and request_key(*arguments[:2]) in model.truncated:
                        cut_prompts.add(doc_id)
            _add_filter(by_document[doc_id], row)
        truncated[name] = len(cut_prompts)

    # A group without a mean of its own is among the results too, but empty.
    task_results = {}
    for name in harness_results["results"]:
        if name in samples:
            task_results[name] = _task_result(name, harness_results, samples[name], truncated[name], model.max_gen_toks)
    groups = {}
    for name in harness_results.get("groups", {}):
        groups[name] = _task_result(name, harness_results, {}, 0, model.max_gen_toks)

    ordered: list[Sample] = []
    for by_document in samples.values():
        ordered += [by_document[doc_id] for doc_id in sorted(by_document)]
    result = EvaluationResult(
        tasks=task_results,
        samples=tuple(ordered),
        settings={"tasks": list(tasks), **settings.described(), **around},
        groups=groups,
    )
    if settings.language_fidelity:
        result = _with_languages(result, tasks)
    return result


def _with_languages(result: EvaluationResult, tasks: Mapping[str, Any]) -> EvaluationResult:
    """The result with the share of each answer that is in its task's language."""
    from adapterswap.experiments.evaluation.languages import METRIC, language_of, language_share, writes_language

    metric, filter_name = METRIC
    shares: dict[str, list[float]] = {}
    samples = []
    for sample in result.samples:
        language = language_of(sample.task)
        if language is not None and writes_language(sample.task, tasks[sample.task]):
            text = sample.output if isinstance(sample.output, str) else ""
            share = language_share(text, language)
            if share is not None:
                shares.setdefault(sample.task, []).append(share)
                sample = replace(sample, scores={**sample.scores, filter_name: {metric: share}})
        samples.append(sample)

    # Each task's mean, with its standard error s/√n; of a single answer there is none.
    scored = dict(result.tasks)
    for name, values in shares.items():
        number = len(values)
        mean = math.fsum(values) / number
        stderr = None
        if number > 1:
            variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
            stderr = math.sqrt(variance) / math.sqrt(number)
        score = Score(metric, filter_name, mean, stderr, True)
        scored[name] = replace(scored[name], scores=(*scored[name].scores, score))
    return replace(result, tasks=scored, samples=tuple(samples))


def surroundings(model: Any, tasks: Iterable[Any] = ()) -> dict[str, Any]:
    """What outputs depend on besides the settings, including the model's own generation settings.

    Args:
        model: the model.
        tasks: the harness's tasks that it will be asked in batches: `one_by_one` then has the kinds of requests for
            which it cannot be.
    """
    from importlib.metadata import version

    from adapterswap.engines.live import Reading

    # Generation pads batches on the left, likelihoods on the right.
    alone = set()
    for task in tasks:
        reading = Reading.of(model)
        if task.OUTPUT_TYPE == "generate_until":
            if not reading.left:
                alone.add("generate_until")
        elif not reading.right:
            is_rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
            alone.add("loglikelihood_rolling" if is_rolling else "loglikelihood")

    generation = model.generation_config.to_diff_dict()
    generation.pop("transformers_version", None)  # it is among the versions
    around: dict[str, Any] = {}
    if alone:
        around["one_by_one"] = sorted(alone)
    around["dtype"] = str(model.dtype).removeprefix("torch.")
    around["device"] = model.device.type
    around["generation_config"] = generation
    around["versions"] = {name: version(name) for name in ("lm_eval", "peft", "torch", "transformers")}
    return around


def _sample(task: str, row: Mapping[str, Any]) -> Sample:
    """A document's sample, without answers and scores; `row` is any of the harness's rows for it."""
    from adapterswap.experiments.evaluation.harness import CutOutput

    # The harness has several responses to a request if a task repeats it; the first one stands for it.
    responses: list[Any] = []
    is_cut = False
    for first, *more in row["resps"]:
        responses.append(str(first) if isinstance(first, str) else first)
        is_cut = is_cut or any(isinstance(output, CutOutput) for output in (first, *more))

    # Several requests, each with a continuation, are the choices of one question.
    choices = []
    if len(responses) > 1 and all(len(arguments) > 1 for arguments in row["arguments"]):
        for arguments in row["arguments"]:
            if isinstance(arguments[1], str):
                choices.append(arguments[1].strip())

    return Sample(
        task=task,
        doc_id=int(row["doc_id"]),
        doc=dict(row["doc"]),
        prompt=str(row["arguments"][0][0]),
        target=str(row["target"]),
        output=responses[0] if len(responses) == 1 else responses,
        answers={},
        scores={},
        cut=is_cut,
        choices=tuple(choices),
    )


def _add_filter(sample: Sample, row: Mapping[str, Any]) -> None:
    """Add one of the harness's rows for a document: a filter's answer and its metrics."""
    from adapterswap.experiments.evaluation.answers import answer_text

    assert isinstance(sample.answers, dict)
    assert isinstance(sample.scores, dict)

    answers = [answer_text(answer) for answer in row["filtered_resps"]]
    sample.answers[row["filter"]] = answers[0] if len(answers) == 1 else str(answers)

    scores = {}
    for metric in row["metrics"]:
        if isinstance(row[metric], int | float):
            scores[metric] = float(row[metric])
    sample.scores[row["filter"]] = scores


def _task_result(
    name: str, harness_results: Mapping[str, Any], samples: Mapping[int, Sample], truncated: int, max_gen_toks: int
) -> TaskResult:
    """The harness's numbers for a task, or for a group, which has no samples."""
    from adapterswap.experiments.evaluation.harness import output_limit

    numbers = harness_results["results"][name]
    higher_is_better = harness_results["higher_is_better"].get(name) or {}

    # Its keys are `acc,none` and `acc_stderr,none`, beside others without a filter.
    scores = []
    for key, value in numbers.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = numbers.get(f"{metric}_stderr,{filter_name}")
        if not isinstance(stderr, float):
            stderr = None
        scores.append(Score(metric, filter_name, float(value), stderr, higher_is_better.get(metric) is not False))

    # The harness counts scores, so its number of documents is 0 for a task without any.
    effective = harness_results["n-samples"].get(name, {}).get("effective", 0)
    num_docs = int(numbers.get("sample_len", effective)) or len(samples)

    num_fewshot = harness_results["n-shot"].get(name)
    if num_fewshot is not None or samples:
        num_fewshot = int(num_fewshot or 0)

    config = harness_results["configs"].get(name, {})
    cut = most = None
    if config.get("output_type") == "generate_until":
        cut = sum(sample.cut for sample in samples.values())
        most = output_limit(config.get("generation_kwargs"), max_gen_toks)

    return TaskResult(
        name=name,
        num_docs=num_docs,
        num_fewshot=num_fewshot,
        version=str(harness_results["versions"].get(name)),
        scores=tuple(scores),
        cut=cut,
        truncated=truncated,
        max_gen_toks=most,
    )
