"""Embeddings and heads row by row: different vocabularies, resized bases, and single trained tokens.

A row whose token the base has follows the rule for its module, like any weight outside the layers. The row of a new
token is copied from its owner: averaging it with weights that were never trained for the token would spoil it.
Tokenizers say which rows are new. This goes for adapters and for full checkpoints.

A trained token is like a new one: if one of the experts that the rule names trained it, its row is copied from that
expert. If several did, the rule applies to these only. All other rows stay the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from adapterswap.core.changes.kinds import Change, Term, Whole
from adapterswap.core.companions.tokenizer import Tokens, read_tokens, tokenizer_bytes
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import ModelConfig, ModuleName
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.facts import PASS_BASE, BaseFacts
from adapterswap.core.planning.slots import BaseShare, Slot, Span, shared_out
from adapterswap.kit.errors import AdapterswapError, Problems, and_more


def with_trained_rows(slot: Slot, size: int | None) -> tuple[Slot, int | None]:
    """The slot with the rows of the trained tokens, and the number of rows of the result if it has more than the base.

    Args:
        slot: the slot with its terms, at least one of them with trained tokens.
        size: the base's number of rows; None if it is unknown.
    """
    if len(slot.whole) < len(slot.terms) or not all(term.change.rows for term in slot.whole):
        return slot, None  # `row_gates` refuses it
    if slot.rule is not None and slot.rule.combines_sides:
        return slot, None  # `targets.in_full_by_a_method` refuses it

    # Whose rows of each token enter
    terms = trained_terms(slot)
    owners: dict[int, list[Term[Whole]]] = {}
    for term in terms.values():
        for row in term.change.rows:
            owners.setdefault(row, []).append(term)

    # One span for rows that follow one another in the result and in the experts' tensors
    spans: list[Span] = []
    for row in sorted(owners):
        entering = shared_out(owners[row])
        last = spans[-1] if spans else None
        follows = (
            last is not None
            and (last.stop, last.terms) == (row, entering)
            and all(term.change.place_of(row) == term.change.place_of(row - 1) + 1 for term in entering)
        )
        is_new = size is not None and row >= size
        if last is not None and follows and last.is_new == is_new:
            spans[-1] = replace(last, stop=row + 1)
        else:
            spans.append(Span(row, row + 1, entering, is_new=is_new))

    total = max(owners) + 1
    settled = replace(slot, terms=shared_out(list(terms.values())), spans=tuple(spans))
    return settled, total if size is not None and total > size else None


def trained_terms(slot: Slot) -> dict[str, Term[Whole]]:
    """The terms with trained tokens by expert, which may enter on two sides."""
    terms: dict[str, Term[Whole]] = {}
    for term in slot.whole:
        if not term.change.rows:
            continue
        earlier = terms.get(term.expert)
        if earlier is None:
            terms[term.expert] = term._replace(coefficient=term.coefficient + 0.0)
        else:
            terms[term.expert] = earlier._replace(coefficient=term.coefficient + earlier.coefficient)
    return terms


class Vocabularies(NamedTuple):
    """The slots with their rows settled, and what that follows from.

    Attributes:
        slots: the slots.
        notes: what the user should know.
        before: the slots as the rules fill them.
        composition: the request.
        table: the tokens of the base and the experts; None if no rows had to be settled.
        rows: by slot, the rows of embeddings and heads that are changed as a whole.
        sizes: by slot, the number of rows of those that are changed.
        is_model: whether the slots are stored tensors of a model, not modules of adapters.
    """

    slots: list[Slot]
    notes: tuple[str, ...] = ()
    before: Sequence[Slot] = ()
    composition: Composition | None = None
    table: TokenTable | None = None
    rows: Mapping[str, Rows] = {}
    sizes: Mapping[str, int] = {}
    is_model: bool = False


class TokenTable(NamedTuple):
    """The vocabularies of the base and the experts, as far as they are known.

    Attributes:
        config: the base's; None if it is not on this machine.
        size: the base's number of rows; None if it is not known.
        base: the base's tokens or, if unknown, those that every expert has.
        tokens: expert → its tokens; experts without a tokenizer are left out.
        is_named: whether it is known which base this is.
        unreadable: why tokenizers, or the base's config, cannot be read.
    """

    config: Mapping[str, Any] | None
    size: int | None
    base: Tokens
    tokens: Mapping[str, Tokens]
    is_named: bool = True
    unreadable: tuple[AdapterswapError, ...] = ()

    def extra(self, module: str) -> int:
        """The rows that the base has for this module beyond its vocabulary."""
        if self.config is None:
            return 0
        return extra_rows(self.config, module)

    def size_of(self, slot: Slot) -> int | None:
        """The base's number of rows of an embedding or head; None if it is not known."""
        if slot.base is not None:
            return slot.base.tensor.shape[0]
        if self.size is None:
            return None
        return self.size + self.extra(slot.module)

    def new(self, expert: str, rows: int) -> dict[int, str | None]:
        """The expert's tokens that the base lacks, by id, for ids below `rows`; None if a token's text is unknown."""
        if expert not in self.tokens:
            first = rows if self.size is None else self.size
            return dict.fromkeys(range(first, rows))
        added: dict[int, str | None] = {}
        for i, token in sorted(self.tokens[expert].items()):
            if i < rows and self.base.get(i) != token:
                added[i] = token
        return added


