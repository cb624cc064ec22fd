"""Reduce an adapter to some of its layers: a shell (a language expert's outer layers) or a core (a task's middle).

A slice is the plan that gives the chosen layers to the expert and the others to the base, so composing slices gives the
same result as composing the whole experts. Modules outside the layers are kept, because compositions average them.
Whatever is written from a slice lacks the layers that were cut away, unless another expert filled them.
"""

from __future__ import annotations

from pathlib import Path

from adapterswap.errors import ArgumentError, CompositionError, check_type
from adapterswap.experts.adapters import Adapter, open_adapter
from adapterswap.experts.layers import NO_LAYER, NumLayers, Stack, check_one_list, format_layers, parse_layers, stack_of
from adapterswap.experts.slices import KeptLayers
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.checks import requested_by_layer
from adapterswap.planning.compositions import Composition
from adapterswap.planning.making import make_plan
from adapterswap.planning.names import expert_name
from adapterswap.planning.plan import Plan

__all__ = ["kept_layers", "slice_layers", "sliced_layers", "whole_rules"]


def slice_layers(
    adapter: Adapter | str | Path,
    layers: str,
    *,
    stack: Stack | None = None,
    num_layers: NumLayers | None = None,
    base_model: str | Path | None = None,
) -> Plan:
    """Plan a slice: keep `layers` of an adapter and its modules outside the layers.

    Args:
        adapter: the whole expert, or a slice that still has these layers: an opened adapter, a folder or a Hub id.
        layers: the layers to keep, such as `0-4,30-31`.
        stack: for a model with an encoder and a decoder, the stack whose layers are kept; the other's are removed. By
            default the layers of both are kept.
        num_layers: the base's number of layers, or that of each stack; by default from the base's config.
        base_model: the base, if the adapter names none or names it differently.

    Returns:
        The plan, to be written or merged.

    Raises:
        ArgumentError: `layers` is not a list of layers, or the adapter has none of them; `stack` is unknown.
        CompositionError: the base, or the slice, does not have these layers or this stack.
        NotFoundError, ExpertError: see `open_adapter`.
        UnsupportedError: see `open_adapter`; or the adapter has several lists of layers.
        AdapterswapError: see `make_plan`.
    """
    check_type(adapter, (Adapter, str, Path), "adapter", "Pass a local folder, a Hub id or an opened adapter")
    check_type(layers, str, "layers", "Pass layers such as `layers=0-4,30-31`")
    if not isinstance(adapter, Adapter):
        adapter = open_adapter(adapter)
    remedy = "Pass layers such as `layers=0-4,30-31`"
    try:
        kept = KeptLayers.of(layers)
    except ValueError as error:
        raise ArgumentError(f"`layers`: {error}", remedy, parameter="layers") from None
    try:
        kept = KeptLayers.of(layers, stack)
    except ValueError as error:
        raise ArgumentError(f"`stack`: {error}", "Pass encoder or decoder", parameter="stack") from None
    if not any(kept.by_stack.values()):
        raise ArgumentError(f"`layers` {layers!r} names no layer", remedy, parameter="layers")
    name = expert_name(adapter, {}, "expert")
    check_one_list(name, adapter.parts)
    parts = [(part.name, part.layer) for part in adapter.parts.values() if part.layer is not None]
    if not any(kept.has(stack_of(part), layer) for part, layer in parts):
        adapted = format_layers(layer for part, layer in parts if stack is None or stack_of(part) == stack)
        raise ArgumentError(
            f"{name} adapts none of the {kept}",
            f"Choose from those that it adapts: {adapted}",
            parameter="layers",
        )
    rules = _slice_rules(name, kept)
    base = None if base_model is None else str(base_model)
    composition = Composition(allocation=rules, num_layers=num_layers, base_model=base)
    try:
        return make_plan(composition, {name: adapter})
    except CompositionError as error:
        raise (error.recast(parameter="layers") if error.parameter == "allocation" else error) from None


def whole_rules(name: str, adapter: Adapter) -> tuple[Rule, ...]:
    """The rules that take everything from one adapter: of a slice, what it has."""
    if adapter.kept_layers is None:
        return (Rule(expert=name),)
    return _slice_rules(name, adapter.kept_layers, optional=True)


def _slice_rules(name: str, kept: KeptLayers, *, optional: bool = False) -> tuple[Rule, ...]:
    """The rules of a slice; with `optional`, the expert need not adapt the layers."""
    return (
        *(
            Rule(layers=format_layers(layers), stack=stack, expert=name, optional=optional)
            for stack, layers in kept.by_stack.items()
        ),
        *_rest(name),
    )


def _rest(name: str) -> tuple[Rule, Rule]:
    """The last rules of a slice: modules outside the layers are the expert's, and other layers the base's."""
    return Rule(layers=NO_LAYER, expert=name, optional=True), Rule(expert=BASE, optional=True)


def sliced_layers(plan: Plan) -> KeptLayers | None:
    """The layers that a slice keeps; None for a plan that is not a slice."""
    *kept, outside, rest = plan.rules if len(plan.rules) > 2 else (None, None)
    name = next(iter(plan.experts))
    if len(plan.experts) != 1 or plan.composition.allocation is None or (outside, rest) != _rest(name):
        return None
    by_stack = {}
    for rule in kept:
        if rule != Rule(layers=rule.layers, stack=rule.stack, expert=name, optional=rule.optional) or not rule.layers:
            return None
        by_stack[rule.stack] = parse_layers(rule.layers)
    return KeptLayers(by_stack)


def kept_layers(plan: Plan) -> KeptLayers | None:
    """The layers that the result has, if it is a slice, or if slices gave it no more; None if it has all.

    A layer that was cut away from an expert, and that the plan leaves to the base, is still missing.
    """
    if (sliced := sliced_layers(plan)) is not None:
        return sliced
    slices = [expert.kept_layers for expert in plan.experts.values() if expert.kept_layers is not None]
    if not slices:
        return None
    requested = requested_by_layer(plan.rules, plan, plan.num_layers)
    by_stack: dict[Stack | None, set[int]] = {}
    for (stack, layer), names in requested.items():
        by_stack.setdefault(stack, set())
        if names or all(kept.has(stack, layer) for kept in slices):
            by_stack[stack].add(layer)
    if sum(map(len, by_stack.values())) == len(requested):
        return None
    return KeptLayers({stack: frozenset(layers) for stack, layers in by_stack.items()})
