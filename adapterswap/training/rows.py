"""Load, screen and render the rows of a recipe's sources, source by source, as text.

Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterswap.errors import DataError
from adapterswap.files.smallfiles import shown
from adapterswap.training.hygiene import MATH, Screen
from adapterswap.training.loading import SourceCounts, load_table
from adapterswap.training.recipe import DatasetSource
from adapterswap.training.rendering import ChatTemplate, Example, Renderer, choose_reader, choose_renderer

__all__ = ["load_rows"]

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

    Raises:
        DataError: see `load_table`; or a row cannot be rendered, or is refused by the screen. The error has its number.
        NotFoundError: see `load_table`.
        BaseModelError: see `choose_renderer`.
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
