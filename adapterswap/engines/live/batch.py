"""Several compositions in one batch: one for each row, and one prompt answered by several at once.

PEFT's layers compute the base for all rows at once, and a hook on each layer adds the experts. Rows that share an
expert are computed together, so a layer that all compositions take from one expert costs as much as one adapter.

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
from adapterswap.engines.live.inventory import Inventory, factors, other_tensors, parameter_of
from adapterswap.engines.live.reading import Reading
from adapterswap.engines.live.switch import Switch, apply_switch, check_loaded
from adapterswap.kit.errors import AdapterswapError, ArgumentError, Problems, RunError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from adapterswap.engines.live.catalogue import Composable
    from adapterswap.engines.live.composer import LiveComposer

# Inputs of a forward pass with a row for each sequence. A decoder called after its encoder has only the last two.
_INPUTS = ("input_ids", "inputs_embeds", "input_features", "decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class _Share:
    """One expert's part in a layer: its factors and the rows that use it.

    Attributes:
        a, b: the factors, A (rank×in; for an embedding rank×vocabulary) and B (out×rank).
        rows: the rows: None for all of them, a slice if they are consecutive.
        factor: c·s; a tensor (rows, 1, 1) if it differs between rows.
        bias: the bias of B (out values), if it has one: the expert then adds c·s·(B·A·x + bias).
    """

    a: torch.Tensor
    b: torch.Tensor
    embedding: bool
    rows: slice | torch.Tensor | None
    factor: float | torch.Tensor
    bias: torch.Tensor | None = None


class Rows:
    """Compositions for the rows of a batch.

    Args:
        switches: one for each row.
        repeat: how many times generation repeats each row (beams, returned sequences).
    """

    def __init__(self, switches: Sequence[Switch], repeat: int = 1) -> None:
        self.switches = tuple(switch for switch in switches for _ in range(repeat))
        self._handles: list[Any] = []
        self._adders: dict[str, _Adder] = {}
        self._inventory: Inventory | None = None
        self._changes = 0
        self._was_checked = False

    def apply(self, inventory: Inventory) -> None:
        """Switch all adapters off in PEFT's layers, and add hooks that compute each row's experts."""
        self.withdraw()
        for switch in self.switches:
            check_loaded(switch, inventory)
        self._inventory, self._changes = inventory, inventory.scales.changes
        shares = {name: self._shares(name, layer, inventory) for name, layer in inventory.layers.items()}
        _check(inventory, shares, self.switches)
        apply_switch(Switch(in_full=self._in_full(inventory)), inventory)
        for name in inventory.layers:
            if shares[name]:
                count = None if name in inventory.other_parts else len(self.switches)
                self._adders[name] = _Adder(name, shares[name], count)
        self._add_hooks(inventory)

    def _add_hooks(self, inventory: Inventory) -> None:
        base = inventory.model.get_base_model()
        self._handles.append(base.register_forward_pre_hook(self._check_batch, with_kwargs=True))
        for name, adder in self._adders.items():
            self._handles.append(inventory.layers[name].register_forward_hook(adder))

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def withdraw(self) -> None:
        self._remove_hooks()
        self._adders.clear()

    def _in_full(self, inventory: Inventory) -> Mapping[str, Mapping[str, float]]:
        """The modules trained in full, which must be the same for all rows."""
        for name in inventory.in_full:
            if any(switch.in_full.get(name) != self.switches[0].in_full.get(name) for switch in self.switches):
                raise UnsupportedError(
                    f"{name} is trained in full (modules_to_save), and the rows would need different weights for it",
                    "Use one composition for the whole batch",
                    parameter="compositions",
                )
        return self.switches[0].in_full if self.switches else {}

    def _shares(self, name: str, layer: Any, inventory: Inventory) -> list[_Share]:
        by_expert: dict[str, dict[int, float]] = {}
        for row, switch in enumerate(self.switches):
            for expert, coefficient in switch.terms.get(name, {}).items():
                by_expert.setdefault(expert, {})[row] = coefficient
        return [
            _share(layer, expert, inventory.scales.of(layer, expert), coefficients, len(self.switches))
            for expert, coefficients in by_expert.items()
        ]

    def _check_batch(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [*args, *map(kwargs.get, _INPUTS)]
        batch = next(len(tensor) for tensor in inputs if tensor is not None)
        if model.training:
            raise UnsupportedError("The model is in training mode", "Call model.eval() first")
        if batch != len(self.switches):
            raise ArgumentError(
                f"The batch has {batch} rows, but there are compositions for {len(self.switches)}",
                "Pass one composition for each row, and `repeat` if generation repeats rows",
                parameter="compositions",
            )

        # A hot swap, or another call of PEFT's, may have changed scales since.
        inventory = self._inventory
        if inventory is None:
            return
        inventory.scales.read(inventory.layers, inventory.model.peft_config)
        if inventory.scales.changes != self._changes:
            self._changes = inventory.scales.changes
            for name, adder in self._adders.items():
                adder.shares = self._shares(name, inventory.layers[name], inventory)

        if batch > 1:
            self._check_rows(inventory, kwargs)

    def _check_rows(self, inventory: Inventory, kwargs: Mapping[str, Any]) -> None:
        if self._was_checked:
            check_rows(inventory.model, kwargs)
            return

        # The model itself may have to be measured first, by other batches than these hooks allow.
        self._was_checked = True
        self._remove_hooks()
        try:
            check_rows(inventory.model, kwargs)
        finally:
            self._add_hooks(inventory)


def check_rows(model: Any, batch: Mapping[str, Any]) -> None:
    """Refuse several rows in a batch, if the answers to some would depend on the others or on padding.

    Args:
        model: the PeftModel.
        batch: the inputs of `generate` or of a forward pass.

    Raises:
        UnsupportedError: the model mixes rows, reads padding on the left, or takes other rotary frequencies for the
            whole batch because of its longest row.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return
    kind, reading = model.config.model_type, Reading.of(model)
    if not reading.even:
        raise UnsupportedError(f"Rows that a {kind} answers together change each other", "Pass one row at a time")

    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2 or bool(mask.all()):
        return
    remedy = "Pass rows of one length, or one row at a time"
    if not bool(mask[:, 0].all()) and not reading.left:
        raise UnsupportedError(f"Rows have different lengths, and a {kind} reads the padding as text", remedy)
    if reading.alike is not None and mask.shape[1] > reading.alike:
        raise UnsupportedError(
            f"A row of more than {reading.alike} tokens changes the rotary embeddings of all rows", remedy
        )


