"""Embeddings and heads of experts whose vocabularies differ: which rows are made of what.

A row whose token the base has follows the rule for its module, as any weight outside the layers does. The row of a new
token is its owner's: averaging it with weights that never stood for the token would spoil it. Tokenizers say which rows
are new. Knows plans and tokenizers; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap.changes.kinds import LowRank, Whole
from adapterswap.errors import CompositionError, ExpertError, Problems, UnsupportedError
from adapterswap.experts.adapters import Adapter, FullModule, LoraModule
from adapterswap.experts.layers import language_config
from adapterswap.experts.shapes import and_more
from adapterswap.experts.sources import at_revision, base_config, cached_base_config, cached_base_folder
from adapterswap.experts.tokenizers import Tokens, clashes, read_tokens
from adapterswap.planning.compositions import Composition
from adapterswap.planning.slots import Rows, Slot, Term

__all__ = ["Vocabularies", "check_sizes", "settle_vocabulary"]

_SAVE = "Save each expert's tokenizer in its folder, with tokenizer.save_pretrained(FOLDER)"


class Vocabularies(NamedTuple):
    """The slots with their rows settled, and what the user should know of them."""

    slots: list[Slot]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Known:
    """What is known of the vocabularies.

    Attributes:
        size: the base's number of rows; None where its config is not on this machine.
        base: the base's tokens, or those that every expert has.
        tokens: each expert's; experts without a tokenizer are left out.
    """

    size: int | None
    base: Tokens
    tokens: Mapping[str, Tokens]

    def new(self, expert: str, rows: int) -> dict[int, str | None]:
        """The ids below `rows` of the expert's tokens that the base lacks; None for a token of no known text."""
        if expert in self.tokens:
            found = {i: t for i, t in self.tokens[expert].items() if i < rows and self.base.get(i) != t}
            return dict(sorted(found.items()))
        return dict.fromkeys(range(rows if self.size is None else self.size, rows))


def settle_vocabulary(
    slots: Sequence[Slot], adapters: Mapping[str, Adapter], composition: Composition, problems: Problems
) -> Vocabularies:
    """Settle the rows of embeddings and heads where an expert has tokens that the base, or another expert, does not.

    Args:
        slots: with their terms.
        adapters: the experts.
        composition: what is asked for.
        problems: collects clashes of tokens, and new tokens that would get no row, or half of one.
    """
    if not any(adapter.vocabulary for adapter in adapters.values()):
        return Vocabularies(list(slots))
    known = _known(adapters, composition, slots, problems)
    if problems:
        return Vocabularies(list(slots))
    settled, sizes = [], {}
    new: dict[int, tuple[str, str | None]] = {}
    for slot in slots:
        held = {
            name: adapter.vocabulary[slot.name] for name, adapter in adapters.items() if slot.name in adapter.vocabulary
        }
        if held:
            slot, size = _settled(slot, held, adapters, known, problems)
            if size is not None:
                sizes[slot.name] = size
            for rows in slot.rows:
                for i in range(rows.start, rows.stop) if rows.is_new else ():
                    owner = rows.terms[0].expert
                    new.setdefault(i, (owner, known.tokens.get(owner, {}).get(i)))
        settled.append(slot)
    check_sizes(sizes, problems)
    return Vocabularies(settled, _notes(known, new, sizes))


def check_sizes(sizes: Mapping[str, int], problems: Problems) -> None:
    """Whether the embeddings and heads of a result, by name, all have the same number of rows."""
    if len(set(sizes.values())) > 1:
        few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        problems.add(
            f"{many} would have {sizes[many]} rows and {few} {sizes[few]}: an expert resized the vocabulary, and holds "
            "only one of the two",
            "Save it again with both in modules_to_save, or with save_embedding_layers=True",
            kind=UnsupportedError,
        )


def _rows_of(part: FullModule | LoraModule) -> int:
    if isinstance(part, LoraModule):
        return part.in_features if part.embedding else part.out_features
    return next(iter(part.tensors.values())).shape[0]


