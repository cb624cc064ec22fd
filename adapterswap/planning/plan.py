"""A plan: a composition applied to real experts, module by module, and checked.

Made from headers alone: no tensors, no torch. It says for every module which experts' ΔW enter with which coefficient;
executors (`writing`, `live`) carry it out. Knows nothing of files to write, nor of how a plan is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

from adapterswap.errors import AdapterswapError, Problems, check_type
from adapterswap.experts.adapters import Adapter, FullModule, LoraModule, by_layer
from adapterswap.experts.layers import num_layers_in_config
from adapterswap.experts.sources import (
    Source,
    at_revision,
    base_config,
    cached_base_config,
    find_source,
    public_name,
    same_base,
    split_revision,
)
from adapterswap.files.smallfiles import expand, is_folder
from adapterswap.planning.allocation import Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.modules import ModulePlan, Term
from adapterswap.planning.plan_checks import (
    check_depth,
    check_experts,
    check_matches,
    check_names,
    check_rules,
    check_saved,
    check_used,
)
from adapterswap.planning.short_names import as_composition

__all__ = ["Plan", "find_num_layers", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """A checked composition: every module that any expert adapts, with what becomes of it.

    Attributes:
        composition: what was asked for.
        rules: its allocation for this number of layers.
        experts: the opened experts by name, in the order in which the rules name them.
        num_layers: the base's layers.
        modules: by full name; those without a layer first, then by layer and name.
        saved: the modules that experts hold in full (`modules_to_save`), likewise.
        notes: what could not be checked on this machine. It changes no byte of a result.
        base: the base, where it was declared as a local folder, or its config told the depth; else None.
    """

    composition: Composition
    rules: tuple[Rule, ...]
    experts: Mapping[str, Adapter]
    num_layers: int
    modules: Mapping[str, ModulePlan[LoraModule]]
    saved: Mapping[str, ModulePlan[FullModule]]
    notes: tuple[str, ...] = ()
    base: Source | None = None

    def __iter__(self) -> Iterator[ModulePlan[LoraModule]]:
        return iter(self.modules.values())

    @property
    def base_model(self) -> str | None:
        """The base as the experts name it, or as the composition declares it where they name none or differ."""
        name = _named_by_all(self.experts)
        declared = self.composition.base_model
        return name if name is not None or declared is None else split_revision(declared)[0]

    @property
    def task_type(self) -> str | None:
        """The experts' task type; those that have none take the others'."""
        return next((adapter.config.task_type for adapter in self.experts.values() if adapter.config.task_type), None)

    @property
    def auto_mapping(self) -> Mapping[str, Any] | None:
        """The classes that PEFT needs to load an adapter without a task type."""
        return next((a.config.auto_mapping for a in self.experts.values() if a.config.auto_mapping), None)

    @property
    def base_revision(self) -> str | None:
        """The base's revision on the Hub: the declared one, or the one on which all experts agree."""
        if self.composition.base_model is not None:
            declared = split_revision(self.composition.base_model)[1]
            if declared is not None:
                return declared
        revisions = {adapter.config.revision for adapter in self.experts.values()}
        return revisions.pop() if len(revisions) == 1 and _named_by_all(self.experts) is not None else None

    @property
    def base_reference(self) -> str | None:
        """Where to open the base: the declared one, or the experts' at their revision."""
        if self.composition.base_model is not None or self.base_model is None:
            return self.composition.base_model
        return at_revision(self.base_model, self.base_revision)


def _named_by_all(experts: Mapping[str, Adapter]) -> str | None:
    """The base that all experts name, as the first one writes it; None where they differ."""
    names = [adapter.config.base_model for adapter in experts.values()]
    return names[0] if names and all(same_base(names[0], name) for name in names) else None


def make_plan(
    composition: Composition | str,
    experts: Mapping[str, Adapter],
    *,
    num_layers: int | None = None,
    recorded: bool = False,
) -> Plan:
    """Apply a composition to opened experts.

    Args:
        composition: what is asked for, or its short name such as `math+swahili`.
        experts: by the names that the composition uses; others are ignored.
        num_layers: the base's number of layers, where you know it from the model itself. By default it comes from the
            base's config; the composition's own is compared with that where the base is on this machine.
        recorded: the composition and the order of the experts come from a record. Experts that give nothing to the
            result were allowed then.

    Raises:
        AdapterswapError: with every mistake found: an expert that is missing, of another base or shape; a rule that
            matches nothing or names layers out of range; a module that no rule covers; an expert that is never used.
    """
    composition = as_composition(composition)
    check_type(experts, Mapping, "experts", "Pass a mapping from names to opened adapters")
    check_type(num_layers, (Integral, type(None)), "num_layers", "Pass a whole number such as 32")
    problems = Problems()
    names: Sequence[str] = composition.expert_names
    if recorded:  # in the order of the record: the first expert gives the result what no rule decides
        names = sorted(names, key=[*experts, *names].index)
    for name in names:
        if not isinstance(experts.get(name), Adapter | None):
            problems.add(
                f"The expert {name!r} is of type {type(experts[name]).__name__}", "Open it first, with `open_adapter`"
            )
    problems.raise_if_any()
    check_names(names, experts, problems)
    used = {name: experts[name] for name in names if name in experts}
    check_experts(used, composition, problems)
    depth = None
    with problems.collect():
        depth = _settle_depth(used, composition, num_layers)
    problems.raise_if_any()
    assert depth is not None
    num_layers = depth.num_layers
    check_depth(used, num_layers, problems)
    problems.raise_if_any()
    rules = composition.rules(num_layers)
    check_rules(rules, num_layers, problems)
    lora = {name: adapter.modules for name, adapter in used.items()}
    full = {name: adapter.saved for name, adapter in used.items()}
    modules = _match(rules, lora, problems, apart=composition.row_threshold is not None)
    saved = _match(rules, full, problems)
    check_matches(rules, [*modules.values(), *saved.values()], used, problems)
    check_saved(modules, saved, composition, problems)
    if not recorded:
        check_used(names, rules, modules, composition, problems)
    problems.raise_if_any()
    return Plan(composition, rules, used, num_layers, modules, saved, depth.notes, depth.base)


