"""One prompt answered by several compositions at once, token by token.

Decoding is greedy unless you ask for samples, so an answer depends only on the model, the composition and the prompt.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from adapterswap.core.model.layers import ModelConfig
from adapterswap.kit.errors import AdapterswapError, ArgumentError, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adapterswap.engines.live.catalogue import Composable
    from adapterswap.engines.live.composer import LiveComposer

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
        if not self.seconds or not sum(self.tokens):
            return None
        return sum(self.tokens) / self.seconds


def stream(
    composer: LiveComposer | PreTrainedModel,
    tokenizer: Any,
    prompt: str | Sequence[int],
    compositions: Sequence[Composable],
    *,
    max_new_tokens: int = 64,
    chat: bool = False,
    sampling: Mapping[str, float] | None = None,
    seed: int = 0,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    stopped: threading.Event | None = None,
) -> Iterator[Answers]:
    """Answer one prompt by several compositions at once, and yield the answers so far after every token.

    The model computes in a separate thread while the caller reads. Closing the iterator ends the generation at the next
    token.

    Args:
        composer: the model's composer; or a model without adapters, which answers as the base alone.
        tokenizer: the model's tokenizer.
        prompt: the text to answer, or its tokens.
        compositions: one for each answer; None and `base` are the base.
        max_new_tokens: the most tokens of an answer; fewer if the model's context ends earlier.
        chat: put the prompt into the tokenizer's chat template, as the user's message.
        sampling: draw the answers: `temperature`, `top_p` and other settings of transformers. By default each token is
            the most likely one.
        seed: of these draws, as of `torch.manual_seed`.
        turn: returns a context manager to hold while the model computes: a lock, if others use the model too.
        stopped: an event that ends the generation at the next token, or before it begins, once it is set.

    Raises:
        ArgumentError: there is no composition; the prompt is empty or fills the context; `max_new_tokens` is below 1;
            the tokenizer has no chat template.
        CompositionError, UnsupportedError: see `LiveComposer.use` for one composition, `use_rows` for several.
        RunError: the device runs out of memory.
    """
    model, using = _setting(composer, compositions)
    ids = _ids(tokenizer, prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
    allowed = _allowed(model, ids, max_new_tokens)
    if not compositions:
        raise ArgumentError("`compositions` is empty", "Pass at least one composition", parameter="compositions")

    news: queue.Queue[Answers | BaseException | None] = queue.Queue()
    closed = threading.Event()

    def is_stopped() -> bool:
        return closed.is_set() or (stopped is not None and stopped.is_set())

    def generate() -> None:
        try:
            with turn(), _seeded(seed if sampling else None):
                if not is_stopped():
                    batch = [ids] * len(compositions)
                    _generate(model, using, tokenizer, batch, allowed, sampling or {}, news.put, is_stopped)
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


def _setting(
    composer: Any, compositions: Sequence[Composable]
) -> tuple[Any, Callable[[], AbstractContextManager[object]]]:
    """The model, and a context manager in which each row of a batch is computed with its composition."""
    from adapterswap.engines.live.composer import LiveComposer

    if not isinstance(composer, LiveComposer):
        return composer, nullcontext
    if len(compositions) == 1:  # which also holds what rows cannot differ in
        return composer.model, partial(composer.use, compositions[0])
    return composer.model, partial(composer.use_rows, compositions)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Begin torch's random numbers at `seed`, and restore them afterwards; None leaves them alone."""
    import torch

    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _ids(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """The tokens of a prompt, as a chat's turn or as plain text."""
    if not prompt.strip():
        raise ArgumentError("The prompt is empty", "Pass some text", parameter="prompt")
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("The tokenizer has no chat template", "Pass `chat=False`", parameter="chat")
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _allowed(model: Any, ids: list[int], max_new_tokens: int) -> int:
    """The most tokens that may follow the prompt."""
    if max_new_tokens < 1:
        raise ArgumentError(f"`max_new_tokens` is {max_new_tokens}", "Pass 1 or more", parameter="max_new_tokens")
    if not ids:
        raise ArgumentError("The prompt is empty", "Pass some text", parameter="prompt")
    # By the config alone: others may be using the model now, so it is not asked.
    context = ModelConfig(model.config.get_text_config().to_dict()).lengths.longest
    if context is None:
        return max_new_tokens
    if len(ids) >= context:
        raise ArgumentError(
            f"The prompt has {len(ids)} tokens, and the model's context has {context}",
            "Shorten the prompt",
            parameter="prompt",
        )
    return min(max_new_tokens, context - len(ids))


def _generate(
    model: Any,
    using: Callable[[], AbstractContextManager[object]],
    tokenizer: Any,
    batch: Sequence[Sequence[int]],
    allowed: int,
    sampling: Mapping[str, float],
    report: Callable[[Answers], None],
    is_stopped: Callable[[], bool],
) -> None:
    """Generate answers to a batch of prompts as tokens, and report them as they grow."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Stopped(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), is_stopped(), dtype=torch.bool, device=input_ids.device)

    ends = _ends(model)
    streamer = _Streamer(tokenizer, len(batch), ends, report)
    tokens = torch.tensor(batch, device=next(model.parameters()).device)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = next(iter(ends), 0)
    config = GenerationConfig(
        max_new_tokens=allowed,
        do_sample=bool(sampling),
        num_beams=1,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        **sampling,
    )
    started = perf_counter()
    with using():
        streamer.begin(started)
        with torch.inference_mode():
            model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=config,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([Stopped()]),
            )
    streamer.finish()


def _ends(model: Any) -> set[int]:
    """The tokens that end an answer."""
    token_ids = model.generation_config.eos_token_id
    if token_ids is None:
        return set()
    if isinstance(token_ids, int):
        return {token_ids}
    return set(token_ids)


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
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in self._rows]
        self._last = replace(
            self._last,
            texts=tuple(texts),
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
    if isinstance(error, AdapterswapError) or not isinstance(error, MemoryError | RuntimeError):
        return error
    text = str(error).lower()
    if isinstance(error, RuntimeError) and not any(words in text for words in _OUT_OF_MEMORY):
        return error

    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return RunError(
        "The device ran out of memory while answering",
        "Compare fewer compositions, shorten the prompt or lower `max_new_tokens`",
        parameter="max_new_tokens",
    )
