"""Rows as tokens: what the model reads, which tokens the loss is taken on, and which rows were cut or dropped.

Tokens live in flat arrays (an Arrow table in the end), since a Python list per row would cost ten times the memory.
Where a completion begins follows TRL's rule: at the first token in which the tokens of the prompt alone and of prompt
and completion together differ. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.training.rendering import Example

__all__ = ["TokenCounts", "Tokens", "tokenize"]

_BATCH = 1000
_ALL = (("", None),)  # the whole text is trained on


@dataclass
class TokenCounts:
    """What tokenising did.

    Attributes:
        cut_off: rows dropped, because nothing to train on was left within max_length.
        split: rows longer than max_length that became several.
        longest: tokens of the longest row, before cutting.
        truncated: for each row that is left, whether it was cut to max_length.
        boundary_moved: likewise, whether its prompt alone ends in other tokens than it has before its completion, so
            that the model trains on a context that it does not see when it answers the prompt.
    """

    cut_off: int = 0
    split: int = 0
    longest: int = 0
    truncated: list[bool] = field(default_factory=list)
    boundary_moved: list[bool] = field(default_factory=list)

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.cut_off + other.cut_off,
            self.split + other.split,
            max(self.longest, other.longest),
            self.truncated + other.truncated,
            self.boundary_moved + other.boundary_moved,
        )


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens, end to end.

    Attributes:
        ids: token ids of all rows, int32, (tokens,).
        trained: whether the loss is taken on the token, (tokens,).
        starts: where each row begins in them, and where the last one ends, (rows + 1,).
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids and mask of one row."""
        span = slice(self.starts[index], self.starts[index + 1])
        return self.ids[span], self.trained[span]

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Tokens:
        """The given rows, in that order."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # Each token's place in the source: its row's start there, plus its place within the row.
        places = np.repeat(self.starts[:-1][rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Tokens(self.ids[places], self.trained[places], starts)

    def sha256(self) -> str:
        """A fingerprint of the rows and their order."""
        digest = hashlib.sha256()
        for item in fields(self):
            digest.update(np.ascontiguousarray(getattr(self, item.name)).tobytes())
        return digest.hexdigest()

    def dataset(self) -> Any:
        """A datasets.Dataset with the columns input_ids and labels (-100 where no loss is taken)."""
        import datasets
        import pyarrow  # type: ignore[import-untyped]

        labels = np.where(self.trained, self.ids, np.int32(-100))
        columns = {
            name: pyarrow.LargeListArray.from_arrays(self.starts, values)
            for name, values in (("input_ids", self.ids), ("labels", labels))
        }
        return datasets.Dataset(pyarrow.table(columns))

    @staticmethod
    def join(parts: Sequence[Tokens]) -> Tokens:
        """The rows of all `parts`, one after the other."""
        starts = [np.zeros(1, np.int64)]
        for part in parts:
            starts.append(part.starts[1:] + starts[-1][-1])
        return Tokens(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.trained for part in parts]),
            np.concatenate(starts),
        )


def tokenize(
    examples: Iterable[Example], tokenizer: Any, *, max_length: int, split_long: bool = False
) -> tuple[Tokens, TokenCounts]:
    """Tokenise rows, take out their masks, and cut them to `max_length`.

    A row that no chat template ended gets the end-of-sequence token. Rows with nothing left to train on are dropped and
    counted; the first token of a row is never trained on, since nothing predicts it. With `split_long`, a plain text
    that is too long becomes several rows; each begins with the last token of the one before, so no token is left out.
    """
    counts = TokenCounts()
    ids: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    examples = iter(examples)
    while batch := list(islice(examples, _BATCH)):
        encode = _encoder(batch, tokenizer)
        for example in batch:
            row, mask, moved = _row(example, encode, tokenizer.eos_token_id)
            counts.longest = max(counts.longest, len(row))
            if split_long and len(row) > max_length and example.trained == _ALL:
                counts.split += 1
                begins = range(0, len(row) - 1, max_length - 1)
                counts.truncated += [False] * len(begins)
                counts.boundary_moved += [False] * len(begins)
                ids.extend(row[begin : begin + max_length] for begin in begins)
                masks.extend(mask[begin : begin + max_length] for begin in begins)
                continue
            if not mask[1:max_length].any():
                counts.cut_off += 1
                continue
            counts.truncated.append(len(row) > max_length)
            counts.boundary_moved.append(moved)
            ids.append(row[:max_length])
            masks.append(mask[:max_length])
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    return Tokens(
        np.concatenate([np.zeros(0, np.int32), *ids]), np.concatenate([np.zeros(0, bool), *masks]), starts
    ), counts


def _encoder(batch: Sequence[Example], tokenizer: Any) -> dict[tuple[bool, str], list[int]]:
    """(chat?, text) → ids, for every text of the batch and every prefix, each tokenised once."""
    encoded: dict[tuple[bool, str], list[int]] = {}
    for chat in (False, True):
        texts: dict[str, None] = {}
        for example in batch:
            if example.chat == chat:
                texts[example.text] = None
                texts.update((prefix, None) for pair in example.trained for prefix in pair if prefix)
        if texts:
            # A chat template writes the special tokens itself.
            result = tokenizer(list(texts), add_special_tokens=not chat, return_attention_mask=False)
            encoded.update(((chat, text), row) for text, row in zip(texts, result["input_ids"], strict=True))
    return encoded


def _row(
    example: Example, encode: dict[tuple[bool, str], list[int]], eos: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
    """A row's ids and mask, and whether the boundary of a prompt moved."""
    ids = encode[example.chat, example.text]
    if not example.chat and ids[-1:] != [eos]:
        ids = [*ids, eos]
    mask = np.zeros(len(ids), bool)
    moved = False
    for before, after in example.trained:
        begin = 0
        if before:
            prefix = encode[example.chat, before]
            begin = _common(prefix, ids)
            # A tokenizer that ends every text with EOS has done so after the prompt too: that is no difference.
            moved |= begin < len(prefix) and prefix[begin:] != [eos]
        end = len(ids) if after is None else _common(encode[example.chat, after], ids)
        mask[begin:end] = True
    return np.array(ids, np.int32), mask, moved


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(index for index in range(length) if one[index] != other[index])
