"""Check that changes other than plain LoRA fit into one adapter, which PEFT loads by a single config.

Knows plans and PEFT's kinds. The only tensors that it reads are projections that several experts must share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapterswap.arithmetic.outputs import Form
from adapterswap.arithmetic.saved_layout import trained_tokens
from adapterswap.changes.copies import is_one_weight, stored_weight
from adapterswap.changes.kinds import LowRank, Opaque
from adapterswap.errors import Problems, UnsupportedError
from adapterswap.experts.adapters import OpaqueModule
from adapterswap.experts.peft_kinds import KINDS
from adapterswap.files.numbers import open_files
from adapterswap.planning.plan import Plan
from adapterswap.planning.slots import Slot, Term

__all__ = ["check_kinds"]

_MERGE = "merge the composition into full weights with `merge`"


def check_kinds(plan: Plan, form: Form) -> None:
    """Check that a plan's changes fit into one adapter, whose config holds one kind for all modules.

    Raises:
        UnsupportedError: a change that is not low-rank is blended; modules have kinds or settings that one config
            cannot hold; the portable layout or a `max_rank` is requested that a module does not allow.
    """
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
