"""Evaluate a loaded model on tasks, as often as wanted, and leave it as it was.

Nothing is cached between calls but the tasks' data, so the same PeftModel can be evaluated again and again while its
composition changes. Knows nothing of adapters or files, and prints nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.evaluation.isolation import restored_modes, seeded, silenced
from adapterswap.evaluation.results import EvaluationResult, Sample, Score, TaskResult
from adapterswap.evaluation.tasks import load_tasks, require_lm_eval

if TYPE_CHECKING:
    from adapterswap.evaluation.harness import EvaluatedModel

__all__ = ["SEED", "check_settings", "evaluate"]

SEED = 1234  # lm-evaluation-harness's


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    max_gen_toks: int = 512,
    gen_kwargs: Mapping[str, Any] | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    truncate: bool = False,
    include_path: str | Path | None = None,
    seed: int = SEED,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Run lm-evaluation-harness on a causal language model in memory.

    Args:
        model: a transformers model or a PeftModel, on its device. It is evaluated in eval mode; the modes of its
            modules are put back afterwards, and so are the global random generators.
        tokenizer: its tokenizer. It is not changed.
        tasks: see `load_tasks`.
        num_fewshot: shots before each question; by default each task's own, which is 8 for MGSM.
        limit: only the first documents of each task: their number, or a fraction below 1.
        batch_size: sequences at once. Padding changes sums in their last bits, so compare runs of one batch size.
        max_gen_toks: the longest output in tokens, for tasks that set none of their own (MGSM sets none).
        gen_kwargs: generation settings over the tasks' own (`do_sample`, `temperature`, `max_gen_toks`, …).
        apply_chat_template: give the prompt as a chat, each shot as a turn of its own.
        system_instruction: a text before everything else.
        truncate: let prompts that do not fit lose their beginning, and count them; without it they are refused.
        include_path: a folder with task files of the user's own.
        seed: for the harness's choice of shots (not MGSM's, which is fixed) and for sampling.
        on_progress: called with the requests that are done, and their number.

    Returns:
        Scores with standard errors, and every sample.

    Raises:
        AdapterswapError: see `load_tasks` and `check_settings`; a prompt that does not fit; the device runs out
            of memory.
    """
    require_lm_eval()
    check_settings(tokenizer, limit, batch_size, max_gen_toks, apply_chat_template)
    loaded = load_tasks(tasks, num_fewshot=num_fewshot, gen_kwargs=gen_kwargs, include_path=include_path)

    import torch
    from lm_eval import evaluator

    from adapterswap.evaluation.harness import EvaluatedModel

    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        assert on_progress is not None
        on_progress(done, sum(len(task.instances or ()) for task in loaded["tasks"].values()))

    with ExitStack() as stack:
        stack.enter_context(restored_modes(model))
        stack.enter_context(silenced())
        stack.enter_context(seeded(seed))
        harness_model = EvaluatedModel(
            model,
            tokenizer if tokenizer.pad_token_id is not None else copy.deepcopy(tokenizer),  # the harness sets one
            batch_size=batch_size,
            max_gen_toks=max_gen_toks,
            truncate=truncate,
            on_progress=step if on_progress else None,
        )
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed)
        try:
            found = evaluator.evaluate(
                harness_model,
                loaded,
                limit=limit,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
                system_instruction=system_instruction,
            )
        except torch.OutOfMemoryError:
            raise AdapterswapError(
                f"the device ran out of memory at batch_size {batch_size}",
                "Lower --batch-size, or load a smaller dtype",
            ) from None
        for task in loaded["tasks"].values():
            task._instances = None  # the tasks are kept, their outputs need not be
    if limit is not None and limit >= 1:
        limit = int(limit)
    settings = {
        "tasks": list(loaded["tasks"]),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "batch_size": batch_size,
        "max_gen_toks": max_gen_toks,
        "gen_kwargs": dict(gen_kwargs or {}),
        "apply_chat_template": apply_chat_template,
        "system_instruction": system_instruction,
        "truncate": truncate,
        "seed": seed,
        **_surroundings(model),
    }
    return _collect(found, harness_model, settings)


