"""Make plans: apply a composition to opened experts, and check it.

Plans are made from headers alone: no tensors, no torch. Rules apply to the modules that adapters change or, if an
expert is a full checkpoint, to the stored tensors of the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral

from adapterswap.core.changes.kinds import Change, Storage, Term, Whole, change_of
from adapterswap.core.changes.locations import Located, TiedHead, locate_all
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.parts import Part
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor, open_checkpoint
from adapterswap.core.model.layers import NumLayers
from adapterswap.core.model.sources import Reference
from adapterswap.core.planning.alignment import Aligned, align
from adapterswap.core.planning.base import unchecked_bases, with_chains
from adapterswap.core.planning.composition import Composition, as_composition
from adapterswap.core.planning.depth import find_depth, find_stored_depth, outside_the_layers
from adapterswap.core.planning.facts import PASS_BASE, BaseFacts
from adapterswap.core.planning.fit import Fit, Heads, Placed, fit
from adapterswap.core.planning.gates import check
from adapterswap.core.planning.lent_rows import with_lent_rows, with_rows_of_base
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rows import settle_vocabulary, without_advice
from adapterswap.core.planning.rules import Rule
from adapterswap.core.planning.slots import Place, Slot, Span
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
from adapterswap.kit.errors import BaseModelError, ExpertError, Problems, UnsupportedError, and_more, check_type

Expert = Adapter | Checkpoint


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
    check(Request(composition, names, experts), problems)
    problems.raise_if_any()

    # Experts on one base: adapters that were trained on top of others are taken to the base of the first.
    named = {name: experts[name] for name in names}
    based, chained = with_chains(named, composition.chains, problems, recorded=recorded)
    problems.raise_if_any()
    opened = Opened(composition, based, recorded)
    check(opened, problems)
    base = BaseFacts.of(based, composition.base_model)

    # One name for each module, as far as the base is at hand.
    aligned = Aligned(opened.adapters) if problems else align(opened.adapters, base)
    check(aligned, problems)
    opened = opened._replace(experts={**based, **aligned.experts})

    skipped = base_at_hand or (recorded and composition.base_model is None)
    seen = Fit() if skipped or problems else fit(aligned.experts, base.local)
    check(seen, problems)

    if opened.adapters.keys() == opened.experts.keys():
        plan, uncovered = _plan_of_modules(opened, base, num_layers, problems)
        base_at_hand = base_at_hand or composition.base_model is not None
    else:
        plan, uncovered = _plan_of_weights(opened, base, problems), ()
    check(Planned(plan, names, uncovered, recorded, base_at_hand), problems)
    problems.raise_if_any()

    if recorded:
        return plan
    unchecked = unchecked_bases(opened.experts, composition.base_model)
    return replace(plan, notes=(*plan.notes, *unchecked, *seen.notes, *chained, *dict.fromkeys(_warnings(plan))))


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

    blended = []
    for slot in plan:
        is_router = not _ROUTERS.isdisjoint(slot.name.split("."))
        if is_router and len({term.side for term in slot.terms}) > 1:
            blended.append(slot.name)
    if blended:
        yield (
            f"{and_more(blended, 1)}: blended routers of mixtures of experts can send tokens to the wrong experts; "
            "a swap copies them (arXiv:2606.03391)"
        )


def _plan_of_modules(
    opened: Opened, base: BaseFacts, num_layers: NumLayers | None, problems: Problems
) -> tuple[Plan, Sequence[Slot]]:
    """The plan of an adapter, and the modules that no rule matches."""
    composition, adapters, depth = opened.composition, opened.adapters, None
    with problems.collect():
        depth = find_depth(adapters, composition, num_layers, base)
        check(depth, problems)
    problems.raise_if_any()
    assert depth is not None
    adapters = outside_the_layers(adapters, depth.num_layers, depth.base)
    rules = _rules(adapters, depth.num_layers, composition, problems)

    changes: dict[str, dict[str, Change]] = {}
    ends: dict[str, dict[str, Change]] = {}
    for name, adapter in adapters.items():
        changes[name] = {module: change_of(part, adapter.file.path) for module, part in adapter.parts.items()}
        ends[name] = {module: changes[name][module] for module in adapter.vocabulary}

    filled = _filled(rules, _places(adapters), changes, apart=composition.row_threshold is not None)
    check(filled, problems)

    vocabularies = settle_vocabulary(filled.slots, ends, adapters, composition, depth.base)
    check(vocabularies, problems)
    slots = {slot.name: slot for slot in sorted(vocabularies.slots, key=lambda slot: slot.storage.in_full)}
    notes = (*depth.notes, *vocabularies.notes)
    plan = Plan(composition, rules, adapters, depth.num_layers, slots, base=depth.base, notes=notes)
    return plan, filled.uncovered


def _places(adapters: Mapping[str, Adapter]) -> list[Place]:
    """A place for each module of an adapter: those outside the layers first, then by layer and name.

    Modules that all experts hold in full come last. What some adapt and others hold is blended as adapted.
    """
    adapted: dict[str, Part] = {}
    held: dict[str, Part] = {}
    for adapter in adapters.values():
        adapted |= adapter.adapted
        held |= adapter.saved

    places = []
    for name, part in {**held, **adapted}.items():
        empty = Storage.LORA if name in adapted else Storage.FULL
        places.append(Place(name, name, name, part.layer, part.kind, empty))
    places.sort(key=lambda place: (-1 if place.layer is None else place.layer, place.name))
    return sorted(places, key=lambda place: place.empty is Storage.FULL)


def _plan_of_weights(opened: Opened, base: BaseFacts, problems: Problems) -> Plan:
    """The plan of full weights, if an expert is a full checkpoint."""
    problems.raise_if_any()
    composition, adapters = opened.composition, opened.adapters
    full = {name: expert for name, expert in opened.experts.items() if isinstance(expert, Checkpoint)}

    # The base or, if nobody names it, the first full expert says which tensors the result has.
    if adapters:
        Reference.to_base(base.reference, PASS_BASE)
    weights = open_checkpoint(base.reference) if base.reference else None
    where, stored_in = ("the base", weights) if weights else next(iter(full.items()))
    base = replace(base, weights=weights, skeleton=stored_in)

    depth = find_stored_depth(composition, where, stored_in)
    num_layers = depth.num_layers
    skeleton = Skeleton(where, stored_in, full, num_layers, composition.config_from)
    check(skeleton, problems)
    check(depth, problems)
    problems.raise_if_any()

    adapters = outside_the_layers(adapters, num_layers, base)
    experts = {**opened.experts, **adapters}
    check(Heads(adapters, stored_in), problems)
    problems.raise_if_any()  # the tensors of such a head would be missed
    rules = _rules(adapters, num_layers, composition, problems, full=True)

    # What each expert does to each stored tensor. Of a tied head and its embedding, a checkpoint may store only one.
    stored, located, tied = locate_all(adapters, stored_in, problems, where=where, resized=True)
    problems.raise_if_any()
    changes: dict[str, dict[str, Change]] = {}
    for name, parts in located.items():
        changes[name] = {key: place.change for key, place in parts.items()}
    for name, checkpoint in full.items():
        changes[name] = {}
        for key in stored:
            if key in stored_in.ahead and key not in checkpoint.ahead:
                continue
            source = tied.source(key, checkpoint.parameters) if tied else key
            parameter = checkpoint.parameters[source]
            changes[name][key] = Whole.of(parameter.path, parameter.tensor)

    places = [_stored_place(parameter, located.values(), weights) for parameter in stored.values()]
    filled = _filled(rules, places, changes)
    check(filled, problems)
    problems.raise_if_any()

    ends: dict[str, dict[str, Change]] = {}
    for name, by_key in changes.items():
        ends[name] = {key: change for key, change in by_key.items() if stored[key].has_tokens}
    vocabularies = settle_vocabulary(filled.slots, ends, experts, composition, base)
    check(vocabularies, problems)
    check(Rowed(vocabularies.slots, skeleton, rules), problems)
    problems.raise_if_any()

    settled = {slot.name: _with_spans(slot, slot.spans) for slot in vocabularies.slots}
    settled, untied = _with_ends(settled, stored, tied, adapters, stored_in, problems)
    notes = (*vocabularies.notes, *_on_further_tokens(where, stored_in, full))
    return Plan(composition, rules, experts, num_layers, settled, is_model=True, base=base, untied=untied, notes=notes)


def _on_further_tokens(where: str, stored_in: Checkpoint, full: Mapping[str, Checkpoint]) -> Iterator[str]:
    """What becomes of tensors for further tokens (MTP) that only some checkpoints hold, in a sentence for each.

    Args:
        where: what messages call `stored_in`.
        stored_in: the checkpoint whose tensors the result has.
        full: the experts that are full checkpoints.
    """
    for name, checkpoint in full.items():
        if lacking := sorted(stored_in.ahead - checkpoint.ahead):
            yield (
                f"{name} lacks {and_more(lacking)} of {where}, which predict further tokens (MTP) and which "
                f"transformers does not save: {name} counts as unchanged there"
            )
        if extra := sorted(checkpoint.ahead - stored_in.ahead):
            yield (
                f"{name} holds {and_more(extra)}, which predict further tokens (MTP). {where} does not, so they are "
                "not in the result"
            )


def _rules(
    adapters: Mapping[str, Adapter],
    num_layers: NumLayers,
    composition: Composition,
    problems: Problems,
    *,
    full: bool = False,
) -> tuple[Rule, ...]:
    """The rules of a composition for a number of layers; see `Composition.rules`."""
    check(Layered(adapters, num_layers, composition), problems)
    problems.raise_if_any()
    rules = composition.rules(num_layers, full=full)
    check(Ruled(rules, num_layers), problems)
    problems.raise_if_any()  # or what follows from these mistakes would be reported too
    return rules


def _with_ends(
    slots: Mapping[str, Slot],
    stored: Mapping[str, StoredTensor],
    tied: TiedHead | None,
    adapters: Mapping[str, Adapter],
    skeleton: Checkpoint,
    problems: Problems,
) -> tuple[dict[str, Slot], bool]:
    """The slots with rows that experts lend and the tied head settled, and whether the result must untie it."""
    settled, untied = with_lent_rows(slots, stored, tied, problems), False
    if tied is not None:
        settled, untied = _with_head(settled, tied, adapters, skeleton)
    check(Ends(settled, stored, skeleton.config), problems)
    return settled, untied


def _filled(
    rules: Sequence[Rule],
    places: Iterable[Place],
    changes: Mapping[str, Mapping[str, Change]],
    *,
    apart: bool = False,
) -> Filled:
    """A slot in each place, with the terms of the first rule that matches.

    Args:
        rules: in order.
        places: where the slots are.
        changes: expert → its changes, by the place's name.
        apart: keep the sides of every rule apart where experts have LoRA; see `Rule.split`.
    """
    # The same for all slots of a rule: the weights of its sides, its experts' coefficients, and whom it requests.
    of_rule = []
    for rule in rules:
        weights = rule.side_weights()
        parts = rule.split(weights, apart=rule.combines_sides)
        requested = tuple(dict.fromkeys(expert for _, expert in parts))
        parts_of = dict.fromkeys(Storage, parts)
        if apart and not rule.combines_sides:
            parts_of[Storage.LORA] = rule.split(weights, apart=True)
        of_rule.append((rule, weights, parts_of, requested))

    filled = Filled([], [])
    for place in places:
        name, layer, kind = place.matched_name, place.layer, place.kind
        first = next((one for one in of_rule if one[0].matches(name, layer, kind)), None)
        if first is None:
            filled.uncovered.append(place.slot())
            continue

        rule, weights, parts_of, requested = first
        terms = []
        for (side, expert), coefficient in parts_of[place.empty].items():
            change = changes[expert].get(place.name) if expert in changes else None
            if change is not None:
                terms.append(Term(expert, side, coefficient, change))
        filled.slots.append(place.slot(terms, weights, rule, requested, rule.method))
    return filled


def _stored_place(parameter: StoredTensor, located: Iterable[Mapping[str, Located]], base: Checkpoint | None) -> Place:
    """The place of a stored tensor."""
    key, tensor = parameter.name, parameter.tensor

    # The name of its module by the first expert that changes it, or else by the base
    module = parameter.module
    for parts in located:
        if key in parts:
            module = parts[key].module
            break

    matched_name = f"{module}.{key.rpartition('.')[2]}"
    weight = Whole.of(parameter.path, tensor) if base else None
    layer, kind = parameter.layer, parameter.kind
    return Place(key, module, matched_name, layer, kind, Storage.TENSOR, tensor.dtype, tensor.shape, weight)


def merge_plan(plan: Plan, base: Checkpoint) -> Plan:
    """Turn a plan of adapters into a plan of full weights: the adapters merged into their base.

    Args:
        plan: with its final coefficients; see `writing.resolution.Resolved.of`.
        base: the base that the experts adapt.
    """
    problems = Problems(BaseModelError)
    check(Merging(plan, base), problems)
    check(Heads(plan.adapters, base), problems)
    problems.raise_if_any()  # names of quantized tensors, and of heads, would be missed

    stored, located, tied = locate_all(plan.adapters, base, problems, resized=True)
    check(Placed(located, base), problems)
    problems.raise_if_any()

    filled = {}
    for key, parameter in stored.items():
        having = {name: parts[key] for name, parts in located.items() if key in parts}
        place = _stored_place(parameter, located.values(), base)
        planned = plan.slots.get(place.module) if having else None
        if planned is None:
            filled[key] = place.slot()
            continue

        # Coefficients of low-rank changes are settled by now, also those of methods like SLERP; see `resolve`.
        is_settled = planned.is_low_rank or planned.storage.in_full or not planned.terms
        method = "linear" if planned.is_linear and is_settled else planned.method
        terms = tuple(_entering(plan, having, problems))
        slot = place.slot(terms, planned.weights, planned.rule, planned.requested, method)
        filled[key] = _resized(slot, planned, having, problems)
    filled, untied = _with_ends(filled, stored, tied, plan.adapters, base, problems)

    facts = replace(plan.base, weights=base, skeleton=base)
    notes = without_advice(plan.notes)
    merged = replace(plan, slots=filled, is_model=True, base=facts, untied=untied, notes=notes)
    check(merged, problems)
    problems.raise_if_any()
    return merged


def _with_spans(slot: Slot, spans: Sequence[Span]) -> Slot:
    """A stored embedding or head with these spans, and as many rows; without spans if one tensor holds all rows.

    If there are no spans, all weights that enter have the same number of rows.
    """
    whole = slot.whole
    if not spans and not whole:
        return slot
    if not spans:
        return replace(slot, shape=whole[0].change.tensor.shape)

    settled = slot.with_spans(spans)
    is_copied = slot.owner is not None and whole and all(span.terms == slot.terms for span in spans)
    if is_copied and whole[0].change.tensor.shape[0] == spans[-1].stop:
        return replace(settled, spans=())
    return settled


def _resized(slot: Slot, planned: Slot, having: Mapping[str, Located], problems: Problems) -> Slot:
    """A stored embedding or head with the spans that the plan gives it."""
    spans = []
    for span in planned.spans:
        if all(term.expert in having for term in span.terms):
            terms = [term._replace(change=having[term.expert].change) for term in span.terms]
            spans.append(replace(span, terms=tuple(terms)))
    if spans and planned.storage.of_tokens:
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


def _entering(plan: Plan, having: Mapping[str, Located], problems: Problems) -> Iterator[Term[Change]]:
    """The terms of a stored tensor, each with its expert's change of it.

    One expert may adapt the experts of a mixture one by one, and another all of them as one parameter.
    """
    modules = dict.fromkeys(located.module for located in having.values())
    slots = [plan.slots[module] for module in modules if module in plan.slots]
    odd = next((slot for slot in slots if not slot.is_linear), None)
    if len(modules) > 1 and odd is not None:
        first, second, *_ = modules
        problems.add(
            f"{first} and {second} are names of the same weight in different experts, but {odd.method} needs one name",
            "Use a weighted sum: layer_swap, soup or task_arithmetic",
            parameter="method",
            kind=UnsupportedError,
        )

    for slot in slots:
        for term in slot.terms:
            if term.expert in having and having[term.expert].module == slot.name:
                yield term._replace(change=having[term.expert].change)


def _with_head(
    slots: dict[str, Slot], tied: TiedHead, adapters: Mapping[str, Adapter], skeleton: Checkpoint
) -> tuple[dict[str, Slot], bool]:
    """The slots, without one that stays tied; and whether the result stores both, so that its config must untie them.

    They stay tied if the skeleton stores one of them, and all adapters in both tie them (PEFT's `ensure_weight_tying`)
    with the same coefficients.
    """
    head, embedding = slots[tied.head], slots[tied.embedding]
    if embedding.storage.of_tokens and not head.terms:  # PEFT ties the head to them
        stays_tied = True
        on_head = replace(
            head,
            terms=embedding.terms,
            weights=embedding.weights,
            rule=embedding.rule,
            requested=embedding.requested,
        )
        slots = {**slots, tied.head: on_head.with_spans(embedding.spans) if embedding.spans else on_head}
    else:
        in_both = _entering_rows(head)
        stays_tied = in_both == _entering_rows(embedding)
        for _, name, _ in in_both:
            if name in adapters and not adapters[name].config.tied:
                stays_tied = False

    absent = tied.absent(skeleton.parameters)
    if stays_tied and absent:
        return {name: slot for name, slot in slots.items() if name != absent}, False
    return slots, True


def _entering_rows(slot: Slot) -> dict[tuple[str, str, int], float]:
    """The coefficients in each range of rows: (side, expert, first row) → coefficient."""
    coefficients = {}
    for span in slot.spans or [slot.ordinary]:
        for term in span.terms:
            coefficients[term.side, term.expert, span.start] = term.coefficient
    return coefficients
