"""What one adapter can hold, the names that it is written with, and whether PEFT loads it.

Knows plans and PEFT's kinds. The only tensors that it reads are projections that several experts must share.

transformers 5 renamed the modules of multimodal models and fused the experts of most mixtures of experts into one
parameter per layer. PEFT converts adapters of transformers 4 when it loads them, but not the full names and the
per-module patterns that a composed config needs. Knows plans and names, and asks PEFT; reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from adapterswap.changes.copies import is_one_weight, stored_weight
from adapterswap.changes.kinds import LowRank, Opaque
from adapterswap.errors import AdapterswapError, ArgumentError, BaseModelError, ExpertError, Problems, UnsupportedError
from adapterswap.experts.adapter import Adapter, LoraModule, OpaqueModule, and_more
from adapterswap.experts.keys import KINDS, TASK_HEADS, factor_key
from adapterswap.experts.names import check_distinct
from adapterswap.experts.trial import try_in_peft
from adapterswap.files.numbers import open_files
from adapterswap.model.base import Base, base_at, empty_model
from adapterswap.model.checkpoints import MODEL_CONFIG
from adapterswap.model.layers import HEADS, is_ahead, language_config, layer_container
from adapterswap.model.sources import base_config, cached_base_config, find_source
from adapterswap.planning.base import named_base
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot, Term
from adapterswap.writing.layout import is_fused, trained_tokens
from adapterswap.writing.outputs import Form, Layout, Names

_MERGE = "merge the composition into full weights with `merge`"


def check_kinds(plan: Plan, form: Form) -> None:
    """Check that a plan's changes fit into one adapter, whose config holds one kind for all modules."""
    problems = Problems(UnsupportedError)
    entering = [(slot, term) for slot in plan for term in slot.terms]
    for slot in plan:
        if slot.rows and slot.factors_by_rows:
            problems.add(
                f"{slot.name} has other rows than the base, and its LoRA has different weights for them, but an "
                "adapter holds one ΔW for all rows",
                f"Give it to one expert in its own rule: {{modules: [{slot.name}], expert: {slot.factors_by_rows}}}, "
                f"or {_MERGE}",
            )
        elif slot.opaque and slot.owner is None and any(not _part(term).is_linear for term in slot.opaque):
            expert, part = next((t.expert, _part(t)) for t in slot.opaque if not _part(t).is_linear)
            problems.add(
                f"{slot.name} is a blend, but {expert} is {part.method} there, which cannot be averaged without the "
                "base's weight",
                f"Give it to one expert, {_MERGE}, or convert {expert} to rsLoRA first with `convert`",
            )
        elif slot.opaque and slot.method != "linear":
            expert, part = slot.opaque[0].expert, _part(slot.opaque[0])
            problems.add(
                f"{slot.method} works on s·B·A, but {expert} is {part.method} at {slot.name}",
                f"Use a linear method such as `soup` or `task_arithmetic`, or {_MERGE}",
                parameter="method",
            )
        elif slot.whole and slot.low_rank:
            full, lora = slot.whole[0].expert, slot.low_rank[0].expert
            problems.add(
                f"{slot.name} is a blend of {full}, which holds it in full (modules_to_save), and {lora}, which has "
                "LoRA on it",
                f"Give it to one of them in its own rule: {{modules: [{slot.name}], expert: {full}}}, or {_MERGE}",
            )
        if problems:  # one module is enough
            break
    problems.raise_if_any()
    _check_tokens(plan, form, problems)
    opaque = [(term.expert, _part(term)) for _, term in entering if term.opaque]
    if not opaque:
        return
    expert, first = opaque[0]
    remedy = f"Give all modules to experts of one kind, or {_MERGE}"
    plain = next(((slot, term.expert) for slot, term in entering if isinstance(term.change, LowRank)), None)
    if plain is not None and (first.lora is None or first.settings.get("use_dora")):
        problems.add(
            f"{expert} is {first.method} and {plain[1]} is LoRA ({plain[0].name}), but an adapter holds only one kind"
            + (". Writing LoRA as DoRA would need the norms of the base's weights" if first.lora is not None else ""),
            remedy,
        )
    without = next(
        ((s.name, t.expert) for s, t in entering if isinstance(t.change, LowRank) and _without_bias(t)), None
    )
    if first.settings.get("lora_bias") and without is not None:
        problems.add(
            f"{expert} has biases (lora_bias) and {without[1]} has LoRA on {without[0]}, an embedding or a parameter, "
            "for which PEFT supports no such biases",
            f"Give {without[0]} to an expert without LoRA on it, or {_MERGE}",
        )
    for other, part in opaque:
        if part.method != first.method:
            problems.add(
                f"{expert} is {first.method} and {other} is {part.method}, but an adapter holds only one kind", remedy
            )
            break
        if part.settings != first.settings and (differing := _differing(first, part)):
            listed = "; ".join(f"{key} is {ours!r} and {theirs!r}" for key, (ours, theirs) in differing.items())
            problems.add(
                f"{expert} and {other} are {part.method} with settings that one adapter cannot hold: {listed}",
                remedy,
            )
            break
    problems.raise_if_any()
    _check_form(opaque, form, problems)
    _check_shared(plan, opaque, problems)
    _check_suffixes(first, plan, problems)
    problems.raise_if_any()


