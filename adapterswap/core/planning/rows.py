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
    if not all(term.change.rows for term in slot.terms):
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
        is_new = size is not None and row >= size
        last = spans[-1] if spans else None
        if last is not None and last.is_new == is_new and _continues(last, row, entering):
            spans[-1] = replace(last, stop=row + 1)
        else:
            spans.append(Span(row, row + 1, entering, is_new=is_new))

    settled = replace(slot, terms=shared_out(list(terms.values())), spans=tuple(spans))
    total = max(owners) + 1
    if size is None or total <= size:
        return settled, None
    return settled, total


def _continues(span: Span, row: int, entering: Sequence[Term[Whole]]) -> bool:
    """Whether a row comes right after a span, in the result as well as in the tensor of every expert that enters."""
    if (span.stop, span.terms) != (row, entering):
        return False
    return all(term.change.place_of(row) == term.change.place_of(row - 1) + 1 for term in entering)


def trained_terms(slot: Slot) -> dict[str, Term[Whole]]:
    """The terms with trained tokens by expert. One that enters on two sides is one term, with both weights."""
    terms: dict[str, Term[Whole]] = {}
    for term in slot.whole:
        if not term.change.rows:
            continue
        first = terms.get(term.expert, term._replace(coefficient=0.0))
        terms[term.expert] = first._replace(coefficient=first.coefficient + term.coefficient)
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
        # Without a tokenizer, only the rows beyond the base's are known to be new.
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
        changes: dict[str, Change] = {}
        for name, by_slot in ends.items():
            if before.name in by_slot:
                changes[name] = by_slot[before.name]
        rows = Rows.of(before, changes, table)

        slot, size = before, None
        if before.storage.of_tokens:
            slot, size = with_trained_rows(before, table.size_of(before))
        elif rows is not None:
            rows_of[before.name] = rows
            slot, size = _settled(rows)
        settled.append(slot)

        # Sizes are compared with one another and with `vocab_size`, which leaves out the extra rows.
        if size is not None:
            sizes[slot.name] = size - table.extra(slot.module)

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
            texts = table.tokens.get(owner)
            for i in range(span.start, span.stop):
                if texts is None:
                    new.setdefault(i, (owner, None))
                elif i in texts:  # else a row without a token, such as padding
                    new.setdefault(i, (owner, texts[i]))
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
    different = {tokenizer_bytes(folder) for folder in folders}
    different.discard(None)  # a folder without a tokenizer contradicts nobody
    return len(different) < 2


def _token_table(
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    slots: Sequence[Slot],
    base: BaseFacts,
) -> TokenTable:
    """The tokens of the base and the experts."""
    unreadable = Problems()

    # The base's config is fetched only for a result that has weights in full and needs the base's for them.
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
    if of_base is None:
        of_base = _shared_tokens(tokens, size or _fewest_rows(ends))

    is_named = base.reference is not None or base.weights is not None
    errors: tuple[AdapterswapError, ...] = ()
    if unreadable:
        errors = (unreadable.as_error(),)
    return TokenTable(config, size, of_base, tokens, is_named, errors)


def _fewest_rows(ends: Mapping[str, Mapping[str, Change]]) -> float:
    """An upper bound of the base's rows, by the experts alone: it has no more than the smallest of them.

    Any trained token may be a new one, so only those before the first are the base's.
    """
    fewest = math.inf
    for changes in ends.values():
        for change in changes.values():
            count = min(change.rows) if change.rows else change.height
            if count is not None:
                fewest = min(fewest, count)
    return fewest


