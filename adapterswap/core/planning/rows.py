"""Embeddings and heads row by row: different vocabularies, resized bases, and single trained tokens.

A row whose token the base has follows the rule for its module, like any weight outside the layers. The row of a new
token is copied from its owner: averaging it with weights that were never trained for the token would spoil it.
Tokenizers say which rows are new. This goes for adapters and for full checkpoints.

A trained token is like a new one: if one of the experts that the rule names trained it, its row is copied from that
expert. If several did, the rule applies to these only. All other rows stay the base's.

PEFT saves the resized weight beside the factors and puts it in the base's place: the result is copy + ΔW. So the rows
that the base lacks are taken from the copies. DoRA computes all rows from the whole copy, so it is merged only if one
expert owns the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from adapterswap.core.changes.kinds import Change, Term, Whole
from adapterswap.core.changes.locating import TiedHead
from adapterswap.core.companions.tokenizer import Tokens, clashes, read_tokens, tokenizer_bytes
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.parts import and_more
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor
from adapterswap.core.model.layers import ModelConfig, ModuleName
from adapterswap.core.model.sources import Reference
from adapterswap.core.planning.base import reference_of
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.slots import BaseShare, Slot, Span, shared_out
from adapterswap.kit.errors import (
    AdapterswapError,
    BaseModelError,
    CompositionError,
    ExpertError,
    Problems,
    UnsupportedError,
)


def with_trained_rows(slot: Slot, size: int | None) -> tuple[Slot, int | None]:
    """The slot with the rows of the trained tokens, and the number of rows of the result if it has more than the base.

    Args:
        slot: the slot with its terms, at least one of them with trained tokens.
        size: the base's number of rows; None if it is unknown.
    """
    if len(slot.whole) < len(slot.terms) or not all(term.change.rows for term in slot.whole):
        return slot, None  # `check_trained_tokens` refuses it
    if slot.rule is not None and slot.rule.combines_sides:
        return slot, None  # `targets.in_full_by_a_method` refuses it
    terms = _trained(slot)
    owners: dict[int, list[Term[Whole]]] = {}
    for term in terms.values():
        for row in term.change.rows:
            owners.setdefault(row, []).append(term)
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


def _trained(slot: Slot) -> dict[str, Term[Whole]]:
    """The terms with trained tokens by expert, which may enter on two sides."""
    terms: dict[str, Term[Whole]] = {}
    for term in (term for term in slot.whole if term.change.rows):
        earlier = terms.get(term.expert)
        coefficient = term.coefficient + (earlier.coefficient if earlier else 0.0)
        terms[term.expert] = replace(earlier or term, coefficient=coefficient)
    return terms


def _check_trained_tokens(slot: Slot, settled: Slot, tokens: Mapping[str, Tokens], problems: Problems) -> None:
    """Report blends of trained tokens with an expert that changes the whole weight, weights that are not above 0, and
    new tokens of several experts that may differ.

    Args:
        slot, settled: the slot without and with the rows of its tokens.
        tokens: expert → its tokens, for experts with a tokenizer.
        problems: collects the mistakes.
    """
    trained = [term for term in slot.whole if term.change.rows]
    other = next((term for term in slot.terms if term not in trained), None)
    remedy = f"Give it to one expert in its own rule: {{modules: [{slot.name}], expert: {trained[0].expert}}}"
    if other is not None:
        problems.add(
            f"{trained[0].expert} trained single tokens of {slot.name} (trainable_token_indices), but {other.expert} "
            "changes the whole weight, so the two cannot be blended",
            remedy.replace("one expert", "one of them", 1),
            kind=UnsupportedError,
        )
        return
    if slot.rule is not None and slot.rule.combines_sides:
        return
    if odd := next((name for name, term in _trained(slot).items() if term.coefficient <= 0), None):
        problems.add(
            f"{odd} trained tokens of {slot.name}, whose rows replace the base's, so its weight must be above 0",
            remedy,
            kind=CompositionError,
        )
        return
    shared = (span for span in settled.spans if span.is_new and len(span.terms) > 1)
    if unknown := next((span for span in shared if not _has_tokenizers(span, tokens)), None):
        several = [term.expert for term in unknown.terms]
        problems.add(
            f"{' and '.join(several)} trained the new token {unknown.start} of {slot.name}, but "
            f"{next(name for name in several if name not in tokens)} has no tokenizer.json that says which token it is",
            "Save each expert's tokenizer in its folder, with tokenizer.save_pretrained(FOLDER)",
        )


def _has_tokenizers(span: Span, tokens: Mapping[str, Tokens]) -> bool:
    return all(term.expert in tokens for term in span.terms)


def check_ties(slots: Sequence[Slot], config: Mapping[str, Any] | None, problems: Problems) -> None:
    """Report results that PEFT computes wrongly if the base ties its head to its embedding.

    Trained tokens of an embedding also apply to the tied head, unless an adapter changes both. So no other change of an
    embedding or head is allowed, unless the base's config says that they are not tied.
    """
    trained = [slot for slot in slots if slot.of_tokens]
    changed = [
        slot for slot in slots if slot.terms and (slot in trained or ModuleName(slot.name).is_vocabulary(slot.layer))
    ]
    if not trained or (config is not None and config.get("tie_word_embeddings") is False):
        return
    if len(changed) == 1 and not ModuleName(changed[0].name).is_head:
        return
    names = " and ".join(slot.name for slot in changed)
    tied = "its config.json is not on this machine" if config is None else "its config.json does not say that"
    problems.add(
        f"Tokens of {trained[0].name} were trained (trainable_token_indices), and the result changes {names}. PEFT "
        f"computes that correctly only if the base's embedding and head are not tied, but {tied}",
        "Use a base with `tie_word_embeddings: false` and pass it as `base_model`, or leave all but the embedding to "
        "the base by rules",
        parameter="base_model",
        kind=BaseModelError if config is None else UnsupportedError,
    )


def with_rows_of_base(slot: Slot, spans: Sequence[Span], problems: Problems) -> Slot:
    """A stored embedding or head, with the rows of trained tokens and the base's rows between them."""
    count, complete, next_row, base = slot.shape[0], list[Span](), 0, (BaseShare(1.0),)
    for span in spans:
        if span.start > next_row:
            complete.append(Span(next_row, span.start, (), base))
        complete.append(span)
        next_row = span.stop
    if next_row < count:
        complete.append(Span(next_row, count, (), base))
    odd = next((span for span in complete if not span.terms and span.stop > count), None)
    if odd is not None:
        problems.add(
            f"The tokens up to {next_row - 1} of {slot.name} were trained, but the base has {count} rows and no expert "
            f"trained row {max(count, odd.start)}",
            "Resize the base's vocabulary as for training, save it, and pass it as `base_model`",
            parameter="base_model",
            kind=BaseModelError,
        )
        return slot
    return slot.with_spans(complete)