def _check_tokens(plan: Plan, form: Form, problems: Problems) -> None:
    """Check that PEFT loads trained tokens together with the other changes: beside LoRA, or in a file of their own."""
    tokens = [slot for slot in plan if slot.of_tokens]
    if not tokens:
        return
    first = tokens[0]
    expert = first.terms[0].expert
    other = next((t for slot in plan for t in slot.opaque if _part(t).lora is None), None)
    if other is not None:
        problems.add(
            f"{expert} trained tokens of {first.name} and {other.expert} is {_part(other).method}, but PEFT loads "
            "trained tokens only beside LoRA",
            f"Give {first.name} to the base, or {_MERGE}",
        )
    elif not any(slot.terms for slot in plan.modules.values()):
        full = next((slot for slot in plan.saved.values() if slot.terms and not slot.of_tokens), None)
        differing = next((slot for slot in tokens if trained_tokens(slot) != trained_tokens(first)), None)
        if full is not None:
            problems.add(
                f"the result has trained tokens of {first.name} and {full.name} in full, and PEFT loads the two "
                "together only beside LoRA",
                f"Give some modules with LoRA to an expert, or {_MERGE}",
            )
        elif differing is not None:
            problems.add(
                f"the result has tokens of {first.name} and other ones of {differing.name}, but PEFT has one list of "
                "tokens for both unless there is LoRA beside them",
                f"Give both modules to the same experts, or {_MERGE}",
            )
        elif form.layout == "portable":
            problems.add(
                "the portable layout is plain LoRA, but the result has only trained tokens",
                "Pass `layout=exact`",
                parameter="layout",
            )
    problems.raise_if_any()


def _differing(first: OpaqueModule, second: OpaqueModule) -> dict[str, tuple[Any, Any]]:
    """The settings in which two modules differ, as PEFT reads them: absent keys have PEFT's defaults."""
    from peft import PeftConfig

    settings = [
        PeftConfig.from_peft_type(peft_type=part.peft_type, **part.settings).to_dict() for part in (first, second)
    ]
    keys = sorted({*first.settings, *second.settings} & settings[0].keys())
    return {key: (settings[0][key], settings[1][key]) for key in keys if settings[0][key] != settings[1][key]}


def _check_shared(plan: Plan, parts: Sequence[tuple[str, OpaqueModule]], problems: Problems) -> None:
    """Check that the experts share the same projections, and that the result would have the same width.

    PEFT makes the projections as wide as the adapter's widest module.
    """
    sharing = {expert: part for expert, part in parts if KINDS.get(part.peft_type) and KINDS[part.peft_type].shared}
    if not sharing:
        return
    first = next(iter(sharing))
    names = sorted({name for part in sharing.values() for name in part.shared})
    adapters = plan.adapters
    with open_files(adapters[expert].file for expert in sharing) as files:
        for expert, part in sharing.items():
            for name in names:
                ours, theirs = sharing[first].shared.get(name), part.shared.get(name)
                if ours is None or theirs is None:
                    same = ours is theirs
                else:
                    same = is_one_weight(
                        stored_weight(ours, files[adapters[first].file.path]),
                        stored_weight(theirs, files[adapters[expert].file.path]),
                    )
                if not same:
                    problems.add(
                        f"{first} and {expert} are {part.method} with different projections ({name}), but all modules "
                        "of an adapter share one",
                        f"Train both with the same projection_prng_key and targets, or {_MERGE}",
                    )
                    return
    result = {_leaf(slot) for slot in plan if slot.opaque}
    for expert in sharing:
        lost = sorted({_leaf(part) for part in adapters[expert].opaque.values()} - result)
        if lost:
            problems.add(
                f"the result has no module like {lost[0]} of {expert}, but the widest module decides the width of the "
                f"projections that {sharing[expert].method} shares",
                f"Keep one such module, or {_MERGE}",
            )
            return


