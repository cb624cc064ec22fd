"""The rows of stored embeddings and heads that a merge writes, beyond those that the base has.

PEFT saves the resized weight beside the factors and puts it in the base's place: the result is copy + ΔW. So the rows
that the base lacks are taken from the copies. DoRA computes all rows from the whole copy, so it is merged only if one
expert owns the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapterswap.core.changes.kinds import Change, Term, Whole
from adapterswap.core.changes.locations import TiedHead
from adapterswap.core.model.checkpoints import StoredTensor
from adapterswap.core.planning.slots import BaseShare, Slot, Span, shared_out
from adapterswap.kit.errors import BaseModelError, Problems, UnsupportedError


def with_rows_of_base(slot: Slot, spans: Sequence[Span], problems: Problems) -> Slot:
    """A stored embedding or head, with the rows of trained tokens and the base's rows between them."""
    base = (BaseShare(1.0),)
    count, next_row = slot.shape[0], 0
    complete: list[Span] = []
    for span in spans:
        if span.start > next_row:
            complete.append(Span(next_row, span.start, (), base))
        complete.append(span)
        next_row = span.stop
    if next_row < count:
        complete.append(Span(next_row, count, (), base))

    # Between trained tokens beyond the base's rows there may be some that nobody has.
    for span in complete:
        if not span.terms and span.stop > count:
            problems.add(
                f"The tokens up to {next_row - 1} of {slot.name} were trained, but the base has {count} rows and no "
                f"expert trained row {max(count, span.start)}",
                "Resize the base's vocabulary as for training, save it, and pass it as `base_model`",
                parameter="base_model",
                kind=BaseModelError,
            )
            return slot
    return slot.with_spans(complete)


def with_lent_rows(
    slots: Mapping[str, Slot],
    stored: Mapping[str, StoredTensor],
    tied: TiedHead | None,
    problems: Problems,
) -> dict[str, Slot]:
    """The slots of a merge, with copies in the rows of embeddings and heads that have LoRA and that the base lacks.

    Args:
        slots: the stored tensors with their terms, and with the rows that the plan gives them.
        stored: the base's tensors.
        tied: the embedding and its head, if they are tied in the base but not in the result: if one of them has LoRA,
            the other has the copy's rows without ΔW.
        problems: collects experts that hold no copy, and methods that are not weighted sums.
    """
    extended = dict(slots)
    for name, slot in slots.items():
        if not slot.has_tokens:
            continue

        low_rank = list(slot.low_rank)
        for span in slot.spans:
            low_rank += span.low_rank
        size = stored[name].tensor.shape[0]
        if any(_factor_rows(term) > size for term in low_rank):
            extended[name] = _with_copies(slot, size, problems)
        elif any(_factor_rows(term) > size for term in slot.opaque):
            extended[name] = _on_copy(slot, size, problems)

    if tied is not None:
        for untied, other in ((tied.head, tied.embedding), (tied.embedding, tied.head)):
            extended[untied] = _without_factors(extended[untied], extended[other])
    return extended


def _factor_rows(term: Term[Change]) -> int:
    """The rows of the stored weight that the factors are for; 0 if the change has none."""
    lora = term.change.lora
    if lora is None:
        return 0
    if term.change.transposed:
        return lora.in_features
    return lora.out_features


def _on_copy(slot: Slot, size: int, problems: Problems) -> Slot:
    """An embedding or head that PEFT computes from the whole of its owner's copy (DoRA)."""
    term = max(slot.opaque, key=_factor_rows)
    total, copy = _factor_rows(term), term.change.copy
    if slot.owner is None:
        problems.add(
            f"{slot.name} is {term.change.method} of a resized vocabulary in {term.expert}, which is computed from its "
            f"own {total} rows, so it cannot be blended",
            f"Give it to {term.expert} in its own rule: {{modules: [{slot.module}], expert: {term.expert}}}",
            kind=UnsupportedError,
        )
        return slot
    if copy is None or copy.shape[0] < total:
        _report_no_copy(term, slot.module, size, problems)
        return slot

    # It has no coefficient: the change is computed from the copy, and nothing else is added.
    lent = BaseShare(None, term.expert, Whole(term.change.path, {"weight": copy}), term.side)
    return slot.with_spans([Span(0, total, slot.terms, (lent,), is_new=True)])


