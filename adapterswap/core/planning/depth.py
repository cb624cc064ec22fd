"""How many layers does the base have? Every place that may say it, in the order in which they are asked.

With adapters (`find_depth`):

1. the model, if one is loaded;
2. if the composition sets `num_layers`: the base's config if it is on this machine, else `num_layers`; both must agree;
3. otherwise the base's config, fetched if need be;
4. if nothing depends on it, because no rule names a layer and no expert is a slice: the least number that the experts'
   modules allow (`least_depth`).

With full weights (`find_stored_depth`): their config, else `num_layers`, else the layers that they store.

What a config says is `ModelConfig.stacked_layers` in `model/layers`, where `Depth` has the number and the stacks in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import STACKS, Depth, ModelConfig, ModuleName, NumLayers, Stack
from adapterswap.core.model.sources import Reference, Source
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.facts import BaseFacts, LocalBase
from adapterswap.kit.errors import AdapterswapError, Problems
from adapterswap.kit.files.text import expand


class FoundDepth(NamedTuple):
    """A base's number of layers.

    Attributes:
        num_layers: the number to use.
        name: what messages call the base; None if it has no name.
        actual: the number by the base itself; None if that does not say it or is not on this machine.
        requested: the number by the composition; None if it sets none.
        required: whether it matters: a rule names layers, or an expert is a slice.
        base: what is known of the base, with its folder if its config was read or it was declared as a folder.
        notes: that the number could not be checked.
    """

    num_layers: NumLayers
    name: str | None = None
    actual: NumLayers | None = None
    requested: NumLayers | None = None
    required: bool = False
    base: BaseFacts = BaseFacts()
    notes: tuple[str, ...] = ()


def find_depth(
    experts: Mapping[str, Adapter], composition: Composition, known: NumLayers | None, base: BaseFacts
) -> FoundDepth:
    """The number of layers to use with adapters; `known` is the model's own, if a model is loaded."""
    if composition.num_layers is not None:
        return _beside_the_base(composition.num_layers, known, base)
    if known:
        return FoundDepth(known, base=base)

    slices = any(adapter.kept_layers is not None for adapter in experts.values())
    required = slices or composition.names_layers

    actual, base = find_num_layers(base)
    return FoundDepth(actual or least_depth(experts), base.reference, actual, required=required, base=base)


def _beside_the_base(requested: NumLayers, known: NumLayers | None, base: BaseFacts) -> FoundDepth:
    """The base's own number if it can be known without the network, else the requested one."""
    if known:
        return FoundDepth(known, "the model", known, requested, base=base)
    if base.declared and os.path.isdir(expand(base.declared)):
        base = replace(base, source=Source.find(base.declared, [], what="base model"))

    config = base.local.config
    if config is not None:
        actual = ModelConfig(config).stacked_layers
        if actual is not None:
            return FoundDepth(actual, base.reference, actual, requested, base=base)

    # Nobody else says it: the requested number is used, with a note.
    if not base.reference:
        reason = "The experts do not name a base"
    elif config is None:
        reason = f"The config of {Reference(base.reference).public_name} is not on this machine"
    else:
        reason = f"The config of {Reference(base.reference).public_name} does not say how many layers it has"
    note = f"{reason}, so num_layers {Depth(requested)} could not be checked"
    return FoundDepth(requested, base.reference, None, requested, base=base, notes=(note,))


def find_num_layers(base: BaseFacts) -> tuple[NumLayers | None, BaseFacts]:
    """The base's number of layers, from its config.json and never from the experts' modules; and the facts with its
    folder."""
    try:
        source, local = base.local.fetched("Pass `num_layers`, or `base_model` with the base's folder")
    except AdapterswapError as error:
        if not base.reference:
            raise

        namer, remedy = "`base_model`", "Correct it, or pass `num_layers`"
        if base.declared is None:
            first = next((name for name, place in base.named.items() if place), None)
            namer = f"{first}'s adapter_config.json"
            remedy = "Pass `base_model` with the base's folder, or `num_layers`"
        reason = error.problems[0].message
        raise type(error)(
            f"cannot read the number of layers from the base that {namer} names: {reason}",
            remedy,
            parameter="base_model",
        ) from None

    return ModelConfig(local.config or {}).stacked_layers, replace(base, source=source, local=local)