def _leaf(module: Slot | OpaqueModule) -> str:
    """A module's name without its layer's number; modules that share it have the same shape in nearly all models."""
    return module.name if module.layer is None else module.name.replace(f".{module.layer}.", ".", 1)


def _check_suffixes(first: OpaqueModule, plan: Plan, problems: Problems) -> None:
    """Check that PEFT can tell (IA)³'s feedforward modules, which it finds by the ends of names, from the others."""
    if first.peft_type != "IA3":
        return
    forward = {
        slot.name: [term.opaque.part.tensors["ia3_l"].shape[0] == 1 for term in slot.terms if term.opaque]
        for slot in plan
        if slot.opaque
    }
    ends = tuple(name for name, flags in forward.items() if any(flags))
    odd = next((name for name, flags in forward.items() if not any(flags) and name.endswith(ends or ("\0",))), None)
    if odd is not None:
        problems.add(
            f"(IA)³ scales the outputs of {odd} but the inputs of a module whose name ends in the same way, and PEFT "
            "cannot distinguish them",
            _MERGE.capitalize(),
        )


def _without_bias(term: Term) -> bool:
    """Whether PEFT refuses `lora_bias` for a module of plain LoRA."""
    return term.lora.embedding or term.lora.parameter


def _part(term: Term) -> OpaqueModule:
    """The module of an opaque term."""
    assert isinstance(term.change, Opaque)
    return term.change.part


def _check_form(parts: Sequence[tuple[str, OpaqueModule]], form: Form, problems: Problems) -> None:
    """Report a layout or a maximum rank that only plain LoRA can have, if a copied module is of another kind."""
    expert, first = parts[0]
    if form.layout == "portable":
        problems.add(
            f"the portable layout is plain LoRA, but {expert} is {first.method} at {first.name}",
            "Pass `layout=exact`"
            + ("" if first.is_linear else f", or convert {expert} to rsLoRA first with `convert`"),
            parameter="layout",
        )
    for expert, part in parts:
        if part.lora is not None and not part.is_linear and (form.max_rank or part.lora.rank) < part.lora.rank:
            problems.add(
                f"{part.name} has rank {part.lora.rank}, but {expert} is {part.method}, which cannot be truncated",
                f"Pass `max_rank={part.lora.rank}` or more, or leave it out",
                parameter="max_rank",
            )
            break


_OLD_PREFIX = "language_model."  # multimodal models of transformers 4; a few audio models still have it

_PARTS = re.compile(r"(^|\.)(language_model|text_model|model\.visual)\.")

# Names that PEFT takes for parts of fused experts, wherever they are in the model.
_FUSED = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# Types of models whose experts PEFT fuses for certain → the config key with the width of an expert.
_KNOWN_TO_FUSE = {"qwen3_moe": "moe_intermediate_size", "olmoe": "intermediate_size"}
_KNOWN_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")
_PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))  # fused into one parameter, gate_up_proj


# Types of models whose modules PEFT 0.21 loses in part: it renames LoRA's keys, which have their final names, by
# transformers' rules for the keys of checkpoints, and these rules change such names again.
_RENAMED_TWICE = frozenset({
    "inkling2", "inkling2_text", "laguna", "mistral_large4", "mistral_large4_text", "pi0", "unlimited_ocr",
})  # fmt: skip


