"""A plan: a composition applied to real experts, module by module, and checked.

Made from headers alone: no tensors, no torch. It says for every module which experts' ΔW enter with which coefficient;
executors (`writing`, `live`) carry it out. Knows nothing of files to write, nor of how a plan is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeVar

from adapterswap.errors import AdapterswapError, Problems, check_type
from adapterswap.experts.adapters import Adapter, FullModule, LoraModule, by_layer
from adapterswap.experts.layers import num_layers_in_config
from adapterswap.experts.sources import base_config
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
    """

    composition: Composition
    rules: tuple[Rule, ...]
    experts: Mapping[str, Adapter]
    num_layers: int
    modules: Mapping[str, ModulePlan[LoraModule]]
    saved: Mapping[str, ModulePlan[FullModule]]

    def __iter__(self) -> Iterator[ModulePlan[LoraModule]]:
        return iter(self.modules.values())

    @property
    def base_model(self) -> str | None:
        """The base as the experts name it, or as the composition declares it where they name none or differ."""
        names = {adapter.config.base_model for adapter in self.experts.values()}
        return names.pop() if len(names) == 1 and None not in names else self.composition.base_model


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
        num_layers: the base's number of layers; by default the composition's, else from the base's config.
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
    with problems.collect():
        num_layers = num_layers or composition.num_layers or find_num_layers(used, composition.base_model)
    problems.raise_if_any()
    assert num_layers is not None
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
    return Plan(composition, rules, used, num_layers, modules, saved)


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


def find_num_layers(experts: Mapping[str, Adapter], base_model: str | None = None) -> int:
    """The base's number of layers, from its config.json; never from the experts' modules.

    Raises:
        AdapterswapError: no base is named, it cannot be had, or its config does not say.
    """
    named = {name: adapter.config.base_model for name, adapter in experts.items() if adapter.config.base_model}
    if base_model is not None:
        base, namer, mend = base_model, "--base-model (base_model)", "Correct it, or give --num-layers"
    elif named:
        name, base = next(iter(named.items()))
        namer, mend = f"{name}'s adapter_config.json", "Give --base-model with the base's folder, or --num-layers"
    else:
        raise AdapterswapError(
            "the experts do not say which base model they adapt",
            "Give --num-layers, or --base-model with the base's folder",
        )
    try:
        config = base_config(base)
    except AdapterswapError as error:
        told = error.problems[0].what
        raise AdapterswapError(
            f"the number of layers comes from the base that {namer} names, and {told}", mend
        ) from None
    found = num_layers_in_config(config)
    if found is None:
        raise AdapterswapError(f"the config of {base} does not say how many layers it has", "Give --num-layers")
    return found