def _share(layer: Any, expert: str, scale: float, coefficients: Mapping[int, float], count: int) -> _Share:
    import torch

    tensors = factors(layer, expert)
    assert tensors is not None  # the switch was made from the loaded adapters
    embed_scale = getattr(layer.get_base_layer(), "embed_scale", None) if tensors.embedding else None
    if embed_scale is not None:  # Gemma's embeddings are multiplied by a constant, and so is what LoRA adds to them
        scale *= float(embed_scale)
    rows = sorted(coefficients)
    index: slice | torch.Tensor | None = None
    if len(rows) < count:
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        index = slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, device=tensors.b.device)
    values = [coefficients[row] * scale for row in rows]
    factor: float | torch.Tensor = values[0]
    if len(set(values)) > 1:
        factor = torch.tensor(values, device=tensors.b.device, dtype=tensors.b.dtype).reshape(-1, 1, 1)
    return _Share(
        tensors.a, tensors.b, tensors.embedding, index, factor, other_tensors(layer, expert).get("lora_B.bias")
    )


def _check(inventory: Inventory, shares: Mapping[str, Sequence[_Share]], switches: Sequence[Switch]) -> None:
    from peft.tuners.lora.layer import MultiheadAttention

    problems = Problems(UnsupportedError)
    remedy = "Use one composition for the whole batch"
    model_type = inventory.model.get_base_model().config.model_type
    if ModelConfig({"model_type": model_type}).architecture.rows_second:
        problems.add(f"A layer of {model_type} sees positions first, and rows second", remedy)
    for name, layer in inventory.layers.items():
        if not shares[name]:
            continue
        if layer.merged:
            problems.add("Adapters are merged into the model's weights", "Call unmerge_adapter() first")
        if any(expert in layer.lora_variant for switch in switches for expert in switch.terms.get(name, {})):
            problems.add(f"{name} is DoRA, which is computed with the base's own output", remedy)
        if "experts" in name.split(".") or parameter_of(layer) is not None:
            problems.add(f"{name} is part of a mixture of experts, which sees tokens instead of rows", remedy)
        if isinstance(layer, MultiheadAttention):
            problems.add(f"{name} is a MultiheadAttention, whose projections are not separate layers", remedy)
        if getattr(layer.get_base_layer(), "max_norm", None) is not None:
            problems.add(f"{name} is an embedding with max_norm, which rescales what LoRA adds", remedy)
        if any(share.a.is_meta or share.b.is_meta for share in shares[name]):
            problems.add(f"The adapters at {name} are offloaded", "Load the model without offloading")
        if problems:  # one such layer is enough
            break
    problems.raise_if_any()


