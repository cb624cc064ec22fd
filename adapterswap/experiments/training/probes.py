"""What a model does with rows, found out by passing two short ones through it: alone, in a padded batch, and packed.

A row's log-probabilities are those that the model's own logits give when the row is alone. Whatever trains faster has
to agree with them: TRL's fused head, which knows some models' scales of logits by the names of their settings, and
packed sequences, whose rows are kept apart by position ids that some models do not read. Importing this module imports
torch and trl.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

_LENGTHS = (7, 11)  # tokens of the two rows
_ORDINARY = range(3, 64)  # ids of tokens, from which those for images and sounds are removed
_ROUNDING = 300  # in eps of the largest number: beyond it, rounding does not explain a difference in float32
_ROUNDING_16_BIT = 4  # the same for the mean difference in 16 bits
_NOISE = 8  # how many times as far apart as in a padded batch, where only rounding differs

Rows = list[torch.Tensor]


@dataclass(frozen=True)
class Head:
    """How log-probabilities of labels are computed from a model.

    Attributes:
        fused: by TRL's fused head, which never holds the logits of all tokens; else from the model's own logits.
        router_loss: whether the loss of a mixture's routers, with its config's coefficient, can be added.
    """

    fused: bool = True
    router_loss: bool = True


class Probe:
    """Two rows in a model, in evaluation mode and without gradients.

    Args:
        model: a language model of transformers, without PEFT around it and without TRL's fused head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, model.dtype
        special = _special_tokens(model.config.to_dict())
        ordinary = [token for token in _ORDINARY if token not in special]
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(len(ordinary), (sum(_LENGTHS),), generator=generator).tolist()
        tokens = [ordinary[place] for place in places]
        self.rows = [tokens[: _LENGTHS[0]], tokens[_LENGTHS[0] :]]

    @cached_property
    def alone(self) -> Rows:
        """The log-probabilities of the tokens of each row but its first, by the model's own logits."""
        return [self._own([row])[0] for row in self.rows]

    @cached_property
    def works(self) -> bool:
        """Whether the model gives finite numbers for plain rows."""
        try:
            return all(bool(row.isfinite().all()) for row in self.alone)
        except Exception:  # of any kind: a class for other inputs, or sizes that do not fit together
            return False

    @cached_property
    def _noise(self) -> tuple[float, float]:
        """The largest and the mean difference in a padded batch, where rounding alone should differ."""
        return _apart(self._without_padding(self._own(self.rows)), self.alone)

    @property
    def depends_on_the_batch(self) -> bool:
        """Whether a row is computed differently in a padded batch with a longer one than alone."""
        return self._matters(*self._noise)

    @property
    def reads_ahead(self) -> bool:
        """Whether the log-probabilities of tokens change with the token after them."""
        row = self.rows[1]
        other = next(token for token in self.rows[0] if token != row[-1])
        changed = self._own([[*row[:-1], other]])[0]
        return self._matters(*_apart([changed[:-1]], [self.alone[1][:-1]]))

    @property
    def mixes_packed_rows(self) -> bool:
        """Whether rows in a packed sequence are not what they are alone."""
        row = self._own(self.rows, packed=True)[0]
        first, second = _LENGTHS
        return self._matters(*_apart([row[: first - 1], row[first : first + second - 1]], self.alone), self._noise)

    @property
    def suits_the_fused_head(self) -> bool:
        """Whether TRL's fused head computes the model's own log-probabilities."""
        batch, labels = self._batch(self.rows)
        try:
            with _with_head(self.model, Head(fused=True)), _evaluating(self.model):
                outputs = self.model(**batch, labels=labels, use_cache=False, fused_lm_head=True)
        except Exception:  # of any kind: what it reads is not there
            return False
        return not self._matters(*_apart(self._without_padding(outputs.log_probs.float()), self.alone), self._noise)

    def has_router_loss(self, *, fused: bool) -> bool:
        """Whether the loss of the routers can be computed, by TRL's fused head or by the model itself."""
        batch, labels = self._batch(self.rows)
        try:
            with _with_head(self.model, Head(fused)), _evaluating(self.model):
                outputs = self.model(
                    **batch, labels=labels, use_cache=False, output_router_logits=True, fused_lm_head=True
                )
            return outputs.aux_loss is not None and bool(torch.as_tensor(outputs.aux_loss).isfinite().all())
        except Exception:  # of any kind
            return False

    def holds(self, tokens: int) -> bool:
        """Whether a row of this length has a position for each token."""
        row = (self.rows[1] * (tokens // _LENGTHS[1] + 1))[:tokens]
        try:
            self._logits(self._batch([row])[0])
        except Exception:  # IndexError, or whatever a model raises instead
            return False
        return True

    def _matters(self, largest: float, mean: float, noise: tuple[float, float] = (0.0, 0.0)) -> bool:
        """Whether a difference is larger than rounding explains, and much larger than between batches.

        Args:
            largest, mean: the largest and the mean difference of log-probabilities.
            noise: the same two numbers where rounding alone should differ, see `_noise`.
        """
        scale = max(row.abs().max().item() for row in self.alone)
        eps = torch.finfo(self.dtype).eps
        largest_noise, mean_noise = noise

        # `not … <=`, so that a difference of NaN matters.
        if self.dtype in (torch.float16, torch.bfloat16):  # rounding alone moves single tokens far
            return not mean <= max(_ROUNDING_16_BIT * eps * scale, _NOISE * mean_noise)
        return not largest <= max(_ROUNDING * eps * scale, _NOISE * largest_noise)

    def _without_padding(self, batch: torch.Tensor) -> Rows:
        """The log-probabilities of each row of a padded batch."""
        return [row[: length - 1] for row, length in zip(batch, _LENGTHS, strict=True)]

    def _batch(self, rows: Sequence[list[int]], *, packed: bool = False) -> tuple[dict[str, Any], torch.Tensor]:
        """Rows as TRL collates them, on the model's device, and their labels."""
        collate = DataCollatorForLanguageModeling(pad_token_id=self.rows[0][0], padding_free=packed)
        batch = collate([{"input_ids": row} for row in rows])
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value.to(self.device)
        return batch, batch.pop("labels")

    def _own(self, rows: Sequence[list[int]], *, packed: bool = False) -> torch.Tensor:
        """The log-probabilities of the rows' tokens by the model's own logits, (rows, tokens - 1)."""
        batch, _ = self._batch(rows, packed=packed)
        log_probs = self._logits(batch)[:, :-1].float().log_softmax(dim=-1)
        return log_probs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]

    def _logits(self, batch: Mapping[str, Any]) -> torch.Tensor:
        with _evaluating(self.model):
            logits: torch.Tensor = self.model(**_accepted(self.model, {**batch, "use_cache": False})).logits
        return logits


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients, and without a trace in the random generators."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        model.train(training)


def _apart(rows: Rows, others: Rows) -> tuple[float, float]:
    """The largest and the mean difference of numbers in pairs of rows."""
    differences = torch.cat([(row - other).abs() for row, other in zip(rows, others, strict=True)])
    return differences.max().item(), differences.mean().item()


def _special_tokens(config: Mapping[str, Any]) -> set[int]:
    """The ids that a config names, of images and sounds for example."""
    tokens: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            tokens |= _special_tokens(value)
        elif isinstance(value, int) and str(name).endswith(("token_id", "token_index")):
            tokens.add(value)
    return tokens


def _accepted(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that the forward of a model's class takes."""
    parameters = inspect.signature(type(model).forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name in parameters}


@contextmanager
def _with_head(model: Any, head: Head) -> Iterator[None]:
    """The model with a head inside the block."""
    before = model.__dict__.get("forward")
    add_head(model, head)
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


def add_head(model: Any, head: Head) -> None:
    """Let `model(…, labels=…, fused_lm_head=True)` return log-probabilities of the labels, as TRL's trainer reads them.

    TRL's fused head computes tile by tile. The other one takes the model's own logits, and replaces TRL's if the model
    has it already; the logits of all tokens, (batch, tokens, vocabulary), are in memory as in the model's own loss.
    """
    if head.fused:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    else:
        _add_own_head(model)


def _add_own_head(model: Any) -> None:
    """Give a model the `fused_lm_head` of TRL's forward pass, computed from its own logits."""
    original = model.forward

    @functools.wraps(type(model).forward)  # TRL and transformers read the signature
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None, **inputs: Any
    ) -> Any:
        if not fused_lm_head:
            others = {"labels": labels, "shift_labels": shift_labels}
            inputs |= {name: value for name, value in others.items() if value is not None}
            return original(*args, **inputs)

        inputs.pop("num_items_in_batch", None)
        outputs = original(*args, **_accepted(self, inputs))
        logits = outputs.logits
        if shift_labels is None:
            logits, labels = logits[:, :-1], labels[:, 1:]
        else:
            labels = shift_labels
        labels = labels.to(logits.device)
        mask = labels != -100

        scored = logits[mask].float()
        log_softmax = scored.log_softmax(dim=-1)
        log_probs = log_softmax.gather(-1, labels[mask][:, None])[:, 0]
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
            is_top1 = scored.argmax(dim=-1) == labels[mask]

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(mask.shape).masked_scatter(mask, values)

        return FusedCausalLMOutput(
            loss=-log_probs.sum() / mask.sum().clamp(min=1),
            log_probs=spread(log_probs),
            entropy=spread(entropy),
            is_top1=spread(is_top1),
            label_mask=mask,
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    model.forward = MethodType(forward, model)


def wants_router_loss(config: Any) -> bool:
    """Whether TRL adds the loss of the routers, by a text model's config: its coefficient is there, and not zero."""
    return hasattr(config, "output_router_logits") and getattr(config, "router_aux_loss_coef", 0.0) != 0.0


def name_experts(config: Any) -> None:
    """Give a text model's config the name for its number of experts that TRL reads, if it has another one for it."""
    if wants_router_loss(config) and not hasattr(config, "num_experts") and getattr(config, "num_local_experts", None):
        config.num_experts = config.num_local_experts


def choose_head(probe: Probe) -> Head:
    """The fastest way to the log-probabilities that the model's own logits give."""
    fused = probe.suits_the_fused_head
    config = probe.model.config.get_text_config()
    if not wants_router_loss(config):
        return Head(fused, router_loss=False)
    name_experts(config)
    for is_fused in (True, False) if fused else (False,):
        if probe.has_router_loss(fused=is_fused):
            return Head(is_fused, router_loss=True)
    return Head(fused, router_loss=False)