def least_depth(experts: Mapping[str, Adapter]) -> NumLayers:
    """The least number of layers that a base with the experts' modules can have."""
    has_both = any(adapter.has_both_stacks for adapter in experts.values())
    if not has_both:
        return _least_layers(experts, None)
    return {stack: _least_layers(experts, stack) for stack in STACKS}


def _least_layers(experts: Mapping[str, Adapter], stack: Stack | None) -> int:
    """The least number of layers in one stack, or in a model that has only one."""
    deepest = 0
    for adapter in experts.values():
        for part in adapter.parts.values():
            if part.layer is not None and stack in (None, ModuleName(part.name).stack):
                deepest = max(deepest, part.layer)

        # A slice may have kept layers in which it adapts nothing.
        if adapter.kept_layers is not None:
            for key, kept in adapter.kept_layers.by_stack.items():
                if key in (None, stack):
                    deepest = max([deepest, *kept])
    return 1 + deepest


def find_stored_depth(composition: Composition, name: str, skeleton: Checkpoint) -> FoundDepth:
    """The number of layers of the full weights in `skeleton`, which messages call `name`."""
    stored_layers = 1
    for parameter in skeleton.parameters.values():
        if parameter.layer is not None:
            stored_layers = max(stored_layers, 1 + parameter.layer)

    in_config, requested = ModelConfig(skeleton.config).stacked_layers, composition.num_layers
    used = in_config if in_config is not None else requested
    actual = in_config
    if in_config is None and requested is not None:
        actual = stored_layers  # with which the composition's number is compared
    required = requested is None and composition.names_layers
    return FoundDepth(used or stored_layers, name, actual, requested, required)


def check_base_depth(depth: FoundDepth, problems: Problems) -> None:
    """Report a number of layers that is not the base's, or that nobody says although it is needed."""
    with problems.collect():
        if depth.required and depth.actual is None:
            Depth.known(depth.actual, str(depth.name), "Pass `num_layers`", parameter="num_layers")

        remedy = "Remove `num_layers`, or pass `base_model` if you mean another base"
        if not same_depth(depth.actual, depth.requested):
            Depth.check(str(depth.name), depth.actual, depth.requested, remedy)


def same_depth(one: NumLayers | None, other: NumLayers | None) -> bool:
    """Whether two depths are the same; a single number also means two stacks of that depth."""
    if isinstance(one, Mapping) and isinstance(other, int):
        return set(one.values()) == {other}
    if isinstance(one, int) and isinstance(other, Mapping):
        return set(other.values()) == {one}
    return one == other


def outside_the_layers(experts: Mapping[str, Adapter], num_layers: NumLayers, base: BaseFacts) -> dict[str, Adapter]:
    """The experts, with layers that predict further tokens (see `layers_ahead`) counted as outside the layers.

    Args:
        experts: as opened, with layers counted from module names alone.
        num_layers: the language model's. If it has one number for each stack, nothing changes.
        base: the base, whose config says how many such layers it has.
    """
    if not isinstance(num_layers, int):
        return dict(experts)

    adapters = dict(experts)
    for name, adapter in experts.items():
        deepest = max((part.layer for part in adapter.parts.values() if part.layer is not None), default=0)
        if deepest < num_layers or deepest >= num_layers + _layers_ahead(name, base):
            continue  # there are no such layers, or not so many of them: `check_depth` reports that

        parts = []
        for part in adapter.parts.values():
            is_ahead = part.layer is not None and part.layer >= num_layers
            parts.append(part.at(part.name, None) if is_ahead else part)
        adapters[name] = adapter.with_parts(parts, adapter.container)
    return adapters


def _layers_ahead(expert: str, base: BaseFacts) -> int:
    """The layers that predict further tokens, by the config of the base or, if none is declared, of the expert's."""
    if base.skeleton is not None:
        return ModelConfig(base.skeleton.config).layers_ahead

    reference = base.declared or base.named[expert]
    local = base.local if reference == base.reference else LocalBase(reference)
    return 0 if local.config is None else ModelConfig(local.config).layers_ahead
