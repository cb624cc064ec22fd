"""Reduce an adapter to some of its layers: a shell (a language expert's outer layers) or a core (a task's middle).

A slice is the plan that gives the chosen layers to the expert and the others to the base, so composing slices gives the
same result as composing the whole experts. Modules outside the layers are kept, because compositions average them.
"""

from __future__ import annotations

from pathlib import Path

from adapterswap.errors import ArgumentError, CompositionError, check_type
from adapterswap.experts.adapters import Adapter, open_adapter
from adapterswap.experts.layers import NO_LAYER, KeptLayers, NumLayers, Stack, check_one_list, format_layers, stack_of
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.making import make_plan
from adapterswap.planning.names import expert_name
from adapterswap.planning.plan import Plan

__all__ = ["slice_layers"]


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
    if not kept.layers:
        raise ArgumentError(f"`layers` {layers!r} names no layer", remedy, parameter="layers")
    name = expert_name(adapter, {}, "expert")
    check_one_list(name, adapter.parts)
    parts = [(part.name, part.layer) for part in adapter.parts.values() if part.layer is not None]
    if not any(kept.holds(*part) for part in parts):
        adapted = format_layers(layer for part, layer in parts if stack is None or stack_of(part) == stack)
        raise ArgumentError(
            f"{name} adapts none of the {kept}",
            f"Choose from those that it adapts: {adapted}",
            parameter="layers",
        )
    rules = (
        Rule(layers=format_layers(kept.layers), stack=stack, expert=name),
        Rule(layers=NO_LAYER, expert=name, optional=True),
        Rule(expert=BASE, optional=True),
    )
    base = None if base_model is None else str(base_model)
    composition = Composition(allocation=rules, num_layers=num_layers, base_model=base)
    try:
        return make_plan(composition, {name: adapter})
    except CompositionError as error:
        raise (error.recast(parameter="layers") if error.parameter == "allocation" else error) from None


def sliced_layers(plan: Plan) -> KeptLayers | None:
    """The layers that a slice, or a copy of one, keeps; None for a plan that is neither."""
    rules = plan.rules
    copied = next(iter(plan.adapters.values())) if len(plan.experts) == len(plan.adapters) == len(rules) == 1 else None
    if copied is not None and rules[0] == Rule(expert=next(iter(plan.adapters))):
        return copied.kept_layers
    if len(plan.experts) != 1 or len(rules) != 3 or plan.composition.allocation is None:
        return None
    kept, outside, rest = rules
    name = next(iter(plan.experts))
    is_slice = kept.expert == outside.expert == name and rest == Rule(expert=BASE, optional=True)
    if not is_slice or kept.layers is None or kept.modules is not None or outside.layers != NO_LAYER:
        return None
    return KeptLayers.of(kept.layers, kept.stack)
