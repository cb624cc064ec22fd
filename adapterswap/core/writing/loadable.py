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

from adapterswap.core.experts.adapter import check_distinct
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import LoraModule, OpaqueModule
from adapterswap.core.experts.trial import try_in_peft
from adapterswap.core.model.base import Base, empty_model
from adapterswap.core.model.layers import ModelConfig, ModuleName, layer_container
from adapterswap.core.model.sources import Reference, Source
from adapterswap.core.planning.plan import Plan
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
from adapterswap.kit.files.tensorfile import open_files


def check_form(plan: Plan, form: Form) -> None:
    """Check that one adapter can hold a plan's result in this form."""
    target = Target.PORTABLE if form.layout == "portable" else Target.ADAPTER
    target.check(plan, max_rank=form.max_rank, max_error=form.max_error)
    _check_shared(plan)


def _check_shared(plan: Plan) -> None:
    """Check that experts whose modules share projections, such as VeRA's, have the same ones."""
    sharing: dict[str, OpaqueModule] = {}
    for slot in plan:
        for term in slot.opaque:
            if term.change.part.shares_tensors:
                sharing[term.expert] = term.change.part
    if len(sharing) < 2:
        return

    (first, ours), *others = sharing.items()
    with open_files(plan.adapters[expert].file for expert in sharing) as files:

        def is_one(name: str, expert: str, theirs: OpaqueModule) -> bool:
            """Whether both hold a projection, and it is the same."""
            if name not in ours.shared or name not in theirs.shared:
                return False
            own = Comparable.of(ours.shared[name], files[plan.adapters[first].file.path])
            return own.is_one_with(Comparable.of(theirs.shared[name], files[plan.adapters[expert].file.path]))

        for expert, theirs in others:
            for name in sorted({*ours.shared, *theirs.shared}):
                if not is_one(name, expert, theirs):
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
        lost: set[str] = set()  # modules
        for key in trial.missing:
            lost.add(key.removeprefix("base_model.model.").partition(".lora_")[0])
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
    # The names that the caller asks for
    if names in ("task", "language"):
        return _as_expert(plan, _expert_of(plan, names), model=None)
    if names is not None:
        model = _names_of(plan)
        canonical = _canonical(plan, model)
        if names == "transformers4":
            canonical = {name: model.older(new) for name, new in canonical.items()}
        return _with_names(plan, canonical)

    # Experts that were renamed to agree: the first one's names, if its model's text-only class has them
    if any(adapter.original for adapter in plan.adapters.values()):
        model = _names_of(plan)
        first = next(iter(plan.adapters))
        if not model.is_multimodal or not plan.adapters[first].original:
            return plan
        try:
            as_first = _as_expert(plan, first, model=model)
        except UnsupportedError:
            return plan
        if model.are_text_only(as_first.slots):
            return as_first
        return plan

    # Names that all experts share: those of transformers 4 are updated
    modules = list(plan.slots)
    are_old = any(name.startswith(_OLD_PREFIX) for name in modules)
    if not are_old and not _may_be_old(plan):
        return plan
    try:
        model = _names_of(plan)
    except AdapterswapError:
        if are_old:
            raise
        return plan
    try:
        return _with_names(plan, _canonical(plan, model))
    except (BaseModelError, ExpertError):
        if are_old or not model.are_text_only(modules):
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
        shape = None
        if slot.low_rank:
            lora = slot.low_rank[0].lora
            shape = (lora.out_features, lora.in_features)

        canonical = model.find(name, container, shape)
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
    if composition.allocation is None:  # rules have no sides
        experts = composition.task if side == "task" else composition.language
        for name in experts:
            if name in plan.adapters:
                return name
    raise ArgumentError(
        f"`names` is {side!r}, but the composition has no {side} expert",
        "Pass `names=transformers5` or `names=transformers4`, or leave it out",
        parameter="names",
    )


def _as_expert(plan: Plan, expert: str, model: Base | None) -> Plan:
    """The plan with the names in an expert's file, extended to modules that this expert does not adapt."""
    adapter = plan.adapters[expert]
    if not any(other.original for other in plan.adapters.values()):
        return plan  # all experts use the same names
    base = model or _names_of(plan)
    own_names = adapter.original or {name: name for name in adapter.parts}  # canonical name → the name in the file

    # The first scheme that explains the names in the file: transformers 5's, 4's, or those of the model's own class
    schemes: list[Callable[[str], str | None]] = [
        lambda name: name,
        base.older,
        lambda name: _in_class_of(base, name, own_names),
    ]
    fitting = next((scheme for scheme in schemes if _explains(scheme, own_names)), None)

    names: dict[str, str] = {}
    for name in plan.slots:
        name_in_file = own_names.get(name)
        if not name_in_file and fitting is not None:
            name_in_file = fitting(name)
        if name_in_file is None:
            raise UnsupportedError(
                f"{expert} names its modules like {next(iter(own_names.values()))}, but {name} has no name "
                "of this form",
                "Choose other `names`, such as transformers5",
                parameter="names",
            )
        names[name] = name_in_file
    return _with_names(plan, names)


def _explains(scheme: Callable[[str], str | None], own_names: Mapping[str, str]) -> bool:
    """Whether a naming scheme produces an expert's own names."""
    try:
        return all(scheme(name) == old for name, old in own_names.items())
    except AdapterswapError:
        return False