_SAVE = "Save each expert's tokenizer in its folder, with tokenizer.save_pretrained(FOLDER)"


@dataclass(frozen=True)
class Vocabularies:
    """The slots with their rows settled, and what that follows from.

    Attributes:
        slots: the slots.
        notes: what the user should know.
        before: the slots as the rules fill them.
        composition: the request.
        table: the tokens of the base and the experts; None if no rows had to be settled.
        rows: by slot, the rows of embeddings and heads that are changed as a whole.
        sizes: by slot, the number of rows of those that are changed.
    """

    slots: list[Slot]
    notes: tuple[str, ...] = ()
    before: Sequence[Slot] = ()
    composition: Composition | None = None
    table: _TokenTable | None = None
    rows: Mapping[str, _Rows] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _TokenTable:
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
        return 0 if self.config is None else extra_rows(self.config, module)

    def size_of(self, slot: Slot) -> int | None:
        """The base's number of rows of an embedding or head; None if it is not known."""
        if slot.base is not None:
            return slot.base.tensor.shape[0]
        return None if self.size is None else self.size + self.extra(slot.module)

    def new(self, expert: str, rows: int) -> dict[int, str | None]:
        """The expert's tokens that the base lacks, by id, for ids below `rows`; None if a token's text is unknown."""
        if expert in self.tokens:
            added = {i: t for i, t in self.tokens[expert].items() if i < rows and self.base.get(i) != t}
            return dict(sorted(added.items()))
        return dict.fromkeys(range(rows if self.size is None else self.size, rows))


