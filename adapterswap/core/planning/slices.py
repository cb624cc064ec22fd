"""Slices: the rules that keep some layers of one expert, and the layers that a plan's result has.

A slice is the plan that gives the chosen layers to the expert and the others to the base, so composing slices gives the
same result as composing the whole experts. Modules outside the layers are kept, because compositions average them.
Whatever is written from a slice lacks the layers that were cut away, unless another expert filled them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adapterswap.core.model.layers import NO_LAYER, Depth, KeptLayers, ModuleName, Stack, format_layers, parse_layers
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slots import Slot


def rules_of_slice(name: str, kept: KeptLayers, *, optional: bool = False) -> tuple[Rule, ...]:
    """The rules of a slice of one expert; with `optional`, the expert need not adapt the layers."""
    layers = (
        Rule(layers=format_layers(layers), stack=stack, expert=name, optional=optional)
        for stack, layers in kept.by_stack.items()
    )
    return (*layers, *_rest(name))


def _rest(name: str) -> tuple[Rule, Rule]:
    """The last rules of a slice: modules outside the layers are the expert's, and other layers the base's."""
    return Rule(layers=NO_LAYER, expert=name, optional=True), Rule(expert=BASE, optional=True)


def slice_in(rules: Sequence[Rule], name: str) -> KeptLayers | None:
    """The layers that these rules keep of one expert; None if they are not those of a slice."""
    *kept, outside, rest = rules if len(rules) > 2 else (None, None)
    if (outside, rest) != _rest(name):
        return None
    by_stack = {}
    for rule in kept:
        if rule != Rule(layers=rule.layers, stack=rule.stack, expert=name, optional=rule.optional) or not rule.layers:
            return None
        by_stack[rule.stack] = parse_layers(rule.layers)
    return KeptLayers(by_stack)


def requested_by_layer(
    rules: Sequence[Rule], slots: Iterable[Slot], depth: Depth
) -> dict[tuple[Stack | None, int], set[str]]:
    """Every layer, and the experts that the rules request in it.

    A slice does not say which modules it had in a layer that was cut away, so every layer counts as if it had the
    modules of all the others.
    """
    inside = [slot for slot in slots if slot.layer is not None]
    names_of = [rule.coefficients().keys() for rule in rules]
    requested: dict[tuple[Stack | None, int], set[str]] = {}
    for stack, layer in depth.layers:
        modules = {(_moved(slot, stack, layer), slot.kind) for slot in inside}
        matching = {next((i for i, r in enumerate(rules) if r.matches(m, layer, kind)), None) for m, kind in modules}
        requested[stack, layer] = {name for i in matching if i is not None for name in names_of[i]}
    return requested


def _moved(slot: Slot, stack: Stack | None, layer: int) -> str:
    """The name of the module of this kind in another layer."""
    parts = slot.matched_name.split(".")
    parts[parts.index(str(slot.layer))] = str(layer)
    name = ".".join(parts)
    return name if stack is None else ModuleName(name).in_stack(stack)
