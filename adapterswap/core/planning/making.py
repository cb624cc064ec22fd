"""Make plans: apply a composition to opened experts, and check it.

Plans are made from headers alone: no tensors, no torch. Rules apply to the modules that adapters change or, if an
expert is a full checkpoint, to the stored tensors of the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral

from adapterswap.core.changes.kinds import Change, Term, Whole, change_of
from adapterswap.core.changes.locating import Located, TiedHead, locate_all
from adapterswap.core.experts.adapter import Adapter, FullModule, and_more, by_layer
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor, open_checkpoint
from adapterswap.core.model.layers import (
    NumLayers,
    check_depth_of,
    check_one_list,
    extra_rows,
    format_depth,
    has_both_stacks,
    known_depth,
    same_depth,
    stacked_layers_in_config,
)
from adapterswap.core.planning.base import (
    check_base_weights,
    check_bases,
    named_base,
    outside_the_layers,
    reference_of,
    settle_depth,
    unchecked_bases,
    under_one_name,
    with_chains,
)
from adapterswap.core.planning.checks import (
    check_architecture,
    check_depth,
    check_experts,
    check_matches,
    check_names,
    check_rules,
    check_shapes,
    check_used,
    check_vocabulary,
)
from adapterswap.core.planning.composition import Composition, as_composition
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rows import check_sizes, settle_vocabulary, with_lent_rows, with_rows_of_base
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.planning.slots import Slot, Span
from adapterswap.core.planning.targets import Target, report
from adapterswap.kit.errors import (
    ArgumentError,
    BaseModelError,
    CompositionError,
    ExpertError,
    Problems,
    UnsupportedError,
    check_type,
)

Expert = Adapter | Checkpoint

_PASS_BASE = "Pass the base's folder or Hub id as `base_model`"


def make_plan(
    composition: Composition | str,
    experts: Mapping[str, Expert],
    *,
    num_layers: NumLayers | None = None,
    recorded: bool = False,
    base_at_hand: bool = False,
) -> Plan:
    """Apply a composition to opened experts.

    Args:
        composition: the composition, or its short name such as `math+swahili`.
        experts: name → expert. Names that the composition does not use are ignored. If one of the experts is a full
            checkpoint, the result is a plan of full weights.
        num_layers: the base's number of layers, or that of each stack, if you know it from the model itself. By
            default it comes from the base's config, and the composition's own number is compared with it if the base
            is on this machine.
        recorded: the composition and the order of the experts come from a record, so experts that contribute nothing
            are allowed.
        base_at_hand: the plan is for a running model, which holds the base's weights, so `base_model` is not needed
            for them.

    Raises:
        ArgumentError: an argument has the wrong type.
        CompositionError: an expert is missing or never used; a rule matches nothing or names layers out of range; no
            rule covers a module or tensor; the zones overlap; `num_layers` is not the base's.
        ExpertError: experts differ in their base, shapes, architecture or vocabulary.
        NotFoundError, BaseModelError: the base is needed, but is unknown, damaged or a different model.
        UnsupportedError: the composition cannot be computed from these tensors, or names layers of experts that have
            several lists of them.
        AdapterswapError: several of these, reported together.
    """
    composition = as_composition(composition)
    check_type(experts, Mapping, "experts", "Pass a mapping from names to opened experts")
    check_type(num_layers, (Integral, Mapping, type(None)), "num_layers", "Pass a whole number such as 32")
    problems = Problems(ExpertError)
    names: Sequence[str] = composition.expert_names
    if recorded:  # in the order of the record: the first expert decides what no rule does
        names = sorted(names, key=[*experts, *names].index)
    for name in names:
        if not isinstance(experts.get(name), Adapter | Checkpoint | None):
            problems.add(
                f"The expert {name!r} is of type {type(experts[name]).__name__}",
                "Open it first, with `open_expert`",
                parameter="experts",
                kind=ArgumentError,
            )
    problems.raise_if_any()
    check_names(names, experts, problems, composition.allocation)
    opened = {name: experts[name] for name in names if name in experts}
    opened, chained = with_chains(opened, composition.chains, problems, recorded=recorded)
    problems.raise_if_any()
    if composition.names_layers:
        for name, expert in opened.items():
            with problems.collect():
                check_one_list(name, expert.parts if isinstance(expert, Adapter) else expert.parameters)
    adapters = {name: expert for name, expert in opened.items() if isinstance(expert, Adapter)}
    check_bases(opened, composition.base_model, problems, by_weights=not recorded)
    check_experts(adapters, composition, problems)
    if not problems:
        adapters = under_one_name(adapters, composition.base_model, problems)
        opened |= adapters
    check_shapes(adapters, problems)
    if any(isinstance(expert, Checkpoint) for expert in opened.values()):
        plan = _plan_of_weights(composition, opened, problems)
    else:
        plan = _plan_of_modules(composition, opened, num_layers, problems, base_at_hand=base_at_hand)
    if not recorded:
        with problems.collect():
            check_base_weights(plan.recorded_bases, plan.base_at_hand)
        check_used(plan, names, problems)
        unchecked = unchecked_bases(opened, composition.base_model)
        plan = replace(plan, notes=(*plan.notes, *unchecked, *chained, *dict.fromkeys(_warnings(plan))))
    problems.raise_if_any()
    return plan


_ROUTERS = frozenset({"router", "gate"})  # parts of the names of a mixture's routers


def _warnings(plan: Plan) -> Iterator[str]:
    """What papers found to do damage, where the plan does it."""
    chains = plan.composition.chains
    for rule in plan.rules:
        used = [name for name, parts in chains.items() if {*parts} <= {*rule.experts}]
        if used and "density" in rule.parameters:
            yield (
                f"{rule.method} drops entries of ΔW: if an adapter of {' or '.join(used)} was trained by reinforcement "
                "learning, whose ΔW is sparse, a swap or a sum loses less (arXiv:2606.18521)"
            )
    blended = [
        slot.name
        for slot in plan
        if not _ROUTERS.isdisjoint(slot.name.split(".")) and len({term.side for term in slot.terms}) > 1
    ]
    if blended:
        yield (
            f"{and_more(blended, 1)}: routers of a mixture are blended, which can send tokens to the wrong experts; a "
            "swap copies them (arXiv:2606.03391)"
        )


def _plan_of_modules(
    composition: Composition,
    experts: Mapping[str, Expert],
    num_layers: NumLayers | None,
    problems: Problems,
    *,
    base_at_hand: bool,
) -> Plan:
    adapters = {name: expert for name, expert in experts.items() if isinstance(expert, Adapter)}
    depth = None
    with problems.collect():
        depth = settle_depth(adapters, composition, num_layers)
    problems.raise_if_any()
    assert depth is not None
    adapters = outside_the_layers(adapters, depth.num_layers, base_model=composition.base_model)
    check_depth(adapters, depth.num_layers, problems, names_layers=composition.names_layers)
    problems.raise_if_any()
    rules = composition.rules(depth.num_layers)
    check_rules(rules, depth.num_layers, problems)
    problems.raise_if_any()  # or what follows from these mistakes would be reported too
    whole = {name: part for adapter in adapters.values() for name, part in adapter.saved.items()}
    others = {
        name: part
        for adapter in adapters.values()
        for name, part in adapter.parts.items()
        if not isinstance(part, FullModule)
    }
    slots = [Slot(name, name, part.layer, part.kind, (), {}, None) for name, part in by_layer(others.values()).items()]
    saved = [
        Slot(name, name, part.layer, part.kind, (), {}, None, in_full=True)
        for name, part in by_layer(whole.values()).items()
        if name not in others
    ]
    changes = {
        name: {module: change_of(part, adapter.file.path) for module, part in adapter.parts.items()}
        for name, adapter in adapters.items()
    }
    apart = composition.row_threshold is not None
    modules = _filled(rules, slots, changes, problems, apart=apart)
    if whole.keys() & others.keys():  # some experts adapt a module that others hold in full: its owner decides
        modules = [replace(slot, in_full=bool(slot.whole) and len(slot.whole) == len(slot.terms)) for slot in modules]
    filled = [*modules, *_filled(rules, saved, changes, problems)]
    ends = {
        name: {module: changes[name][module] for module in adapter.vocabulary} for name, adapter in adapters.items()
    }
    vocabularies = settle_vocabulary(filled, ends, adapters, composition, problems)
    filled = sorted(vocabularies.slots, key=lambda slot: slot.in_full)
    covered = {slot.name for slot in filled}
    uncovered = [slot for slot in (*slots, *saved) if slot.name not in covered]
    check_matches(rules, filled, adapters, depth.num_layers, composition, problems, uncovered=uncovered)
    plan = Plan(
        composition, rules, adapters, depth.num_layers, {slot.name: slot for slot in filled},
        base_source=depth.base, notes=(*depth.notes, *vocabularies.notes),
    )  # fmt: skip
    report(plan, Target.PLAN, problems, base_at_hand=base_at_hand or composition.base_model is not None)
    return plan


def _plan_of_weights(composition: Composition, experts: Mapping[str, Expert], problems: Problems) -> Plan:
    adapters = {name: expert for name, expert in experts.items() if isinstance(expert, Adapter)}
    full = {name: expert for name, expert in experts.items() if isinstance(expert, Checkpoint)}
    report(Plan(composition, (), experts, 0, {}, is_model=True), Target.WEIGHTS, problems)
    problems.raise_if_any()
    base = _open_base(composition, adapters)
    skeleton_name, skeleton = ("the base", base) if base else next(iter(full.items()))
    for name, checkpoint in full.items():
        check_architecture(skeleton_name, skeleton, name, checkpoint, problems)
    num_layers = _stored_depth(composition, skeleton_name, skeleton, problems)
    adapters = outside_the_layers(adapters, num_layers, config=skeleton.config)
    experts = {**experts, **adapters}
    check_depth(adapters, num_layers, problems, names_layers=composition.names_layers)
    rules = composition.rules(num_layers, full=True)
    check_rules(rules, num_layers, problems)
    problems.raise_if_any()
    stored, located, tied = locate_all(adapters, skeleton, problems, where=skeleton_name, resized=True)
    problems.raise_if_any()
    changes: dict[str, Mapping[str, Change]] = {
        name: {key: place.change for key, place in parts.items()} for name, parts in located.items()
    }
    for name, checkpoint in full.items():
        changes[name] = {key: _whole(checkpoint, key, tied) for key in stored}
    slots = [_stored_slot(parameter, located.values(), base) for parameter in stored.values()]
    with_terms = _filled(rules, slots, changes, problems)
    problems.raise_if_any()
    ends = {
        expert: {key: change for key, change in by_key.items() if stored[key].has_tokens}
        for expert, by_key in changes.items()
    }
    vocabularies = settle_vocabulary(with_terms, ends, experts, composition, problems, base)
    check_vocabulary(vocabularies.slots, skeleton, full, rules, problems)
    problems.raise_if_any()
    filled = {slot.name: _with_spans(slot, slot.spans) for slot in vocabularies.slots}
    filled = with_lent_rows(filled, stored, tied, problems)
    filled, untied = _settle_head(filled, tied, adapters, skeleton)
    _check_ends(filled, stored, skeleton, problems)
    check_matches(rules, list(filled.values()), experts, num_layers, composition, problems)
    plan = Plan(
        composition, rules, experts, num_layers, filled,
        is_model=True, base=base, untied=untied, notes=vocabularies.notes,
    )  # fmt: skip
    report(plan, Target.WEIGHTS, problems)
    report(plan, Target.PLAN, problems)
    if base is None and (needing := [slot.name for slot in filled.values() if slot.needs_base or not slot.terms]):
        more = f", and so do {len(needing) - 1} more" * (len(needing) > 1)
        message = f"{needing[0]} needs the base's own weights{more}"
        problems.add(message, _PASS_BASE, parameter="base_model", kind=BaseModelError)
    return plan


def _stored_depth(composition: Composition, name: str, skeleton: Checkpoint, problems: Problems) -> NumLayers:
    """The number of layers of full weights, from their config or, if that does not say, from the composition."""
    in_config = stacked_layers_in_config(skeleton.config)
    stored_layers = 1 + max((p.layer for p in skeleton.parameters.values() if p.layer is not None), default=0)
    num_layers = composition.num_layers or in_config or (None if composition.names_layers else stored_layers)
    if same_depth(in_config, num_layers):
        num_layers = in_config
    if isinstance(num_layers, int) and has_both_stacks(skeleton.container):
        problems.add(
            f"{name} stores an encoder and a decoder ({skeleton.container}), but its config does not mention both",
            "Use a folder with the config.json of these weights",
            parameter="base_model",
            kind=BaseModelError,
        )
    with problems.collect():
        known_depth(num_layers, name, "Pass `num_layers`", parameter="num_layers")
        remedy = "Remove or correct `num_layers`"
        check_depth_of(name, stored_layers if in_config is None else in_config, num_layers, remedy)
    problems.raise_if_any()
    assert num_layers is not None
    return num_layers


def _filled(
    rules: Sequence[Rule],
    slots: Iterable[Slot],
    changes: Mapping[str, Mapping[str, Change]],
    problems: Problems,
    *,
    apart: bool = False,
) -> list[Slot]:
    """The slots, filled with the terms of the first rule that matches."""
    weights_of = [rule.side_weights() for rule in rules]
    parts_of = [
        rule.split(weights, apart=apart or rule.combines_sides) for rule, weights in zip(rules, weights_of, strict=True)
    ]
    filled: list[Slot] = []
    uncovered: list[str] = []
    for slot in slots:
        place = next(
            (i for i, rule in enumerate(rules) if rule.matches(slot.matched_name, slot.layer, slot.kind)), None
        )
        if place is None:
            uncovered.append(slot.name)
            continue
        terms = tuple(
            Term(expert, side, coefficient, changes[expert][slot.name])
            for (side, expert), coefficient in parts_of[place].items()
            if slot.name in changes.get(expert, {})
        )
        rule = rules[place]
        filled.append(replace(slot, terms=terms, weights=weights_of[place], rule=rule, method=rule.method))
    if uncovered:
        more = f" and {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
        problems.add(
            f"No rule covers {uncovered[0]}{more}",
            "End with a rule for everything else, such as {expert: NAME} or, as text, NAME",
            parameter="allocation",
            kind=CompositionError,
        )
    return filled


def _stored_slot(parameter: StoredTensor, located: Iterable[Mapping[str, Located]], base: Checkpoint | None) -> Slot:
    """A slot for a stored tensor, before any rule is applied."""
    key = parameter.name
    module = next((parts[key].module for parts in located if key in parts), parameter.module)
    weight = Whole.of(parameter.path, parameter.tensor) if base else None
    return Slot(
        key, module, parameter.layer, parameter.kind, (), {}, None,
        dtype=parameter.tensor.dtype, shape=parameter.tensor.shape, base=weight,
    )  # fmt: skip


def _whole(checkpoint: Checkpoint, key: str, tied: TiedHead | None) -> Whole:
    """A full expert's tensor; for the absent one of a tied head and its embedding, the other's."""
    parameter = checkpoint.parameters[tied.source(key, checkpoint.parameters) if tied else key]
    return Whole.of(parameter.path, parameter.tensor)


def base_of(plan: Plan, base_model: str | None = None) -> Checkpoint:
    """The base of a plan of adapters: `base_model`, or the one that the experts or the composition name."""
    return open_checkpoint(named_base(base_model or plan.base_reference, _PASS_BASE))


def merge_plan(plan: Plan, base: Checkpoint) -> Plan:
    """Turn a plan of adapters into a plan of full weights: the adapters merged into their base.

    Args:
        plan: with its final coefficients; see `writing.resolving.resolve`.
        base: the base that the experts adapt.
    """
    problems = Problems(BaseModelError)
    check_architecture("the base", base, "the base", base, problems)
    depth = stacked_layers_in_config(base.config)
    if depth is not None and depth != plan.num_layers:
        message = f"the plan is for {format_depth(plan.num_layers)} layers, but the base has {format_depth(depth)}"
        problems.add(message, "Pass the experts' base", parameter="base_model")
    stored, located, tied = locate_all(plan.adapters, base, problems, resized=True)
    problems.raise_if_any()
    filled = {}
    for key, parameter in stored.items():
        having = {name: parts[key] for name, parts in located.items() if key in parts}
        slot = _stored_slot(parameter, located.values(), base)
        planned = plan.slots.get(slot.module) if having else None
        if planned is not None:
            entering = _entering(plan, having, problems)
            terms = tuple(replace(t, change=having[t.expert].change) for t in entering)
            factors = len(planned.low_rank) == len(planned.terms)  # then `resolve` has computed the coefficients
            method = "linear" if planned.is_linear and (factors or planned.in_full) else planned.method
            slot = replace(slot, terms=terms, weights=planned.weights, rule=planned.rule, method=method)
            slot = _resized(slot, planned, having, problems)
        filled[key] = slot
    filled = with_lent_rows(filled, stored, tied, problems)
    filled, untied = _settle_head(filled, tied, plan.adapters, base)
    _check_ends(filled, stored, base, problems)
    merged = replace(plan, slots=filled, is_model=True, base=base, untied=untied)
    report(merged, Target.WEIGHTS, problems)
    problems.raise_if_any()
    return merged


def _check_ends(
    slots: Mapping[str, Slot], stored: Mapping[str, StoredTensor], skeleton: Checkpoint, problems: Problems
) -> None:
    """Check that embeddings and heads have one number of rows, if any of them was resized, and that the base has the
    rows that it adds."""
    for slot in slots.values():
        if slot.base is None or not slot.spans:
            continue
        size = slot.base.tensor.shape[0]
        if any(span.stop > size and term.expert == BASE for span in slot.spans for term in span.base):
            problems.add(
                f"The base has {size} rows of {slot.name}, which was not known when the experts were composed",
                "Pass `base_model` when you compose them",
                parameter="base_model",
                kind=BaseModelError,
            )
    ends = {name: slot for name, slot in slots.items() if slot.has_tokens}
    if any(slot.shape != stored[name].tensor.shape for name, slot in ends.items() if name in stored):
        # a base's own embedding and head may differ in size
        sizes = {name: slot.shape[0] - extra_rows(skeleton.config, slot.module) for name, slot in ends.items()}
        check_sizes(sizes, problems)


def _with_spans(slot: Slot, spans: Sequence[Span]) -> Slot:
    """A stored embedding or head with these spans, and as many rows; without spans if one tensor holds all rows.

    If there are no spans, all weights that enter have the same number of rows.
    """
    whole = slot.whole
    if not spans:
        return replace(slot, shape=whole[0].change.tensor.shape) if whole else slot
    alone = slot.owner is not None and whole and all(span.terms == slot.terms for span in spans)
    is_copy = alone and whole[0].change.tensor.shape[0] == spans[-1].stop
    settled = slot.with_spans(spans)
    return replace(settled, spans=()) if is_copy else settled


def _resized(slot: Slot, planned: Slot, having: Mapping[str, Located], problems: Problems) -> Slot:
    """A stored embedding or head with the spans that the plan gives it."""
    spans = tuple(
        replace(span, terms=tuple(replace(term, change=having[term.expert].change) for term in span.terms))
        for span in planned.spans
        if all(term.expert in having for term in span.terms)
    )
    if spans and planned.of_tokens:
        return with_rows_of_base(slot, spans, problems)
    if spans:
        return _with_spans(slot, spans)
    odd = next((term for term in slot.whole if term.change.tensor.shape != slot.shape), None)
    if odd is not None:
        problems.add(
            f"{odd.expert} holds {slot.name} with {odd.change.tensor.shape[0]} rows, but the base has {slot.shape[0]}, "
            "which was not known when the experts were composed",
            "Pass `base_model` when you compose them",
            parameter="base_model",
        )
    return slot


def _entering(plan: Plan, having: Mapping[str, Located], problems: Problems) -> list[Term[Change]]:
    """The terms of a stored tensor, each from its expert's own module.

    One expert may adapt the experts of a mixture one by one, and another all of them as one parameter.
    """
    modules = dict.fromkeys(located.module for located in having.values())
    slots = [plan.slots[module] for module in modules if module in plan.slots]
    if len(modules) > 1 and (odd := next((slot for slot in slots if not slot.is_linear), None)) is not None:
        first, second, *_ = modules
        problems.add(
            f"{first} and {second} are names of the same weight in different experts, but {odd.method} needs one name",
            "Use a weighted sum: layer_swap, soup or task_arithmetic",
            parameter="method",
            kind=UnsupportedError,
        )
    return [t for slot in slots for t in slot.terms if t.expert in having and having[t.expert].module == slot.name]


def _open_base(composition: Composition, adapters: Mapping[str, Adapter]) -> Checkpoint | None:
    reference = reference_of(adapters, composition.base_model)
    if adapters:
        named_base(reference, _PASS_BASE)
    return open_checkpoint(reference) if reference else None


def _settle_head(
    slots: dict[str, Slot], tied: TiedHead | None, adapters: Mapping[str, Adapter], skeleton: Checkpoint
) -> tuple[dict[str, Slot], bool]:
    """The slots, without one that stays tied; and whether the result stores both, so that its config must untie them.

    They stay tied if the skeleton stores one of them, and all adapters in both tie them (PEFT's `ensure_weight_tying`)
    with the same coefficients.
    """
    if tied is None:
        return slots, False
    head, embedding = slots[tied.head], slots[tied.embedding]
    absent = tied.absent(skeleton.parameters)
    if embedding.of_tokens and not head.terms:  # PEFT ties the head to them
        on_head = replace(head, terms=embedding.terms, weights=embedding.weights, rule=embedding.rule)
        if embedding.spans:
            on_head = on_head.with_spans(embedding.spans)
        slots, stays_tied = {**slots, tied.head: on_head}, True
    else:
        stays_tied = _entering_rows(head) == _entering_rows(embedding) and all(
            adapters[name].config.tied for _, name, _ in _entering_rows(head) if name in adapters
        )
    if stays_tied and absent:
        return {name: slot for name, slot in slots.items() if name != absent}, False
    return slots, True


def _entering_rows(slot: Slot) -> dict[tuple[str, str, int], float]:
    """The coefficients in each range of rows: (side, expert, first row) → coefficient."""
    spans = slot.spans or [slot.ordinary]
    return {(term.side, term.expert, span.start): term.coefficient for span in spans for term in span.terms}
