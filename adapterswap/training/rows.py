"""The rows of a recipe's sources as text, source by source: loading and rendering joined. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.training.loading import SourceCounts, load_table
from adapterswap.training.recipe import DatasetSource
from adapterswap.training.rendering import ChatTemplate, Example, Renderer, choose_renderer

__all__ = ["load_rows"]

_BATCH = 1000  # rows held as Python objects at once


def load_rows(
    sources: Sequence[DatasetSource],
    folder: Path,
    *,
    seed: int,
    chat: ChatTemplate | None,
    chat_prompts: bool,
    separator: str = "",
) -> Iterator[tuple[SourceCounts, Iterator[Example]]]:
    """The rows of every source; the counts are complete when a source's rows are used up.

    Args:
        sources: what to load.
        folder: what local paths are relative to.
        seed: of `samples`.
        chat: the tokenizer's `apply_chat_template`, where it has a template.
        chat_prompts: render prompts and completions as chat turns.
        separator: stands between prompt and completion where they are no chat turns.

    Raises:
        AdapterswapError: as `load_table` and `choose_renderer`, and for a row that cannot be rendered, with its number.
    """
    for source in sources:
        render = choose_renderer(source, chat, chat_prompts=chat_prompts, separator=separator)
        table, counts = load_table(source, folder, seed=seed)
        yield counts, _examples(table, render, counts)


def _examples(table: Any, render: Renderer, counts: SourceCounts) -> Iterator[Example]:
    for start in range(0, len(table), _BATCH):
        batch = table[start : start + _BATCH]
        names = list(batch)
        for offset, values in enumerate(zip(*batch.values(), strict=True)):
            try:
                example = render(dict(zip(names, values, strict=True)))
            except AdapterswapError as error:
                problem = error.problems[0]
                raise AdapterswapError(
                    f"the dataset {counts.source}, row {start + offset} of those kept: {problem.what}", problem.mend
                ) from None
            if example is None:
                counts.empty += 1
            else:
                yield example