_Module = TypeVar("_Module", LoraModule, FullModule)


def _match(
    rules: Sequence[Rule], experts: Mapping[str, Mapping[str, _Module]], problems: Problems, *, apart: bool = False
) -> dict[str, ModulePlan[_Module]]:
    """Give each module of the union to the first rule that matches it.

    `apart` keeps averages apart where coefficients alone do not, as a row threshold needs it.
    """
    union = by_layer({name: module for modules in experts.values() for name, module in modules.items()})
    weights_of = {id(rule): rule.side_weights() for rule in rules}
    parts_of = {id(rule): rule.split(weights_of[id(rule)], apart=apart or rule.combines_sides) for rule in rules}
    plans: dict[str, ModulePlan[_Module]] = {}
    uncovered: list[str] = []
    for name, module in union.items():
        rule = next((rule for rule in rules if rule.matches(name, module.layer, module.kind)), None)
        if rule is None:
            uncovered.append(name)
            continue
        terms = tuple(
            Term(expert, side, factor, experts[expert][name])
            for (side, expert), factor in parts_of[id(rule)].items()
            if name in experts.get(expert, {})
        )
        plans[name] = ModulePlan(name, module.layer, module.kind, terms, weights_of[id(rule)], rule)
    if uncovered:
        more = f" and {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
        problems.add(
            f"no rule covers {uncovered[0]}{more}", "End the allocation with a rule for all, such as {expert: NAME}"
        )
    return plans


@dataclass(frozen=True)
class _Depth:
    """The base's number of layers, a note where it could not be checked, and the base itself (see `Plan.base`)."""

    num_layers: int
    base: Source | None = None
    notes: tuple[str, ...] = ()


def _settle_depth(experts: Mapping[str, Adapter], composition: Composition, known: int | None) -> _Depth:
    """See `_Depth`; `known` is what the model itself says.

    Raises:
        AdapterswapError: the composition's is not the base's, or there is none; see `find_num_layers`.
    """
    given, declared = composition.num_layers, composition.base_model
    if given is None:
        return _Depth(known) if known else _Depth(*find_num_layers(experts, declared))
    base, found = ("the model", known) if known else _depth_on_this_machine(experts, declared)
    is_local = declared is not None and not known and is_folder(expand(declared))
    source = find_source(declared, [], what="base model") if declared and is_local else None
    if found is None:
        reach = f"This machine does not have the depth of {public_name(base)}" if base else "The experts name no base"
        return _Depth(given, source, (f"{reach}, so num_layers {given} could not be checked",))
    if found != given:
        raise AdapterswapError(
            f"num_layers is {given}, and {base} has {found} layers",
            "Leave `num_layers` out; pass `base_model` if that is another base than the experts'",
        )
    return _Depth(given, source)


def _depth_on_this_machine(experts: Mapping[str, Adapter], base_model: str | None) -> tuple[str | None, int | None]:
    """The base and its number of layers; None for what is not known without the network."""
    base = base_model or next((_reference(adapter) for adapter in experts.values() if adapter.config.base_model), None)
    config = cached_base_config(base) if base else None
    try:
        return base, None if config is None else num_layers_in_config(config)
    except AdapterswapError:  # an encoder and a decoder, whose depths may differ
        return base, None


def _reference(adapter: Adapter) -> str | None:
    """The base that an adapter names, at its revision."""
    name = adapter.config.base_model
    return None if name is None else at_revision(name, adapter.config.revision)


def find_num_layers(experts: Mapping[str, Adapter], base_model: str | None = None) -> tuple[int, Source]:
    """The base's number of layers, from its config.json, never from the experts' modules; and the base.

    Raises:
        AdapterswapError: no base is named, it cannot be had, or its config does not say.
    """
    named: dict[str, str] = {}
    for name, adapter in experts.items():
        if (reference := _reference(adapter)) is not None:
            named[name] = reference
    if base_model is not None:
        base, namer, mend = base_model, "`base_model`", "Correct it, or pass `num_layers`"
    elif named:
        namer, base = next(iter(named.items()))
        namer, mend = f"{namer}'s adapter_config.json", "Pass `base_model` with the base's folder, or `num_layers`"
    else:
        raise AdapterswapError(
            "the experts do not say which base model they adapt",
            "Pass `num_layers`, or `base_model` with the base's folder",
        )
    try:
        source, config = base_config(base)
    except AdapterswapError as error:
        told = error.problems[0].what
        raise AdapterswapError(
            f"the number of layers comes from the base that {namer} names, and {told}", mend
        ) from None
    found = num_layers_in_config(config)
    if found is None:
        raise AdapterswapError(f"the config of {base} does not say how many layers it has", "Pass `num_layers`")
    return found, source
