"""Gates: what is checked at each stage of making a plan, beside the path.

A gate looks at what the path has made, and adds the problems that it finds. It changes nothing and returns nothing, so
`planner` gives the same plan without gates. They are listed in one table, by the class of what they look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import Depth, ModelConfig, check_one_list
from adapterswap.core.planning.alignment import Aligned, check_alignment
from adapterswap.core.planning.base import check_base_weights, check_bases
from adapterswap.core.planning.checks import (
    check_architecture,
    check_config_owner,
    check_depth,
    check_experts,
    check_matches,
    check_names,
    check_rules,
    check_shapes,
    check_used,
    check_vocabulary,
)
from adapterswap.core.planning.depth import FoundDepth, check_base_depth
from adapterswap.core.planning.fit import Fit, Heads, Placed, check_fit, check_heads, check_placed, check_quantized
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.row_gates import check_sizes, check_vocabularies
from adapterswap.core.planning.rows import Vocabularies, extra_rows
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.stages import (
    Ends,
    Filled,
    Layered,
    Merging,
    Opened,
    Planned,
    Request,
    Rowed,
    Ruled,
    Skeleton,
)
from adapterswap.core.planning.targets import Target
from adapterswap.kit.errors import ArgumentError, BaseModelError, CompositionError, Problems, and_more

Gate = Callable[[Any, Problems], None]


def check(made: object, problems: Problems) -> None:
    """Let every gate for this stage look at what was made."""
    for gate in GATES.get(type(made), ()):
        gate(made, problems)


def _types(request: Request, problems: Problems) -> None:
    for name in request.names:
        if not isinstance(request.experts.get(name), Adapter | Checkpoint | None):
            problems.add(
                f"The expert {name!r} is of type {type(request.experts[name]).__name__}",
                "Open it first, with `open_expert`",
                parameter="experts",
                kind=ArgumentError,
            )


def _names(request: Request, problems: Problems) -> None:
    if not problems:
        check_names(request.names, request.experts, problems, request.composition.allocation)


def _one_list(opened: Opened, problems: Problems) -> None:
    if not opened.composition.names_layers:
        return
    for name, expert in opened.experts.items():
        modules = expert.parts if isinstance(expert, Adapter) else expert.parameters
        with problems.collect():
            check_one_list(name, modules)


def _one_base(opened: Opened, problems: Problems) -> None:
    check_bases(opened.experts, opened.composition.base_model, problems, by_weights=not opened.recorded)


def _beside_checkpoints(opened: Opened, problems: Problems) -> None:
    if len(opened.adapters) < len(opened.experts):
        Target.WEIGHTS.report(Plan(opened.composition, (), opened.experts, 0, {}, is_model=True), problems)


def _one_kind(opened: Opened, problems: Problems) -> None:
    check_experts(opened.adapters, opened.composition, problems)


def _shapes(aligned: Aligned, problems: Problems) -> None:
    check_shapes(aligned.experts, problems)


def _within_the_base(layered: Layered, problems: Problems) -> None:
    names_layers = layered.composition.names_layers
    check_depth(layered.adapters, layered.num_layers, problems, names_layers=names_layers)


def _layers_of_rules(ruled: Ruled, problems: Problems) -> None:
    check_rules(ruled.rules, ruled.num_layers, problems)


def _one_list_of_layers(skeleton: Skeleton, problems: Problems) -> None:
    if isinstance(skeleton.num_layers, int) and skeleton.checkpoint.has_both_stacks:
        problems.add(
            f"{skeleton.name} stores an encoder and a decoder ({skeleton.checkpoint.container}), but its config does "
            "not mention both",
            "Use a folder with the config.json of these weights",
            parameter="base_model",
            kind=BaseModelError,
        )


def _one_architecture(skeleton: Skeleton, problems: Problems) -> None:
    for name, checkpoint in skeleton.experts.items():
        check_architecture(
            skeleton.name, skeleton.checkpoint, name, checkpoint, problems, config_from=skeleton.config_from
        )


def _covered(filled: Filled, problems: Problems) -> None:
    if not filled.uncovered:
        return
    problems.add(
        f"No rule covers {and_more([slot.name for slot in filled.uncovered])}",
        "End with a rule for everything else, such as {expert: NAME} or, as text, NAME",
        parameter="allocation",
        kind=CompositionError,
    )


def _rows(rowed: Rowed, problems: Problems) -> None:
    check_vocabulary(rowed.slots, rowed.skeleton.checkpoint, rowed.skeleton.experts, rowed.rules, problems)


def _rows_of_the_base(ends: Ends, problems: Problems) -> None:
    """Report spans beyond the rows that the base adds to them."""
    for slot in ends.slots.values():
        if slot.base is None or not slot.spans:
            continue
        size = slot.base.tensor.shape[0]
        for span in slot.spans:
            # Rows that an expert has a copy of are taken from there.
            if span.stop > size and any(share.copy is None for share in span.base):
                problems.add(
                    f"The base has {size} rows of {slot.name}, which was not known when the experts were composed",
                    "Pass `base_model` when you compose them",
                    parameter="base_model",
                    kind=BaseModelError,
                )
                break


def _one_size(ends: Ends, problems: Problems) -> None:
    """Report embeddings and heads with different numbers of rows, if any of them was resized."""
    slots = {name: slot for name, slot in ends.slots.items() if slot.has_tokens}
    common = slots.keys() & ends.stored.keys()
    if all(slots[name].shape == ends.stored[name].tensor.shape for name in common):
        return  # a base's own embedding and head may differ in size

    sizes = {name: slot.shape[0] - extra_rows(ends.config, slot.module) for name, slot in slots.items()}
    check_sizes(sizes, problems)


def _not_quantized_there(merging: Merging, problems: Problems) -> None:
    check_quantized(merging.plan.adapters, merging.base, problems)


def _depth_of_the_plan(merging: Merging, problems: Problems) -> None:
    depth = ModelConfig(merging.base.config).stacked_layers
    if depth is not None and depth != merging.plan.num_layers:
        message = f"The plan is for {merging.plan.depth} layers, but the base has {Depth(depth)}"
        problems.add(message, "Pass the experts' base", parameter="base_model")


def _full_weights(merged: Plan, problems: Problems) -> None:
    Target.WEIGHTS.report(merged, problems)


def _config_owner(planned: Planned, problems: Problems) -> None:
    plan = planned.plan
    owners = list(plan.checkpoints)
    if plan.base.weights is not None or not plan.is_model:
        owners.insert(0, BASE)
    check_config_owner(plan.composition, owners, problems)


def _matches(planned: Planned, problems: Problems) -> None:
    plan = planned.plan
    check_matches(
        plan.rules, list(plan), plan.experts, plan.num_layers, plan.composition, problems, uncovered=planned.uncovered
    )


def _limits(planned: Planned, problems: Problems) -> None:
    if planned.plan.is_model:
        Target.WEIGHTS.report(planned.plan, problems)
    Target.PLAN.report(planned.plan, problems, base_at_hand=planned.base_at_hand)


def _has_its_base(planned: Planned, problems: Problems) -> None:
    plan = planned.plan
    if not plan.is_model or plan.base.weights is not None:
        return

    needing = [slot.name for slot in plan if slot.needs_base or not slot.terms]
    if needing:
        first, *others = needing
        more = f", and so do {len(others)} more" if others else ""
        problems.add(
            f"{first} needs the base's own weights{more}",
            "Pass the base's folder or Hub id as `base_model`",
            parameter="base_model",
            kind=BaseModelError,
        )


def _base_is_theirs(planned: Planned, problems: Problems) -> None:
    if planned.recorded:
        return
    base = planned.plan.base
    with problems.collect():
        check_base_weights(base.recorded, base.at_hand, base.named)


def _used(planned: Planned, problems: Problems) -> None:
    if not planned.recorded:
        check_used(planned.plan, planned.names, problems)


GATES: Mapping[type, tuple[Gate, ...]] = {
    Request: (_types, _names),
    Opened: (_one_list, _one_base, _one_kind, _beside_checkpoints),
    Aligned: (check_alignment, _shapes),
    Fit: (check_fit,),
    FoundDepth: (check_base_depth,),
    Layered: (_within_the_base,),
    Ruled: (_layers_of_rules,),
    Skeleton: (_one_architecture, _one_list_of_layers),
    Filled: (_covered,),
    Vocabularies: (check_vocabularies,),
    Rowed: (_rows,),
    Heads: (check_heads,),
    Merging: (_not_quantized_there, _depth_of_the_plan),
    Placed: (check_placed,),
    Ends: (_rows_of_the_base, _one_size),
    Plan: (_full_weights,),
    Planned: (_config_owner, _matches, _limits, _has_its_base, _base_is_theirs, _used),
}
