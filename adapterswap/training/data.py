"""Turn a recipe's sources into training rows and validation rows, and count the rest.

Joins the sources, shuffles with the data seed and splits off the validation rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.errors import BaseModelError, DataError
from adapterswap.files.text import shown
from adapterswap.model.loading import OpenedBase
from adapterswap.planning.composition import SIDES
from adapterswap.training.hygiene import MATH, Screen
from adapterswap.training.loading import SourceCounts, load_table
from adapterswap.training.recipe import DatasetSource, TrainingOptions, TrainRecipe
from adapterswap.training.report import RowCounts
from adapterswap.training.tokens import (
    ChatTemplate,
    Example,
    Renderer,
    TokenCounts,
    Tokens,
    choose_reader,
    choose_renderer,
    tokenize,
)

_BATCH = 1000  # rows held as Python objects at once

Row = Mapping[str, Any]


def load_rows(
    sources: Sequence[DatasetSource],
    folder: Path,
    *,
    seed: int,
    chat: ChatTemplate | None,
    chat_prompts: bool,
    separator: str = "",
    screen: Screen | None = None,
) -> Iterator[tuple[SourceCounts, Iterator[Example]]]:
    """The rows of every source. The counts of a source are complete once its rows have been read.

    Args:
        sources: what to load.
        folder: local paths are relative to it.
        seed: for drawing `samples`.
        chat: the tokenizer's `apply_chat_template`; None if it has no template.
        chat_prompts: render prompts and completions as chat turns.
        separator: the text between prompt and completion if they are not chat turns.
        screen: decides which rows to drop; dropped rows are counted.
    """
    for source in sources:
        render = choose_renderer(source, chat, chat_prompts=chat_prompts, separator=separator)
        table, counts = load_table(source, folder, seed=seed)
        yield counts, _examples(table, render, _row_filter(source, screen, counts), counts)


def _row_filter(source: DatasetSource, screen: Screen | None, counts: SourceCounts) -> Callable[[Row], bool]:
    """A function that says whether the screen keeps a row, and counts the rows that it drops."""
    if screen is None:
        return lambda row: True
    read_text = choose_reader(source)

    def keeps(row: Row) -> bool:
        reason = screen.judge(read_text(row), is_task=source.side == "task")
        if reason == MATH:
            counts.math += 1
        elif reason is not None and screen.refuses:
            raise DataError(
                f"it shares 13 words in a row, or a whole line, with {reason}: {shown(read_text(row))}",
                "Remove such rows from the data, or set hygiene.on_overlap: drop",
                parameter="datasets",
            )
        elif reason is not None:
            counts.overlap[reason] = counts.overlap.get(reason, 0) + 1
        return reason is None

    return keeps


def _examples(table: Any, render: Renderer, keeps: Callable[[Row], bool], counts: SourceCounts) -> Iterator[Example]:
    for start in range(0, len(table), _BATCH):
        batch = table[start : start + _BATCH]
        names = list(batch)
        for offset, values in enumerate(zip(*batch.values(), strict=True)):
            row = dict(zip(names, values, strict=True))
            try:
                example = render(row)
                is_kept = example is not None and keeps(row)
            except DataError as error:
                raise error.within(f"the dataset {counts.source}, row {start + offset} of those kept") from None
            if example is None:
                counts.empty += 1
            elif is_kept:
                yield example


@dataclass(frozen=True)
class Data:
    """Tokenised rows to train on and to hold out, with their counts.

    Attributes:
        train: rows to train on; with `simultaneous`, first the task's, then the language's.
        parts: how many rows of `train` each side has, in this order; without sides, one number.
        validation: rows held out, or None.
        rows: the counts of rows used and dropped.
    """

    train: Tokens
    parts: tuple[int, ...]
    validation: Tokens | None
    rows: RowCounts


def load_data(recipe: TrainRecipe, base: OpenedBase) -> Data:
    """Load, tokenise, shuffle and split the recipe's rows."""
    joined, sides, sources, counts = _tokens(recipe.datasets, recipe, base)
    chance = np.random.default_rng(recipe.training.data_seed)
    used_rows = _drawn(sides, recipe.samples_per_side, chance)
    groups = [chance.permutation(group) for group in _groups(sides, used_rows, recipe)]
    validation, held_out = recipe.validation, None
    if validation and validation.datasets:
        held_out, held_out_sides, _, _ = _tokens(validation.datasets, recipe, base)
        if recipe.simultaneous:
            equal = _groups(held_out_sides, np.arange(len(held_out)), recipe)
            share = min(map(len, equal))
            held_out = held_out.take(np.concatenate([chance.permutation(group)[:share] for group in equal]))
    elif validation:
        total = validation.rows or max(1, round((validation.fraction or 0) * len(used_rows)))
        share = math.ceil(total / len(groups))  # of each side as many
        if share >= min(map(len, groups)):
            side = " of each side" if recipe.simultaneous else ""
            raise DataError(
                f"validation would take {share} rows{side}, but there are only {min(map(len, groups))}",
                "Hold out fewer rows, or add more",
                parameter="validation",
            )
        held_out = joined.take(np.concatenate([group[:share] for group in groups]))
        groups = [group[share:] for group in groups]
    train = joined.take(np.concatenate(groups))
    rows = RowCounts(
        sources=[asdict(source) for source in sources],
        train=len(train),
        validation=len(held_out) if held_out else 0,
        empty=sum(source.empty for source in sources),
        math=sum(source.math for source in sources),
        overlap=sum(sum(source.overlap.values()) for source in sources),
        cut_off=counts.cut_off,
        surplus=len(joined) - len(used_rows),
        truncated=int(np.sum(np.array(counts.truncated)[used_rows])),
        split=counts.split,
        boundary_moved=int(np.sum(np.array(counts.boundary_moved)[used_rows])),
        longest=counts.longest,
        tokens=len(train.ids),
        trained_tokens=int(train.trained.sum()),
        sha256=train.sha256(),
    )
    return Data(train, tuple(map(len, groups)), held_out, rows)


