"""LoRA on an embedding or head of a resized base, merged into a base that was not resized.

PEFT saves the resized weight beside the factors and puts it in the base's place: the result is copy + ΔW. So the rows
that the base lacks are taken from the copies. DoRA computes all rows from the whole copy, so it is merged only if one
expert owns the weight. Knows slots of stored tensors; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adapterswap.changes.copies import copy_beside
from adapterswap.changes.kinds import LowRank, Whole
from adapterswap.changes.locating import TiedHead
from adapterswap.errors import BaseModelError, Problems, UnsupportedError
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import StoredTensor
from adapterswap.planning.slots import Rows, Slot, Term, shared_out

__all__ = ["with_lent_rows"]


def with_lent_rows(
    slots: Mapping[str, Slot],
    stored: Mapping[str, StoredTensor],
    tied: TiedHead | None,
    adapters: Mapping[str, Adapter],
    problems: Problems,
) -> dict[str, Slot]:
    """The slots of a merge, with copies in the rows of embeddings and heads that have LoRA and that the base lacks.

    Args:
        slots: the stored tensors with their terms, and with the rows that the plan gives them.
        stored: the base's tensors.
        tied: the embedding and its head, if they are tied in the base but not in the result: if one of them has LoRA,
            the other has the copy's rows without ΔW.
        adapters: the experts that are adapters.
        problems: collects experts that hold no copy, and methods that are not weighted sums.
    """
    extended = dict(slots)
    for name, slot in slots.items():
        if not slot.has_tokens:
            continue
        size = stored[name].tensor.shape[0]
        if any(_rows_of(term) > size for term in _low_rank(slot)):
            extended[name] = _with_copies(slot, size, adapters, problems)
        elif any(_rows_of(term) > size for term in slot.opaque):
            extended[name] = _on_copy(slot, size, problems)
    if tied is not None:
        for untied, other in ((tied.head, tied.embedding), (tied.embedding, tied.head)):
            extended[untied] = _without_factors(extended[untied], extended[other])
    return extended


def _rows_of(term: Term) -> int:
    """The rows of the stored weight that the factors are for; 0 if the change has none."""
    if term.opaque is None:
        return term.lora.in_features if term.low_rank.transposed else term.lora.out_features
    lora = term.opaque.part.lora
    return 0 if lora is None else lora.in_features if term.opaque.transposed else lora.out_features


def _on_copy(slot: Slot, size: int, problems: Problems) -> Slot:
    """An embedding or head that PEFT computes from the whole of its owner's copy (DoRA)."""
    term = max(slot.opaque, key=_rows_of)
    total, copy = _rows_of(term), copy_beside(term.change)
    if slot.owner is None:
        problems.add(
            f"{slot.name} is {term.method} of a resized vocabulary in {term.expert}, which is computed from its own "
            f"{total} rows, so it cannot be blended",
            f"Give it to {term.expert} in its own rule: {{modules: [{slot.module}], expert: {term.expert}}}",
            kind=UnsupportedError,
        )
        return slot
    if copy is None or copy.shape[0] < total:
        _report_no_copy(term, slot.module, size, problems)
        return slot
    lent = replace(term, change=Whole(term.change.path, {"weight": copy}))
    rows = (Rows(0, total, slot.terms, 0.0, is_new=True, lent=(lent,)),)
    return replace(slot, rows=rows, shape=(total, *slot.shape[1:]))


def _report_no_copy(term: Term, module: str, size: int, problems: Problems) -> None:
    problems.add(
        f"{term.expert} has {term.method or 'LoRA'} on {_rows_of(term)} rows of {module}, but the base has {size}, "
        "and the adapter holds no copy of the others",
        "Save the adapter again with `save_embedding_layers=True`, or pass the resized base on which it "
        "was trained as `base_model`",
        parameter="base_model",
        kind=BaseModelError,
    )


def _with_copies(slot: Slot, size: int, adapters: Mapping[str, Adapter], problems: Problems) -> Slot:
    """An embedding or head with LoRA; the base has only the first `size` of its rows."""
    if not slot.is_linear or slot.opaque:
        problems.add(
            f"{slot.name} has LoRA of a resized vocabulary, whose rows can only be added up, but its method is "
            f"{slot.method}",
            "Compose the experts into an adapter with `compose` first, and merge that",
            parameter="method",
            kind=UnsupportedError,
        )
        return slot
    total = max(_rows_of(term) for term in _low_rank(slot))
    rows = slot.rows or (Rows(0, size, slot.terms, slot.rest), Rows(size, total, slot.terms, slot.rest, is_new=True))
    complete = []
    for part in rows:
        if part.stop <= size or part.rest == 0:
            complete.append(part)
            continue
        if part.start < size:
            problems.add(
                f"the base has {size} rows of {slot.name}, which was not known when the experts were composed",
                "Pass `base_model` when you compose them",
                parameter="base_model",
                kind=BaseModelError,
            )
            return slot
        lent = []
        for term in shared_out(_low_rank(part)):
            copy = copy_beside(term.change)
            if copy is None or copy.shape[0] < part.stop:
                _report_no_copy(term, term.lora.name, size, problems)
                return slot
            whole = Whole(term.change.path, {"weight": copy})
            lent.append(replace(term, coefficient=part.rest * term.coefficient, change=whole))
        complete.append(replace(part, rest=0.0, lent=tuple(lent)))
    return replace(slot, rows=tuple(complete), shape=(rows[-1].stop, *slot.shape[1:]))


def _low_rank(part: Slot | Rows) -> list[Term]:
    """The terms with factors, of all rows."""
    terms = part.all_terms if isinstance(part, Slot) else part.terms
    return [term for term in terms if isinstance(term.change, LowRank)]


def _without_factors(slot: Slot, other: Slot) -> Slot:
    """An embedding or head without LoRA, with the new rows of `other`, to which it is tied in the base."""
    added = [replace(part, start=max(part.start, slot.shape[0])) for part in other.rows if part.stop > slot.shape[0]]
    if slot.rows or not added or not all(part.lent and len(part.lent) == len(part.terms) for part in added):
        return slot
    rows = [Rows(0, slot.shape[0], slot.terms, slot.rest)]
    rows += [Rows(part.start, part.stop, part.lent, 0.0, is_new=True) for part in added]
    return replace(slot, rows=tuple(rows), shape=other.shape)
