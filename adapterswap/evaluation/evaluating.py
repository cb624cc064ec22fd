"""Evaluate a loaded model on tasks, any number of times, and leave it unchanged.

Only the tasks' data are cached between calls, so a PeftModel can be evaluated again whenever its composition changes.
Knows nothing of adapters or files, and prints nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adapterswap.errors import RunError
from adapterswap.evaluation.isolation import compiled_once, restored_modes, seeded, silenced
from adapterswap.evaluation.languages import require_lingua
from adapterswap.evaluation.results import EvaluationResult, Sample, Score, TaskResult
from adapterswap.evaluation.settings import Settings
from adapterswap.evaluation.stock_tasks import explained_task_errors
from adapterswap.evaluation.task_code import rendering
from adapterswap.evaluation.tasks import load_tasks, require_lm_eval
from adapterswap.evaluation.texts import check_texts
from adapterswap.evaluation.unsafe_code import code_allowed
from adapterswap.processes import Processes

if TYPE_CHECKING:
    from adapterswap.evaluation.harness import EvaluatedModel

__all__ = ["evaluate", "surroundings"]


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
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
        tasks: see `load_tasks`.
        settings: see `Settings`, whose defaults apply otherwise.
        documents: task → the numbers of the documents to evaluate, at least one; by default all within
            `settings.limit`. Random shots are drawn for these documents alone.
        processes: the processes that evaluate together, from `adapterswap.processes.joined`; by default this one alone.
            All call this function with the same model and arguments, and each answers its share of the batches.
        on_progress: called with the number of finished requests and the total; first with 0, when the prompts are
            built. It assumes that other processes are as far as this one.

    Returns:
        Scores with standard errors, and every sample: the same in each process, for any number of processes.

    Raises:
        AdapterswapError: see `load_tasks`, `Settings.check` and `check_texts`.
        ArgumentError: a prompt and its output do not fit into the model's context.
        DataError: a task cannot make a prompt of a document, or cannot score it.
        RunError: the device runs out of memory.
    """
    require_lm_eval()
    settings = settings or Settings()
    settings.check(tokenizer)
    loaded = load_tasks(tasks, settings)
    if settings.language_fidelity:
        require_lingua()

    import torch
    from lm_eval import evaluator

    from adapterswap.evaluation.harness import EvaluatedModel

    # The harness numbers the documents in the given order, and takes an empty list for all.
    requested_documents = None if documents is None else {task: sorted(documents[task]) for task in loaded["tasks"]}
    processes = processes or Processes()
    done = 0

    def begin() -> None:
        assert on_progress is not None
        if done == 0:
            on_progress(0, sum(len(task.instances or ()) for task in loaded["tasks"].values()))

    def step() -> None:
        nonlocal done
        total = sum(len(task.instances or ()) for task in loaded["tasks"].values())
        done = min(done + processes.count, total)
        assert on_progress is not None
        on_progress(done, total)

    with ExitStack() as stack:
        stack.enter_context(restored_modes(model))
        stack.enter_context(silenced())
        stack.enter_context(rendering(sandboxed=settings.sandboxed))
        stack.enter_context(compiled_once())
        stack.enter_context(seeded(settings.seed))
        stack.enter_context(code_allowed(settings.confirm_run_unsafe_code))
        stack.enter_context(explained_task_errors(loaded["tasks"]))
        harness_model = EvaluatedModel(
            model,
            tokenizer if tokenizer.pad_token_id is not None else copy.deepcopy(tokenizer),  # the harness sets one
            batch_size=settings.batch_size,
            max_gen_toks=settings.max_gen_toks,
            truncate=settings.truncate,
            seed=settings.seed,
            processes=processes,
            check=lambda: check_texts(loaded["tasks"]),
            on_begin=begin if on_progress else None,
            on_progress=step if on_progress else None,
        )
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(settings.seed)
        try:
            harness_results = evaluator.evaluate(
                harness_model,
                loaded,
                limit=settings.limit if requested_documents is None else None,
                samples=requested_documents,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.apply_chat_template,
                system_instruction=settings.system_instruction,
                confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            )
        except torch.OutOfMemoryError:
            raise RunError(
                f"the device ran out of memory at batch_size {settings.batch_size}",
                "Lower `batch_size`, or load the base in a smaller dtype",
                parameter="batch_size",
            ) from None
        for task in loaded["tasks"].values():
            task._instances = None  # the tasks are kept, their outputs need not be
    described = {"tasks": list(loaded["tasks"]), **settings.described(), **surroundings(model)}
    # All processes have the same results, unless a task runs generated code: the main process decides.
    result = _collect(harness_results, harness_model, described)
    return processes.from_main(_with_languages(result, loaded["tasks"]) if settings.language_fidelity else result)


