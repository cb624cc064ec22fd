"""Make a plan of full weights: a composition applied to full checkpoints, adapters or both, and checked.

Made from headers alone: no tensors, no torch. Knows nothing of files to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.adapters import Adapter, FullModule, LoraModule
from adapterswap.experts.checkpoints import Checkpoint, Parameter, open_checkpoint
from adapterswap.experts.layers import num_layers_in_config
from adapterswap.experts.orientation import Orientation
from adapterswap.experts.sources import at_revision
from adapterswap.planning.allocation import Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.locating import Located, TiedHead, find_tied_head, locate, with_head
from adapterswap.planning.model_checks import check_architecture, check_model_used, check_numbers
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.modules import ModulePlan, Part
from adapterswap.planning.parameters import LowRankTerm, ParameterPlan, Stored, WholeTerm
from adapterswap.planning.plan import Plan
from adapterswap.planning.plan_checks import (
    check_depth,
    check_experts,
    check_matches,
    check_names,
    check_rules,
)

__all__ = ["base_of", "make_model_plan", "merge_plan"]

_GIVE_BASE = "Give the base's folder or Hub id with `base_model`"


def base_of(plan: Plan, base_model: str | None = None) -> Checkpoint:
    """The base of a plan of adapters: `base_model`, or the one that the experts or the composition name.

    Raises:
        AdapterswapError: none is named, or see `open_checkpoint`.
    """
    reference = base_model or plan.base_reference
    if reference is None:
        raise AdapterswapError("the experts do not say which base model they adapt", _GIVE_BASE)
    return open_checkpoint(reference)


def merge_plan(plan: Plan, base: Checkpoint) -> ModelPlan:
    """The full weights that a plan of adapters means for its base.

    Args:
        plan: with its final coefficients; see `arithmetic.resolving.resolve`.
        base: the base that the experts adapt.

    Raises:
        AdapterswapError: the base lacks a module, or has it in another shape or in other than floating point numbers.
    """
    problems = Problems()
    check_architecture("the base", base, "the base", base, problems)
    found = num_layers_in_config(base.config)
    if found is not None and found != plan.num_layers:
        problems.add(f"the plan is for {plan.num_layers} layers, and the base has {found}", "Give the experts' base")
    tied = find_tied_head(base, plan.experts)
    stored = with_head(base.parameters, tied)
    located = _locate(plan.experts, stored, "the base", base, problems)
    problems.raise_if_any()
    modules: dict[str, ModulePlan[LoraModule] | ModulePlan[FullModule]] = {**plan.modules, **plan.saved}
    parameters = {}
    for key, parameter in stored.items():
        having = {name: found[key] for name, found in located.items() if key in found}
        module = next((having[name].module for name in having), parameter.module)
        planned = modules.get(module) if having else None
        parts: Sequence[Part] = planned.terms if planned else ()
        terms = tuple(
            _lora_term((part.expert, part.side, part.coefficient), plan.experts[part.expert], having[part.expert])
            for part in parts
            if part.expert in having
        )
        linear = planned is None or planned.is_linear
        parameters[key] = ParameterPlan(
            key, module, parameter.layer, parameter.kind, parameter.tensor.dtype, parameter.tensor.shape,
            Stored.of(parameter), terms, planned.weights if planned else {}, planned.rule if planned else None,
            "linear" if linear or planned is None else planned.rule.method,
        )  # fmt: skip
    parameters, untied = _settle_head(parameters, tied, plan.experts, base)
    check_numbers(parameters, problems)
    problems.raise_if_any()
    return ModelPlan(plan.composition, plan.rules, plan.experts, plan.num_layers, base, parameters, untied)


def make_model_plan(
    composition: Composition,
    experts: Mapping[str, Adapter | Checkpoint],
    base: Checkpoint | None = None,
    *,
    recorded: bool = False,
) -> ModelPlan:
    """Apply a composition to experts of which at least one is a full checkpoint.

    Args:
        composition: what is asked for.
        experts: by the names that the composition uses; others are ignored.
        base: the base; by default the composition's, else the one that the adapters among the experts name.
        recorded: see `make_plan`.

    Raises:
        AdapterswapError: with every mistake found: an expert that is missing, or of another architecture or vocabulary;
            a rule that matches nothing; a tensor that no rule covers; a base that is needed and not given.
    """
    problems = Problems()
    names: Sequence[str] = composition.expert_names
    if recorded:  # in the order of the record: the first expert gives the result what no rule decides
        names = sorted(names, key=[*experts, *names].index)
    check_names(names, experts, problems)
    used = {name: experts[name] for name in names if name in experts}
    adapters = {name: expert for name, expert in used.items() if isinstance(expert, Adapter)}
    full = {name: expert for name, expert in used.items() if isinstance(expert, Checkpoint)}
    check_experts(adapters, composition, problems)
    if composition.row_threshold:
        problems.add("row_threshold is for rows of adapters' ΔW, and an expert is a full checkpoint", "Leave it out")
    problems.raise_if_any()
    base = base or _open_base(composition, adapters)
    skeleton_name, skeleton = ("the base", base) if base else next(iter(full.items()))
    for name, checkpoint in full.items():
        check_architecture(skeleton_name, skeleton, name, checkpoint, problems)
    found = num_layers_in_config(skeleton.config)
    stored_layers = 1 + max((p.layer for p in skeleton.parameters.values() if p.layer is not None), default=-1)
    num_layers = composition.num_layers or found
    if num_layers is None:
        problems.add(f"the config of {skeleton_name} does not say how many layers it has", "Pass `num_layers`")
    elif found not in (None, num_layers):
        problems.add(f"num_layers is {num_layers}, and {skeleton_name} has {found} layers", "Leave `num_layers` out")
    elif found is None and num_layers != stored_layers:
        problems.add(
            f"num_layers is {num_layers}, and {skeleton_name} stores {stored_layers} layers", "Correct `num_layers`"
        )
    problems.raise_if_any()
    assert num_layers is not None
    check_depth(adapters, num_layers, problems)
    rules = composition.rules(num_layers, full=True)
    check_rules(rules, num_layers, problems)
    tied = find_tied_head(skeleton, adapters)
    stored = with_head(skeleton.parameters, tied)
    located = _locate(adapters, stored, skeleton_name, skeleton, problems)
    problems.raise_if_any()
    parameters = {}
    for key, parameter in stored.items():
        planned = _parameter(parameter, rules, used, located, tied, base)
        if planned is None:
            problems.add(f"no rule covers {key}", "End the allocation with a rule for all, such as {expert: NAME}")
        else:
            parameters[key] = planned
    problems.raise_if_any()
    parameters, untied = _settle_head(parameters, tied, adapters, skeleton)
    check_matches(rules, list(parameters.values()), adapters, problems)
    if not recorded:
        check_model_used(names, rules, list(parameters.values()), composition, problems)
    check_numbers(parameters, problems)
    if base is None and (needing := [p.name for p in parameters.values() if p.needs_base or not p.terms]):
        problems.add(
            f"{needing[0]} has a part of the base's own weights"
            + f", like {len(needing) - 1} more" * (len(needing) > 1),
            _GIVE_BASE,
        )
    problems.raise_if_any()
    return ModelPlan(composition, rules, used, num_layers, base, parameters, untied)


def _locate(
    adapters: Mapping[str, Adapter],
    stored: Mapping[str, Parameter],
    where: str,
    skeleton: Checkpoint,
    problems: Problems,
) -> dict[str, dict[str, Located]]:
    """What each adapter has for the stored tensors of the model called `where`; see `locate`."""
    orientation = Orientation(skeleton)
    found = {}
    for name, adapter in adapters.items():
        with problems.collect():
            found[name] = locate(name, adapter, stored, where, orientation, problems)
    return found


def _open_base(composition: Composition, adapters: Mapping[str, Adapter]) -> Checkpoint | None:
    configs = [adapter.config for adapter in adapters.values() if adapter.config.base_model]
    named = (at_revision(config.base_model, config.revision) for config in configs if config.base_model)
    reference = composition.base_model or next(named, None)
    if reference is None and adapters:
        raise AdapterswapError(f"{next(iter(adapters))} does not say which base model it adapts", _GIVE_BASE)
    return open_checkpoint(reference) if reference else None


def _parameter(
    parameter: Parameter,
    rules: tuple[Rule, ...],
    experts: Mapping[str, Adapter | Checkpoint],
    located: Mapping[str, Mapping[str, Located]],
    tied: TiedHead | None,
    base: Checkpoint | None,
) -> ParameterPlan | None:
    """What becomes of one stored tensor; None where no rule matches it."""
    key = parameter.name
    module = next((found[key].module for found in located.values() if key in found), parameter.module)
    names = (f"{module}.{key.rpartition('.')[2]}", parameter.layer, parameter.kind)
    rule = next((rule for rule in rules if rule.matches(*names)), None)
    if rule is None:
        return None
    weights = rule.side_weights()
    terms: list[WholeTerm | LowRankTerm] = []
    for (side, name), coefficient in rule.split(weights, apart=rule.combines_sides).items():
        expert = experts[name]
        if isinstance(expert, Adapter):
            if key in located[name]:
                terms.append(_lora_term((name, side, coefficient), expert, located[name][key]))
            continue
        source = tied.embedding if tied and key == tied.head and key not in expert.parameters else key
        terms.append(WholeTerm(name, side, coefficient, Stored.of(expert.parameters[source])))
    return ParameterPlan(
        key, module, parameter.layer, parameter.kind, parameter.tensor.dtype, parameter.tensor.shape,
        Stored.of(parameter) if base else None, tuple(terms), weights, rule, rule.method,
    )  # fmt: skip


def _lora_term(part: tuple[str, str, float], adapter: Adapter, found: Located) -> WholeTerm | LowRankTerm:
    """The term of an adapter that enters as `part`: expert, side and coefficient."""
    path = adapter.file.path
    if isinstance(found.part, LoraModule):
        return LowRankTerm(*part, found.part, path, found.transposed)
    return WholeTerm(*part, Stored(path, found.part))


def _settle_head(
    parameters: dict[str, ParameterPlan],
    tied: TiedHead | None,
    adapters: Mapping[str, Adapter],
    skeleton: Checkpoint,
) -> tuple[dict[str, ParameterPlan], bool]:
    """Whether the head comes apart from its embedding: not where every adapter in both ties them (PEFT's
    `ensure_weight_tying`) with the same coefficients."""
    if tied is None:
        return parameters, False
    head, embedding = parameters[tied.head], parameters[tied.embedding]

    def entering(parameter: ParameterPlan) -> dict[tuple[str, str], float]:
        return {(term.side, term.expert): term.coefficient for term in parameter.terms}

    together = entering(head) == entering(embedding) and all(
        adapters[name].config.tied for _, name in entering(head) if name in adapters
    )
    if together and tied.head not in skeleton.parameters:
        return {name: parameter for name, parameter in parameters.items() if name != tied.head}, False
    return parameters, not together
