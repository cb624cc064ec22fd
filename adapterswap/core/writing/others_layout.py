"""The layout of adapters of other kinds than LoRA ((IA)³, OFT, HiRA, …), whose modules have one owner each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.core.experts.keys import KINDS, ModuleKeys
from adapterswap.core.experts.parts import OpaqueModule
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.writing.outputs import Layout, OutputTensor, Piece
from adapterswap.core.writing.peft_config import earliest, most_common, purpose
from adapterswap.core.writing.saved_layout import saved_tensors


def lay_out_kind(plan: Plan, modules: Sequence[Slot], fan_in_fan_out: bool) -> Layout:
    """The layout of a plan whose changed modules are all of one such kind, each with one owner.

    Args:
        plan: the plan.
        modules: its slots with a change, without modules stored in full.
        fan_in_fan_out: PEFT's flag for the result.
    """
    parts: dict[str, OpaqueModule] = {}
    tensors: list[OutputTensor] = []
    for module in modules:
        (term,) = module.opaque
        part = term.change.part
        parts[module.name] = part
        for name, tensor in part.tensors.items():
            pieces = (Piece(term.expert, term.change.path, tensor),)
            tensors.append(OutputTensor(ModuleKeys(module.name).part(name), tensor.dtype, tensor.shape, None, pieces))

    # What all modules and all experts share, from the first module
    (term,) = modules[0].opaque
    for name, tensor in term.change.part.shared.items():
        pieces = (Piece(term.expert, term.change.path, tensor),)
        tensors.append(OutputTensor(ModuleKeys.shared(name), tensor.dtype, tensor.shape, None, pieces))

    for slot in plan.saved.values():
        tensors += saved_tensors(slot, plan, ())
    return Layout(_config(plan, parts, fan_in_fan_out), tuple(tensors))


def _config(plan: Plan, parts: Mapping[str, OpaqueModule], fan_in_fan_out: bool) -> dict[str, Any]:
    first = next(iter(parts.values()))
    config: dict[str, Any] = {
        **purpose(first.peft_type, plan.task_type, plan.auto_mapping, plan.base.name, plan.base.revision),
        **_version(plan),
        **first.settings,
        "target_modules": sorted(parts),
        "modules_to_save": sorted(name for name, slot in plan.saved.items() if slot.terms) or None,
        "inference_mode": True,
    }

    # Settings that differ between modules go into patterns. PEFT matches a pattern after any dot, and the first match
    # wins, so longer names go first.
    names = sorted(parts, key=lambda name: (-name.count("."), name))
    for key, pattern in KINDS[first.peft_type].patterns.items():
        values = {name: parts[name].values[key] for name in names if key in parts[name].values}
        if values:
            config[key] = most_common(values.values(), default=None)
            config[pattern] = {name: value for name, value in values.items() if value != config[key]}

    # (IA)³ scales the inputs of feed-forward modules (1×in), and the outputs of others (out×1).
    if first.peft_type == "IA3":
        config["feedforward_modules"] = sorted(name for name in parts if parts[name].tensors["ia3_l"].shape[0] == 1)
    if any(adapter.config.fan_in_fan_out for adapter in plan.adapters.values()):
        config["fan_in_fan_out"] = fan_in_fan_out
    return config


def _version(plan: Plan) -> dict[str, str]:
    """The earliest PEFT version among the experts, so that PEFT can warn about later changes."""
    versions: list[str] = []
    for adapter in plan.adapters.values():
        if not adapter.opaque:
            continue
        if adapter.config.peft_version is None:
            return {}
        versions.append(adapter.config.peft_version)
    if not versions:
        return {}
    return {"peft_version": earliest(versions)}