def check_renaming(plan: Plan, layout: Layout) -> None:
    """Check that PEFT loads every factor into this type of base; only the types that may lose some are tried."""
    reference = plan.base_reference
    config = cached_base_config(reference) if reference else None
    if reference is None or config is None or config.get("model_type") not in _RENAMED_TWICE:
        return
    import torch
    from peft import PeftConfig

    model = empty_model(base_config(reference)[0].folder, reference, task_type=plan.task_type)
    tensors = {tensor.key: torch.empty(tensor.shape, device="meta") for tensor in layout.tensors}
    trial = try_in_peft(model, PeftConfig.from_peft_type(**layout.config), tensors)
    if trial is not None and trial.dropped:
        lost = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in trial.missing}
        raise UnsupportedError(
            f"PEFT would lose LoRA on {and_more(sorted(lost))}: for {config['model_type']} it renames these keys",
            f"Give these modules to the base in a rule of their own, or {_MERGE}",
        )


def check_heads(plan: Plan) -> None:
    """Check that the adapter holds the modules that PEFT loads in full for its task type."""
    problems = Problems(UnsupportedError)
    for name, module in plan.saved.items():
        if not module.terms and name.rpartition(".")[2] in TASK_HEADS.get(plan.task_type or "", ()):
            problems.add(
                f"The rule `{module.rule}` gives {name} to the base, but PEFT cannot load an adapter for "
                f"{plan.task_type} without it",
                f"Give it to an expert in its own rule: {{modules: [{name}], expert: NAME}}",
            )
    problems.raise_if_any()


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
    modules, reference = list(plan.slots), plan.base_reference
    old = any(name.startswith(_OLD_PREFIX) for name in modules)
    if not old and not _may_be_old(modules, reference):
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
    reference = named_base(plan.base_reference)
    return base_at(find_source(reference, [MODEL_CONFIG], what="base model").folder, reference)


def _canonical(plan: Plan, model: Base) -> dict[str, str]:
    """The canonical name of every slot."""
    container = layer_container(plan.slots)
    names = {}
    for name, slot in plan.slots.items():
        shapes = [(term.lora.out_features, term.lora.in_features) for term in slot.low_rank]
        canonical = model.find(name, container, shapes[0] if shapes else None)
        if canonical is None and is_ahead(name, None, None):
            canonical = name  # transformers does not load it
        if canonical is None:
            raise BaseModelError(
                f"{plan.base_reference} has no module {name} in the installed transformers",
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
        lambda name: name, model.older, lambda name: _in_class_of(model, name, own_names),
    ]  # fmt: skip
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
    return name if moved is None and name.removesuffix(".bias").rpartition(".")[2] in HEADS else moved


def _may_be_old(names: Sequence[str], reference: str | None) -> bool:
    """Whether transformers may have renamed these modules, so that the model must be built, which takes seconds.

    In transformers 4, Qwen2-VL's modules were `model.layers.N` and `visual.blocks.N`, without a prefix for the language
    model, LLaVA's tower was `model.vision_tower.vision_model`, and Nemotron-H's layers were `backbone.layers.N`, as
    Mamba's still are.
    """
    if reference is None or all(name in HEADS or _PARTS.search(name) for name in names):
        return False
    try:
        _, config = base_config(reference)
    except AdapterswapError:  # the config is not available, and nothing else needs it
        return False
    return language_config(config) is not config or any(name.startswith("backbone.") for name in names)


