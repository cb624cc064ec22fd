"""Slices: the rules that keep some layers of one expert, and the layers that a plan's result has.

A slice is the plan that gives the chosen layers to the expert and the others to the base, so composing slices gives the
same result as composing the whole experts. Modules outside the layers are kept, because compositions average them.
Whatever is written from a slice lacks the layers that were cut away, unless another expert filled them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adapterswap.core.model.layers import NO_LAYER, Depth, KeptLayers, ModuleName, Stack, parse_layers
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slots import Slot


def rules_of_slice(name: str, kept: KeptLayers, *, optional: bool = False) -> tuple[Rule, ...]:
    """The rules of a slice of one expert; with `optional`, the expert need not adapt the layers."""
    rules = []
    for stack, layers in kept.by_stack.items():
        rules.append(Rule(layers=frozenset(layers), stack=stack, expert=name, optional=optional))
    rules.append(Rule(layers=NO_LAYER, expert=name, optional=True))
    rules.append(Rule(expert=BASE, optional=True))
    return tuple(rules)


def slice_in(rules: Sequence[Rule], name: str) -> KeptLayers | None:
    """The layers that these rules keep of one expert; None if they are not those of a slice."""
    if len(rules) < 3:
        return None
    *kept, outside, rest = [rule.as_data() for rule in rules]
    if outside != {"layers": NO_LAYER, "expert": name, "optional": True} or rest != {"expert": BASE, "optional": True}:
        return None

    by_stack = {}
    for rule in kept:
        if rule.get("expert") != name or not {"layers"} <= rule.keys() <= {"layers", "stack", "expert", "optional"}:
            return None
        by_stack[rule.get("stack")] = parse_layers(rule["layers"])
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
        names = requested[stack, layer] = set[str]()
        modules = {(_moved(slot, stack, layer), slot.kind) for slot in inside}
        for module, kind in modules:
            for rule, named in zip(rules, names_of, strict=True):
                if rule.matches(module, layer, kind):
                    names.update(named)
                    break
    return requested


def _moved(slot: Slot, stack: Stack | None, layer: int) -> str:
    """The name of the module of this kind in another layer."""
    parts = slot.matched_name.split(".")
    parts[parts.index(str(slot.layer))] = str(layer)
    name = ".".join(parts)
    return name if stack is None else ModuleName(name).in_stack(stack)
