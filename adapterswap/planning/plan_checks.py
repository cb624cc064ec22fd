"""What must hold before a plan is made: experts that belong together, rules that mean something.

Each function adds the mistakes that it finds to a `Problems`, so that all are told at once. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from adapterswap.errors import Problems, did_you_mean
from adapterswap.experts.adapters import Adapter, FullModule, LoraModule
from adapterswap.experts.layers import EMBEDDINGS, HEADS, NO_LAYER, Kind, ends_of, format_layers, parse_layers
from adapterswap.experts.shapes import compare_shapes
from adapterswap.experts.sources import same_base
from adapterswap.planning.allocation import Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.modules import ModulePlan, needs_base

__all__ = [
    "TASK_HEADS",
    "check_depth",
    "check_experts",
    "check_matches",
    "check_names",
    "check_rules",
    "check_saved",
    "check_used",
    "silenced_experts",
]


# Modules that PEFT trains and loads in full for a task type, whatever modules_to_save says.
TASK_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


class _Ruled(Protocol):
    """What a rule was matched to: a module of adapters, or a stored tensor of a model."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def asked(self) -> Mapping[str, float]: ...
    @property
    def rule(self) -> Rule | None: ...


def check_names(names: Sequence[str], known: Collection[str], problems: Problems) -> None:
    """Whether a composition names experts that there are, and at least one."""
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none"
            problems.add(
                f"There is no expert {name!r} (experts: {listed})",
                did_you_mean(name, known, "Name one of them, or add this one to the experts"),
            )
    if not names:
        problems.add("Every rule gives its modules to the base", "Name at least one expert")


def check_experts(experts: Mapping[str, Adapter], composition: Composition, problems: Problems) -> None:
    """Whether the experts adapt the same base in the same way; each is compared with the first."""
    if not experts:
        return
    first_name, first = next(iter(experts.items()))
    for name, adapter in experts.items():
        one, other = first.config, adapter.config
        if composition.base_model is None and not same_base(one.base_model, other.base_model):
            problems.add(
                f"{first_name} adapts the base {one.base_model}, and {name} adapts {other.base_model}",
                "Compose experts of one base; if both names mean the same weights, pass `base_model`",
            )
        elif composition.base_model is None and (one.revision or "main") != (other.revision or "main"):
            problems.add(
                f"{first_name} adapts the revision {one.revision or 'main'} of {one.base_model}, and {name} adapts "
                f"{other.revision or 'main'}",
                "Compose experts of one revision, or pass `base_model=org/name@revision` for the result",
            )
        if one.tied != other.tied:
            problems.add(
                f"ensure_weight_tying is {one.tied} in {first_name}, and {other.tied} in {name}",
                "Compose experts that treat the base's tied embeddings alike",
            )
        # Without a task type PEFT loads what it loads for a language model.
        if (one.task_type or "CAUSAL_LM") != (other.task_type or "CAUSAL_LM"):
            problems.add(
                f"task_type is {one.task_type} in {first_name}, and {other.task_type} in {name}",
                "Compose experts of one task type",
            )
        for ours, theirs in ((first.modules, adapter.modules), (first.saved, adapter.saved)):
            compare_shapes(
                {module: held.shape for module, held in ours.items()},
                {module: held.shape for module, held in theirs.items()},
                one=first_name, other=name, remedy="Compose experts of one base model", problems=problems,
            )  # fmt: skip
    _check_names(experts, problems)


def _check_names(experts: Mapping[str, Adapter], problems: Problems) -> None:
    """Whether all experts name the modules of their base alike; if not, one module would be taken for two."""
    remedy = "Use experts of one base, saved with the same version of transformers and the same model class"
    layered = {name: adapter.container for name, adapter in experts.items() if adapter.container is not None}
    for name, container in layered.items():
        first_name, first = next(iter(layered.items()))
        if container != first:
            problems.add(
                f"The layers are named {first}.N in {first_name}, and {container}.N in {name}, which may be two names "
                "of the same modules",
                remedy,
            )
    if problems:
        return
    held = {name: {*adapter.modules, *adapter.saved} for name, adapter in experts.items()}
    for name, modules in held.items():
        for other, others in held.items():
            twin = next(
                (
                    (long, short)
                    for long in sorted(modules - others)
                    for short in _other_names(long, others)
                    if short not in modules
                ),
                None,
            )
            if twin is not None:
                problems.add(
                    f"{name} adapts {twin[0]}, and {other} adapts {twin[1]}, which may be two names of the same module",
                    remedy,
                )
                return


def _other_names(module: str, names: Collection[str]) -> Iterator[str]:
    """Those of `names` that may mean `module`: its end, or an embedding or head under another prefix."""
    _, *ends = ends_of(module)
    yield from (end for end in ends if end in names)
    last = module.rpartition(".")[2]
    if last in EMBEDDINGS | HEADS:
        yield from (name for name in sorted(names) if name.rpartition(".")[2] == last and name != module)