def _shared_tokens(tokens: Mapping[str, Tokens], stop: float) -> Tokens:
    """The tokens below `stop` that all experts share: the best guess at those of a base without a tokenizer."""
    shared: set[tuple[int, str]] | None = None
    for listed in tokens.values():
        own = set(listed.items())
        shared = own if shared is None else shared & own
    return {i: token for i, token in shared or () if i < stop}


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
        whole = {name: change for name, change in changes.items() if not change.rows}
        if not whole:
            return None

        table = table._replace(size=table.size_of(slot))
        heights = {name: change.height for name, change in whole.items()}
        known = [height for height in heights.values() if height is not None]
        if table.size is None and not known:
            return None

        # A method without factors changes the base's own rows. Every expert has at least these.
        own = table.size or min(known)
        sizes: dict[str, int] = {}
        new: dict[str, Mapping[int, str | None]] = {}
        for name, height in heights.items():
            sizes[name] = own if height is None else height
            new[name] = table.new(name, sizes[name])
        return cls(slot, whole, table, sizes, new)

    @cached_property
    def new_ids(self) -> set[int]:
        """The ids of the tokens that are new in any expert."""
        return set().union(*self.new.values())

    @cached_property
    def entering(self) -> set[str]:
        """The experts whose rows enter: those of the terms, and owners of new tokens that these lack."""
        entering = {term.expert for term in self.slot.terms}
        covered: set[int] = set()
        for name in entering:
            covered.update(self.new[name])

        for name, tokens in self.new.items():
            if not tokens.keys() <= covered:
                entering.add(name)
        return entering

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
        if not self.new_ids:
            return True
        if slot.owner is not None and self.new_ids <= self.new.get(slot.owner, {}).keys():
            return True

        # Ids without a text may be different tokens, so they are not the same ones.
        new_tokens = [self.new.get(name, {}) for name in slot.requested]
        for tokens in new_tokens:
            if tokens.keys() != self.new_ids or tokens != new_tokens[0] or None in tokens.values():
                return False
        return len(slot.low_rank) == len(slot.terms)

    def spans(self, total: int) -> tuple[Span, ...]:
        """The first `total` rows in order; none if all are computed as the rule says."""
        slot, size = self.slot, self.table.size

        # Where rows may begin to be computed in another way: at the end of somebody's rows, around a new token
        edges = {0, total, *self.sizes.values()}
        for token in self.new_ids:
            edges |= {token, token + 1}
        if size is not None:
            edges.add(size)

        spans: list[Span] = []
        edges = {edge for edge in edges if edge <= total}
        for start, stop in pairwise(sorted(edges)):
            span = self._span(start, stop)
            last = spans[-1] if spans else None
            if last is not None and last.is_like(span) and last.is_new == span.is_new:
                spans[-1] = replace(last, stop=stop)
            else:
                spans.append(span)

        # Even if all rows have the same terms, merging has to know where the base's rows end.
        if size not in (None, total):
            return tuple(spans)

        is_ordinary = all(span.is_like(slot.ordinary) for span in spans)
        if is_ordinary and all(self.sizes[term.expert] == total for term in slot.terms):
            return ()
        return tuple(spans)

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

        # The rule names none of those that have these rows, and a result without them would not be complete.
        if not entering:
            entering = [Term(owners[0], owners[0], 1.0, self.changes[owners[0]])]
        terms = shared_out(entering)

        # The coefficients add up to 1, so the base's is the sum of those that are added to it.
        added = [term.coefficient for term in terms if not term.change.replaces]
        rest = 1.0 if len(added) == len(terms) else sum(added)
        if not rest:
            return Span(start, stop, terms, is_new=True)
        return Span(start, stop, terms, (BaseShare(rest),), is_new=True)


def _settled(rows: Rows) -> tuple[Slot, int | None]:
    """The slot with its rows, and their number; None if it stays the base's."""
    slot = rows.slot
    if not slot.terms:
        return slot, None

    # If all rows are computed alike, the module needs no spans, and methods that need the whole weight apply.
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
    shrinks = table.size is not None and 0 < size < table.size
    has_new = is_model and bool(new)  # with an adapter, the user has to know only if the size changes
    if not has_new and not grows and not shrinks:
        return ()

    if shrinks and not has_new:
        note = f"the vocabulary shrinks from {table.size} to {size} rows"
    else:
        listed = _additions(new)
        note = f"the vocabulary has new tokens{listed}"
        if grows:
            note = f"the vocabulary grows from {table.size} to {size} rows{listed}"

    if not is_model:
        note = f"{note}: {_ADVICE}{size}) before PEFT loads the adapter"
    return (note,)


def _additions(new: Mapping[int, tuple[str, str | None]]) -> str:
    """The new tokens by their owners, in parentheses; nothing if there are none."""
    by_owner: dict[str, list[str]] = {}
    for i, (owner, token) in new.items():
        text = repr(token) if token else str(i)
        by_owner.setdefault(owner, []).append(text)
    if not by_owner:
        return ""

    additions = [f"{and_more(tokens)} of {owner}" for owner, tokens in by_owner.items()]
    return f" ({'; '.join(additions)})"


_ADVICE = "call model.resize_token_embeddings("


def without_advice(notes: Sequence[str]) -> tuple[str, ...]:
    """The notes on an adapter for a model that it is merged into, which has its own size already."""
    return tuple(note.partition(f": {_ADVICE}")[0] for note in notes)


def extra_rows(config: Mapping[str, Any], module: str) -> int:
    """The rows of an embedding beyond `vocab_size`, which some multimodal models have for image tokens; their heads
    have none."""
    if not ModuleName(module).is_embedding:
        return 0

    # The architecture says how many, or which entry of the config does.
    language = ModelConfig(config).language
    rows: Any = ModelConfig(language).architecture.extra_rows
    if isinstance(rows, str):
        rows = language.get(rows)
    return rows if type(rows) is int else 0