def settle_vocabulary(
    slots: Sequence[Slot],
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    composition: Composition,
    base: BaseFacts,
) -> Vocabularies:
    """Settle the rows of embeddings and heads if an expert has tokens that the base or another expert lacks.

    Args:
        slots: the slots with their terms.
        ends: expert → its changes of embeddings and heads, by the slot's name.
        experts: the experts.
        composition: the request.
        base: what is known of the base.
    """
    if not (slots and any(ends.values())):
        return Vocabularies(list(slots))
    is_model = slots[0].is_stored  # all slots are, or none
    if is_model and _are_alike(slots, ends, experts, base.weights):
        return Vocabularies(list(slots))

    table = _token_table(ends, experts, slots, base)
    settled: list[Slot] = []
    sizes: dict[str, int] = {}
    rows_of: dict[str, Rows] = {}
    for before in slots:
        changes = {name: by_slot[before.name] for name, by_slot in ends.items() if before.name in by_slot}
        rows = Rows.of(before, changes, table)
        slot, size = before, None
        if before.storage.of_tokens:
            slot, size = with_trained_rows(before, table.size_of(before))
        elif rows is not None:
            rows_of[before.name] = rows
            slot, size = _settled(rows)
        if size is not None:
            sizes[slot.name] = size - table.extra(slot.module)
        settled.append(slot)

    notes = _notes(table, _new_tokens(settled, table), sizes, is_model=is_model)
    return Vocabularies(settled, notes, slots, composition, table, rows_of, sizes, is_model)


def _new_tokens(slots: Iterable[Slot], table: TokenTable) -> dict[int, tuple[str, str | None]]:
    """The new tokens by id: their owner, and their text if it is known."""
    new: dict[int, tuple[str, str | None]] = {}
    for slot in slots:
        for span in slot.spans:
            if not span.is_new:
                continue
            owner = span.terms[0].expert
            for i in range(span.start, span.stop):
                if owner not in table.tokens or i in table.tokens[owner]:  # else a row without a token
                    new.setdefault(i, (owner, table.tokens.get(owner, {}).get(i)))
    return new


def _are_alike(
    slots: Sequence[Slot],
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    base: Checkpoint | None,
) -> bool:
    """Whether stored embeddings and heads have the same rows in all checkpoints, and all tokenizers the same bytes.

    Parsing a large tokenizer takes longer than planning.
    """
    rows_of = {slot.name: slot.shape[0] for slot in slots if slot.shape}
    for parts in ends.values():
        for name, part in parts.items():
            if part.height not in (None, rows_of[name]):
                return False

    folders = [expert.source.folder for expert in experts.values()]
    if base is not None:
        folders.append(base.source.folder)
    return len({tokenizer_bytes(folder) for folder in folders} - {None}) < 2