def settle_vocabulary(
    slots: Sequence[Slot],
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    composition: Composition,
    base: Checkpoint | None = None,
) -> Vocabularies:
    """Settle the rows of embeddings and heads if an expert has tokens that the base or another expert lacks.

    Args:
        slots: the slots with their terms.
        ends: expert → its changes of embeddings and heads, by the slot's name.
        experts: the experts.
        composition: the request.
        base: the base, if it has been opened.
    """
    if not (slots and any(ends.values())) or _are_alike(slots, ends, experts, base):
        return Vocabularies(list(slots))
    table = _token_table(ends, experts, composition, slots, base)
    settled: list[Slot] = []
    sizes: dict[str, int] = {}
    rows_of: dict[str, _Rows] = {}
    for before in slots:
        rows = _Rows.of(
            before, {n: by_name[before.name] for n, by_name in ends.items() if before.name in by_name}, table
        )
        slot, size = before, None
        if before.of_tokens:
            slot, size = with_trained_rows(before, table.size_of(before))
        elif rows is not None:
            rows_of[before.name] = rows
            slot, size = _settled(rows)
        if size is not None:
            sizes[slot.name] = size - table.extra(slot.module)
        settled.append(slot)
    notes = _notes(table, _new_tokens(settled, table), sizes, is_model=any(slot.is_stored for slot in slots))
    return Vocabularies(settled, notes, slots, composition, table, rows_of, sizes)


def _new_tokens(slots: Iterable[Slot], table: _TokenTable) -> dict[int, tuple[str, str | None]]:
    """The new tokens by id: their owner, and their text if it is known."""
    new: dict[int, tuple[str, str | None]] = {}
    for span in (span for slot in slots for span in slot.spans if span.is_new):
        owner = span.terms[0].expert
        for i in range(span.start, span.stop):
            if owner not in table.tokens or i in table.tokens[owner]:  # else a row without a token
                new.setdefault(i, (owner, table.tokens.get(owner, {}).get(i)))
    return new


def check_vocabularies(made: Vocabularies, problems: Problems) -> None:
    """Report clashes of tokens, and new tokens that would get no row, or only part of one."""
    table, composition = made.table, made.composition
    if table is None or composition is None:
        return
    for error in table.unreadable:
        with problems.collect():
            raise error
    _check_clashes(table, problems)
    if problems:
        return
    for before, slot in zip(made.before, made.slots, strict=True):
        if before.of_tokens:
            _check_trained_tokens(before, slot, table.tokens, problems)
        elif before.name in made.rows:
            with problems.collect():
                _check_rows(made.rows[before.name], slot, composition)
    if not any(slot.is_stored for slot in made.slots):  # else `gates` checks them, after the rows of LoRA's copies
        check_sizes(made.sizes, problems)
    check_ties(made.slots, table.config, problems)


def _are_alike(
    slots: Sequence[Slot],
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    base: Checkpoint | None,
) -> bool:
    """Whether stored embeddings and heads have the same rows in all checkpoints, and all tokenizers the same bytes.

    Parsing a large tokenizer takes longer than planning.
    """
    if not all(slot.is_stored for slot in slots):
        return False
    rows_of = {slot.name: slot.shape[0] for slot in slots if slot.shape}
    if any(part.height not in (None, rows_of[name]) for parts in ends.values() for name, part in parts.items()):
        return False
    folders = [expert.source.folder for expert in experts.values()] + ([base.source.folder] if base else [])
    return len({tokenizer_bytes(folder) for folder in folders} - {None}) < 2


