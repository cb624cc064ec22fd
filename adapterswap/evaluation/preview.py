"""The prompts of an evaluation without a model: their text, their length, and whether they fit.

Needs a tokenizer and a config, but no weights. Knows nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapterswap.evaluation.isolation import seeded, silenced
from adapterswap.evaluation.settings import Settings
from adapterswap.evaluation.stock_tasks import explained_task_errors
from adapterswap.evaluation.task_code import rendering
from adapterswap.evaluation.tasks import load_tasks
from adapterswap.evaluation.texts import check_texts

__all__ = ["TaskPreview", "preview"]


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
            generate nothing.
        max_gen_toks: the longest output in tokens, by the task's own limit if it has one; None for tasks that generate
            nothing.
    """

    name: str
    num_docs: int
    num_requests: int
    num_fewshot: int
    prompt: str
    longest: int
    room: int | None
    max_gen_toks: int | None = None


def preview(
    tokenizer: Any,
    config: Any,
    tasks: Sequence[str],
    settings: Settings | None = None,
) -> list[TaskPreview]:
    """Build the prompts that `evaluate` would send to a model with this config; the arguments are those of `evaluate`.

    Raises:
        AdapterswapError: as in `evaluate`, except that a prompt that does not fit only shows in `room`.
    """
    settings = settings or Settings()
    settings.check(tokenizer)
    loaded = load_tasks(tasks, settings)

    from lm_eval.evaluator_utils import get_sample_size
    from lm_eval.models.utils import has_bos_prefix, resolve_max_length

    from adapterswap.evaluation.harness import output_limit

    def as_chat(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    context = resolve_max_length(config, tokenizer)
    previews = []
    with (
        silenced(),
        rendering(sandboxed=settings.sandboxed),
        seeded(settings.seed),
        explained_task_errors(loaded["tasks"]),
    ):
        for name, task in loaded["tasks"].items():
            task.set_fewshot_seed(settings.seed)
            task.build_all_requests(
                limit=get_sample_size(task, settings.limit),
                system_instruction=settings.system_instruction,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.apply_chat_template,
                chat_template=as_chat if settings.apply_chat_template else None,
            )
            check_texts({name: task})
            requests, task._instances = task.instances, None
            prompts = [str(request.args[0]) for request in requests]
            # A chat template may already have added the start token: the harness adds it once.
            begun = has_bos_prefix(prompts[0], getattr(tokenizer, "bos_token", None))
            longest = max(map(len, tokenizer(prompts, add_special_tokens=not begun)["input_ids"]))
            generates = task.OUTPUT_TYPE == "generate_until"
            previews.append(
                TaskPreview(
                    name=name,
                    num_docs=len({request.doc_id for request in requests}),
                    num_requests=len(requests),
                    num_fewshot=task.get_config("num_fewshot"),
                    prompt=prompts[0],
                    longest=longest,
                    room=context - longest if generates else None,
                    max_gen_toks=output_limit(requests[0].args[1], settings.max_gen_toks) if generates else None,
                )
            )
    return previews