def _token_table(
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    slots: Sequence[Slot],
    base: BaseFacts,
) -> TokenTable:
    """The tokens of the base and the experts."""
    unreadable = Problems()
    local = base.local
    is_needed = base.declared is not None and any(slot.storage.in_full and slot.needs_base for slot in slots)
    if is_needed and base.weights is None and local.config is None:
        with unreadable.collect():
            local = local.fetched(PASS_BASE)[1]
    config, folder = local.config, local.folder
    if base.weights is not None:
        config, folder = base.weights.config, base.weights.source.folder

    size = None
    if config is not None:
        stated = ModelConfig(config).language.get("vocab_size")
        size = stated if type(stated) is int else None

    tokens: dict[str, Tokens] = {}
    for name, expert in experts.items():
        with unreadable.collect():
            own_tokens = read_tokens(expert.source.folder)
            if own_tokens is not None:
                tokens[name] = own_tokens

    of_base = None
    if folder is not None:
        with unreadable.collect():
            of_base = read_tokens(folder)
    if of_base is None:  # assume the tokens that all experts share
        row_counts: list[float] = []
        for by_name in ends.values():
            for change in by_name.values():
                count = min(change.rows) if change.rows else change.height
                if count is not None:
                    row_counts.append(count)
        most = size or min(row_counts, default=math.inf)

        everywhere: set[tuple[int, str]] = set()
        if tokens:
            everywhere = set.intersection(*(set(listed.items()) for listed in tokens.values()))
        of_base = {i: token for i, token in everywhere if i < most}
    is_named = base.reference is not None or base.weights is not None
    errors = (unreadable.as_error(),) if unreadable else ()
    return TokenTable(config, size, of_base, tokens, is_named, errors)


@dataclass(frozen=True)
class Rows:
    """The rows of one embedding or head: for each expert how many, and which of them are of new tokens."""

    slot: Slot
    changes: Mapping[str, Change]  # of the whole weight
    table: TokenTable  # its size is the base's number of these rows
    sizes: Mapping[str, int]
    new: Mapping[str, Mapping[int, str | None]]

    @classmethod
    def of(cls, slot: Slot, changes: Mapping[str, Change], table: TokenTable) -> Rows | None:
        """The rows of a slot with these changes; None if nothing changes it as a whole, or nothing says how many."""
        changes = {name: change for name, change in changes.items() if not change.rows}
        heights = {name: change.height for name, change in changes.items()}
        table = table._replace(size=table.size_of(slot))
        if table.size is None and set(heights.values()) <= {None}:
            return None
        # A method without factors changes the base's own rows. Every expert has at least these.
        own = table.size or min(height for height in heights.values() if height is not None)
        sizes = {name: own if height is None else height for name, height in heights.items()}
        if not changes:
            return None
        return cls(slot, changes, table, sizes, {name: table.new(name, size) for name, size in sizes.items()})

    @cached_property
    def new_ids(self) -> set[int]:
        return set().union(*self.new.values())

    @cached_property
    def entering(self) -> set[str]:
        """The experts whose rows enter: those of the terms, and owners of new tokens that these lack."""
        named = {term.expert for term in self.slot.terms}
        known = set().union(*(self.new[name] for name in named))
        return named | {name for name, tokens in self.new.items() if not tokens.keys() <= known}

    @property
    def are_separate(self) -> bool:
        """Whether every change that enters can be computed row by row."""
        return all(self.changes[name].by_rows for name in self.entering)

    @property
    def have_one_rule(self) -> bool:
        """Whether all rows of a module with LoRA are computed alike, so that an adapter can hold the result.

        They are if there are no new tokens, or one expert has all of them and owns the module, or all experts that
        the rule names have the same ones. Otherwise the rule would also scale the ΔW of new tokens.
        """
        slot = self.slot
        if len({self.sizes[term.expert] for term in slot.terms}) > 1:
            return False
        if not self.new_ids or (slot.owner is not None and self.new_ids <= self.new.get(slot.owner, {}).keys()):
            return True
        new_tokens = [self.new.get(name, {}) for name in slot.requested]
        same = all(
            tokens.keys() == self.new_ids and tokens == new_tokens[0] and None not in tokens.values()
            for tokens in new_tokens
        )
        return same and len(slot.low_rank) == len(slot.terms)

    def spans(self, total: int) -> tuple[Span, ...]:
        """The first `total` rows in order; none if all are computed as the rule says."""
        slot, size = self.slot, self.table.size
        edges = {0, total, *self.sizes.values(), *self.new_ids, *(i + 1 for i in self.new_ids)}
        if size is not None:
            edges.add(size)

        spans: list[Span] = []
        for start, stop in pairwise(sorted(edge for edge in edges if edge <= total)):
            span = self._span(start, stop)
            last = spans[-1] if spans else None
            if last is not None and last.is_like(span) and last.is_new == span.is_new:
                spans[-1] = replace(last, stop=stop)
            else:
                spans.append(span)

        ordinary = all(span.is_like(slot.ordinary) for span in spans)
        ordinary = ordinary and all(self.sizes[term.expert] == total for term in slot.terms)
        # Even if all rows have the same terms, merging has to know where the base's rows end.
        return () if ordinary and size in (None, total) else tuple(spans)

    def _span(self, start: int, stop: int) -> Span:
        """Rows that are computed alike: those of new tokens by the experts that have them, the others by the rule."""
        slot, size = self.slot, self.table.size
        owners = [name for name, tokens in self.new.items() if start in tokens]
        if owners:
            entering = [term for term in slot.terms if term.expert in owners]
        else:
            entering = [term for term in slot.terms if self.sizes[term.expert] >= stop]
            has_base = not slot.ordinary.rest or size is None or stop <= size
            if len(entering) == len(slot.terms) and has_base:
                return replace(slot.ordinary, start=start, stop=stop)
            owners = [name for name, count in self.sizes.items() if count >= stop]
        if not entering:
            entering = [Term(owners[0], owners[0], 1.0, self.changes[owners[0]])]

        terms = shared_out(entering)
        # The coefficients add up to 1, so the base's is the sum of those that are added to it.
        added = [term.coefficient for term in terms if not term.change.replaces]
        rest = 1.0 if len(added) == len(terms) else sum(added)
        return Span(start, stop, terms, (BaseShare(rest),) if rest else (), is_new=True)