def _known(
    adapters: Mapping[str, Adapter], composition: Composition, slots: Sequence[Slot], problems: Problems
) -> _Known:
    """See `_Known`; two experts that give an id different tokens are a problem."""
    config: Mapping[str, Any] | None = None
    folder: Path | None = None
    named = (at_revision(a.config.base_model, a.config.revision) for a in adapters.values() if a.config.base_model)
    reference = composition.base_model or next(named, None)
    if reference is not None:
        config, folder = cached_base_config(reference), cached_base_folder(reference)
    if config is None and composition.base_model is not None and any(s.in_full and s.needs_base for s in slots):
        with problems.collect():
            source, config = base_config(composition.base_model)
            folder = source.folder
    size = None if config is None else language_config(config).get("vocab_size")
    size = size if type(size) is int else None
    tokens: dict[str, Tokens] = {}
    for name, adapter in adapters.items():
        with problems.collect():
            found = read_tokens(adapter.source.folder)
            if found is not None:
                tokens[name] = found
    base = None
    with problems.collect():
        base = None if folder is None else read_tokens(folder)
    if base is None:  # what all agree on, as far as it can be the base's
        everywhere = set.intersection(*(set(found.items()) for found in tokens.values())) if tokens else set()
        held = [_rows_of(part) for adapter in adapters.values() for part in adapter.vocabulary.values()]
        base = {i: token for i, token in everywhere if i < (size or min(held))}
    names = list(tokens)
    for number, name in enumerate(names):
        for other in names[:number]:
            own, theirs = ({i: t for i, t in tokens[who].items() if base.get(i) != t} for who in (other, name))
            if odd := clashes(own, theirs):
                problems.add(
                    f"{other} and {name} have different tokens under one id, or one token under two: {and_more(odd)}",
                    "Train both with one tokenizer: add all new tokens, in one order, to each before training",
                    kind=ExpertError,
                )
    return _Known(size, base, tokens)


def _settled(
    slot: Slot,
    held: Mapping[str, FullModule | LoraModule],
    adapters: Mapping[str, Adapter],
    known: _Known,
    problems: Problems,
) -> tuple[Slot, int | None]:
    """The slot with its rows, and their number; None where it is the base's."""
    new = {name: known.new(name, _rows_of(part)) for name, part in held.items()}
    every = {i for found in new.values() for i in found}
    if every and not slot.terms:
        problems.add(
            f"the rule `{slot.rule}` gives {slot.name} to the base, and the new tokens of {_owners(new)} "
            f"({_tokens(new)}) have no row there",
            "Average it (`outside=average`), or give it to that expert in a rule of its own: "
            f"{{modules: [{slot.name}], expert: {_owners(new)}}}",
            kind=CompositionError,
        )
        return slot, None
    if not slot.terms:
        return slot, None
    if not slot.in_full or not all(isinstance(part, FullModule) for part in held.values()):
        return _with_factors(slot, held, new, problems)
    if len(unknown := [name for name, found in new.items() if None in found.values()]) and len(new) > 1:
        shared = {i for i in new[unknown[0]] if any(i in found for name, found in new.items() if name != unknown[0])}
        if shared:
            problems.add(
                f"{' and '.join(new)} hold rows for new tokens ({_ids(shared)}) in {slot.name}, and {unknown[0]} has "
                "no tokenizer.json that says which tokens they are",
                _SAVE,
                kind=ExpertError,
            )
            return slot, None
    sizes = {name: _rows_of(part) for name, part in held.items()}
    entering = {term.expert for term in slot.terms} | {name for name, found in new.items() if found}
    total = max(sizes[name] for name in entering)
    edges = {0, total, *sizes.values(), *every, *(i + 1 for i in every), *(() if known.size is None else (known.size,))}
    rows: list[Rows] = []
    ordered = sorted(edge for edge in edges if edge <= total)
    for start, stop in pairwise(ordered):
        owners = [name for name, found in new.items() if start in found]
        made = _made(slot, start, stop, owners, sizes, known, adapters)
        if made is None:
            problems.add(
                f"{' and '.join(owners)} each hold a row for the new token {start} in {slot.name}, and the rule "
                f"`{slot.rule}` gives it to neither",
                f"Give it to one of them, in a rule of its own: {{modules: [{slot.name}], expert: {owners[0]}}}",
                kind=CompositionError,
            )
            return slot, None
        last = rows[-1] if rows else None
        if last is not None and (last.terms, last.rest, last.is_new) == (made.terms, made.rest, made.is_new):
            rows[-1] = replace(last, stop=stop)
        else:
            rows.append(made)
    ordinary = all((part.terms, part.rest) == (slot.terms, slot.rest) for part in rows)
    ordinary = ordinary and all(sizes[term.expert] == total for term in slot.terms)
    if ordinary and (known.size in (None, total) or not slot.rest):
        # Nothing differs between the rows; merging still has to know where the base's end.
        rows = rows if known.size is not None and known.size != total else []
    return replace(slot, rows=tuple(rows)), total