def _with_copies(slot: Slot, size: int, problems: Problems) -> Slot:
    """An embedding or head with LoRA; the base has only the first `size` of its rows."""
    # The copies stand in for the base's rows in a sum. Other methods would also compare experts by them.
    if slot.is_held_whole:
        problems.add(
            f"{slot.name} has LoRA of a resized vocabulary, whose rows can only be added up, but its method is "
            f"{slot.method}",
            "Compose the experts into an adapter with `compose` first, and merge that",
            parameter="method",
            kind=UnsupportedError,
        )
        return slot

    spans = slot.spans
    if not spans:
        total = max(_factor_rows(term) for term in slot.low_rank)
        spans = replace(slot.ordinary, stop=size), replace(slot.ordinary, start=size, stop=total, is_new=True)

    complete: list[Span] = []
    for span in spans:
        # The base has these rows, or they have no share of it.
        if span.stop <= size or span.rest == 0:
            complete.append(span)
            continue

        # The plan's rows would have been split at the base's last one if it had been known.
        if span.start < size:
            problems.add(
                f"The base has {size} rows of {slot.name}, which was not known when the experts were composed",
                "Pass `base_model` when you compose them",
                parameter="base_model",
                kind=BaseModelError,
            )
            return slot

        # Each expert lends its copy by its share of the span, so that together they have the base's coefficient.
        lent: list[BaseShare] = []
        for term in shared_out(span.low_rank):
            copy = term.change.copy
            if copy is None or copy.shape[0] < span.stop:
                _report_no_copy(term, term.lora.name, size, problems)
                return slot
            whole = Whole(term.change.path, {"weight": copy})
            lent.append(BaseShare(span.rest * term.coefficient, term.expert, whole, term.side))
        complete.append(replace(span, base=tuple(lent)))
    return slot.with_spans(complete)


def _report_no_copy(term: Term[Change], module: str, size: int, problems: Problems) -> None:
    """Report an expert whose factors are for rows that neither the base nor a copy in the adapter has."""
    problems.add(
        f"{term.expert} has {term.change.method} on {_factor_rows(term)} rows of {module}, but the base has {size}, "
        "and the adapter holds no copy of the others",
        "Save the adapter again with `save_embedding_layers=True`, or pass the resized base on which it "
        "was trained as `base_model`",
        parameter="base_model",
        kind=BaseModelError,
    )


def _without_factors(slot: Slot, other: Slot) -> Slot:
    """An embedding or head without LoRA, with the new rows of `other`, to which it is tied in the base."""
    count = slot.shape[0]
    added = [span for span in other.spans if span.stop > count]
    if slot.spans or not added:
        return slot
    for span in added:
        if not 0 < len(_lent(span)) == len(span.terms):
            return slot  # not all of the experts lend a copy

    spans = [replace(slot.ordinary, stop=count)]
    for span in added:
        terms = _lent(span)
        if not span.rest:  # PEFT computes DoRA from the copy, which has no coefficient
            terms = shared_out(terms)
        spans.append(Span(max(span.start, count), span.stop, terms, is_new=True))
    return slot.with_spans(spans)


def _lent(span: Span) -> tuple[Term[Whole], ...]:
    """The copies that experts lend of rows that the base lacks, as terms."""
    terms: list[Term[Whole]] = []
    for share in span.base:
        if share.copy is not None:
            terms.append(Term(share.expert, share.side, share.coefficient or 0.0, share.copy))
    return tuple(terms)