def check_sizes(sizes: Mapping[str, int], problems: Problems) -> None:
    """Check that all embeddings and heads of a result have the same number of rows (`sizes`, by name)."""
    if len(set(sizes.values())) > 1:
        few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        problems.add(
            f"{many} would have {sizes[many]} rows and {few} {sizes[few]}: an expert resized the vocabulary but holds "
            "only one of the two",
            "Save that expert again with both in modules_to_save, or with save_embedding_layers=True",
            kind=UnsupportedError,
        )


def _token_table(
    ends: Mapping[str, Mapping[str, Change]],
    experts: Mapping[str, Adapter | Checkpoint],
    composition: Composition,
    slots: Sequence[Slot],
    opened: Checkpoint | None,
) -> _TokenTable:
    """The tokens of the base and the experts."""
    unreadable = Problems()
    config: Mapping[str, Any] | None = None
    folder: Path | None = None
    reference = reference_of(experts, composition.base_model)
    if opened is not None:
        config, folder = opened.config, opened.source.folder
    elif reference is not None:
        config, folder = Reference(reference).cached_config, Reference(reference).cached_folder
    if config is None and composition.base_model is not None and any(s.in_full and s.needs_base for s in slots):
        with unreadable.collect():
            source, config = Reference(composition.base_model).config()
            folder = source.folder
    size = None if config is None else ModelConfig(config).language.get("vocab_size")
    size = size if type(size) is int else None
    tokens: dict[str, Tokens] = {}
    for name, expert in experts.items():
        with unreadable.collect():
            own_tokens = read_tokens(expert.source.folder)
            if own_tokens is not None:
                tokens[name] = own_tokens
    base = None
    with unreadable.collect():
        base = None if folder is None else read_tokens(folder)
    if base is None:  # assume the tokens that all experts share
        everywhere = set.intersection(*(set(listed.items()) for listed in tokens.values())) if tokens else set()
        changes = [change for by_name in ends.values() for change in by_name.values()]
        row_counts = [min(change.rows) if change.rows else change.height for change in changes]
        most = size or min((count for count in row_counts if count is not None), default=math.inf)
        base = {i: token for i, token in everywhere if i < most}
    is_named = reference is not None or opened is not None
    errors = (unreadable.as_error(),) if unreadable else ()
    return _TokenTable(config, size, base, tokens, is_named, errors)


def _check_clashes(table: _TokenTable, problems: Problems) -> None:
    """Report experts that have different tokens under one id."""
    own = {name: {i: t for i, t in tokens.items() if table.base.get(i) != t} for name, tokens in table.tokens.items()}
    more = "" if table.is_named else ". If one of them has the base's tokens, pass the base as `base_model`"
    for number, name in enumerate(own):
        for other in [*own][:number]:
            if odd := clashes(own[other], own[name]):
                problems.add(
                    f"{other} and {name} have different tokens under one id, or one token under two: {and_more(odd)}",
                    "Train both with one tokenizer: add all new tokens, in one order, to each before training" + more,
                    kind=ExpertError,
                )


