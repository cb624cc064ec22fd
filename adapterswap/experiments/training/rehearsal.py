"""What would stop a run before its second step, found before the weights are read, and in a dry run.

A small copy of the base (see `small`) gets two rows, alone and packed as the run has them, the longest row's number of
tokens, and a forward and a backward pass with the recipe's adapter. What cannot be copied is checked on the base itself
once it is loaded: `check_rows`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from adapterswap.core import OpenedBase
from adapterswap.experiments.training.data import Data
from adapterswap.experiments.training.probes import Head, Probe, add_head, choose_head
from adapterswap.experiments.training.recipe import TrainingOptions, TrainRecipe
from adapterswap.experiments.training.small import POSITIONS, small_copy
from adapterswap.experiments.training.targets import TrainingTargets
from adapterswap.kit.errors import BaseModelError, FieldError, UnsupportedError, reason_of

_MOST_POSITIONS = 32_768  # no model learns so many positions, and trying them takes long


def rehearse(
    recipe: TrainRecipe, base: OpenedBase, model: Any, targets: TrainingTargets, data: Data, *, device: str
) -> Head | None:
    """Raise what would stop the run, as far as a small copy of the base shows it.

    Args:
        model: the base without weights.
        device: where the run computes. On CUDA, kernels may keep packed rows apart that the copy, on the CPU, mixes.
            There the base itself decides, once it is loaded.

    Returns:
        How the copy's log-probabilities are computed; None if it shows nothing.

    Raises:
        BaseModelError: the model reads the tokens that it is to predict.
        FieldError: a row is longer than the model's positions; PEFT or the model does not work with an adapter on a
            module.
        UnsupportedError: the model mixes packed rows, or rows of a batch.
    """
    small = small_copy(model)
    if small is None or not Probe(small).works:
        return None
    options = recipe.training
    if device != "cpu":
        options = options.model_copy(update={"packing": False, "padding_free": False})
    head = check_rows(small, base.reference, options)
    check_length(small, recipe.training, data)
    if recipe.adapter.method == "lora":
        _check_adapter(small, recipe, targets, head)
    return head


def check_rows(model: Any, name: str, options: TrainingOptions) -> Head:
    """Raise if a model, called `name`, does not compute rows one by one; return how its losses are computed."""
    probe = Probe(model)
    kind = type(model).__name__
    if not probe.works:
        raise BaseModelError(
            f"The base model {name} gives no finite logits for a row of plain text",
            f"Use a language model that reads text alone: {kind} may need other inputs, or have damaged weights",
            parameter="base_model",
        )

    if probe.reads_ahead:
        switch = getattr(model.config, "is_decoder", None)
        remedy = "Use a causal language model"
        if switch is False:
            remedy = f"Set is_decoder: true in its config.json, or use a causal language model: {kind} is neither now"
        raise BaseModelError(
            f"The base model {name} reads the tokens that it should predict: {kind} attends in both directions",
            remedy,
            parameter="base_model",
        )

    if options.packing or options.padding_free:
        _check_packed(probe, kind, "packing" if options.packing else "padding_free")
    elif options.batch_size > 1 and probe.depends_on_the_batch:
        raise UnsupportedError(
            f"In {kind}, the padding of a batch changes what the model computes for a row",
            "Set training.batch_size: 1, and training.gradient_accumulation to the number of rows of a step",
            parameter="training.batch_size",
        )
    return choose_head(probe)


def _check_packed(probe: Probe, kind: str, option: str) -> None:
    """Refuse an option that packs rows, if the model mixes rows of one sequence."""
    remedy = f"Remove training.{option}; training.group_by_length leaves little padding, and rows stay apart"
    try:
        mixed = probe.mixes_packed_rows
    except Exception as error:  # of any kind: the model says that it cannot, or stumbles
        raise UnsupportedError(
            f"training.{option}: {kind} cannot compute packed rows: {reason_of(error)}",
            remedy,
            parameter=f"training.{option}",
        ) from None
    if mixed:
        raise UnsupportedError(
            f"training.{option}: rows in one sequence see each other in {kind}, or lose their positions",
            remedy,
            parameter=f"training.{option}",
        )


def check_length(model: Any, options: TrainingOptions, data: Data) -> None:
    """Raise if the longest row has more tokens than the model, which may be a small copy, has positions."""
    longest = data.train.longest
    if data.validation:
        longest = max(longest, data.validation.longest)

    # Only where the config says less is it worth trying.
    settings = []
    for name, value in model.config.get_text_config().to_dict().items():
        if POSITIONS.fullmatch(name) and isinstance(value, int) and value > 0:
            settings.append(value)
    if not settings or not min(settings) < longest <= _MOST_POSITIONS:
        return
    probe = Probe(model)
    if probe.holds(longest):
        return

    # The largest number of tokens that the model holds, between one that it holds and one that it does not.
    most, fewest = longest, 1
    while most - fewest > 1:
        middle = (most + fewest) // 2
        if probe.holds(middle):
            fewest = middle
        else:
            most = middle
    raise FieldError(
        f"training.max_length is {options.max_length} and the longest row has {longest} tokens, but "
        f"{type(model).__name__} has positions for {fewest}",
        f"Set training.max_length: {fewest}, which cuts longer rows, or use another base",
        parameter="training.max_length",
    )


def _check_adapter(small: Any, recipe: TrainRecipe, targets: TrainingTargets, head: Head) -> None:
    """Raise if a forward and a backward pass with the recipe's adapter fails, and name the modules at fault."""
    # The target modules in the small copy, by their ends or, where it has them, by their full names.
    modules = {name for name, _ in small.named_modules()}
    names = []
    for name in targets.names:
        if name in modules or any(module.endswith(f".{name}") for module in modules):
            names.append(name)
    transposed = targets.conv1d
    reason = _failure(small, names, head, transposed) if names else None
    if reason is None:
        return

    # Each by itself; if they fail together only, all of them.
    at_fault = [name for name in names if _failure(small, [name], head, transposed) is not None]
    ends = sorted({name.rpartition(".")[2] for name in at_fault or names})
    others = sorted(set(targets.ends) - set(ends))
    remedy = "Name others in adapter.target_modules"
    if others:
        remedy = f"Set adapter.target_modules: [{', '.join(others)}]"
    raise FieldError(
        f"{type(small).__name__} cannot be trained with an adapter on {', '.join(ends)}: {reason}",
        remedy,
        parameter="adapter.target_modules",
    )


def _failure(small: Any, names: Sequence[str], head: Head, transposed: bool) -> str | None:
    """Why an adapter on these modules fails; None if it works. The small copy stays as it is."""
    model = copy.deepcopy(small)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=list(names), fan_in_fan_out=transposed)
            peft = get_peft_model(model, adapter)
            add_head(model, head)
            tokens = torch.tensor([Probe(small).rows[0]])
            router = {"output_router_logits": True} if head.router_loss else {}
            outputs = peft.train()(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, use_cache=False,
                fused_lm_head=True, **router,
            )  # fmt: skip
            outputs.loss.backward()
    except Exception as error:  # of any kind: PEFT's, TRL's or the model's
        return reason_of(error)
    return None