def _settled(rows: Rows) -> tuple[Slot, int | None]:
    """The slot with its rows, and their number; None if it stays the base's."""
    slot = rows.slot
    if not slot.terms:
        return slot, None
    if not rows.are_separate and rows.have_one_rule:
        return slot, max(rows.sizes[term.expert] for term in slot.terms)
    total = max(rows.sizes[name] for name in rows.entering)
    return replace(slot, spans=rows.spans(total)), total


def _notes(
    table: TokenTable, new: Mapping[int, tuple[str, str | None]], sizes: Mapping[str, int], *, is_model: bool
) -> tuple[str, ...]:
    """What becomes of the vocabulary; `new` are its new tokens, `sizes` the rows of embeddings and heads."""
    size = max(sizes.values(), default=0)
    grows = table.size is not None and size > table.size
    if table.size is not None and 0 < size < table.size and not (is_model and new):
        shrinkage = f"the vocabulary shrinks from {table.size} to {size} rows"
        return (shrinkage if is_model else f"{shrinkage}: {_resize(size)}",)
    if not grows and not (is_model and new):
        return ()

    by_owner: dict[str, list[str]] = {}
    for i, (owner, token) in new.items():
        by_owner.setdefault(owner, []).append(repr(token) if token else str(i))
    additions = [f"{and_more(tokens)} of {owner}" for owner, tokens in by_owner.items()]
    listed = f" ({'; '.join(additions)})" if additions else ""
    if is_model and not grows:
        return (f"the vocabulary has new tokens{listed}",)
    growth = f"the vocabulary grows from {table.size} to {size} rows{listed}"
    if is_model:
        return (growth,)
    return (f"{growth}: {_resize(size)}",)


_ADVICE = "call model.resize_token_embeddings("


def _resize(size: int) -> str:
    return f"{_ADVICE}{size}) before PEFT loads the adapter"


def without_advice(notes: Sequence[str]) -> tuple[str, ...]:
    """The notes on an adapter for a model that it is merged into, which has its own size already."""
    return tuple(note.partition(f": {_ADVICE}")[0] for note in notes)


def extra_rows(config: Mapping[str, Any], module: str) -> int:
    """The rows of an embedding beyond `vocab_size`, which some multimodal models have for image tokens; their heads
    have none."""
    if not ModuleName(module).is_embedding:
        return 0
    language = ModelConfig(config).language
    rows = ModelConfig(language).architecture.extra_rows
    more = language.get(rows) if isinstance(rows, str) else rows
    return more if type(more) is int else 0
