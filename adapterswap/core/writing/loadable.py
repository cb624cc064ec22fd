"""The names that an adapter is written with, and whether PEFT loads it.

transformers 5 renamed the modules of multimodal models and fused the experts of most mixtures of experts into one
parameter per layer. PEFT converts adapters of transformers 4 when it loads them, but not the full names and the
per-module patterns that a composed config needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from adapterswap.core.experts.adapter import Adapter, check_distinct
from adapterswap.core.experts.keys import KINDS, ModuleKeys
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.experts.trial import try_in_peft
from adapterswap.core.model.base import Base, empty_model
from adapterswap.core.model.layers import ModelConfig, ModuleName, layer_container
from adapterswap.core.model.sources import Reference, Source
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.slots import Slot
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.copies import Comparable
from adapterswap.core.writing.outputs import Form, Layout, Names
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    UnsupportedError,
    and_more,
)
from adapterswap.kit.files.tensorfile import Tensor, open_files


def check_form(plan: Plan, form: Form) -> None:
    """Check that one adapter can hold a plan's result in this form."""
    target = Target.PORTABLE if form.layout == "portable" else Target.ADAPTER
    target.check(plan, max_rank=form.max_rank, max_error=form.max_error)
    _check_shared(plan)


def _check_shared(plan: Plan) -> None:
    """Check that experts whose modules share projections, such as VeRA's, have the same ones."""
    parts = {term.expert: term.change.part for slot in plan for term in slot.opaque}
    sharing = {name: part for name, part in parts.items() if part.peft_type in KINDS and KINDS[part.peft_type].shared}
    if len(sharing) < 2:
        return
    (first, ours), *others = sharing.items()
    with open_files(plan.adapters[expert].file for expert in sharing) as files:

        def stored(expert: str, tensor: Tensor | None) -> Comparable | None:
            return None if tensor is None else Comparable.of(tensor, files[plan.adapters[expert].file.path])

        for expert, theirs in others:
            for name in sorted({*ours.shared, *theirs.shared}):
                pair = stored(first, ours.shared.get(name)), stored(expert, theirs.shared.get(name))
                if pair[0] is None or pair[1] is None or not pair[0].is_one_with(pair[1]):
                    raise UnsupportedError(
                        f"{first} and {expert} are {theirs.method} with different projections ({name}), but all "
                        "modules of an adapter share one",
                        f"Train both with the same projection_prng_key and targets. Or: {Target.ADAPTER.otherwise}",
                    )


_OLD_PREFIX = "language_model."  # multimodal models of transformers 4; a few audio models still have it

_PARTS = re.compile(r"(^|\.)(language_model|text_model|model\.visual)\.")

_KNOWN_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")


def check_renaming(plan: Plan, layout: Layout) -> None:
    """Check that PEFT loads every factor into this type of base; only the types that may lose some are tried."""
    reference, config = plan.base.reference, plan.base.local.config
    if reference is None or config is None or not ModelConfig(config).architecture.renamed_twice:
        return
    import torch
    from peft import PeftConfig

    model = empty_model(Reference(reference).config()[0].folder, reference, task_type=plan.task_type)
    tensors = {tensor.key: torch.empty(tensor.shape, device="meta") for tensor in layout.tensors}
    trial = try_in_peft(model, PeftConfig.from_peft_type(**layout.config), tensors)
    if trial is not None and trial.dropped:
        lost = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in trial.missing}
        raise UnsupportedError(
            f"PEFT would lose LoRA on {and_more(sorted(lost))}: for {config['model_type']} it renames these keys",
            f"Give these modules to the base in a rule of their own. Or: {Target.ADAPTER.otherwise}",
        )


def with_written_names(plan: Plan, names: Names | None = None) -> Plan:
    """The plan, with its modules renamed to those of the written adapter.

    Args:
        plan: a plan of adapters.
        names: `transformers5` means the names of the base's modules in the installed transformers, `transformers4`
            those of the Hub's checkpoints, and `task` or `language` those in the file of that side's first expert. By
            default the first expert's names, if the base or its text-only class has all of them; names of transformers
            4 are updated, because PEFT converts the keys of the tensors but not the names in the config.
    """
    if names in ("task", "language"):
        return _as_expert(plan, _expert_of(plan, names), model=None)
    if names is not None:
        model = _names_of(plan)
        canonical = _canonical(plan, model)
        if names == "transformers4":
            canonical = {name: model.older(new) for name, new in canonical.items()}
        return _with_names(plan, canonical)
    if any(adapter.original for adapter in plan.adapters.values()):
        model = _names_of(plan)
        first = next(iter(plan.adapters))
        if not model.is_multimodal or not plan.adapters[first].original:
            return plan
        try:
            as_first = _as_expert(plan, first, model=model)
        except UnsupportedError:
            return plan
        return as_first if model.are_text_only(as_first.slots) else plan
    modules = list(plan.slots)
    old = any(name.startswith(_OLD_PREFIX) for name in modules)
    if not old and not _may_be_old(plan):
        return plan
    try:
        model = _names_of(plan)
    except AdapterswapError:
        if old:
            raise
        return plan
    try:
        return _with_names(plan, _canonical(plan, model))
    except (BaseModelError, ExpertError):
        if old or not model.are_text_only(modules):
            raise
        return plan


