"""Rows drawn from a source that is read as a stream, so that a corpus of any size costs what the rows drawn cost.

The stream's shards are shuffled by the seed, and its rows within a buffer that moves along it, by `datasets` itself; so
the rows are those near the beginning of some shards, not a sample of the whole. Knows nothing of how it was opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["draw_rows"]

_BUFFER = 10_000  # rows


def draw_rows(
    stream: Any, columns: Sequence[str], wanted: Mapping[str, set[Any]], *, samples: int, seed: int
) -> tuple[Any, int]:
    """The first rows of the shuffled stream that are wanted, and how many were looked at.

    Args:
        stream: a datasets.IterableDataset.
        columns: what to keep of a row.
        wanted: column → the values that a row may have there.
        samples: how many rows to draw; fewer are drawn where the stream ends.
        seed: of the shuffling.

    Returns:
        A datasets.Dataset in memory, and a number of rows.
    """
    import datasets

    looked_at = 0
    drawn: dict[str, list[Any]] = {column: [] for column in columns}

    def rows() -> Iterator[Mapping[str, Any]]:
        nonlocal looked_at
        for row in stream.shuffle(seed=seed, buffer_size=_BUFFER):
            looked_at += 1
            if all(row[column] in values for column, values in wanted.items()):
                yield row

    for _, row in zip(range(samples), rows(), strict=False):
        for column, values in drawn.items():
            values.append(row[column])
    return datasets.Dataset.from_dict(drawn), looked_at
