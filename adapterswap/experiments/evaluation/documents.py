"""Documents of tasks that cannot be scored: they are found before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from adapterswap.kit.errors import DataError, Problems
from adapterswap.kit.files.text import shown

_REMEDY = "Correct the task's file (`doc_to_choice`, `doc_to_target`) or its data"


def check_documents(tasks: Mapping[str, Any], limit: float | None) -> None:
    """Refuse documents of tasks that compare likelihoods, if nothing can be compared or nothing would be right.

    Args:
        tasks: the harness's tasks, by name.
        limit: the most documents of each task, as the harness takes it.

    Raises:
        DataError: a document has no choices, a choice or a target without text, or a target that is no choice.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator_utils import get_sample_size

    problems = Problems(DataError)
    for name, task in tasks.items():
        is_compared = task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood")
        if not (is_compared and isinstance(task, ConfigurableTask)):  # others make their requests in code
            continue
        for number, document in enumerate(islice(task.eval_docs, get_sample_size(task, limit))):
            for message in _mistakes(task, document):
                problems.add(f"{name}: {message} in document {number}", _REMEDY, parameter="tasks")
    problems.raise_if_any()


def check_prompt(task: str, document: int, tokens: int) -> None:
    """Refuse a prompt without tokens, after which no model can write."""
    if not tokens:
        raise DataError(
            f"{task}: the prompt of document {document} has no tokens",
            "Correct the task's file (`doc_to_text`) or its data, or pass `apply_chat_template`",
            parameter="tasks",
        )


def _mistakes(task: Any, document: Any) -> Iterator[str]:
    """Why a document cannot be scored."""
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "loglikelihood":
        if target == "":
            yield "the target has no text"
        return

    choices = task.doc_to_choice(document)
    if not choices:
        yield "there are no choices"
        return
    if any(choice == "" for choice in choices):
        yield f"one of the choices has no text, {shown(list(choices))},"

    # A task with several contexts has the choices there, and its target follows each of them.
    if task.multiple_input:
        if target == "":
            yield "the target has no text"
        target = task.doc_to_text(document)
    targets = target if isinstance(target, list) else [target]
    is_scored_by_code = callable(task.config.process_results)
    if not is_scored_by_code and not any(_is_choice(one, choices) for one in targets):
        yield f"the target {shown(target)} is none of the choices {shown(list(choices))}"


def _is_choice(target: Any, choices: Any) -> bool:
    """Whether a target is the number of a choice, or its text."""
    if isinstance(target, int | float):
        return target in range(len(choices))
    return target in choices