def _names_of(plan: Plan) -> Base:
    """The names of the modules of the plan's base."""
    reference = Reference.to_base(plan.base.reference)
    return Base.at(Source.of_base(reference).folder, reference)


def _canonical(plan: Plan, model: Base) -> dict[str, str]:
    """The canonical name of every slot."""
    container = layer_container(plan.slots)
    names = {}
    for name, slot in plan.slots.items():
        shapes = [(term.lora.out_features, term.lora.in_features) for term in slot.low_rank]
        canonical = model.find(name, container, shapes[0] if shapes else None)
        if canonical is None and ModuleName(name).is_ahead(None, None):
            canonical = name  # transformers does not load it
        if canonical is None:
            raise BaseModelError(
                f"{plan.base.reference} has no module {name} in the installed transformers",
                "Save the expert again with this version of transformers, or pass the base model that it adapts",
                parameter="base_model",
            )
        names[name] = canonical
    return names


def _expert_of(plan: Plan, side: Literal["task", "language"]) -> str:
    """The first expert of a side."""
    composition = plan.composition
    by_rules = composition.allocation is not None
    sides = {} if by_rules else {"task": composition.task, "language": composition.language}
    expert = next((name for name in sides.get(side, ()) if name in plan.adapters), None)
    if expert is None:
        raise ArgumentError(
            f"`names` is {side!r}, but the composition has no {side} expert",
            "Pass `names=transformers5` or `names=transformers4`, or leave it out",
            parameter="names",
        )
    return expert


def _as_expert(plan: Plan, expert: str, model: Base | None) -> Plan:
    """The plan with the names in an expert's file, extended to modules that this expert does not adapt."""
    adapter = plan.adapters[expert]
    if not any(other.original for other in plan.adapters.values()):
        return plan  # all experts use the same names
    model = model or _names_of(plan)
    own_names = _own_names(adapter)
    schemes: list[Callable[[str], str | None]] = [
        lambda name: name,
        model.older,
        lambda name: _in_class_of(model, name, own_names),
    ]
    scheme = next((scheme for scheme in schemes if _explains(scheme, own_names)), lambda name: None)
    names: dict[str, str] = {}
    for name in plan.slots:
        if (name_in_file := own_names.get(name) or scheme(name)) is None:
            raise UnsupportedError(
                f"{expert} names its modules like {next(iter(own_names.values()))}, but {name} has no name "
                "of this form",
                "Choose other `names`, such as transformers5",
                parameter="names",
            )
        names[name] = name_in_file
    return _with_names(plan, names)


def _own_names(adapter: Adapter) -> Mapping[str, str]:
    """Canonical name → the name in the file."""
    return adapter.original or {name: name for name in adapter.parts}


def _explains(scheme: Callable[[str], str | None], own_names: Mapping[str, str]) -> bool:
    """Whether a naming scheme produces an expert's own names."""
    try:
        return all(scheme(name) == old for name, old in own_names.items())
    except AdapterswapError:
        return False


def _in_class_of(model: Base, name: str, own_names: Mapping[str, str]) -> str | None:
    """The name in the model class that `own_names` come from, which is known by the prefix of its layers."""
    moved = model.exchange(name, model.container, layer_container(own_names.values()))
    return name if moved is None and ModuleName(name.removesuffix(".bias")).is_head else moved


def _may_be_old(plan: Plan) -> bool:
    """Whether transformers may have renamed these modules, so that the model must be built, which takes seconds.

    In transformers 4, Qwen2-VL's modules were `model.layers.N` and `visual.blocks.N`, without a prefix for the language
    model, LLaVA's tower was `model.vision_tower.vision_model`, and Nemotron-H's layers were `backbone.layers.N`, as
    Mamba's still are.
    """
    names, base = plan.slots, plan.base
    heads = [name for name in names if "." not in name and ModuleName(name).is_head]
    if base.reference is None or all(name in heads or _PARTS.search(name) for name in names):
        return False
    config = base.local.config  # before the Hub is asked, which takes longer than a swap
    with suppress(AdapterswapError):  # if the config is not available: nothing else needs it
        config = config or Reference(base.reference).config()[1]
    if config is None:
        return False
    return ModelConfig(config).language is not config or any(name.startswith("backbone.") for name in names)


