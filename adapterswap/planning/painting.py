"""Give single layers of a composition to other experts, as a click on the picture of layers does.

Knows compositions and rules; opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.errors import CompositionError
from adapterswap.experts.layers import NO_LAYER, Kind, format_layers, parse_layers
from adapterswap.planning.allocation import Rule
from adapterswap.planning.compositions import Composition

__all__ = ["Painted", "by_rules", "paint"]

Painted = Mapping[tuple[int, Kind], str]
"""(layer, kind of module) → the expert that owns it, or `base`."""

_KINDS: tuple[Kind, ...] = ("attention", "mlp", "other")
_KEPT = {"experts", "base_model", "task_type", "num_layers", "row_threshold", "allow_negative"}


def paint(composition: Composition, painted: Painted, num_layers: int) -> Composition:
    """The composition as an allocation in which the painted modules have new owners and all others stay as before.

    Args:
        composition: any composition.
        painted: the new owners, by layer and kind. If it is empty, the composition is returned unchanged.
        num_layers: L.

    Raises:
        CompositionError: a layer does not exist; see also `Composition.rules`.
    """
    if not painted:
        return composition
    if odd := sorted(layer for layer, _ in painted if not 0 <= layer < num_layers):
        raise CompositionError(
            f"layer {odd[0]} does not exist: the model has {num_layers} layers, counted from 0",
            f"Choose a layer from 0 to {num_layers - 1}",
            parameter="layers",
        )
    layers = {layer for layer, _ in painted}
    rules = [*_painted_rules(painted), *(_lenient(rule, layers) for rule in composition.rules(num_layers))]
    return _with_rules(composition, rules)


def by_rules(composition: Composition, num_layers: int) -> Composition:
    """The same composition as an allocation: its method and its sides are written as rules.

    Args:
        composition: any composition.
        num_layers: L.

    Raises:
        CompositionError, FieldError: see `Composition.rules`.
    """
    return _with_rules(composition, composition.rules(num_layers))


def _with_rules(composition: Composition, rules: Sequence[Rule]) -> Composition:
    """An allocation with the composition's experts and base."""
    fields = _KEPT | ({"seed"} if composition.is_random else set())
    content: dict[str, Any] = {name: getattr(composition, name) for name in fields & composition.model_fields_set}
    if any(weight < 0 for rule in rules for weight in (rule.blend or {}).values()):
        content["allow_negative"] = True  # AdaMergeX subtracts an expert
    return Composition(allocation=tuple(rules), **content)


def _lenient(rule: Rule, layers: set[int]) -> Rule:
    """The rule, made optional if painting these layers may leave it without a module."""
    shrinks = rule.layers not in (None, NO_LAYER) and not layers.isdisjoint(parse_layers(rule.layers or ""))
    return rule.model_copy(update={"optional": True}) if shrinks or rule.layers is None else rule


def _painted_rules(painted: Painted) -> list[Rule]:
    """A rule for each owner and set of kinds."""
    by_layer: dict[tuple[int, str], set[Kind]] = {}
    for (layer, kind), owner in painted.items():
        by_layer.setdefault((layer, owner), set()).add(kind)
    grouped: dict[tuple[str, tuple[Kind, ...]], list[int]] = {}
    for (layer, owner), kinds in sorted(by_layer.items()):
        named = tuple(kind for kind in _KINDS if kind in kinds)
        grouped.setdefault((owner, named), []).append(layer)
    return [
        Rule(layers=format_layers(layers), modules=kinds, expert=owner) for (owner, kinds), layers in grouped.items()
    ]