@dataclass(frozen=True)
class _Rows:
    """The rows of one embedding or head: for each expert how many, and which of them are of new tokens."""

    slot: Slot
    changes: Mapping[str, Change]  # of the whole weight
    table: _TokenTable  # its size is the base's number of these rows
    sizes: Mapping[str, int]
    new: Mapping[str, Mapping[int, str | None]]

    @classmethod
    def of(cls, slot: Slot, changes: Mapping[str, Change], table: _TokenTable) -> _Rows | None:
        """The rows of a slot with these changes; None if nothing changes it as a whole, or nothing says how many."""
        changes = {name: change for name, change in changes.items() if not change.rows}
        heights = {name: change.height for name, change in changes.items()}
        table = replace(table, size=table.size_of(slot))
        if table.size is None and set(heights.values()) <= {None}:
            return None
        # A method without factors changes the base's own rows. Every expert has at least these.
        own = table.size or min(height for height in heights.values() if height is not None)
        sizes = {name: own if height is None else height for name, height in heights.items()}
        return cls(slot, changes, table, sizes, {n: table.new(n, sizes[n]) for n in changes}) if changes else None

    @cached_property
    def new_ids(self) -> set[int]:
        return {i for tokens in self.new.values() for i in tokens}

    @cached_property
    def entering(self) -> set[str]:
        """The experts whose rows enter: those of the terms, and owners of new tokens that these lack."""
        named = {term.expert for term in self.slot.terms}
        known = {i for name in named for i in self.new[name]}
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
        edges |= set() if size is None else {size}
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


def _settled(rows: _Rows) -> tuple[Slot, int | None]:
    """The slot with its rows, and their number; None if it stays the base's."""
    slot = rows.slot
    if not slot.terms:
        return slot, None
    if not rows.are_separate and rows.have_one_rule:
        return slot, max(rows.sizes[term.expert] for term in slot.terms)
    total = max(rows.sizes[name] for name in rows.entering)
    return replace(slot, spans=rows.spans(total)), total


def _check_rows(rows: _Rows, settled: Slot, composition: Composition) -> None:
    """Raise if the rows of a slot cannot be computed one by one, or if it is not known whose they are."""
    slot = rows.slot
    _check_named(rows)
    if not slot.terms:
        return
    _check_shrunk(rows)
    if not rows.are_separate:
        if rows.have_one_rule:
            return
        _check_sum(rows, composition)
    _check_texts(rows)
    _check_owned(rows)
    if settled.spans and slot.is_stored and slot.rule is not None and slot.rule.combines_sides:
        weighting = "magnitude weights" if slot.method == "linear" else slot.method
        raise UnsupportedError(
            f"{slot.name} has rows for tokens that the base or an expert lacks, so it cannot be combined by "
            f"{weighting}",
            f"Give it to one expert or explicit weights in its own rule: {{modules: [{slot.module}], expert: NAME}}",
            parameter="weights" if slot.method == "linear" else "method",
        )


def _check_owned(rows: _Rows) -> None:
    """Raise if several experts hold a row for a new token, and the rule gives it to none of them."""
    named = {term.expert for term in rows.slot.terms}
    for token in sorted(rows.new_ids):
        owners = [name for name, tokens in rows.new.items() if token in tokens]
        if len(owners) > 1 and not named.intersection(owners):
            raise CompositionError(
                f"{' and '.join(owners)} each hold a row for the new token {token} in {rows.slot.name}, but the rule "
                f"`{rows.slot.rule}` gives it to neither",
                f"Give it to one of them in its own rule: {{modules: [{rows.slot.module}], expert: {owners[0]}}}",
            )


def _check_shrunk(rows: _Rows) -> None:
    """Raise if an expert has fewer rows than the base, and an adapter would have to hold others that it lacks.

    Full weights give each row to the experts that have it.
    """
    slot, size = rows.slot, rows.table.size
    if slot.is_stored:
        return
    shrunk = next((name for name, count in rows.sizes.items() if size is not None and count < size), None)
    if shrunk is None or slot.owner == shrunk:
        return
    sizes = {rows.sizes[name] for name in rows.entering}
    if len(sizes) > 1 or slot.ordinary.rest:
        raise UnsupportedError(
            f"{shrunk} shrank the vocabulary: it has {rows.sizes[shrunk]} rows of {slot.name}, and the base {size}, so "
            "the rows that it removed cannot be averaged",
            f"Give {slot.module} to {shrunk} in a rule of its own, {{modules: [{slot.module}], expert: {shrunk}}}, or "
            "train all experts with one vocabulary",
            parameter="outside",
        )


