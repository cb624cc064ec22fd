"""The number of layers of the experts' base: from its config, never from the experts' modules.

Reads configs of bases; knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from adapterswap.errors import AdapterswapError, BaseModelError, CompositionError
from adapterswap.experts.adapters import Adapter, FullModule, LoraModule, OpaqueModule, by_layer
from adapterswap.experts.layers import (
    STACKS,
    NumLayers,
    Stack,
    format_depth,
    has_both_stacks,
    layers_ahead,
    same_depth,
    stack_of,
    stacked_layers_in_config,
)
from adapterswap.experts.sources import (
    Source,
    at_revision,
    base_config,
    cached_base_config,
    find_source,
    public_name,
)
from adapterswap.files.smallfiles import expand, is_folder
from adapterswap.planning.compositions import Composition

__all__ = ["Depth", "find_num_layers", "least_depth", "outside_the_layers", "settle_depth"]


@dataclass(frozen=True)
class Depth:
    """The base's number of layers, the base itself (see `Plan.base_source`), and a note if it could not be checked."""

    num_layers: NumLayers
    base: Source | None = None
    notes: tuple[str, ...] = ()


def settle_depth(experts: Mapping[str, Adapter], composition: Composition, known: NumLayers | None) -> Depth:
    """The number of layers to use; `known` is the model's own, if a model is loaded.

    A composition of whole experts whose rules name no layers needs no number: if the config does not say it, the least
    possible one is used.

    Raises:
        CompositionError: the composition's `num_layers` differs from the base's.
        NotFoundError, BaseModelError: see `find_num_layers`.
    """
    requested: NumLayers | None = composition.num_layers
    declared = composition.base_model
    if requested is None:
        if known:
            return Depth(known)
        slices = any(adapter.kept_layers is not None for adapter in experts.values())
        num_layers, base_source = find_num_layers(experts, declared, required=slices or composition.names_layers)
        return Depth(num_layers or least_depth(experts), base_source)
    base, actual, is_read = ("the model", known, True) if known else _depth_on_this_machine(experts, declared)
    is_local = declared is not None and not known and is_folder(expand(declared))
    source = find_source(declared, [], what="base model") if declared and is_local else None
    if actual is None:
        fault = "does not say how many layers it has" if is_read else "is not on this machine"
        reason = f"The config of {public_name(base)} {fault}" if base else "The experts do not name a base"
        return Depth(requested, source, (f"{reason}, so num_layers {format_depth(requested)} could not be checked",))
    if not same_depth(actual, requested):
        raise CompositionError(
            f"num_layers is {format_depth(requested)}, but {base} has {format_depth(actual)} layers",
            "Remove `num_layers`, or pass `base_model` if you mean another base",
            parameter="num_layers",
        )
    return Depth(actual, source)


def outside_the_layers(
    experts: Mapping[str, Adapter],
    num_layers: NumLayers,
    *,
    base_model: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Adapter]:
    """The experts, with layers that predict further tokens (see `layers_ahead`) counted as outside the layers.

    Args:
        experts: as opened, with layers counted from module names alone.
        num_layers: the language model's. If it has one number for each stack, nothing changes.
        base_model: the declared base, whose config is read if it is on this machine; by default the experts' own.
        config: the base's config, if it is already loaded.
    """
    if not isinstance(num_layers, int):
        return dict(experts)
    adapters = {}
    for name, adapter in experts.items():
        deepest = max((part.layer for part in adapter.parts.values() if part.layer is not None), default=0)
        if deepest >= num_layers:
            reference = base_model or _reference(adapter)
            base_config = config or (cached_base_config(reference) if reference else None)
            if base_config is not None and deepest < num_layers + layers_ahead(base_config):
                adapter = _cut_off(adapter, num_layers)
        adapters[name] = adapter
    return adapters


def _cut_off(adapter: Adapter, num_layers: int) -> Adapter:
    """The adapter, with its modules from layer `num_layers` on counted as outside the layers."""

    def lora(module: LoraModule) -> LoraModule:
        return replace(module, layer=None) if (module.layer or 0) >= num_layers else module

    def full(module: FullModule) -> FullModule:
        return replace(module, layer=None) if (module.layer or 0) >= num_layers else module

    def opaque(module: OpaqueModule) -> OpaqueModule:
        if (module.layer or 0) < num_layers:
            return module
        return replace(module, layer=None, lora=None if module.lora is None else lora(module.lora))

    return replace(
        adapter,
        modules=by_layer({name: lora(module) for name, module in adapter.modules.items()}),
        saved=by_layer({name: full(module) for name, module in adapter.saved.items()}),
        opaque=by_layer({name: opaque(module) for name, module in adapter.opaque.items()}),
    )


def _depth_on_this_machine(
    experts: Mapping[str, Adapter], base_model: str | None
) -> tuple[str | None, NumLayers | None, bool]:
    """The base and its number of layers, each None if it cannot be known without the network, and whether the base's
    config was read."""
    base = base_model or next((_reference(adapter) for adapter in experts.values() if adapter.config.base_model), None)
    config = cached_base_config(base) if base else None
    return base, None if config is None else stacked_layers_in_config(config), config is not None


def _reference(adapter: Adapter) -> str | None:
    """The base that an adapter names, at its revision."""
    name = adapter.config.base_model
    return None if name is None else at_revision(name, adapter.config.revision)


def least_depth(experts: Mapping[str, Adapter]) -> NumLayers:
    """The least number of layers that a base with the experts' modules can have."""
    parts = [part for adapter in experts.values() for part in adapter.parts.values()]

    slices = [adapter.kept_layers for adapter in experts.values() if adapter.kept_layers is not None]
    kept = [(stack, layer) for slice_ in slices for stack, layers in slice_.by_stack.items() for layer in layers]

    def least(stack: Stack | None) -> int:
        layers = [part.layer for part in parts if part.layer is not None and stack in (None, stack_of(part.name))]
        return 1 + max([*layers, *(layer for key, layer in kept if key in (None, stack))], default=0)

    if not any(has_both_stacks(adapter.container) for adapter in experts.values()):
        return least(None)
    return {stack: least(stack) for stack in STACKS}


def find_num_layers(
    experts: Mapping[str, Adapter], base_model: str | None = None, *, required: bool = True
) -> tuple[NumLayers | None, Source]:
    """The base's number of layers, from its config.json and never from the experts' modules, and the base.

    Raises:
        NotFoundError: the base exists neither on this machine nor on the Hub.
        BaseModelError: no base is named, or its config is damaged or, if it is `required`, has no number of layers.
    """
    named: dict[str, str] = {}
    for name, adapter in experts.items():
        if (reference := _reference(adapter)) is not None:
            named[name] = reference
    if base_model is not None:
        base, namer, remedy = base_model, "`base_model`", "Correct it, or pass `num_layers`"
    elif named:
        namer, base = next(iter(named.items()))
        namer, remedy = f"{namer}'s adapter_config.json", "Pass `base_model` with the base's folder, or `num_layers`"
    else:
        raise BaseModelError(
            "the experts do not say which base model they adapt",
            "Pass `num_layers`, or `base_model` with the base's folder",
            parameter="base_model",
        )
    try:
        source, config = base_config(base)
    except AdapterswapError as error:
        reason = error.problems[0].message
        raise type(error)(
            f"cannot read the number of layers from the base that {namer} names: {reason}",
            remedy,
            parameter="base_model",
        ) from None
    num_layers = stacked_layers_in_config(config)
    if num_layers is None and required:
        raise BaseModelError(
            f"the config of {base} does not say how many layers it has", "Pass `num_layers`", parameter="num_layers"
        )
    return num_layers, source
