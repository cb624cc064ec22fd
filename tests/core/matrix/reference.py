"""The expected result of every operation in plain torch: PEFT's ΔW of each expert alone, added up.

Nothing of the library is used here. The rules for layers are the table in docs/compose.md, written out by hand.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import PeftModel, peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from tolerances import close
from transformers import PreTrainedModel

from core.matrix.adapters import Expert
from core.matrix.architectures import LAYERS, VOCABULARY, Architecture
from core.matrix.methods import METHODS, by_module
from core.matrix.methods import combined as combined_by

__all__ = [
    "SHARES",
    "Changes",
    "changes_in",
    "expected",
    "expert_changes",
    "load_with_peft",
    "logits",
    "parameters",
    "rounded_otherwise",
    "untied",
    "with_changes",
]

Changes = dict[str, torch.Tensor]  # ΔW in float64, by parameter of the base

Share = tuple[float, float]  # of the task expert and of the language expert


def swap(layer: int | None, is_attention: bool) -> Share:
    """bottom=1, top=1, bottom_transition=1, task_weight=1, language_weight=3."""
    if layer is None:
        return 0.25, 0.75
    if layer < 1 or layer > LAYERS - 1 - 1:
        return 0, 1
    if layer > 1 - 1 + 1 and layer < LAYERS - 1 - 0:
        return 1, 0
    return 0.25, 0.75


def soup(layer: int | None, is_attention: bool) -> Share:
    """task_weight=1, language_weight=3."""
    return 0.25, 0.75


def partition_a(layer: int | None, is_attention: bool) -> Share:
    """Attention is the language's, and so are the first 6 and the last 2 of 28 layers: 1 and 0 of 5 in proportion."""
    if layer is None:
        return 0.5, 0.5
    return (0, 1) if is_attention or layer < 1 else (1, 0)


def copied(layer: int | None, is_attention: bool) -> Share:
    """bottom=1, top=1, and the language outside the layers: every module has one owner."""
    return (0, 1) if layer is None or layer < 1 or layer > LAYERS - 1 - 1 else (1, 0)


SHARES: dict[str, Callable[[int | None, bool], Share]] = {
    "swap": swap, "soup": soup, "partition_a": partition_a, "copied": copied,
}  # fmt: skip


def expected(
    architecture: Architecture, composition: str, task: Changes, language: Changes, base: PreTrainedModel
) -> Changes:
    """What a composition, or a method, makes of every parameter that either expert changes.

    Σ c_i ΔW_i of a composition. An expert that lacks a parameter does not change it.
    """
    combined: Changes = {}
    if composition in METHODS:
        stored = parameters(base)
        for name in task.keys() | language.keys():
            weight = stored[name] if name in stored else torch.zeros_like((task | language)[name])
            changes = [one.get(name, torch.zeros_like(weight, dtype=torch.float64)) for one in (task, language)]
            module = base.get_submodule(name.rpartition(".")[0])
            in_by_out = isinstance(module, torch.nn.Embedding) or type(module).__name__ == "Conv1D"
            transposed = in_by_out and weight.ndim == 2
            combined[name] = torch.empty_like(weight, dtype=torch.float64)
            views = zip(*(by_module(name, tensor) for tensor in (combined[name], weight, *changes)), strict=True)
            for result, stored_part, *parts in views:
                result.copy_(combined_by(composition, stored_part, parts, transposed=transposed))
        return combined
    for name in task.keys() | language.keys():
        shares = SHARES[composition](architecture.layer_of(name), architecture.is_attention(name))
        parts = [
            share * changes[name] for share, changes in zip(shares, (task, language), strict=True) if name in changes
        ]
        combined[name] = torch.stack(parts).sum(dim=0)
    return combined