class _Adder:
    """A forward hook that adds Σ c·s·B·A·x to each row of a LoRA layer's output.

    `count` is the number of rows; None in a part of the model that sees images or audio, however many each row has.
    """

    def __init__(self, name: str, shares: Sequence[_Share], count: int | None) -> None:
        self.name, self.shares, self.count = name, shares, count
        self.rows_differ = any(share.rows is not None or not isinstance(share.factor, float) for share in shares)

    def __call__(self, layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        import torch
        from torch.nn.functional import embedding, linear

        if layer.disable_adapters:
            return None
        x, dtype = args[0], output.dtype
        # Like PEFT, sum in the adapters' precision if it is higher.
        result = output.to(torch.promote_types(dtype, self.shares[0].b.dtype)).contiguous()
        shape = result.shape
        if self.count is None and self.rows_differ:
            raise UnsupportedError(
                f"{self.name} sees images or audio instead of rows, and the rows would need different experts in it",
                "Use one composition for the whole batch, or compositions with the same experts there (`outside`)",
            )
        # Some models flatten rows and positions before their feed-forward layers.
        if self.count is not None and len(result) != self.count:
            if len(result) % self.count or result.dim() != 2:
                raise UnsupportedError(
                    f"{self.name} receives {len(result)} rows, and the batch has {self.count}",
                    "Use one composition for the whole batch",
                )
            result, x = result.view(self.count, -1, shape[-1]), x.reshape(self.count, -1, x.shape[-1])
        for share in self.shares:
            part = x if share.rows is None else x[share.rows]
            low = embedding(part, share.a.T) if share.embedding else linear(part.to(share.a.dtype), share.a)
            alpha = 1.0
            if isinstance(share.factor, float):
                alpha = share.factor
            else:
                low = low * (share.factor if low.dim() == 3 else share.factor[:, 0])
            if share.rows is None or isinstance(share.rows, slice):
                target = result if share.rows is None else result[share.rows]
                target.view(-1, shape[-1]).addmm_(
                    low.reshape(-1, low.shape[-1]).to(result.dtype), share.b.T, alpha=alpha
                )
            else:
                result.index_add_(0, share.rows, linear(low, share.b).to(result.dtype), alpha=alpha)
            if share.bias is not None:
                factor = (
                    share.factor[:, 0] if isinstance(share.factor, torch.Tensor) and low.dim() == 2 else share.factor
                )
                result[... if share.rows is None else share.rows] += (factor * share.bias).to(result.dtype)
        return result.view(shape).to(dtype)


def pad_left(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with each row's tokens moved to its right end, where generation continues.

    Every tensor of the attention mask's shape (batch, length) is reordered in the same way. Tokens keep their order.
    """
    import torch

    mask = batch.get("attention_mask")
    if mask is None or bool(mask[:, -1].all()):
        return dict(batch)
    order = mask.bool().to(torch.uint8).argsort(dim=1, stable=True)

    def moved(value: Any) -> Any:
        reordered = isinstance(value, torch.Tensor) and value.shape == mask.shape
        return value.gather(1, order) if reordered else value

    return {key: moved(value) for key, value in batch.items()}


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
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Stopped(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), is_stopped(), dtype=torch.bool, device=input_ids.device)

    ends = _ends(model)
    streamer = _Streamer(tokenizer, len(batch), ends, report)
    tokens = torch.tensor(batch, device=next(model.parameters()).device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
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
        "The device ran out of memory while answering",
        "Compare fewer compositions, shorten the prompt or lower `max_new_tokens`",
        parameter="max_new_tokens",
    )


def _release_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
