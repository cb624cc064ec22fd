"""Whether a plan whose changes are not all plain LoRA fits into one adapter, which PEFT loads by one config.

Knows plans and PEFT's kinds; of the tensors it reads only projections that several experts must share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapterswap.arithmetic.outputs import Form
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
    """Whether a plan's changes fit into one adapter that PEFT loads, whose config holds one kind for all modules.

    Raises:
        UnsupportedError: a change that is not low-rank is blended; modules are of kinds, or have settings, that one
            config cannot hold; the portable layout, or a rank that a module of DoRA exceeds.
    """
    problems = Problems(UnsupportedError)
    entering = [(slot, term) for slot in plan for term in slot.terms]
    for slot in plan:
        if slot.opaque and slot.owner is None and any(not _part(term).is_linear for term in slot.opaque):
            expert, part = next((t.expert, _part(t)) for t in slot.opaque if not _part(t).is_linear)
            problems.add(
                f"{slot.name} is a blend, and {expert} is {part.method} there, which cannot be averaged without the "
                "base's weight",
                f"Give it to one expert, {_MERGE}, or turn {expert} into rsLoRA first with `convert`",
            )
        elif slot.opaque and slot.method != "linear":
            expert, part = slot.opaque[0].expert, _part(slot.opaque[0])
            problems.add(
                f"{slot.method} works on s·B·A, and {expert} is {part.method} at {slot.name}",
                f"Use a linear method such as `soup` or `task_arithmetic`, or {_MERGE}",
                parameter="method",
            )
        elif slot.whole and slot.low_rank:
            one, other = slot.whole[0].expert, slot.low_rank[0].expert
            problems.add(
                f"{slot.name} is a blend of {one}, which holds it in full (modules_to_save), and {other}, which has "
                "LoRA on it",
                f"Give it to one of them, in a rule of its own: {{modules: [{slot.name}], expert: {one}}}, or {_MERGE}",
            )
        if problems:  # the first module tells enough
            break
    problems.raise_if_any()
    opaque = [(term.expert, _part(term)) for _, term in entering if term.opaque]
    if not opaque:
        return
    expert, first = opaque[0]
    remedy = f"Give all modules to experts of one kind, or {_MERGE}"
    plain = next(((slot, term.expert) for slot, term in entering if isinstance(term.change, LowRank)), None)
    if plain is not None and (first.lora is None or first.settings.get("use_dora")):
        problems.add(
            f"{expert} is {first.method} and {plain[1]} is LoRA ({plain[0].name}), and an adapter is of one kind"
            + (": LoRA as DoRA needs the norms of the base's weights" if first.lora is not None else ""),
            remedy,
        )
    for other, part in opaque:
        if part.method != first.method:
            problems.add(
                f"{expert} is {first.method} and {other} is {part.method}, and an adapter is of one kind", remedy
            )
            break
        if part.settings != first.settings and (differing := _differing(first, part)):
            told = "; ".join(f"{key} is {one!r} and {two!r}" for key, (one, two) in differing.items())
            problems.add(
                f"{expert} and {other} are {part.method} with different settings, and an adapter has one: {told}",
                remedy,
            )
            break
    problems.raise_if_any()
    _check_form(opaque, form, problems)
    _check_shared(plan, opaque, problems)
    _check_suffixes(first, plan, problems)
    problems.raise_if_any()


def _differing(one: OpaqueModule, other: OpaqueModule) -> dict[str, tuple[Any, Any]]:
    """The settings in which they differ, as PEFT reads them: a key that is absent has PEFT's default."""
    from peft import PeftConfig

    read = [PeftConfig.from_peft_type(peft_type=part.peft_type, **part.settings).to_dict() for part in (one, other)]
    keys = sorted({*one.settings, *other.settings} & read[0].keys())
    return {key: (read[0][key], read[1][key]) for key in keys if read[0][key] != read[1][key]}


def _check_shared(plan: Plan, parts: Sequence[tuple[str, OpaqueModule]], problems: Problems) -> None:
    """Whether the experts share the same projections, and whether the result has the same width.

    PEFT builds them as wide as the widest module of the adapter.
    """
    held = {expert: part for expert, part in parts if KINDS.get(part.peft_type) and KINDS[part.peft_type].shared}
    if not held:
        return
    first = next(iter(held))
    names = sorted({name for part in held.values() for name in part.shared})
    adapters = plan.adapters
    with open_files(adapters[expert].file for expert in held) as files:
        for expert, part in held.items():
            for name in names:
                one, other = held[first].shared.get(name), part.shared.get(name)
                if one is None or other is None:
                    same = one is other
                else:
                    same = is_one_weight(
                        stored_weight(one, files[adapters[first].file.path]),
                        stored_weight(other, files[adapters[expert].file.path]),
                    )
                if not same:
                    problems.add(
                        f"{first} and {expert} are {part.method} with different projections ({name}), which all "
                        "modules of an adapter share",
                        f"Train both with the same projection_prng_key and targets, or {_MERGE}",
                    )
                    return
    result = {_leaf(slot) for slot in plan if slot.opaque}
    for expert in held:
        lost = sorted({_leaf(part) for part in adapters[expert].opaque.values()} - result)
        if lost:
            problems.add(
                f"the result has no module like {lost[0]} of {expert}, and PEFT builds the projections that "
                f"{held[expert].method} shares as wide as its widest module",
                f"Keep one such module, or {_MERGE}",
            )
            return


def _leaf(module: Slot | OpaqueModule) -> str:
    """A module's name without its layer's number: those of one such name have one shape in nearly all models."""
    return module.name if module.layer is None else module.name.replace(f".{module.layer}.", ".", 1)


def _check_suffixes(first: OpaqueModule, plan: Plan, problems: Problems) -> None:
    """(IA)³ finds its feedforward modules by the end of a name: none of the others may end like one of them."""
    if first.peft_type != "IA3":
        return
    forward = {
        slot.name: [term.opaque.part.tensors["ia3_l"].shape[0] == 1 for term in slot.terms if term.opaque]
        for slot in plan
        if slot.opaque
    }
    ends = tuple(name for name, found in forward.items() if any(found))
    odd = next((name for name, found in forward.items() if not any(found) and name.endswith(ends or ("\0",))), None)
    if odd is not None:
        problems.add(
            f"(IA)³ scales the inputs of one module and the outputs of {odd}, whose name ends alike, and PEFT finds "
            "the former by the ends of names",
            _MERGE.capitalize(),
        )


def _part(term: Term) -> OpaqueModule:
    """The module of an opaque term."""
    assert isinstance(term.change, Opaque)
    return term.change.part


def _check_form(parts: Sequence[tuple[str, OpaqueModule]], form: Form, problems: Problems) -> None:
    """Whether a form that is about plain LoRA is asked for, where modules are copied that are not."""
    expert, first = parts[0]
    if form.layout == "portable":
        problems.add(
            f"the portable layout is plain LoRA, and {expert} is {first.method} at {first.name}",
            "Pass `layout=exact`, or turn the expert into rsLoRA first with `convert`",
            parameter="layout",
        )
    for expert, part in parts:
        if part.lora is not None and not part.is_linear and (form.max_rank or part.lora.rank) < part.lora.rank:
            problems.add(
                f"{part.name} has rank {part.lora.rank}, and {expert} is {part.method} there, which is not truncated",
                "Pass a larger `max_rank`, or leave it out",
                parameter="max_rank",
            )
            break