def _with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with its slots under other names."""
    for in_full in (False, True):
        check_distinct({n: names[n] for n, slot in plan.slots.items() if slot.in_full == in_full}, "The composition")
    if all(new == name for name, new in names.items()):
        return plan
    return replace(plan, slots={names[name]: _renamed(slot, names[name]) for name, slot in plan.slots.items()})


def _renamed(slot: Slot, name: str) -> Slot:
    terms = tuple(replace(term, change=term.change.at(name)) for term in slot.terms)
    return replace(slot, name=name, terms=terms)


def loadable_form(plan: Plan, form: Form) -> Form:
    """The form in which PEFT can load the plan's adapter: the portable layout if PEFT fuses its experts.

    PEFT gives all fused experts one rank and one alpha, and ignores patterns on their old names. If every module is a
    copy with the same rank and alpha, the layout `exact` has no patterns, and is kept; but not if the scale is α/√r:
    PEFT doubles both for the fused gates, which is right for α/r only.
    """
    is_kept = first_fused(plan) is None or _is_uniform(plan, form)
    return form if is_kept else replace(form, layout="portable")


def first_fused(plan: Plan) -> str | None:
    """The first module of a plan that PEFT fuses with others; None if there is none."""
    return next((name for name, slot in plan.modules.items() if ModuleKeys(name).is_fused and slot.terms), None)


def _is_uniform(plan: Plan, form: Form) -> bool:
    """Whether every module is a copy of plain LoRA, and all have one rank and alpha."""
    if form.max_rank is not None or form.max_error is not None or not all(slot.owner for slot in plan.modules.values()):
        return False
    copies = [slot.terms[0].lora if slot.terms else None for slot in plan.modules.values()]
    stabilized = any(lora.rslora for lora in copies if lora)
    return not stabilized and len({lora and (lora.rank, lora.alpha) for lora in copies}) == 1


def _is_known_to_fuse(config: Mapping[str, Any], parts: Sequence[LoraModule]) -> bool:
    """Whether PEFT is known to fuse these: LoRA on all experts of a Qwen3-MoE or OLMoE, in the right shapes.

    This saves a trial in PEFT, which needs torch, transformers, PEFT and an empty model.
    """
    key = ModelConfig(config).architecture.expert_width
    hidden, inner = config.get("hidden_size"), config.get(key or "")
    count = config.get("num_experts", config.get("num_local_experts"))
    if key is None or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return False
    matches = [_KNOWN_EXPERT.fullmatch(part.name) for part in parts]
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {int(match[1]) for match in matches if match} == set(range(count or 0)) and all(
        match is not None and shapes[match[2]] == (part.out_features, part.in_features)
        for match, part in zip(matches, parts, strict=True)
    )


def check_fusing(plan: Plan) -> None:
    """Check that PEFT fuses LoRA on the experts of this base: for some types of models it drops them instead.

    The check loads factors of rank 1 for one layer into an empty model with PEFT.
    """
    if (module := first_fused(plan)) is None:
        return
    reference = Reference.to_base(plan.base.reference)
    modules = {name: part for adapter in plan.adapters.values() for name, part in adapter.modules.items()}
    if _is_known_to_fuse(reference.config()[1], [part for name, part in modules.items() if ModuleKeys(name).is_fused]):
        return
    import torch
    from peft import LoraConfig

    model = empty_model(Source.of_base(reference).folder, reference)
    layer = f"{module.partition('.experts.')[0]}.experts."
    parts = [part for name, part in modules.items() if name.startswith(layer)]
    tensors = {}
    for part in parts:
        a_key, b_key = ModuleKeys(part.name).factors()
        tensors[a_key] = torch.empty(1, part.in_features, device="meta")
        tensors[b_key] = torch.empty(part.out_features, 1, device="meta")
    trial = try_in_peft(model, LoraConfig(r=1, target_modules=[part.name for part in parts]), tensors)
    if trial is None or trial.dropped:
        raise UnsupportedError(
            f"PEFT cannot load LoRA on {module} into {reference}: transformers 5 fuses the experts of a layer, and "
            "PEFT does not convert adapters for this type of model",
            "Merge the composition into the base with `merge`, which does not depend on PEFT",
        )