def _drawn(sides: NDArray[np.str_], most: int | None, chance: np.random.Generator) -> NDArray[np.int64]:
    """The indices of the rows to use: `most` of each side, drawn at random, or all if it is None."""
    if most is None:
        return np.arange(len(sides))
    drawn = [chance.permutation(np.flatnonzero(sides == side))[:most] for side in np.unique(sides)]
    return np.sort(np.concatenate(drawn))


def _groups(sides: NDArray[np.str_], used_rows: NDArray[np.int64], recipe: TrainRecipe) -> list[NDArray[np.int64]]:
    """The rows of `used_rows` by group: with `simultaneous` one group for each side, else a single group."""
    return [used_rows[sides[used_rows] == side] for side in SIDES] if recipe.simultaneous else [used_rows]


def _tokens(
    datasets: Sequence[DatasetSource], recipe: TrainRecipe, base: OpenedBase
) -> tuple[Tokens, NDArray[np.str_], list[Any], TokenCounts]:
    """The rows of all sources, the side of each row, the counts of each source, and the counts of tokens."""
    options = recipe.training
    parts, sources, total = [], [], TokenCounts()
    loaded = load_rows(
        datasets,
        recipe.folder,
        seed=options.data_seed,
        chat=base.tokenizer.apply_chat_template if base.tokenizer.chat_template else None,
        chat_prompts=recipe.chat_template,
        separator=recipe.separator,
        screen=Screen(recipe.hygiene, recipe.folder) if recipe.hygiene else None,
    )
    for source, examples in loaded:
        part, counts = tokenize(examples, base.tokenizer, max_length=options.max_length, split_long=options.split_long)
        if not len(part):
            _nothing_left(source, counts, options.max_length)
        parts.append(part)
        sources.append(source)
        total = total + counts
    joined = Tokens.join(parts)
    vocabulary = base.config.get_text_config().vocab_size
    if joined.ids.max() >= vocabulary:
        raise BaseModelError(
            f"the tokenizer of {base.reference} produces the token {joined.ids.max()}, but the model's vocabulary has "
            f"{vocabulary} tokens",
            "Use a folder whose tokenizer belongs to its model",
            parameter="base_model",
        )
    sides = np.repeat([source.side or "" for source in datasets], [len(part) for part in parts])
    return joined, sides, sources, total


def _nothing_left(source: Any, counts: TokenCounts, max_length: int) -> None:
    if counts.cut_off:
        raise DataError(
            f"the dataset {source.source}: max_length {max_length} cuts off the completion of all {counts.cut_off} "
            "rows",
            f"Raise training.max_length (the longest row has {counts.longest} tokens) or shorten the prompt",
            parameter="training.max_length",
        )
    if screened := source.math + sum(source.overlap.values()):
        raise DataError(
            f"the dataset {source.source}: hygiene drops {screened} of {source.kept} rows, and the rest are empty",
            "Choose a source without math and evaluation texts; if it is the task's own math, set `side: task`",
            parameter="datasets",
        )
    raise DataError(
        f"the dataset {source.source}: all {source.kept} rows are empty",
        "Check the templates and the values in the columns",
        parameter="datasets",
    )


def sequences(data: Data, options: TrainingOptions) -> tuple[Any, tuple[int, ...]]:
    """The dataset to train on, packed if the options say so, and how many sequences each side has.

    A packed sequence has up to max_length tokens from several whole rows of one side (best-fit decreasing).
    """
    if not options.packing:
        return data.train.dataset(), data.parts
    import datasets
    from trl import pack_dataset

    starts = np.cumsum([0, *data.parts])
    parts = [
        pack_dataset(data.train.take(np.arange(begin, end)).dataset(), options.max_length, "bfd")
        for begin, end in pairwise(starts)
    ]
    return datasets.concatenate_datasets(parts), tuple(map(len, parts))
