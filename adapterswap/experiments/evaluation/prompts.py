"""Prompts as a model gets them: rendered by its chat template, and made of tokens that its embedding has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from adapterswap.experiments.evaluation.settings import Settings
from adapterswap.kit.errors import ArgumentError, BaseModelError

Turn = Mapping[str, str]
_SYSTEM = "system"


def chat_prompts(tokenizer: Any, settings: Settings) -> Callable[..., str]:
    """A function that turns turns into a prompt, as lm-evaluation-harness calls it.

    The harness itself leaves out a system turn that the template refuses. Here that is an error: `ArgumentError`.
    """
    from jinja2 import TemplateError

    template = settings.chat(tokenizer)

    def render(history: Sequence[Turn], add_generation_prompt: bool = True) -> str:
        try:
            return template(
                history,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except TemplateError as error:
            raise _refusal(history, error, settings) from None

    return render


def _refusal(history: Sequence[Turn], error: Exception, settings: Settings) -> ArgumentError:
    """The error for turns that the chat template refuses: a task's own system turn is its description."""
    if history[0].get("role") != _SYSTEM:
        return ArgumentError(
            f"The chat template refuses a prompt: {error}",
            "Leave out `apply_chat_template`, or use another chat template",
            parameter="apply_chat_template",
        )
    if settings.system_instruction is not None:
        return ArgumentError(
            f"The chat template refuses a system turn: {error}",
            "Leave out `system_instruction`, or use a model whose chat template takes system turns",
            parameter="system_instruction",
        )
    return ArgumentError(
        f"The chat template refuses a system turn, which is the task's description: {error}",
        "Leave out `apply_chat_template`, or use a model whose chat template takes system turns",
        parameter="apply_chat_template",
    )


class Vocabulary:
    """The tokens that a model's embedding has rows for.

    Args:
        config: the model's config.
        tokenizer: its tokenizer.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._rows = getattr(config.get_text_config(), "vocab_size", None)
        self._tokenizer = tokenizer
        self.may_lack_rows = self._rows is not None and max(tokenizer.get_vocab().values(), default=0) >= self._rows

    def check(self, ids: Iterable[int]) -> None:
        """Refuse a prompt's ids if one of them has no row: a `BaseModelError` that names the token."""
        if not self.may_lack_rows:
            return
        beyond = max(ids, default=0)
        if self._rows is not None and beyond >= self._rows:
            raise BaseModelError(
                f"A prompt has the token {self._tokenizer.convert_ids_to_tokens(beyond)!r}, whose id is {beyond}, but "
                f"the model's vocabulary has {self._rows} tokens",
                "Use the tokenizer that belongs to the model",
                parameter="base_model",
            )