def _check_named(rows: _Rows) -> None:
    """Raise if it is not known which tokens the rows are for, or if new tokens would get no row."""
    slot, sizes = rows.slot, rows.sizes
    unnamed = next((name for name in rows.changes if name not in rows.table.tokens), None)
    differ = len(set(sizes.values())) > 1 or bool(rows.new_ids)
    if rows.table.size is None and slot.is_stored and differ and unnamed is not None:
        listed = ", ".join(f"{size} rows in {name}" for name, size in sizes.items())
        raise ExpertError(
            f"The rows of {slot.name} are those of different tokens ({listed}), but {unnamed} has no "
            "tokenizer.json that says which",
            f"Pass `base_model`, whose tokens are known by their place. {_SAVE}",
            parameter="base_model",
        )
    if rows.new_ids and not slot.terms:
        owners = _owners(rows.new)
        raise CompositionError(
            f"The rule `{slot.rule}` gives {slot.name} to the base, which has no row for the new tokens of "
            f"{owners} ({_tokens(rows.new)})",
            "Average it (`outside=average`), or give it to that expert in its own rule: "
            f"{{modules: [{slot.module}], expert: {owners}}}",
        )


def _check_sum(rows: _Rows, composition: Composition) -> None:
    """Raise unless the rows can be computed one by one: as a sum with coefficients that no tensor decides."""
    slot, changes = rows.slot, rows.changes
    opaque = next((name for name, change in changes.items() if change.replaces and not change.by_rows), None)
    fixed = slot.rule is not None and not slot.rule.weights and composition.row_threshold is None
    if fixed and slot.method == "linear" and opaque is None:
        return
    owner = max(sorted(rows.entering), key=lambda name: (len(rows.new[name]), rows.sizes[name]))
    excess = f"new tokens ({_tokens(rows.new)})" if rows.new_ids else f"{rows.sizes[owner]} rows"
    odd = opaque or owner
    raise UnsupportedError(
        f"{owner} has {excess} and {changes[owner].method} on {slot.name}, whose rows the rule "
        f"`{slot.rule}` does not combine with fixed weights"
        if odd == owner
        else f"{owner} has {excess}, but {odd} has {changes[odd].method} on {slot.name}, whose rows cannot "
        "be computed one by one",
        f"Give it to {owner} in its own rule: {{modules: [{slot.module}], expert: {owner}}}",
    )


def _check_texts(rows: _Rows) -> None:
    """Raise if two experts hold a row of one id, and one of them has no tokenizer that says for which token."""
    unknown = next((name for name, tokens in rows.new.items() if None in tokens.values()), None)
    if unknown is None:
        return
    others = [tokens for name, tokens in rows.new.items() if name != unknown]
    if shared := {i for i in rows.new[unknown] if any(i in tokens for tokens in others)}:
        raise ExpertError(
            f"{' and '.join(rows.new)} hold rows for new tokens ({_ids(shared)}) in {rows.slot.name}, but {unknown} "
            "has no tokenizer.json that says which tokens they are",
            _SAVE,
        )


def _owners(new: Mapping[str, Mapping[int, str | None]]) -> str:
    return " and ".join(name for name, tokens in new.items() if tokens)


def _tokens(new: Mapping[str, Mapping[int, str | None]]) -> str:
    texts = {i: token for tokens in new.values() for i, token in tokens.items()}
    return and_more([f"{i}" if texts[i] is None else f"{i} {texts[i]!r}" for i in sorted(texts)])


def _ids(numbers: set[int]) -> str:
    return and_more([str(number) for number in sorted(numbers)])