def check_settings(
    tokenizer: Any, limit: float | None, batch_size: int, max_gen_toks: int, apply_chat_template: bool
) -> None:
    """Raise `AdapterswapError` for settings of `evaluate` that cannot be meant, all of them together."""
    problems = Problems()
    # The harness takes 0 as no limit at all, and 2.5 as 2.
    if limit is not None and not (0 < limit < 1 or (math.isfinite(limit) and limit >= 1 and limit == int(limit))):
        problems.add(
            f"the limit {limit:g} is neither a number of documents nor a fraction of them",
            "Give a whole number from 1 on, or a fraction between 0 and 1",
        )
    for name, value in (("batch_size", batch_size), ("max_gen_toks", max_gen_toks)):
        if value < 1:
            problems.add(f"{name} is {value}", "Give 1 or more")
    if tokenizer.eos_token_id is None:
        problems.add("the tokenizer has no end-of-sequence token", "Set eos_token in its tokenizer_config.json")
    if apply_chat_template and not tokenizer.chat_template:
        problems.add("the tokenizer has no chat template", "Evaluate without one, or give the base its template")
    problems.raise_if_any()


def _surroundings(model: Any) -> dict[str, Any]:
    """What else an output depends on; the model's own generation settings (a repetition penalty, say) hold too."""
    from importlib.metadata import version

    generation = model.generation_config.to_diff_dict()
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "generation_config": {key: value for key, value in generation.items() if key != "transformers_version"},
        "versions": {name: version(name) for name in ("lm_eval", "peft", "torch", "transformers")},
    }


def _collect(found: Mapping[str, Any], model: EvaluatedModel, settings: Mapping[str, Any]) -> EvaluationResult:
    """The harness's nested dictionaries as our result."""
    from adapterswap.evaluation.harness import request_key

    samples: dict[str, dict[int, Sample]] = {}
    truncated: dict[str, int] = {}
    for task, rows in found["samples"].items():
        merged: dict[int, Sample] = {}
        for row in rows:
            arguments = row["arguments"][0]
            generated = len(arguments) > 1 and isinstance(arguments[1], dict)
            key = request_key(*arguments[:2]) if generated else ""
            first = row["doc_id"] not in merged
            sample = merged.setdefault(row["doc_id"], _sample(task, row, cut=key in model.cut))
            _add_filter(sample, row)
            truncated[task] = truncated.get(task, 0) + (first and key in model.truncated)
        samples[task] = merged
    names = found["results"].keys() - found.get("groups", {}).keys()
    tasks = {
        name: _task_result(name, found, samples[name], truncated[name]) for name in found["results"] if name in names
    }
    groups = {name: _task_result(name, found, {}, 0) for name in found.get("groups", {})}
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
    """One of the harness's rows for a document: what one filter took from its output, and the metrics of that."""
    from adapterswap.evaluation.answers import answer_text

    assert isinstance(sample.answers, dict)
    assert isinstance(sample.scores, dict)
    answers = [answer_text(answer) for answer in row["filtered_resps"]]
    sample.answers[row["filter"]] = answers[0] if len(answers) == 1 else str(answers)
    numbers = {metric: row[metric] for metric in row["metrics"]}
    sample.scores[row["filter"]] = {
        metric: float(value) for metric, value in numbers.items() if isinstance(value, int | float)
    }


def _task_result(name: str, found: Mapping[str, Any], samples: Mapping[int, Sample], truncated: int) -> TaskResult:
    numbers = found["results"][name]
    scores = []
    for key, value in numbers.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = numbers.get(f"{metric}_stderr,{filter_name}")
        better = (found["higher_is_better"].get(name) or {}).get(metric)
        scores.append(
            Score(metric, filter_name, float(value), stderr if isinstance(stderr, float) else None, better is not False)
        )
    generates = found["configs"].get(name, {}).get("output_type") == "generate_until"
    return TaskResult(
        name=name,
        num_docs=int(numbers.get("sample_len", found["n-samples"].get(name, {}).get("effective", 0))),
        num_fewshot=int(found["n-shot"].get(name) or 0),
        version=str(found["versions"].get(name)),
        scores=tuple(scores),
        cut=sum(sample.cut for sample in samples.values()) if generates else None,
        truncated=truncated,
    )
