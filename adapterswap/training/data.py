"""From a recipe's sources to the rows that are trained on and those held out, with an account of the rest.

Joins the sources, shuffles by the data seed, splits off the validation rows. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adapterswap.bases import Base
from adapterswap.errors import AdapterswapError
from adapterswap.training.recipe import DatasetSource, TrainRecipe
from adapterswap.training.report import Rows
from adapterswap.training.rows import load_rows
from adapterswap.training.tokens import TokenCounts, Tokens, tokenize

__all__ = ["Data", "load_data", "packed"]


@dataclass(frozen=True)
class Data:
    """Tokenised rows: to train on, held out (or None), and the account."""

    train: Tokens
    validation: Tokens | None
    rows: Rows


def load_data(recipe: TrainRecipe, base: Base) -> Data:
    """Load, tokenise, shuffle and split the recipe's rows.

    Raises:
        AdapterswapError: what `load_rows` raises; no rows are left; or validation takes all of them.
    """
    joined, sources, counts = _tokens(recipe.datasets, recipe, base)
    order = np.random.default_rng(recipe.training.data_seed).permutation(len(joined))
    train, held_out = joined.take(order), None
    validation = recipe.validation
    if validation and validation.datasets:
        held_out, _, _ = _tokens(validation.datasets, recipe, base)
    elif validation:
        held = validation.rows or max(1, round((validation.fraction or 0) * len(joined)))
        if held >= len(joined):
            raise AdapterswapError(
                f"validation takes {held} rows, and there are {len(joined)}", "Hold out fewer, or give more rows"
            )
        train, held_out = joined.take(order[held:]), joined.take(order[:held])
    rows = Rows(
        sources=[asdict(source) for source in sources],
        train=len(train),
        validation=len(held_out) if held_out else 0,
        empty=sum(source.empty for source in sources),
        cut_off=counts.cut_off,
        truncated=counts.truncated,
        boundary_moved=counts.boundary_moved,
        longest=counts.longest,
        tokens=len(train.ids),
        trained_tokens=int(train.trained.sum()),
        sha256=train.sha256(),
    )
    return Data(train, held_out, rows)


def _tokens(wanted: Sequence[DatasetSource], recipe: TrainRecipe, base: Base) -> tuple[Tokens, list[Any], TokenCounts]:
    """The rows of all sources; what became of each; and what tokenising did to them all."""
    options = recipe.training
    parts, sources, total = [], [], TokenCounts()
    loaded = load_rows(
        wanted,
        recipe.folder,
        seed=options.data_seed,
        chat=base.tokenizer.apply_chat_template if base.tokenizer.chat_template else None,
        chat_prompts=recipe.chat_template,
    )
    for source, examples in loaded:
        part, counts = tokenize(examples, base.tokenizer, max_length=options.max_length)
        if not len(part):
            _nothing_left(source, counts, options.max_length)
        parts.append(part)
        sources.append(source)
        total = total + counts
    joined = Tokens.join(parts)
    vocabulary = base.config.get_text_config().vocab_size
    if joined.ids.max() >= vocabulary:
        raise AdapterswapError(
            f"the tokenizer of {base.reference} gives the token {joined.ids.max()}, and the model knows {vocabulary}",
            "Tokenizer and model do not belong together: give the folder of a matching pair",
        )
    return joined, sources, total


def _nothing_left(source: Any, counts: TokenCounts, max_length: int) -> None:
    if counts.cut_off:
        raise AdapterswapError(
            f"the dataset {source.source}: all {counts.cut_off} rows lose their completion to max_length {max_length}",
            f"Raise training.max_length (the longest row has {counts.longest} tokens), or shorten the prompt",
        )
    raise AdapterswapError(
        f"the dataset {source.source}: all {source.kept} rows are empty", "Check the templates and the columns' values"
    )


def packed(tokens: Tokens, max_length: int) -> Any:
    """A dataset of sequences of up to `max_length` tokens, each of several whole rows (best-fit decreasing)."""
    from trl import pack_dataset

    return pack_dataset(tokens.dataset(), max_length, "bfd")