def _made(
    slot: Slot,
    start: int,
    stop: int,
    owners: Sequence[str],
    sizes: Mapping[str, int],
    known: _Known,
    adapters: Mapping[str, Adapter],
) -> Rows | None:
    """What rows are made of; None where several own them, and the rule names none of them."""
    if owners:
        entering = [term for term in slot.terms if term.expert in owners]
        if not entering and len(owners) > 1:
            return None
    else:
        entering = [term for term in slot.terms if sizes[term.expert] >= stop]
        if len(entering) == len(slot.terms) and (not slot.rest or known.size is None or stop <= known.size):
            return Rows(start, stop, slot.terms, slot.rest)
        owners = [name for name, size in sizes.items() if size >= stop]
    if not entering:
        part = adapters[owners[0]].saved[slot.name]
        whole = Whole(adapters[owners[0]].file.path, part.tensors)
        return Rows(start, stop, (Term(owners[0], owners[0], 1.0, whole),), 0.0, is_new=True)
    shares = sum(term.coefficient for term in entering)
    even = min(term.coefficient for term in entering) <= 0
    terms = (replace(t, coefficient=1 / len(entering) if even else t.coefficient / shares) for t in entering)
    return Rows(start, stop, tuple(terms), 0.0, is_new=True)


def _with_factors(
    slot: Slot,
    held: Mapping[str, FullModule | LoraModule],
    new: Mapping[str, Mapping[int, str | None]],
    problems: Problems,
) -> tuple[Slot, int | None]:
    """An embedding or head with LoRA. A blend multiplies ΔW of every row, and a new token needs all of its own."""
    size = max(_rows_of(held[term.expert]) for term in slot.terms)
    owner = next((name for name, found in new.items() if found), None)
    every = {i for found in new.values() for i in found}
    kept = slot.owner is not None and every <= new.get(slot.owner, {}).keys()
    if owner is not None and not kept and not _all_own(slot, new):
        problems.add(
            f"{owner} has new tokens ({_tokens(new)}) and LoRA on {slot.name}, and the rule `{slot.rule}` does not "
            "leave these rows to it alone",
            f"Give it to that expert, in a rule of its own: {{modules: [{slot.name}], expert: {owner}}}",
            kind=UnsupportedError,
        )
    return slot, size


def _all_own(slot: Slot, new: Mapping[str, Mapping[int, str | None]]) -> bool:
    """Whether all experts that a rule names have the same known new tokens, which it may then average."""
    found = [new.get(name, {}) for name in slot.requested]
    return all(one == found[0] and None not in one.values() for one in found) and all(
        isinstance(term.change, LowRank) for term in slot.terms
    )


def _owners(new: Mapping[str, Mapping[int, str | None]]) -> str:
    return " and ".join(name for name, found in new.items() if found)


def _tokens(new: Mapping[str, Mapping[int, str | None]]) -> str:
    found = {i: token for tokens in new.values() for i, token in tokens.items()}
    return and_more([f"{i}" if found[i] is None else f"{i} {found[i]!r}" for i in sorted(found)])


def _ids(numbers: set[int]) -> str:
    return and_more([str(number) for number in sorted(numbers)])


def _notes(known: _Known, new: Mapping[int, tuple[str, str | None]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    size = max(sizes.values(), default=0)
    if known.size is None or size <= known.size:
        return ()
    owners = dict.fromkeys(owner for owner, _ in new.values())
    which = [
        f"{and_more([repr(token) if token else str(i) for i, (o, token) in new.items() if o == owner])} of {owner}"
        for owner in owners
    ]
    told = f" ({'; '.join(which)})" if which else ""
    return (
        f"the vocabulary grows from {known.size} to {size} rows{told}: before PEFT loads the adapter, call "
        f"model.resize_token_embeddings({size})",
    )
