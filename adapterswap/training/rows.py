"""The rows of a recipe's sources as text, source by source: loading, screening and rendering joined.

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
    """The rows of every source; the counts are complete when a source's rows are used up.

    Args:
        sources: what to load.
        folder: what local paths are relative to.
        seed: of `samples`.
        chat: the tokenizer's `apply_chat_template`, where it has a template.
        chat_prompts: render prompts and completions as chat turns.
        separator: stands between prompt and completion where they are no chat turns.
        screen: keeps rows out, which are counted.

    Raises:
        DataError: as `load_table`; and with its number, for a row that cannot be rendered, or that the screen refuses.
        NotFoundError: as `load_table`.
        BaseModelError: as `choose_renderer`.
    """
    for source in sources:
        render = choose_renderer(source, chat, chat_prompts=chat_prompts, separator=separator)
        table, counts = load_table(source, folder, seed=seed)
        yield counts, _examples(table, render, _admission(source, screen, counts), counts)


def _admission(source: DatasetSource, screen: Screen | None, counts: SourceCounts) -> Callable[[Row], bool]:
    """Whether the screen lets a row through; those that it does not are counted."""
    if screen is None:
        return lambda row: True
    read = choose_reader(source)

    def admits(row: Row) -> bool:
        reason = screen.judge(read(row), is_task=source.side == "task")
        if reason == MATH:
            counts.math += 1
        elif reason is not None and screen.refuses:
            raise DataError(
                f"it shares 13 words in a row, or a whole line, with {reason}: {shown(read(row))}",
                "Remove such rows from the data, or set hygiene.on_overlap: drop",
                parameter="datasets",
            )
        elif reason is not None:
            counts.overlap[reason] = counts.overlap.get(reason, 0) + 1
        return reason is None

    return admits


def _examples(table: Any, render: Renderer, admits: Callable[[Row], bool], counts: SourceCounts) -> Iterator[Example]:
    for start in range(0, len(table), _BATCH):
        batch = table[start : start + _BATCH]
        names = list(batch)
        for offset, values in enumerate(zip(*batch.values(), strict=True)):
            row = dict(zip(names, values, strict=True))
            try:
                example = render(row)
                admitted = example is not None and admits(row)
            except DataError as error:
                raise error.within(f"the dataset {counts.source}, row {start + offset} of those kept") from None
            if example is None:
                counts.empty += 1
            elif admitted:
                yield example
