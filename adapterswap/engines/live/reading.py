"""How a loaded model reads rows of different lengths: whether padding changes answers, and how many positions it has.

Rows of a batch are padded, on the left before answers are generated and on the right where texts are scored. A model
that ignores the attention mask (RWKV), or in some of its layers (MiniMax), reads the padding as text, and no config
says so. So the model itself is asked, once: a short row is padded in two ways beside a longer one, and must be
continued and scored as it is alone. That takes two short batches for each side.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from adapterswap.core.model.layers import ModelConfig
from adapterswap.kit.errors import AdapterswapError, BaseModelError, reason_of

if TYPE_CHECKING:
    import torch

_Result = TypeVar("_Result")

_SHORT, _LONG = 6, 24  # tokens of the two rows: most of what the short one could read wrongly is padding
_STEPS = 3  # tokens that follow a row: the first from the row, the others from the model's cache
_LAYER = 50  # in eps: the roundings of one layer added up
_OTHER_SUMS = 20  # how much more a row may differ that is added up in another order, which later layers amplify
_SHORT_FORMATS = 8  # in eps of a 16-bit format, whose sums run in float32: only the results are rounded


@dataclass(frozen=True)
class _Rows:
    """Tokens to ask a model with.

    Attributes:
        short, long: two rows.
        fillers: what the short one is padded with: the model's own token for it, if it has one, and another.
        next: the token that follows a row, whatever the model prefers.
    """

    short: list[int]
    long: list[int]
    fillers: tuple[int, int]
    next: int


class Reading:
    """What a batch of a model may hold. Each answer is measured when it is first needed, and kept with the model.

    The model must be in eval mode. All properties raise `BaseModelError` if it cannot read texts alone.
    """

    def __init__(self, model: Any) -> None:
        self._reference = weakref.ref(model)

    @staticmethod
    def of(model: Any) -> Reading:
        """The one of a model of transformers, or of a PeftModel."""
        if model not in _KNOWN:
            _KNOWN[model] = Reading(model)
        return _KNOWN[model]

    @cached_property
    def even(self) -> bool:
        """Whether rows of one length, without padding, are continued as each is alone. RWKV's are not."""
        rows = [self._rows.short, self._rows.short[::-1]]
        ones = [1] * len(self._rows.short)
        together = self._following(rows, [ones, ones])
        return self._equal(together[0], self._alone[0], times=_OTHER_SUMS)

    @cached_property
    def left(self) -> bool:
        """Whether a row that is padded on the left, with an attention mask, is continued as it is alone."""
        rows = self._rows
        padding = len(rows.long) - len(rows.short)
        padded = [[filler] * padding + rows.short for filler in rows.fillers]
        mask = [0] * padding + [1] * len(rows.short)
        _, one, other = self._following([rows.long, *padded], [[1] * len(rows.long), mask, mask])
        return self._equal(one, other) and self._equal(one, self._alone[0], times=_OTHER_SUMS)

    @cached_property
    def right(self) -> bool:
        """Whether a row that is padded on the right, without a mask, has the logits that it has alone."""
        rows = self._rows
        padding = len(rows.long) - len(rows.short)
        padded = [rows.short + [filler] * padding for filler in rows.fillers]

        alone = self._logits([rows.short])
        _, one, other = self._logits([rows.long, *padded])[:, : len(rows.short)]
        return self._equal(one, other) and self._equal(one, alone[0], times=_OTHER_SUMS)

    @cached_property
    def causal(self) -> bool:
        """Whether a row's logits stay the same with more tokens behind it."""
        rows = self._rows
        alone, longer = self._logits([rows.long[:-1]]), self._logits([rows.long])
        return self._equal(longer[0, :-1], alone[0], times=_OTHER_SUMS)

    @cached_property
    def positions(self) -> int | None:
        """How many tokens the model has learned positions for; None if it has no table of positions.

        A table is a matrix whose rows are read one after another while all tokens are the same. Some begin after their
        first rows: OPT's at row 2, RoBERTa's after that of padding.
        """
        from torch.nn.functional import embedding
        from torch.overrides import TorchFunctionMode

        stated = self._config.lengths.longest
        if stated is None:
            return None

        lengths: list[int] = []

        class Watched(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is embedding:
                    rows, read = args[1].shape[0], args[0].unique()
                    first, count = int(read[0]), len(read)
                    if rows >= stated and count == _SHORT and int(read[-1]) - first == _SHORT - 1:
                        lengths.append(rows - first)
                return function(*args, **(kwargs or {}))

        with Watched():
            self._logits([[self._rows.next] * _SHORT])
        return min(lengths, default=None)

    def forget(self) -> None:
        """Put rotary embeddings back whose frequencies have grown with earlier texts: transformers keeps the last."""
        for module in self._model.modules():
            if not hasattr(module, "original_max_seq_len"):
                continue
            for name, first in list(module.named_buffers(recurse=False)):
                prefix, grows, _ = name.partition("original_inv_freq")
                if grows:
                    setattr(module, f"{prefix}inv_freq", first.clone())
                    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    @cached_property
    def alike(self) -> int | None:
        """Up to this length a row's rotary embeddings do not depend on the longest row; None if they never do."""
        return self._config.lengths.alike

    @property
    def _model(self) -> Any:
        return self._reference()

    @property
    def _config(self) -> ModelConfig:
        return ModelConfig(self._model.config.get_text_config().to_dict())

    @property
    def _embeddings(self) -> Any:
        """The embeddings of tokens, without LoRA on them."""
        embeddings = self._model.get_input_embeddings()
        return getattr(embeddings, "base_layer", embeddings)

    @cached_property
    def _rows(self) -> _Rows:
        """Ordinary tokens: a multimodal model looks for images where it reads the token of one."""
        special = set(_token_ids(self._model.config.to_dict()))
        count = min(self._embeddings.weight.shape[0], self._config.language.get("vocab_size") or 2**31)
        ordinary = (token for token in range(count) if token not in special)
        tokens = [token for token, _ in zip(ordinary, range(_LONG + 3), strict=False)]
        while len(tokens) < _LONG + 3:
            tokens += tokens

        width = _LONG
        for length in (self._config.lengths.longest, self.alike):
            if length is not None:
                width = max(2, min(width, length - _STEPS))
        own = self._config.language.get("pad_token_id")
        padding = own if isinstance(own, int) and 0 <= own < count else tokens[-1]

        return _Rows(
            short=tokens[1 : 1 + min(_SHORT, width // 2)],
            long=tokens[:width],
            fillers=(padding, tokens[-2]),
            next=tokens[-3],
        )

    @cached_property
    def _alone(self) -> torch.Tensor:
        """What follows the short row."""
        return self._following([self._rows.short], [[1] * len(self._rows.short)])

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits (rows, tokens, vocabulary) of rows of one length."""
        import torch

        ids = torch.tensor(rows, device=self._model.device)
        with torch.no_grad():
            logits: torch.Tensor = _asked(self._model, lambda: self._model(input_ids=ids).logits)
        return logits

    def _following(self, rows: Sequence[Sequence[int]], mask: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits (rows, steps, vocabulary) of what follows rows of one length, each step after the same token."""
        import torch
        from transformers import LogitsProcessor, LogitsProcessorList

        token = self._rows.next

        class Chosen(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                chosen = torch.full_like(scores, -torch.inf)
                chosen[:, token] = 0
                return chosen

        def generate() -> Any:
            return self._model.generate(
                input_ids=torch.tensor(rows, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                max_new_tokens=_STEPS,
                do_sample=False,
                num_beams=1,
                pad_token_id=self._rows.fillers[0],
                logits_processor=LogitsProcessorList([Chosen()]),
                output_logits=True,
                return_dict_in_generate=True,
            ).logits

        return torch.stack(_asked(self._model, generate), dim=1)

    def _equal(self, row: torch.Tensor, alone: torch.Tensor, *, times: int = 1) -> bool:
        """Whether logits differ by no more than rounding explains, or than that many times as much."""
        import torch

        row, alone = row.float(), alone.float()
        dtype = self._model.dtype
        if dtype in (torch.float16, torch.bfloat16):
            share = _SHORT_FORMATS * torch.finfo(dtype).eps
        else:
            share = times * _LAYER * torch.finfo(torch.float32).eps * (self._config.num_layers or 1)
        if not alone.isfinite().all():
            return True  # nothing can be said about such a model
        return bool(((row - alone).abs() <= share * alone.abs().max()).all())


_KNOWN: weakref.WeakKeyDictionary[Any, Reading] = weakref.WeakKeyDictionary()


def _asked(model: Any, question: Callable[[], _Result]) -> _Result:
    """What a model answers; with other inputs than it expects, its code can raise anything."""
    import torch

    try:
        return question()
    except (AdapterswapError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BaseModelError(
            f"The base model, a {model.config.model_type}, cannot read a text alone: {reason_of(error)}",
            "Use a base that answers in transformers: model.generate(**tokenizer('text', return_tensors='pt'))",
            parameter="base_model",
        ) from error


def _token_ids(config: Mapping[Any, Any]) -> Iterator[int]:
    """The tokens that a config gives a meaning of their own, at any depth."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _token_ids(value)
        elif str(name).endswith(("token_id", "token_ids", "token_index")):
            values = value if isinstance(value, list) else [value]
            yield from (token for token in values if isinstance(token, int))