def _in_class_of(model: Base, name: str, own_names: Mapping[str, str]) -> str | None:
    """The name in the model class that `own_names` come from, which is known by the prefix of its layers."""
    moved = model.exchange(name, model.container, layer_container(own_names.values()))
    if moved is None and ModuleName(name.removesuffix(".bias")).is_head:
        return name
    return moved


def _may_be_old(plan: Plan) -> bool:
    """Whether transformers may have renamed these modules, so that the model must be built, which takes seconds.

    In transformers 4, Qwen2-VL's modules were `model.layers.N` and `visual.blocks.N`, without a prefix for the language
    model, LLaVA's tower was `model.vision_tower.vision_model`, and Nemotron-H's layers were `backbone.layers.N`, as
    Mamba's still are.
    """
    base = plan.base
    if base.reference is None:
        return False

    # Names that only transformers 5 gives, and a head's, which has none of the prefixes
    inside = [name for name in plan.slots if "." in name or not ModuleName(name).is_head]
    if all(_PARTS.search(name) for name in inside):
        return False

    # Only multimodal models and those with a `backbone` were renamed. The Hub is asked last: that takes longer than a
    # swap, and if the config is not available, nothing else needs it.
    config = base.local.config
    if not config:
        with suppress(AdapterswapError):
            config = Reference(base.reference).config()[1]
    if config is None:
        return False
    is_multimodal = ModelConfig(config).language is not config
    return is_multimodal or any(name.startswith("backbone.") for name in plan.slots)


def _with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with its slots under other names."""
    # No two modules with factors, and no two that are stored whole, may get one name.
    for slots_of_kind in (plan.modules, plan.saved):
        check_distinct({name: names[name] for name in slots_of_kind}, "The composition")
    if all(new == name for name, new in names.items()):
        return plan

    slots = {}
    for old, slot in plan.slots.items():
        new = names[old]
        terms = tuple(term._replace(change=term.change.at(new)) for term in slot.terms)
        slots[new] = replace(slot, name=new, terms=terms)
    return replace(plan, slots=slots)


def loadable_form(plan: Plan, form: Form) -> Form:
    """The form in which PEFT can load the plan's adapter: the portable layout if PEFT fuses its experts.

    PEFT gives all fused experts one rank and one alpha, and ignores patterns on their old names. If every module is a
    copy with the same rank and alpha, the layout `exact` has no patterns, and is kept; but not if the scale is α/√r:
    PEFT doubles both for the fused gates, which is right for α/r only.
    """
    if first_fused(plan) is None or _is_uniform(plan, form):
        return form
    return replace(form, layout="portable")


def first_fused(plan: Plan) -> str | None:
    """The first module of a plan that PEFT fuses with others; None if there is none."""
    for name, slot in plan.modules.items():
        if slot.terms and ModuleKeys(name).is_fused:
            return name
    return None


def _is_uniform(plan: Plan, form: Form) -> bool:
    """Whether every module is a copy of plain LoRA, and all have one rank and alpha."""
    is_copied = all(slot.owner for slot in plan.modules.values())
    if form.max_rank is not None or form.max_error is not None or not is_copied:
        return False

    pairs: set[tuple[int, float] | None] = set()  # None is for a module that stays the base's
    for slot in plan.modules.values():
        if not slot.terms:
            pairs.add(None)
            continue
        lora = slot.terms[0].lora
        if lora.rslora:
            return False
        pairs.add((lora.rank, lora.alpha))
    return len(pairs) == 1


def _is_known_to_fuse(config: Mapping[str, Any], parts: Sequence[LoraModule]) -> bool:
    """Whether PEFT is known to fuse these: LoRA on all experts of a Qwen3-MoE or OLMoE, in the right shapes.

    This saves a trial in PEFT, which needs torch, transformers, PEFT and an empty model.
    """
    key = ModelConfig(config).architecture.expert_width
    has_dense_layers = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    if key is None or has_dense_layers:
        return False

    hidden, inner = config.get("hidden_size"), config.get(key)
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}  # out×in
    experts: set[int] = set()
    for part in parts:
        match = _KNOWN_EXPERT.fullmatch(part.name)
        if match is None or shapes[match[2]] != (part.out_features, part.in_features):
            return False
        experts.add(int(match[1]))

    count = config.get("num_experts", config.get("num_local_experts"))
    return experts == set(range(count or 0))


def check_fusing(plan: Plan) -> None:
    """Check that PEFT fuses LoRA on the experts of this base: for some types of models it drops them instead.

    The check loads factors of rank 1 for one layer into an empty model with PEFT.
    """
    module = first_fused(plan)
    if module is None:
        return

    reference = Reference.to_base(plan.base.reference)
    modules: dict[str, LoraModule] = {}
    for adapter in plan.adapters.values():
        modules |= adapter.modules
    fused = [part for name, part in modules.items() if ModuleKeys(name).is_fused]
    if _is_known_to_fuse(reference.config()[1], fused):
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

    config = LoraConfig(r=1, target_modules=[part.name for part in parts])
    trial = try_in_peft(model, config, tensors)
    if trial is None or trial.dropped:
        raise UnsupportedError(
            f"PEFT cannot load LoRA on {module} into {reference}: transformers 5 fuses the experts of a layer, and "
            "PEFT does not convert adapters for this type of model",
            "Merge the composition into the base with `merge`, which does not depend on PEFT",
        )