def check_depth(experts: Mapping[str, Adapter], num_layers: int, problems: Problems) -> None:
    for name, adapter in experts.items():
        layers = [m.layer for m in adapter.modules.values()] + [m.layer for m in adapter.saved.values()]
        deepest = max((layer for layer in layers if layer is not None), default=-1)
        if deepest >= num_layers:
            problems.add(
                f"{name} adapts layer {deepest}, and the base has {num_layers} layers (0-{num_layers - 1})",
                "Check `num_layers` or `base_model`",
            )


def check_rules(rules: Sequence[Rule], num_layers: int, problems: Problems) -> None:
    for rule in rules:
        outside = sorted(layer for layer in parse_layers(rule.layers or NO_LAYER) if layer >= num_layers)
        if outside:
            problems.add(
                f"the rule `{rule}` names layer {outside[0]}, and the base has {num_layers} (0-{num_layers - 1})",
                "Correct the rule's layers, or `num_layers`",
            )


def check_matches(
    rules: Sequence[Rule],
    plans: Sequence[_Ruled],
    experts: Mapping[str, Adapter],
    problems: Problems,
) -> None:
    """A rule that takes nothing is a mistake; a slice that is asked for a layer that was cut away is another."""
    matched = {id(plan.rule) for plan in plans}
    for rule in rules:
        if id(rule) not in matched and not rule.optional:
            problems.add(f"the rule `{rule}` matches no module that it could still have", _explain(rule, plans))
    for name, adapter in experts.items():
        if adapter.kept_layers is not None and any(rule.weights and name in rule.experts for rule in rules):
            problems.add(
                f"{name} is a slice, and its magnitude is that of the whole expert",
                "Give the whole expert, or explicit weights",
            )
    for plan in plans:
        for name in plan.asked:
            kept = experts[name].kept_layers if name in experts else None
            if kept is not None and plan.layer is not None and plan.layer not in kept:
                problems.add(
                    f"{name} is a slice with the layers {format_layers(kept)}, and is asked for layer {plan.layer}",
                    "Give the whole expert, or other zones",
                )


def check_saved(
    modules: Mapping[str, ModulePlan[LoraModule]],
    saved: Mapping[str, ModulePlan[FullModule]],
    composition: Composition,
    problems: Problems,
) -> None:
    """Full weights can be averaged among themselves; to mix them with no change, the base's own are needed."""
    for name, plan in saved.items():
        if name in modules:
            problems.add(
                f"{name} is trained in full (modules_to_save) by one expert, and by LoRA by another",
                "Compose experts that adapt it in the same way",
            )
        if plan.rule.method != "linear" or plan.rule.weights is not None:
            problems.add(
                f"{name} is trained in full (modules_to_save), and cannot be blended by magnitude or by a method on ΔW",
                "Give it explicit weights, in a rule of its own: {modules: [" + name + "], expert: NAME}",
            )
        elif needs_base(plan) and composition.base_model is None:
            told = " and ".join(plan.absent) or "the base"
            problems.add(
                f"{name} is to be averaged with {told}, which has the base's own weights there",
                "Give the base's folder with `base_model`",
            )


def _explain(rule: Rule, modules: Sequence[_Ruled]) -> str:
    if any(rule.matches(m.name, m.layer, m.kind) for m in modules):
        return "Earlier rules took them all: put it before them, or remove it"
    ends = sorted({m.name.removesuffix(".weight").rpartition(".")[2] for m in modules})
    layers = {m.layer for m in modules if m.layer is not None}
    told = f"layers {min(layers)}-{max(layers)}" if layers else "no layer"
    return f"The experts adapt {', '.join(ends[:12])} in {told}: correct the rule, or mark it optional: true"


def silenced_experts(rules: Sequence[Rule]) -> set[str]:
    """The experts that a rule gives the weight 0, or whose weights on two sides cancel."""
    return {expert for rule in rules for expert in rule.experts if rule.blend and expert not in rule.coefficients()}


def check_used(
    names: Sequence[str],
    rules: Sequence[Rule],
    modules: Mapping[str, ModulePlan[LoraModule]],
    composition: Composition,
    problems: Problems,
) -> None:
    """An expert that gives nothing is a mistake, unless zones of 0 layers or a weight of 0 ask for just that."""
    if composition.bottom is not None and composition.top is not None and composition.allocation is None:
        return
    used = {term.expert for module in modules.values() for term in module.terms}
    silenced = silenced_experts(rules)
    for name in names:
        if name not in used | silenced and modules:
            problems.add(
                f"the expert {name!r} gives no module to the result",
                "Leave it out, or give it layers and modules that it adapts",
            )
