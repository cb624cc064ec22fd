"""Draw rows from a source that is read as a stream, so that the cost depends on the rows drawn, not on the corpus.

`datasets` shuffles the order of the shards with the seed, and the rows within a moving buffer. So the rows come from
the beginning of some shards; they are not a sample of the whole. Knows nothing of how the stream was opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["draw_rows"]

_BUFFER = 10_000  # rows


def draw_rows(
    stream: Any, columns: Sequence[str], allowed: Mapping[str, set[Any]], *, samples: int, seed: int
) -> tuple[Any, int]:
    """The first matching rows of the shuffled stream, and how many rows were read.

    Args:
        stream: a datasets.IterableDataset.
        columns: the columns to keep.
        allowed: column → the values that a row may have in it.
        samples: how many rows to draw; fewer if the stream ends before.
        seed: for shuffling.

    Returns:
        A datasets.Dataset in memory, and the number of rows that were read.
    """
    import datasets

    rows_read = 0
    drawn: dict[str, list[Any]] = {column: [] for column in columns}

    def rows() -> Iterator[Mapping[str, Any]]:
        nonlocal rows_read
        for row in stream.shuffle(seed=seed, buffer_size=_BUFFER):
            rows_read += 1
            if all(row[column] in values for column, values in allowed.items()):
                yield row

    for _, row in zip(range(samples), rows(), strict=False):
        for column, values in drawn.items():
            values.append(row[column])
    return datasets.Dataset.from_dict(drawn), rows_read