def _with_languages(result: EvaluationResult, tasks: Mapping[str, Any]) -> EvaluationResult:
    """The result with the share of each answer that is in its task's language."""
    from adapterswap.evaluation.languages import METRIC, language_of, language_share, writes_language

    metric, filter_name = METRIC
    shares: dict[str, list[float]] = {}
    samples = []
    for sample in result.samples:
        language = language_of(sample.task) if writes_language(sample.task, tasks[sample.task]) else None
        text = sample.output if isinstance(sample.output, str) else ""
        share = None if language is None else language_share(text, language)
        if share is not None:
            shares.setdefault(sample.task, []).append(share)
            sample = replace(sample, scores={**sample.scores, filter_name: {metric: share}})
        samples.append(sample)
    scored = dict(result.tasks)
    for name, values in shares.items():
        mean, number = math.fsum(values) / len(values), len(values)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1)) if number > 1 else None
        score = Score(metric, filter_name, mean, None if spread is None else spread / math.sqrt(number), True)
        scored[name] = replace(scored[name], scores=(*scored[name].scores, score))
    return replace(result, tasks=scored, samples=tuple(samples))


def surroundings(model: Any) -> dict[str, Any]:
    """What outputs depend on besides the settings, including the model's own generation settings."""
    from importlib.metadata import version

    generation = model.generation_config.to_diff_dict()
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "generation_config": {key: value for key, value in generation.items() if key != "transformers_version"},
        "versions": {name: version(name) for name in ("lm_eval", "peft", "torch", "transformers")},
    }


def _collect(
    harness_results: Mapping[str, Any], model: EvaluatedModel, settings: Mapping[str, Any]
) -> EvaluationResult:
    """The harness's nested dictionaries as an `EvaluationResult`."""
    from adapterswap.evaluation.batches import request_key

    samples: dict[str, dict[int, Sample]] = {}
    truncated: dict[str, int] = {}
    for task, rows in harness_results["samples"].items():
        merged: dict[int, Sample] = {}
        for row in rows:
            arguments = row["arguments"][0]
            generated = len(arguments) > 1 and isinstance(arguments[1], dict)
            key = request_key(*arguments[:2]) if generated else ""
            is_first = row["doc_id"] not in merged
            sample = merged.setdefault(row["doc_id"], _sample(task, row, cut=key in model.cut))
            _add_filter(sample, row)
            truncated[task] = truncated.get(task, 0) + (is_first and key in model.truncated)
        samples[task] = merged
    # A group without a mean of its own is among the results too, but empty.
    tasks = {
        name: _task_result(name, harness_results, samples[name], truncated[name], model.max_gen_toks)
        for name in harness_results["results"]
        if name in samples
    }
    groups = {
        name: _task_result(name, harness_results, {}, 0, model.max_gen_toks)
        for name in harness_results.get("groups", {})
    }
    ordered = tuple(sample for merged in samples.values() for _, sample in sorted(merged.items()))
    return EvaluationResult(tasks=tasks, samples=ordered, settings=settings, groups=groups)


def _sample(task: str, row: Mapping[str, Any], *, cut: bool) -> Sample:
    responses = [responses[0] for responses in row["resps"]]
    return Sample(
        task=task,
        doc_id=int(row["doc_id"]),
        doc=dict(row["doc"]),
        prompt=str(row["arguments"][0][0]),
        target=str(row["target"]),
        output=responses[0] if len(responses) == 1 else responses,
        answers={},
        scores={},
        cut=cut,
    )


def _add_filter(sample: Sample, row: Mapping[str, Any]) -> None:
    """Add one of the harness's rows for a document: a filter's answer and its metrics."""
    from adapterswap.evaluation.answers import answer_text

    assert isinstance(sample.answers, dict)
    assert isinstance(sample.scores, dict)
    answers = [answer_text(answer) for answer in row["filtered_resps"]]
    sample.answers[row["filter"]] = answers[0] if len(answers) == 1 else str(answers)
    numbers = {metric: row[metric] for metric in row["metrics"]}
    sample.scores[row["filter"]] = {
        metric: float(value) for metric, value in numbers.items() if isinstance(value, int | float)
    }


def _task_result(
    name: str, harness_results: Mapping[str, Any], samples: Mapping[int, Sample], truncated: int, max_gen_toks: int
) -> TaskResult:
    from adapterswap.evaluation.harness import output_limit

    numbers = harness_results["results"][name]
    scores = []
    for key, value in numbers.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = numbers.get(f"{metric}_stderr,{filter_name}")
        better = (harness_results["higher_is_better"].get(name) or {}).get(metric)
        scores.append(
            Score(metric, filter_name, float(value), stderr if isinstance(stderr, float) else None, better is not False)
        )
    config = harness_results["configs"].get(name, {})
    generates = config.get("output_type") == "generate_until"
    shots = harness_results["n-shot"].get(name)
    return TaskResult(
        name=name,
        # The harness counts scores, so its number is 0 for a task without any.
        num_docs=int(numbers.get("sample_len", harness_results["n-samples"].get(name, {}).get("effective", 0)))
        or len(samples),
        num_fewshot=int(shots or 0) if samples or shots is not None else None,
        version=str(harness_results["versions"].get(name)),
        scores=tuple(scores),
        cut=sum(sample.cut for sample in samples.values()) if generates else None,
        truncated=truncated,
        max_gen_toks=output_limit(config.get("generation_kwargs"), max_gen_toks) if generates else None,
    )
