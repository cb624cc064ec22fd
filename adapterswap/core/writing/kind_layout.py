"""The layout of adapters without LoRA: other kinds of PEFT, each module with one owner, and trained tokens alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from adapterswap.core.experts.keys import KINDS, TRAINABLE_TOKENS, ModuleKeys
from adapterswap.core.experts.parts import OpaqueModule
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.writing.outputs import Layout, OutputTensor, Piece
from adapterswap.core.writing.peft_config import check_base_name, most_common
from adapterswap.core.writing.saved_layout import saved_tensors, tied_names


def lay_out_kind(plan: Plan, modules: Sequence[Slot], fan_in_fan_out: bool) -> Layout:
    """The layout of a plan whose changed modules are all of one such kind, each with one owner.

    Args:
        plan: the plan.
        modules: its slots with a change, without modules stored in full.
        fan_in_fan_out: PEFT's flag for the result.
    """
    tensors = [tensor for module in modules for tensor in _copied(module)]
    tensors += _shared(modules)
    tensors += [tensor for slot in plan.saved.values() for tensor in saved_tensors(slot, plan, ())]
    return Layout(_config_of_kind(plan, modules, fan_in_fan_out), tuple(tensors))


def lay_out_tokens(plan: Plan) -> Layout:
    """The layout of a plan that changes nothing but trained tokens, the same in each embedding or head.

    If the base's head is tied to its embedding, PEFT expects the rows under both names.
    """
    slots = [slot for slot in plan.saved.values() if slot.terms]
    tensors = [
        replace(rows, key=ModuleKeys(name).trained_rows)
        for slot in slots
        for rows in saved_tensors(slot, plan, ())
        for name in (slot.name, *tied_names(slot, plan))
    ]
    targets = sorted(slot.name for slot in slots)
    config = {
        **_named(plan, TRAINABLE_TOKENS),
        "token_indices": list(slots[0].tokens),
        "target_modules": targets[0] if len(targets) == 1 else targets,  # PEFT writes a single name as a regex, too
        "init_weights": True,
        "inference_mode": True,
    }
    return Layout(config, tuple(tensors))


def _named(plan: Plan, peft_type: str) -> dict[str, Any]:
    """The keys that say what an adapter is for."""
    check_base_name(plan.base.name)
    return {
        "peft_type": peft_type,
        "task_type": plan.task_type,
        **({"auto_mapping": dict(plan.auto_mapping)} if plan.auto_mapping and plan.task_type is None else {}),
        "base_model_name_or_path": plan.base.name,
        "revision": plan.base.revision,
    }


def _version(plan: Plan) -> dict[str, str]:
    """The earliest PEFT version among the experts, so that PEFT can warn about later changes."""
    versions = [adapter.config.peft_version for adapter in plan.adapters.values() if adapter.opaque]
    known_versions = [version for version in versions if version is not None]
    if not known_versions or len(known_versions) < len(versions):
        return {}
    return {"peft_version": min(known_versions, key=lambda version: [int(n) for n in re.findall(r"\d+", version)[:3]])}


def part_of(module: Slot) -> OpaqueModule:
    """The module's only change."""
    (term,) = module.opaque
    return term.change.part


def _copied(module: Slot) -> Iterator[OutputTensor]:
    (term,) = module.terms
    for name, tensor in part_of(module).tensors.items():
        pieces = (Piece(term.expert, term.change.path, tensor),)
        yield OutputTensor(ModuleKeys(module.name).part(name), tensor.dtype, tensor.shape, None, pieces)


def _shared(modules: Sequence[Slot]) -> Iterator[OutputTensor]:
    """Tensors that all modules and all experts share, from the first module."""
    (term,) = modules[0].terms
    for name, tensor in part_of(modules[0]).shared.items():
        pieces = (Piece(term.expert, term.change.path, tensor),)
        yield OutputTensor(ModuleKeys.shared(name), tensor.dtype, tensor.shape, None, pieces)


def _config_of_kind(plan: Plan, modules: Sequence[Slot], fan_in_fan_out: bool) -> dict[str, Any]:
    parts = {module.name: part_of(module) for module in modules}
    first = next(iter(parts.values()))
    kind = KINDS[first.peft_type]
    config: dict[str, Any] = {
        **_named(plan, first.peft_type),
        **_version(plan),
        **first.settings,
        "target_modules": sorted(parts),
        "modules_to_save": sorted(name for name, slot in plan.saved.items() if slot.terms) or None,
        "inference_mode": True,
    }
    # PEFT matches a pattern after any dot, and the first match wins, so longer names go first.
    names = sorted(parts, key=lambda name: (-name.count("."), name))
    for key, pattern in kind.patterns.items():
        values = {name: parts[name].values[key] for name in names if key in parts[name].values}
        if values:
            config[key] = most_common(values.values(), default=None)
            config[pattern] = {name: value for name, value in values.items() if value != config[key]}
    if first.peft_type == "IA3":
        config["feedforward_modules"] = sorted(name for name in names if parts[name].tensors["ia3_l"].shape[0] == 1)
    if any(adapter.config.fan_in_fan_out for adapter in plan.adapters.values()):
        config["fan_in_fan_out"] = fan_in_fan_out
    return config
