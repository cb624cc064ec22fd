"""Gates of embeddings and heads: whether their rows can be computed one by one, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap.core.companions.tokenizer import Tokens, clashes
from adapterswap.core.model.layers import ModuleName
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.rows import Rows, TokenTable, Vocabularies, trained_terms
from adapterswap.core.planning.slots import Slot
from adapterswap.kit.errors import (
    AdapterswapError,
    BaseModelError,
    CompositionError,
    ExpertError,
    Problems,
    UnsupportedError,
    and_more,
)

_SAVE = "Save each expert's tokenizer in its folder, with tokenizer.save_pretrained(FOLDER)"


def check_vocabularies(made: Vocabularies, problems: Problems) -> None:
    """Report clashes of tokens, and new tokens that would get no row, or only part of one."""
    table, composition = made.table, made.composition
    if table is None or composition is None:
        return

    # Later checks tell rows apart by their tokens, so these must be readable and agree.
    for error in table.unreadable:
        with problems.collect():
            raise error
    _check_clashes(table, problems)
    if problems:
        return

    for before, slot in zip(made.before, made.slots, strict=True):
        if before.storage.of_tokens:
            _check_trained_tokens(before, slot, table.tokens, problems)
        elif before.name in made.rows:
            with problems.collect():
                _check_rows(made.rows[before.name], slot, composition)

    if not made.is_model:  # else `gates` checks them, after the rows of LoRA's copies
        check_sizes(made.sizes, problems)
    check_ties(made.slots, table.config, problems)


def _check_clashes(table: TokenTable, problems: Problems) -> None:
    """Report experts that have different tokens under one id."""
    own = {}
    for name, tokens in table.tokens.items():
        own[name] = {i: token for i, token in tokens.items() if table.base.get(i) != token}

    remedy = "Train both with one tokenizer: add all new tokens, in one order, to each before training"
    if not table.is_named:
        remedy += ". If one of them has the base's tokens, pass the base as `base_model`"

    earlier: list[str] = []
    for name in own:
        for other in earlier:
            odd = clashes(own[other], own[name])
            if odd:
                problems.add(
                    f"{other} and {name} have different tokens under one id, or one token under two: {and_more(odd)}",
                    remedy,
                    kind=ExpertError,
                )
        earlier.append(name)


def _check_trained_tokens(slot: Slot, settled: Slot, tokens: Mapping[str, Tokens], problems: Problems) -> None:
    """Report blends of trained tokens with an expert that changes the whole weight, weights that are not above 0, and
    new tokens of several experts that may differ.

    Args:
        slot, settled: the slot without and with the rows of its tokens.
        tokens: expert → its tokens, for experts with a tokenizer.
        problems: collects the mistakes.
    """
    trained = [term for term in slot.terms if term.change.rows]
    others = [term for term in slot.terms if term not in trained]
    remedy = f"Give it to one expert in its own rule: {{modules: [{slot.name}], expert: {trained[0].expert}}}"
    if others:
        problems.add(
            f"{trained[0].expert} trained single tokens of {slot.name} (trainable_token_indices), but "
            f"{others[0].expert} changes the whole weight, so the two cannot be blended",
            remedy.replace("one expert", "one of them", 1),
            kind=UnsupportedError,
        )
        return
    if slot.rule is not None and slot.rule.combines_sides:
        return  # `targets.in_full_by_a_method` refuses it

    for name, term in trained_terms(slot).items():
        if term.coefficient <= 0:
            problems.add(
                f"{name} trained tokens of {slot.name}, whose rows replace the base's, so its weight must be above 0",
                remedy,
                kind=CompositionError,
            )
            return

    # New tokens of several experts, of which one does not say which token it is
    for span in settled.spans:
        several = [term.expert for term in span.terms]
        without = [name for name in several if name not in tokens]
        if span.is_new and len(several) > 1 and without:
            problems.add(
                f"{' and '.join(several)} trained the new token {span.start} of {slot.name}, but "
                f"{without[0]} has no tokenizer.json that says which token it is",
                _SAVE,
            )
            return


def _check_rows(rows: Rows, settled: Slot, composition: Composition) -> None:
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

    # What combines experts by their tensors would have to compare rows that not all of them have.
    if settled.spans and slot.is_stored and slot.rule is not None and slot.rule.combines_sides:
        weighting, parameter = slot.method, "method"
        if slot.method == "linear":
            weighting, parameter = "magnitude weights", "weights"
        raise UnsupportedError(
            f"{slot.name} has rows for tokens that the base or an expert lacks, so it cannot be combined by "
            f"{weighting}",
            f"Give it to one expert or explicit weights in its own rule: {{modules: [{slot.module}], expert: NAME}}",
            parameter=parameter,
        )


def _check_named(rows: Rows) -> None:
    """Raise if it is not known which tokens the rows are for, or if new tokens would get no row."""
    slot, sizes = rows.slot, rows.sizes

    # Rows beside those of a base that is not here, and no tokenizer to compare them by
    unnamed = [name for name in rows.changes if name not in rows.table.tokens]
    differ = len(set(sizes.values())) > 1 or bool(rows.new_ids)
    if rows.table.size is None and slot.is_stored and differ and unnamed:
        listed = ", ".join(f"{size} rows in {name}" for name, size in sizes.items())
        raise ExpertError(
            f"The rows of {slot.name} are those of different tokens ({listed}), but {unnamed[0]} has no "
            "tokenizer.json that says which",
            f"Pass `base_model`, whose tokens are known by their place. {_SAVE}",
            parameter="base_model",
        )

    if rows.new_ids and not slot.terms:
        owners = " and ".join(name for name, tokens in rows.new.items() if tokens)
        raise CompositionError(
            f"The rule `{slot.rule}` gives {slot.name} to the base, which has no row for the new tokens of "
            f"{owners} ({_tokens(rows.new)})",
            "Average it (`outside=average`), or give it to that expert in its own rule: "
            f"{{modules: [{slot.module}], expert: {owners}}}",
        )


def _check_shrunk(rows: Rows) -> None:
    """Raise if an expert has fewer rows than the base, and an adapter would have to hold others that it lacks.

    Full weights give each row to the experts that have it.
    """
    slot, size = rows.slot, rows.table.size
    if slot.is_stored or size is None:
        return
    shrunk = [name for name, count in rows.sizes.items() if count < size]
    if not shrunk or slot.owner == shrunk[0]:
        return

    first = shrunk[0]
    sizes = {rows.sizes[name] for name in rows.entering}
    if len(sizes) > 1 or slot.ordinary.rest:
        raise UnsupportedError(
            f"{first} shrank the vocabulary: it has {rows.sizes[first]} rows of {slot.name}, and the base {size}, so "
            "the rows that it removed cannot be averaged",
            f"Give {slot.module} to {first} in a rule of its own, {{modules: [{slot.module}], expert: {first}}}, or "
            "train all experts with one vocabulary",
            parameter="outside",
        )


def _check_sum(rows: Rows, composition: Composition) -> None:
    """Raise unless the rows can be computed one by one: as a sum with coefficients that no tensor decides."""
    slot, changes = rows.slot, rows.changes
    opaque = [name for name, change in changes.items() if change.replaces and not change.by_rows]
    fixed = slot.rule is not None and not slot.rule.weights and composition.row_threshold is None
    if fixed and slot.method == "linear" and not opaque:
        return

    # The expert with the most new tokens, or else the most rows, is probably the one that should own the module.
    owner = max(sorted(rows.entering), key=lambda name: (len(rows.new[name]), rows.sizes[name]))
    excess = f"{rows.sizes[owner]} rows"
    if rows.new_ids:
        excess = f"new tokens ({_tokens(rows.new)})"

    odd = opaque[0] if opaque else owner
    if odd == owner:
        message = (
            f"{owner} has {excess} and {changes[owner].method} on {slot.name}, whose rows the rule "
            f"`{slot.rule}` does not combine with fixed weights"
        )
    else:
        message = (
            f"{owner} has {excess}, but {odd} has {changes[odd].method} on {slot.name}, whose rows cannot "
            "be computed one by one"
        )
    raise UnsupportedError(
        message,
        f"Give it to {owner} in its own rule: {{modules: [{slot.module}], expert: {owner}}}",
    )


def _check_texts(rows: Rows) -> None:
    """Raise if two experts hold a row of one id, and one of them has no tokenizer that says for which token."""
    unnamed = [name for name, tokens in rows.new.items() if None in tokens.values()]
    if not unnamed:
        return

    others: set[int] = set()
    for name, tokens in rows.new.items():
        if name != unnamed[0]:
            others |= tokens.keys()
    shared = sorted(others & rows.new[unnamed[0]].keys())
    if shared:
        raise ExpertError(
            f"{' and '.join(rows.new)} hold rows for new tokens ({and_more([*map(str, shared)])}) in "
            f"{rows.slot.name}, but {unnamed[0]} "
            "has no tokenizer.json that says which tokens they are",
            _SAVE,
        )


def _check_owned(rows: Rows) -> None:
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


def check_sizes(sizes: Mapping[str, int], problems: Problems) -> None:
    """Check that all embeddings and heads of a result have the same number of rows (`sizes`, by name)."""
    if len(set(sizes.values())) <= 1:
        return

    few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    problems.add(
        f"{many} would have {sizes[many]} rows and {few} {sizes[few]}: an expert resized the vocabulary but holds "
        "only one of the two",
        "Save that expert again with both in modules_to_save, or with save_embedding_layers=True",
        kind=UnsupportedError,
    )


def check_ties(slots: Sequence[Slot], config: Mapping[str, Any] | None, problems: Problems) -> None:
    """Report results that PEFT computes wrongly if the base ties its head to its embedding.

    Trained tokens of an embedding also apply to the tied head, unless an adapter changes both. So no other change of an
    embedding or head is allowed, unless the base's config says that they are not tied.
    """
    trained = [slot for slot in slots if slot.storage.of_tokens]
    if not trained:
        return
    if config is not None and config.get("tie_word_embeddings") is False:
        return

    changed = []
    for slot in slots:
        is_vocabulary = slot in trained or ModuleName(slot.name).is_vocabulary(slot.layer)
        if slot.terms and is_vocabulary:
            changed.append(slot)
    if len(changed) == 1 and not ModuleName(changed[0].name).is_head:
        return

    names = " and ".join(slot.name for slot in changed)
    kind: type[AdapterswapError] = UnsupportedError
    doubt = "its config.json does not say that"
    if config is None:
        kind, doubt = BaseModelError, "its config.json is not on this machine"
    problems.add(
        f"Tokens of {trained[0].name} were trained (trainable_token_indices), and the result changes {names}. PEFT "
        f"computes that correctly only if the base's embedding and head are not tied, but {doubt}",
        "Use a base with `tie_word_embeddings: false` and pass it as `base_model`, or leave all but the embedding to "
        "the base by rules",
        parameter="base_model",
        kind=kind,
    )


def _tokens(new: Mapping[str, Mapping[int, str | None]]) -> str:
    """The new tokens of all experts by id, with their texts where they are known."""
    texts: dict[int, str | None] = {}
    for tokens in new.values():
        texts |= tokens

    listed = []
    for i in sorted(texts):
        name = str(i)
        if texts[i] is not None:
            name = f"{i} {texts[i]!r}"
        listed.append(name)
    return and_more(listed)