def _with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with its slots under other names."""
    for in_full in (False, True):
        check_distinct({n: names[n] for n, slot in plan.slots.items() if slot.in_full == in_full}, "The composition")
    if all(new == name for name, new in names.items()):
        return plan
    return replace(plan, slots={names[name]: _renamed(slot, names[name]) for name, slot in plan.slots.items()})


def _renamed(slot: Slot, name: str) -> Slot:
    def renamed(term: Term) -> Term:
        if isinstance(term.change, LowRank):
            return replace(term, change=replace(term.change, lora=replace(term.change.lora, name=name)))
        if isinstance(term.change, Opaque):
            part = term.change.part
            lora = None if part.lora is None else replace(part.lora, name=name)
            return replace(term, change=replace(term.change, part=replace(part, name=name, lora=lora)))
        return term

    return replace(slot, name=name, terms=tuple(map(renamed, slot.terms)))


def loadable_form(plan: Plan, form: Form) -> Form:
    """The form in which PEFT can load the plan's adapter: the portable layout if PEFT fuses its experts.

    PEFT gives all fused experts one rank and one alpha, and ignores patterns on their old names. If every module is a
    copy with the same rank and alpha, the layout `exact` has no patterns, and is kept.
    """
    modules = plan.modules
    fused = [name for name in modules if is_fused(name)]
    if not any(modules[name].terms for name in fused):
        return form
    remedy = "Merge the composition into the base with `merge`, which does not depend on PEFT"
    if other := next((s.name for s in modules.values() if s.low_rank and s.low_rank[0].lora.parameter), None):
        raise UnsupportedError(
            f"{fused[0]} has LoRA on one expert, but {other} on all experts of a layer as one parameter", remedy
        )
    if opaque := next((name for name in fused if modules[name].opaque), None):
        raise UnsupportedError(
            f"{opaque} is not plain LoRA, but PEFT on transformers 5 fuses only plain LoRA on experts", remedy
        )
    for module in modules.values():
        if module.terms and module.name.rpartition(".")[2] in _FUSED and not is_fused(module.name):
            raise UnsupportedError(
                f"{module.name} and experts ({fused[0]}) both have LoRA, but PEFT on transformers 5 would take the "
                "former for one of the fused experts",
                remedy,
            )
    names_within: dict[str, set[str]] = {}  # list of experts → names within it
    for name in fused:
        start, _, within = name.rpartition(".experts.")
        names_within.setdefault(start, set()).add(within)
    required = set().union(*names_within.values())
    for pairs in (_PAIRS, [(second, first) for first, second in _PAIRS]):
        required |= {f"{name.removesuffix(a)}{b}" for name in required for a, b in pairs if name.endswith(a)}
    for start, names in names_within.items():
        if missing := sorted(required - names):
            raise UnsupportedError(
                f"No expert has LoRA on {start}.experts.{missing[0]}, but PEFT on transformers 5 fuses the experts of "
                "a layer into one parameter, and loads all of them or none",
                remedy,
            )
    _check_fusing(plan, next(name for name in fused if modules[name].terms), remedy)
    return form if _is_uniform(plan, form) else replace(form, layout="portable")


def _is_uniform(plan: Plan, form: Form) -> bool:
    """Whether every module is a copy, and all have one rank and alpha."""
    if form.max_rank is not None or form.max_error is not None or not all(slot.owner for slot in plan.modules.values()):
        return False
    copies = [slot.terms[0].lora if slot.terms else None for slot in plan.modules.values()]
    return len({lora and (lora.rank, lora.alpha, lora.rslora) for lora in copies}) == 1


def _is_known_to_fuse(config: Mapping[str, Any], parts: Sequence[LoraModule]) -> bool:
    """Whether PEFT is known to fuse these: LoRA on all experts of a Qwen3-MoE or OLMoE, in the right shapes.

    This saves a trial in PEFT, which needs torch, transformers, PEFT and an empty model.
    """
    key = _KNOWN_TO_FUSE.get(str(config.get("model_type")))
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


def _check_fusing(plan: Plan, module: str, remedy: str) -> None:
    """Check that PEFT fuses LoRA on the experts of this base: for some types of models it drops them instead.

    The check loads factors of rank 1 for the layer of `module` into an empty model with PEFT.
    """
    reference = named_base(plan.base_reference)
    modules = {name: part for adapter in plan.adapters.values() for name, part in adapter.modules.items()}
    if _is_known_to_fuse(base_config(reference)[1], [part for name, part in modules.items() if is_fused(name)]):
        return
    import torch
    from peft import LoraConfig

    model = empty_model(find_source(reference, [MODEL_CONFIG], what="base model").folder, reference)
    layer = f"{module.partition('.experts.')[0]}.experts."
    parts = [part for name, part in modules.items() if name.startswith(layer)]
    tensors = {}
    for part in parts:
        tensors[factor_key(part.name, "A", embedding=False)] = torch.empty(1, part.in_features, device="meta")
        tensors[factor_key(part.name, "B", embedding=False)] = torch.empty(part.out_features, 1, device="meta")
    trial = try_in_peft(model, LoraConfig(r=1, target_modules=[part.name for part in parts]), tensors)
    if trial is None or trial.dropped:
        raise UnsupportedError(
            f"PEFT cannot load LoRA on {module} into {reference}: transformers 5 fuses the experts of a layer, and "
            "PEFT does not convert adapters for this type of model",
            remedy,
        )
