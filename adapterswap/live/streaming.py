"""Answer one prompt by several compositions in one batch, and stream the answers token by token.

Knows the composer and transformers' generation, but not who reads the answers. Decoding is greedy, so an answer depends
only on the model, the composition and the prompt.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from adapterswap.errors import AdapterswapError, ArgumentError, RunError

if TYPE_CHECKING:
    from adapterswap.live.catalogue import Composable
    from adapterswap.live.composer import LiveComposer

__all__ = ["Answers", "stream"]

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Answers:
    """The answers of several compositions so far.

    Attributes:
        texts: a text for each composition, without special tokens.
        tokens: the number of tokens in each answer, without the end-of-sequence token.
        ended: whether each answer has reached its end-of-sequence token.
        switch_seconds: how long setting the compositions took.
        first_seconds: the time to the first token, including setting the compositions; None before it.
        seconds: the time so far, including setting the compositions.
        done: whether this is the last update.
    """

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    ended: tuple[bool, ...]
    switch_seconds: float = 0.0
    first_seconds: float | None = None
    seconds: float = 0.0
    done: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of all answers together; None before the first token."""
        return sum(self.tokens) / self.seconds if self.seconds and sum(self.tokens) else None


def stream(
    composer: LiveComposer,
    tokenizer: Any,
    prompt: str,
    compositions: Sequence[Composable],
    *,
    max_new_tokens: int = 64,
    chat: bool = False,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    stopped: threading.Event | None = None,
) -> Iterator[Answers]:
    """Answer one prompt by several compositions at once, and yield the answers so far after every token.

    The model computes in a separate thread while the caller reads. Closing the iterator ends the generation at the next
    token.

    Args:
        composer: the model's composer.
        tokenizer: the model's tokenizer.
        prompt: the text to answer.
        compositions: one for each answer; None and `base` are the base.
        max_new_tokens: the most tokens of an answer; fewer if the model's context ends earlier.
        chat: put the prompt into the tokenizer's chat template, as the user's message.
        turn: returns a context manager to hold while the model computes: a lock, if others use the model too.
        stopped: an event that ends the generation at the next token, or before it begins, once it is set.

    Raises:
        ArgumentError: there is no composition; the prompt is empty or fills the context; `max_new_tokens` is below 1;
            the tokenizer has no chat template.
        CompositionError, UnsupportedError: see `LiveComposer.use_rows`.
        RunError: the device runs out of memory.
    """
    ids = _ids(tokenizer, prompt, chat=chat)
    allowed = _allowed(composer, ids, max_new_tokens)
    if not compositions:
        raise ArgumentError("`compositions` is empty", "Pass at least one composition", parameter="compositions")
    news: queue.Queue[Answers | BaseException | None] = queue.Queue()
    closed = threading.Event()

    def is_stopped() -> bool:
        return closed.is_set() or (stopped is not None and stopped.is_set())

    def generate() -> None:
        try:
            with turn():
                if not is_stopped():
                    _generate(composer, tokenizer, ids, compositions, allowed, news.put, is_stopped)
        except BaseException as error:  # the reader raises it
            news.put(_explained(error))
        finally:
            news.put(None)

    worker = threading.Thread(target=generate, daemon=True, name="adapterswap-stream")
    worker.start()
    try:
        while (item := news.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        worker.join()


def _ids(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    if not prompt.strip():
        raise ArgumentError("the prompt is empty", "Pass some text", parameter="prompt")
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("the tokenizer has no chat template", "Pass `chat=False`", parameter="chat")
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _allowed(composer: LiveComposer, ids: list[int], max_new_tokens: int) -> int:
    """The most tokens that may follow the prompt."""
    if max_new_tokens < 1:
        raise ArgumentError(f"`max_new_tokens` is {max_new_tokens}", "Pass 1 or more", parameter="max_new_tokens")
    config = composer.model.get_base_model().config.get_text_config()
    context: int | None = getattr(config, "max_position_embeddings", None)
    if context is None:
        return max_new_tokens
    if len(ids) >= context:
        raise ArgumentError(
            f"the prompt has {len(ids)} tokens, and the model's context has {context}",
            "Shorten the prompt",
            parameter="prompt",
        )
    return min(max_new_tokens, context - len(ids))


def _generate(
    composer: LiveComposer,
    tokenizer: Any,
    ids: list[int],
    compositions: Sequence[Composable],
    allowed: int,
    report: Callable[[Answers], None],
    is_stopped: Callable[[], bool],
) -> None:
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Stopped(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), is_stopped(), dtype=torch.bool, device=input_ids.device)

    model = composer.model
    ends = _ends(model)
    streamer = _Streamer(tokenizer, len(compositions), ends, report)
    tokens = torch.tensor([ids] * len(compositions), device=next(model.parameters()).device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    config = GenerationConfig(
        max_new_tokens=allowed, do_sample=False, num_beams=1, eos_token_id=sorted(ends) or None, pad_token_id=pad
    )
    started = perf_counter()
    with composer.use_rows(compositions):
        streamer.begin(started)
        with torch.inference_mode():
            model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=config, streamer=streamer,
                stopping_criteria=StoppingCriteriaList([Stopped()]),
            )  # fmt: skip
    streamer.finish()


def _ends(model: Any) -> set[int]:
    """The tokens that end an answer."""
    token_ids = model.generation_config.eos_token_id
    if token_ids is None:
        return set()
    return {token_ids} if isinstance(token_ids, int) else set(token_ids)


class _Streamer:
    """A streamer as transformers defines it: it receives the prompt, and then one token of each row at a time."""

    def __init__(self, tokenizer: Any, rows: int, ends: set[int], report: Callable[[Answers], None]) -> None:
        self._tokenizer, self._ends, self._report = tokenizer, ends, report
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._prompted = False
        self._started = perf_counter()
        self._last = Answers(("",) * rows, (0,) * rows, (False,) * rows)

    def begin(self, started: float) -> None:
        """Record that the compositions are set; setting them began at `started`."""
        self._started = started
        self._last = replace(self._last, switch_seconds=perf_counter() - started)
        self._report(self._last)

    def put(self, value: Any) -> None:
        if not self._prompted:  # transformers begins with the prompt
            self._prompted = True
            return
        for row, token in enumerate(value.reshape(-1).tolist()):
            if token in self._ends:
                self._ended[row] = True
            if not self._ended[row]:
                self._rows[row].append(token)
        seconds = perf_counter() - self._started
        self._last = replace(
            self._last,
            texts=tuple(self._tokenizer.decode(row, skip_special_tokens=True) for row in self._rows),
            tokens=tuple(map(len, self._rows)),
            ended=tuple(self._ended),
            first_seconds=self._last.first_seconds or seconds,
            seconds=seconds,
        )
        self._report(self._last)

    def end(self) -> None:
        """transformers calls this at the end; `finish` reports it once the composition is left."""

    def finish(self) -> None:
        self._report(replace(self._last, done=True))


def _explained(error: BaseException) -> BaseException:
    """`RunError` if the device ran out of memory; every other error unchanged."""
    text = str(error).lower()
    if isinstance(error, AdapterswapError) or not (
        isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in text for w in _OUT_OF_MEMORY))
    ):
        return error
    _release_memory()
    return RunError(
        "the device ran out of memory while answering",
        "Compare fewer compositions, shorten the prompt or lower `max_new_tokens`",
        parameter="max_new_tokens",
    )


def _release_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