def _notes(
    table: _TokenTable, new: Mapping[int, tuple[str, str | None]], sizes: Mapping[str, int], *, is_model: bool
) -> tuple[str, ...]:
    size = max(sizes.values(), default=0)
    grows = table.size is not None and size > table.size
    if table.size is not None and 0 < size < table.size and not (is_model and new):
        shrinkage = f"the vocabulary shrinks from {table.size} to {size} rows"
        return (shrinkage if is_model else f"{shrinkage}: {_resize(size)}",)
    if not grows and not (is_model and new):
        return ()
    owners = dict.fromkeys(owner for owner, _ in new.values())
    additions = [
        f"{and_more([repr(token) if token else str(i) for i, (o, token) in new.items() if o == owner])} of {owner}"
        for owner in owners
    ]
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
        size = stored[name].tensor.shape[0]
        if any(_factor_rows(term) > size for part in (slot, *slot.spans) for term in part.low_rank):
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
    return 0 if lora is None else lora.in_features if term.change.transposed else lora.out_features


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
    lent = BaseShare(None, term.expert, Whole(term.change.path, {"weight": copy}), term.side)
    return slot.with_spans([Span(0, total, slot.terms, (lent,), is_new=True)])


def _report_no_copy(term: Term[Change], module: str, size: int, problems: Problems) -> None:
    problems.add(
        f"{term.expert} has {term.change.method} on {_factor_rows(term)} rows of {module}, but the base has {size}, "
        "and the adapter holds no copy of the others",
        "Save the adapter again with `save_embedding_layers=True`, or pass the resized base on which it "
        "was trained as `base_model`",
        parameter="base_model",
        kind=BaseModelError,
    )


def _with_copies(slot: Slot, size: int, problems: Problems) -> Slot:
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
    spans = slot.spans
    if not spans:
        total = max(_factor_rows(term) for term in slot.low_rank)
        spans = replace(slot.ordinary, stop=size), replace(slot.ordinary, start=size, stop=total, is_new=True)
    complete = []
    for span in spans:
        if span.stop <= size or span.rest == 0:
            complete.append(span)
            continue
        if span.start < size:
            problems.add(
                f"The base has {size} rows of {slot.name}, which was not known when the experts were composed",
                "Pass `base_model` when you compose them",
                parameter="base_model",
                kind=BaseModelError,
            )
            return slot
        lent = []
        for term in shared_out(span.low_rank):
            copy = term.change.copy
            if copy is None or copy.shape[0] < span.stop:
                _report_no_copy(term, term.lora.name, size, problems)
                return slot
            whole = Whole(term.change.path, {"weight": copy})
            lent.append(BaseShare(span.rest * term.coefficient, term.expert, whole, term.side))
        complete.append(replace(span, base=tuple(lent)))
    return slot.with_spans(complete)


def _without_factors(slot: Slot, other: Slot) -> Slot:
    """An embedding or head without LoRA, with the new rows of `other`, to which it is tied in the base."""
    added = [span for span in other.spans if span.stop > slot.shape[0]]
    if slot.spans or not added or not all(0 < len(_lent(span)) == len(span.terms) for span in added):
        return slot
    spans = [replace(slot.ordinary, stop=slot.shape[0])]
    for span in added:
        terms = _lent(span) if span.rest else shared_out(_lent(span))  # PEFT computes DoRA from the copy
        spans.append(Span(max(span.start, slot.shape[0]), span.stop, terms, is_new=True))
    return slot.with_spans(spans)


def _lent(span: Span) -> tuple[Term[Whole], ...]:
    """The copies that experts lend of rows that the base lacks, as terms."""
    return tuple(
        Term(share.expert, share.side, share.coefficient or 0.0, share.copy)
        for share in span.base
        if share.copy is not None
    )


def extra_rows(config: Mapping[str, Any], module: str) -> int:
    """The rows of an embedding beyond `vocab_size`, which some multimodal models have for image tokens; their heads
    have none."""
    if not ModuleName(module).is_embedding:
        return 0
    language = ModelConfig(config).language
    rows = ModelConfig(language).architecture.extra_rows
    more = language.get(rows) if isinstance(rows, str) else rows
    return more if type(more) is int else 0
