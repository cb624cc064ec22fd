"""Embeddings and heads with single trained tokens (PEFT's `trainable_token_indices`): which expert's row is used.

A trained token is like a new one: if one of the experts that the rule names trained it, its row is copied from that
expert, because an average with a row that was never trained would spoil it. If several did, the rule applies to these
only. All other rows stay the base's. Knows slots; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapterswap.changes.kinds import Whole
from adapterswap.errors import BaseModelError, CompositionError, Problems, UnsupportedError
from adapterswap.experts.layers import HEADS, is_vocabulary
from adapterswap.experts.tokenizers import Tokens
from adapterswap.planning.slots import Rows, Slot, Term, shared_out

__all__ = ["check_ties", "settle_tokens", "with_rows_of_base"]


def settle_tokens(
    slot: Slot, size: int | None, tokens: Mapping[str, Tokens], problems: Problems
) -> tuple[Slot, int | None]:
    """The slot with the rows of the trained tokens, and the number of rows of the result if it has more than the base.

    Args:
        slot: the slot with its terms, at least one of them with trained tokens.
        size: the base's number of rows; None if it is unknown.
        tokens: expert → its tokens, for experts with a tokenizer.
        problems: collects blends with an expert that changes the whole weight, negative weights, and new tokens of
            several experts that may differ.
    """
    trained = [term for term in slot.terms if isinstance(term.change, Whole) and term.change.rows]
    other = next((term for term in slot.terms if term not in trained), None)
    first = trained[0].expert
    if other is not None:
        problems.add(
            f"{first} trained single tokens of {slot.name} (trainable_token_indices), but {other.expert} changes the "
            "whole weight, so the two cannot be blended",
            f"Give it to one of them in its own rule: {{modules: [{slot.name}], expert: {first}}}",
            kind=UnsupportedError,
        )
        return slot, None
    if slot.rule is not None and slot.rule.combines_sides:
        return slot, None  # `check_saved` refuses it
    terms: dict[str, Term] = {}
    for term in trained:  # an expert may enter on two sides
        earlier = terms.get(term.expert)
        terms[term.expert] = (
            term if earlier is None else replace(term, coefficient=earlier.coefficient + term.coefficient)
        )
    if any(term.coefficient <= 0 for term in terms.values()):
        odd = next(name for name, term in terms.items() if term.coefficient <= 0)
        problems.add(
            f"{odd} trained tokens of {slot.name}, whose rows replace the base's, so its weight must be above 0",
            f"Give it to one expert in its own rule: {{modules: [{slot.name}], expert: {first}}}",
            kind=CompositionError,
        )
        return replace(slot, terms=(replace(trained[0], coefficient=1.0),)), None
    owners: dict[int, list[Term]] = {}
    for term in terms.values():
        for row in term.whole.rows:
            owners.setdefault(row, []).append(term)
    rows: list[Rows] = []
    for row in sorted(owners):
        entering = shared_out(owners[row])
        last = rows[-1] if rows else None
        follows = (
            last is not None
            and (last.stop, last.terms) == (row, entering)
            and all(term.whole.place_of(row) == term.whole.place_of(row - 1) + 1 for term in entering)
        )
        is_new = size is not None and row >= size
        if last is not None and follows and last.is_new == is_new:
            rows[-1] = replace(last, stop=row + 1)
        else:
            rows.append(Rows(row, row + 1, entering, 0.0, is_new))
    unknown = next(
        (part for part in rows if part.is_new and len(part.terms) > 1 and not _has_tokenizers(part, tokens)), None
    )
    if unknown is not None:
        several = [term.expert for term in unknown.terms]
        problems.add(
            f"{' and '.join(several)} trained the new token {unknown.start} of {slot.name}, but "
            f"{next(name for name in several if name not in tokens)} has no tokenizer.json that says which token it is",
            "Save each expert's tokenizer in its folder, with tokenizer.save_pretrained(FOLDER)",
        )
    total = rows[-1].stop
    settled = replace(slot, terms=shared_out(list(terms.values())), rows=tuple(rows))
    return settled, total if size is not None and total > size else None


def _has_tokenizers(rows: Rows, tokens: Mapping[str, Tokens]) -> bool:
    return all(term.expert in tokens for term in rows.terms)


def check_ties(slots: Sequence[Slot], config: Mapping[str, Any] | None, problems: Problems) -> None:
    """Report results that PEFT computes wrongly if the base ties its head to its embedding.

    Trained tokens of an embedding also apply to the tied head, unless an adapter changes both. So no other change of an
    embedding or head is allowed, unless the base's config says that they are not tied.
    """
    trained = [slot for slot in slots if slot.of_tokens]
    changed = [slot for slot in slots if slot.terms and (slot in trained or is_vocabulary(slot.name, slot.layer))]
    if not trained or (config is not None and config.get("tie_word_embeddings") is False):
        return
    if len(changed) == 1 and changed[0].name.rpartition(".")[2] not in HEADS:
        return
    names = " and ".join(slot.name for slot in changed)
    tied = "its config.json is not on this machine" if config is None else "its config.json does not say that"
    problems.add(
        f"tokens of {trained[0].name} were trained (trainable_token_indices), and the result changes {names}. PEFT "
        f"computes that correctly only if the base's embedding and head are not tied, but {tied}",
        "Use a base with `tie_word_embeddings: false` and pass it as `base_model`, or leave all but the embedding to "
        "the base by rules",
        parameter="base_model",
        kind=BaseModelError if config is None else UnsupportedError,
    )


def with_rows_of_base(slot: Slot, rows: Sequence[Rows], problems: Problems) -> Slot:
    """A stored embedding or head, with the rows of trained tokens and the base's rows between them."""
    count, complete, next_row = slot.shape[0], list[Rows](), 0
    for part in rows:
        if part.start > next_row:
            complete.append(Rows(next_row, part.start, (), 1.0))
        complete.append(part)
        next_row = part.stop
    if next_row < count:
        complete.append(Rows(next_row, count, (), 1.0))
    odd = next((part for part in complete if not part.terms and part.stop > count), None)
    if odd is not None:
        problems.add(
            f"the tokens up to {next_row - 1} of {slot.name} were trained, but the base has {count} rows and no expert "
            f"trained row {max(count, odd.start)}",
            "Resize the base's vocabulary as for training, save it, and pass it as `base_model`",
            parameter="base_model",
            kind=BaseModelError,
        )
        return slot
    return replace(slot, rows=tuple(complete), shape=(complete[-1].stop, *slot.shape[1:]))
