"""A plan: a composition applied to real experts, module by module, and checked.

Made from headers alone: no tensors, no torch. It says for every module which experts' ΔW enter with which coefficient;
executors (`writing`, `live`) carry it out. Knows nothing of files to write, nor of how a plan is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from adapterswap.adapters import Adapter, LoraModule
from adapterswap.allocation import BASE, NO_LAYER, Rule, parse_layers
from adapterswap.compositions import Composition
from adapterswap.errors import AdapterswapError, Problems
from adapterswap.layers import Kind, layer_container, num_layers_in_config
from adapterswap.sources import base_config, same_base

__all__ = ["ModulePlan", "Plan", "Term", "coefficients", "find_num_layers", "make_plan"]


@dataclass(frozen=True)
class Term:
    """One summand c·ΔW of a module's new ΔW; `module` is the expert's part."""

    expert: str
    coefficient: float
    module: LoraModule


@dataclass(frozen=True)
class ModulePlan:
    """What becomes of one module: ΔW' = Σ c_i ΔW_i over `terms`.

    Attributes:
        name, layer, kind: the module.
        terms: none leaves the base unchanged; a single one with coefficient 1 is a copy; all others are a blend.
        asked: the coefficients that the rule gave, before experts that lack the module were left out.
        rule: the position of the rule that matched.
    """

    name: str
    layer: int | None
    kind: Kind
    terms: tuple[Term, ...]
    asked: Mapping[str, float]
    rule: int

    @property
    def owner(self) -> str | None:
        """The expert that is copied, `base` for no change, None for a blend."""
        if not self.terms:
            return BASE
        return self.terms[0].expert if len(self.terms) == 1 and self.terms[0].coefficient == 1 else None

    @property
    def absent(self) -> tuple[str, ...]:
        """The experts that the rule asked for and that do not adapt this module (their ΔW is zero)."""
        present = {term.expert for term in self.terms}
        return tuple(name for name in self.asked if name not in present)


@dataclass(frozen=True)
class Plan:
    """A checked composition: every module that any expert adapts, with what becomes of it.

    Attributes:
        composition: what was asked for.
        rules: its allocation for this number of layers.
        experts: the opened experts by name, in the order in which the rules name them.
        num_layers: the base's layers.
        modules: by full name; those without a layer first, then by layer and name.
    """

    composition: Composition
    rules: tuple[Rule, ...]
    experts: Mapping[str, Adapter]
    num_layers: int
    modules: Mapping[str, ModulePlan]

    def __iter__(self) -> Iterator[ModulePlan]:
        return iter(self.modules.values())

    @property
    def base_model(self) -> str | None:
        """The base as the experts name it, or as the composition declares it where they name none or differ."""
        names = {adapter.config.base_model for adapter in self.experts.values()}
        return names.pop() if len(names) == 1 and None not in names else self.composition.base_model


def make_plan(composition: Composition, experts: Mapping[str, Adapter], *, num_layers: int | None = None) -> Plan:
    """Apply a composition to opened experts.

    Args:
        composition: what is asked for.
        experts: by the names that the composition uses; others are ignored.
        num_layers: the base's number of layers; by default the composition's, else from the base's config.

    Raises:
        AdapterswapError: with every mistake found: an expert that is missing, of another base or shape; a rule that
            matches nothing or names layers out of range; a module that no rule covers; an expert that is never used.
    """
    problems = Problems()
    names = composition.expert_names
    for name in names:
        if name not in experts:
            given = ", ".join(experts) or "none"
            problems.add(f"the expert {name!r} is not among the experts given ({given})", "Name one of them, or add it")
    used = {name: experts[name] for name in names if name in experts}
    if not names:
        problems.add("every rule gives its modules to the base", "Name at least one expert")
    _check_experts(used, composition, problems)
    with problems.collect():
        num_layers = num_layers or composition.num_layers or find_num_layers(used, composition.base_model)
    problems.raise_if_any()
    assert num_layers is not None
    _check_depth(used, num_layers, problems)
    problems.raise_if_any()
    rules = composition.rules(num_layers)
    _check_rules(rules, num_layers, problems)
    modules = _match(rules, used, problems)
    _check_used(names, rules, modules, composition, problems)
    problems.raise_if_any()
    return Plan(composition, rules, used, num_layers, modules)


def coefficients(module: ModulePlan) -> str | dict[str, float]:
    """What becomes of a module as plain data: the owner's name, `base`, or each expert's coefficient."""
    return module.owner or {term.expert: term.coefficient for term in module.terms}


def find_num_layers(experts: Mapping[str, Adapter], base_model: str | None = None) -> int:
    """The base's number of layers, from its config.json; never from the experts' modules.

    Raises:
        AdapterswapError: no base is named, it cannot be had, or its config does not say.
    """
    named = [adapter.config.base_model for adapter in experts.values() if adapter.config.base_model]
    base = base_model or (named[0] if named else None)
    mend = "Give --num-layers, or --base-model with the base's folder"
    if base is None:
        raise AdapterswapError("the experts do not say which base model they adapt", mend)
    try:
        config = base_config(base)
    except AdapterswapError as error:
        told = error.problems[0].what
        raise AdapterswapError(f"the number of layers comes from the base's config, and {told}", mend) from None
    found = num_layers_in_config(config)
    if found is None:
        raise AdapterswapError(f"the config of {base} does not say how many layers it has", "Give --num-layers")
    return found


def _check_experts(experts: Mapping[str, Adapter], composition: Composition, problems: Problems) -> None:
    """Whether the experts adapt the same base in the same way; each is compared with the first."""
    if not experts:
        return
    first_name, first = next(iter(experts.items()))
    for name, adapter in experts.items():
        one, other = first.config, adapter.config
        if composition.base_model is None and not same_base(one.base_model, other.base_model):
            problems.add(
                f"{first_name} adapts the base {one.base_model}, and {name} adapts {other.base_model}",
                "Compose experts of one base; if both names mean the same weights, declare them with --base-model",
            )
        if one.fan_in_fan_out != other.fan_in_fan_out:
            problems.add(
                f"fan_in_fan_out is {one.fan_in_fan_out} in {first_name}, and {other.fan_in_fan_out} in {name}",
                "Compose experts that store their base's weights the same way round",
            )
        if one.task_type != other.task_type:
            problems.add(
                f"task_type is {one.task_type} in {first_name}, and {other.task_type} in {name}",
                "Compose experts of one task type",
            )
        for module in adapter.modules.values():
            _check_shape(first_name, first.modules.get(module.name), name, module, problems)
    with problems.collect():
        layer_container(name for adapter in experts.values() for name in adapter.modules)


def _check_shape(first_name: str, first: LoraModule | None, name: str, module: LoraModule, problems: Problems) -> None:
    if first is None:
        return
    shapes = [(m.out_features, m.in_features, m.embedding) for m in (first, module)]
    if shapes[0] != shapes[1]:
        told = [f"{out}×{into}{' embedding' if embedding else ''}" for out, into, embedding in shapes]
        problems.add(
            f"{module.name} is {told[0]} in {first_name}, and {told[1]} in {name}", "Compose experts of one base model"
        )


def _check_depth(experts: Mapping[str, Adapter], num_layers: int, problems: Problems) -> None:
    for name, adapter in experts.items():
        deepest = max((m.layer for m in adapter.modules.values() if m.layer is not None), default=-1)
        if deepest >= num_layers:
            problems.add(
                f"{name} adapts layer {deepest}, and the base has {num_layers} layers (0-{num_layers - 1})",
                "Check --num-layers or --base-model",
            )


def _check_rules(rules: Sequence[Rule], num_layers: int, problems: Problems) -> None:
    for rule in rules:
        outside = sorted(layer for layer in parse_layers(rule.layers or NO_LAYER) if layer >= num_layers)
        if outside:
            problems.add(
                f"the rule `{rule}` names layer {outside[0]}, and the base has {num_layers} (0-{num_layers - 1})",
                "Correct the rule's layers, or --num-layers",
            )


def _match(rules: Sequence[Rule], experts: Mapping[str, Adapter], problems: Problems) -> dict[str, ModulePlan]:
    """Give each module of the union to the first rule that matches it."""
    union = {module.name: module for adapter in experts.values() for module in adapter.modules.values()}
    ordered = sorted(union.values(), key=lambda m: (-1 if m.layer is None else m.layer, m.name))
    coefficients = [rule.coefficients() for rule in rules]
    hits = [0] * len(rules)
    modules: dict[str, ModulePlan] = {}
    uncovered: list[str] = []
    for module in ordered:
        matching = (i for i, rule in enumerate(rules) if rule.matches(module.name, module.layer, module.kind))
        position = next(matching, None)
        if position is None:
            uncovered.append(module.name)
            continue
        hits[position] += 1
        asked = coefficients[position]
        terms = tuple(
            Term(name, factor, experts[name].modules[module.name])
            for name, factor in asked.items()
            if name in experts and module.name in experts[name].modules
        )
        modules[module.name] = ModulePlan(module.name, module.layer, module.kind, terms, asked, position)
    if uncovered:
        more = f" and {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
        problems.add(
            f"no rule covers {uncovered[0]}{more}", "End the allocation with a rule for all, such as {expert: NAME}"
        )
    for rule, count in zip(rules, hits, strict=True):
        if not count and not rule.optional:
            problems.add(
                f"the rule `{rule}` matches no module that it could still have", _explain_no_match(rule, ordered)
            )
    return modules


def _explain_no_match(rule: Rule, modules: Sequence[LoraModule]) -> str:
    if any(rule.matches(m.name, m.layer, m.kind) for m in modules):
        return "Earlier rules took them all: put it before them, or remove it"
    ends = sorted({m.name.rpartition(".")[2] for m in modules})
    layers = {m.layer for m in modules if m.layer is not None}
    told = f"layers {min(layers)}-{max(layers)}" if layers else "no layer"
    return f"The experts adapt {', '.join(ends[:12])} in {told}: correct the rule, or mark it optional: true"


def _check_used(
    names: Sequence[str],
    rules: Sequence[Rule],
    modules: Mapping[str, ModulePlan],
    composition: Composition,
    problems: Problems,
) -> None:
    """An expert that gives nothing is a mistake, unless zones of 0 layers or a weight of 0 ask for just that."""
    if composition.bottom is not None and composition.top is not None and composition.allocation is None:
        return
    used = {term.expert for module in modules.values() for term in module.terms}
    silenced = {name for rule in rules for name, weight in (rule.blend or {}).items() if weight == 0}
    for name in names:
        if name not in used | silenced and modules:
            problems.add(
                f"the expert {name!r} gives no module to the result",
                "Leave it out, or give it layers and modules that it adapts",
            )
