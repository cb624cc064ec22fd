"""Read modules of other kinds than LoRA ((IA)³, OFT, HiRA, …), whose tensors are copied as they are.

Errors name the module; the caller puts the adapter's folder before them.
"""

from __future__ import annotations

from collections.abc import Mapping

from adapterswap.core.experts.config import AdapterConfig
from adapterswap.core.experts.keys import MISMATCH
from adapterswap.core.experts.lora import check_not_empty
from adapterswap.core.experts.parts import OpaqueModule
from adapterswap.core.model.sources import CONFIG
from adapterswap.kit.errors import Problems, UnsupportedError
from adapterswap.kit.files.tensorfile import Tensor

_HIRA_RANK = 32  # PEFT's default


def read_other(
    name: str, layer: int | None, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor], config: AdapterConfig
) -> OpaqueModule:
    """A module of another kind than LoRA.

    Args:
        name, layer: the module's.
        tensors: its tensors, by the end of their keys.
        shared: tensors that all modules of the adapter use.
        config: the adapter's.

    Raises:
        ExpertError: a tensor is empty.
        UnsupportedError: it has a rank that PEFT would not give it.
    """
    check_not_empty(name, tensors)
    rank = config.settings.get("r", _HIRA_RANK)
    if config.peft_type == "HIRA" and "hira_A" in tensors and tensors["hira_A"].shape[0] != rank:
        raise UnsupportedError(
            f"{name}: hira_A has the rank {tensors['hira_A'].shape[0]}, but {CONFIG} says r: {rank}, which "
            "PEFT 0.21 gives every module",
            "Train it without `rank_pattern`",
        )
    return OpaqueModule(
        name, layer, config.title, config.peft_type, tensors, config.settings, config.values_of(name), shared
    )


def check_feedforward(parts: Mapping[str, Mapping[str, Tensor]], config: AdapterConfig, problems: Problems) -> None:
    """Check that (IA)³ scales the inputs of the modules in `feedforward_modules`, and the outputs of the others.

    Its vector is (1×in) where it scales inputs, and (out×1) where it scales outputs.
    """
    try:
        feedforward = config.targets.are_feedforward(parts)
    except ValueError as error:
        problems.add(f"{CONFIG}: {error}", "Use plain module names in feedforward_modules")
        return

    for name, tensors in parts.items():
        shape = tensors["ia3_l"].shape
        scales_inputs = shape[0] == 1
        if shape == (1, 1) or scales_inputs == (name in feedforward):
            continue
        if scales_inputs:
            problems.add(f"{name} scales its input, but {CONFIG} says that it is not feedforward", MISMATCH)
        else:
            problems.add(f"{name} scales its output, but {CONFIG} says that it is feedforward", MISMATCH)