@contextmanager
def recorded_warnings() -> Iterator[set[str]]:
    """Everything that Python's warnings and the loggers of transformers and PEFT report inside the block."""
    said: set[str] = set()

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.add(record.getMessage())

    loggers, recorder = [logging.getLogger(name) for name in ("transformers", "peft")], Recorder(logging.WARNING)
    for logger in loggers:
        logger.addHandler(recorder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said |= {str(warning.message) for warning in caught if "is_gradient_checkpointing" not in str(warning.message)}
    finally:
        for logger in loggers:
            logger.removeHandler(recorder)


def load_with_peft(base: PreTrainedModel, folder: Path) -> tuple[PeftModel, set[str]]:
    """The adapter in a copy of the base as PEFT loads it, and PEFT's warnings meanwhile."""
    unexpected: list[str] = []
    load = peft_model.set_peft_model_state_dict

    def observed(*args: Any, **kwargs: Any) -> Any:
        """PEFT's own function, whose result PEFT drops: it has the unused keys."""
        result = load(*args, **kwargs)
        unexpected.extend(result.unexpected_keys)
        return result

    with recorded_warnings() as said, mock.patch.object(peft_model, "set_peft_model_state_dict", observed):
        model = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    if unexpected:
        said.add(f"unexpected keys: {unexpected}")
    return model, said


def changes_in(model: PeftModel, base: PreTrainedModel | None = None, *, keep: bool = True) -> Changes:
    """ΔW of every parameter as PEFT computes it for the active adapters, with their present scalings.

    For kinds that do not add a ΔW to the base's weight, the difference between PEFT's merge and `base`. Without `keep`
    the model is not needed any more, and merged itself instead of a copy.
    """
    config = model.peft_config[model.active_adapters[0]]
    plain = config.peft_type == "LORA" and not config.use_dora and not config.lora_bias and config.bias == "none"
    if base is not None and not plain:
        unmerged = copy.deepcopy(model) if keep else model
        return _merged_changes(unmerged, base, with_biases=config.peft_type == "LORA" and config.lora_bias)
    changes: Changes = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            # A layer that wraps a parameter, such as fused experts, may wrap another such layer.
            parameter = f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}"
            own = {*module.lora_A, *module.lora_embedding_A}
            for adapter in (adapter for adapter in module.active_adapters if adapter in own):
                delta = module.get_delta_weight(adapter).detach().double()
                changes[parameter] = changes[parameter] + delta if parameter in changes else delta
        elif isinstance(module, TrainableTokensWrapper):
            tokens, own = module.token_adapter, module.original_module.weight
            changes[f"{name}.weight"] = (tokens.get_merged_weights(tokens.active_adapters) - own).detach().double()
        elif isinstance(module, ModulesToSaveWrapper):
            original = dict(module.original_module.named_parameters())
            for adapter in (adapter for adapter in module.active_adapters if adapter in module.modules_to_save):
                for key, parameter in module.modules_to_save[adapter].named_parameters():
                    changes[f"{name}.{key}"] = (parameter.double() - original[key].double()).detach()
    return changes


def _merged_changes(model: PeftModel, base: PreTrainedModel, *, with_biases: bool) -> Changes:
    merged = model.double()
    if with_biases:  # PEFT merges biases into biases only
        for module in merged.modules():
            inner = getattr(module, "base_layer", None)
            if isinstance(inner, torch.nn.Linear) and inner.bias is None:
                inner.bias = torch.nn.Parameter(torch.zeros(inner.out_features, dtype=torch.float64))
    own = parameters(base)
    changes = {}
    for name, parameter in parameters(merged.merge_and_unload()).items():
        change = parameter.detach().double()
        if name in own:
            change = change - own[name].detach().double()
        if change.any():
            changes[name] = change
    return changes


def rounded_otherwise(base: PreTrainedModel, changes: Changes, seed: int) -> Changes:
    """ΔW that W + ΔW in float32 cannot tell from these: within a few eps of the weight."""
    weights, generator = parameters(base), torch.Generator().manual_seed(seed)
    few = 4 * torch.finfo(torch.float32).eps
    return {
        name: change + few * weights[name].detach().double() * (2 * torch.rand(change.shape, generator=generator) - 1)
        for name, change in changes.items()
    }


def expert_changes(base: PreTrainedModel, expert: Expert) -> tuple[Changes, set[str]]:
    """An expert's ΔW, and PEFT's warnings when it loads the expert. PEFT's merge must first agree with its own ΔW.

    Experts with v4 names also hold changes that PEFT did not create; these are added. PEFT's warnings about their names
    count only if it loads them.
    """
    model, said = load_with_peft(base, expert.made)
    actual = logits(model)
    changes = changes_in(model, base, keep=False)
    close(actual, logits(with_changes(base, changes)), depth=LAYERS)
    if expert.folder != expert.made:
        with contextlib.suppress(RuntimeError, ValueError):
            _, more = load_with_peft(base, expert.folder)
            said |= {text for text in more if not re.search("missing|unexpected", text)}
    return {**changes, **expert.extra}, said


def parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter by each of its names: a tied head has one of its own, as in `untied`, without copying a model."""
    return dict(model.named_parameters(remove_duplicate=False))


def untied(base: PreTrainedModel) -> PreTrainedModel:
    """A copy whose head has a weight of its own: PEFT's LoRA on an embedding leaves the head alone, and vice versa."""
    model = copy.deepcopy(base)
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def with_changes(base: PreTrainedModel, changes: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The base with W + ΔW in place of W."""
    model = untied(base)
    for name in changes.keys() - dict(model.named_parameters()).keys():  # a bias that the base does not have
        module = model.get_submodule(name.removesuffix(".bias"))
        module.bias = torch.nn.Parameter(torch.zeros(len(changes[name])))
    parameters = dict(model.named_parameters())
    for name, change in changes.items():
        parameter = parameters[name]
        parameter.data = (parameter.data.double() + change).to(parameter.dtype)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 7 % (VOCABULARY - 4) + 1  # not the image tokens, nor padding
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    return result
