"""Rendered rows → tokens, and those of them that the loss is computed on; rows that are cut are counted.

Tokens are kept in flat arrays, and finally in an Arrow table, because a list for each row would take ten times the
memory. As in TRL, a completion begins at the first token in which the tokens of the prompt alone differ from those of
prompt and completion together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments.training.texts import Example
from adapterswap.experiments.training.turns import common_length

_BATCH = 1000


@dataclass
class TokenCounts:
    """Counts of what tokenising changed.

    Attributes:
        cut_off: how many rows were dropped because max_length left nothing to train on.
        split: how many rows longer than max_length were split into several.
        longest: how many tokens the longest row had before it was cut.
        truncated: for each remaining row, whether it was cut to max_length.
        boundary_moved: for each remaining row, whether its prompt ends in other tokens alone than with its completion.
            The model then trains on a context that it does not see when it answers the prompt.
        date: the date that a chat template wrote, if one did.
        without_end: for each remaining row, whether what is trained on last has no token at which the model stops.
    """

    cut_off: int = 0
    split: int = 0
    longest: int = 0
    truncated: list[bool] = field(default_factory=list)
    boundary_moved: list[bool] = field(default_factory=list)
    without_end: list[bool] = field(default_factory=list)
    date: str | None = None

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.cut_off + other.cut_off,
            self.split + other.split,
            max(self.longest, other.longest),
            self.truncated + other.truncated,
            self.boundary_moved + other.boundary_moved,
            self.without_end + other.without_end,
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of all rows, one row after the other.

    Attributes:
        ids: token ids, int32, (tokens,).
        trained: whether the loss is computed on each token, (tokens,).
        starts: where each row begins, and where the last one ends, (rows + 1,).
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        return int(np.diff(self.starts).max(initial=0))

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids and mask of one row."""
        span = slice(self.starts[index], self.starts[index + 1])
        return self.ids[span], self.trained[span]

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Tokens:
        """The given rows, in that order."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # The index of each token in `ids`: the start of its row, plus its index within the row.
        places = np.repeat(self.starts[:-1][rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Tokens(self.ids[places], self.trained[places], starts)

    def sha256(self) -> str:
        """A fingerprint of the rows and their order."""
        digest = hashlib.sha256()
        for item in fields(self):
            digest.update(np.ascontiguousarray(getattr(self, item.name)).tobytes())
        return digest.hexdigest()

    def dataset(self) -> Any:
        """A datasets.Dataset with the columns input_ids and labels (-100 where no loss is computed)."""
        import datasets
        import pyarrow  # type: ignore[import-untyped]

        labels = np.where(self.trained, self.ids, np.int32(-100))
        columns = {
            "input_ids": pyarrow.LargeListArray.from_arrays(self.starts, self.ids),
            "labels": pyarrow.LargeListArray.from_arrays(self.starts, labels),
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
    examples: Iterable[Example],
    tokenizer: Any,
    *,
    max_length: int,
    split_long: bool = False,
    ends: Collection[int] = (),
) -> tuple[Tokens, TokenCounts]:
    """Tokenise rows, mark the tokens to train on, and cut rows to `max_length`.

    Rows without a chat template get the end-of-sequence token; others that have none of `ends` are counted. A text that
    begins with the token for that gets no second one. Rows with nothing left to train on are dropped and counted. The
    first token of a row is never trained on, because nothing predicts it. With `split_long`, a plain text that is too
    long becomes several rows; each begins with the last token of the row before, so no token is lost.
    """
    counts = TokenCounts()
    ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    masks: list[NDArray[np.bool_]] = [np.zeros(0, bool)]
    examples = iter(examples)
    while True:
        batch = list(islice(examples, _BATCH))
        if not batch:
            break
        encode = _encoder(batch, tokenizer)
        for example in batch:
            row, mask, moved = _row(example, encode, tokenizer.eos_token_id)
            has_no_end = example.chat and bool(ends) and not _ends(row, mask, ends)
            counts.longest = max(counts.longest, len(row))

            # Several rows of a plain text. Each begins with the token before it, from which its first is predicted.
            if split_long and len(row) > max_length and example.trained == ((0, len(example.text)),):
                counts.split += 1
                begins = range(0, len(row) - 1, max_length - 1)
                counts.truncated += [False] * len(begins)
                counts.boundary_moved += [False] * len(begins)
                counts.without_end += [False] * len(begins)
                ids.extend(row[begin : begin + max_length] for begin in begins)
                masks.extend(mask[begin : begin + max_length] for begin in begins)
                continue

            if not mask[1:max_length].any():
                counts.cut_off += 1
                continue
            counts.truncated.append(len(row) > max_length)
            counts.boundary_moved.append(moved)
            counts.without_end.append(has_no_end)
            ids.append(row[:max_length])
            masks.append(mask[:max_length])

    # The empty arrays at the beginning make the first of the sums of lengths 0.
    starts = np.cumsum([len(row) for row in ids]).astype(np.int64)
    return Tokens(np.concatenate(ids), np.concatenate(masks), starts), counts


def _encoder(batch: Sequence[Example], tokenizer: Any) -> dict[tuple[bool, str], list[int]]:
    """(whether it is a chat, text) → ids, for each text and prefix of the batch, tokenised once."""
    # Each text, and what precedes the beginning and the end of what is trained on.
    texts: dict[tuple[bool, str], None] = {}
    for example in batch:
        texts[example.chat, example.text] = None
        for begin, end in example.trained:
            if begin:
                texts[example.chat, example.text[:begin]] = None
            texts[example.chat, example.text[:end]] = None

    # A chat template writes the special tokens itself. A text that begins with the first of them has no need of it.
    with_special: list[tuple[bool, str]] = []
    without: list[tuple[bool, str]] = []
    bos = tokenizer.bos_token
    for is_chat, text in texts:
        if is_chat or (bos and text.startswith(str(bos))):
            without.append((is_chat, text))
        else:
            with_special.append((is_chat, text))

    encoded: dict[tuple[bool, str], list[int]] = {}
    for keys, adds_special in ((with_special, True), (without, False)):
        if keys:
            plain = [text for _, text in keys]
            result = tokenizer(plain, add_special_tokens=adds_special, return_attention_mask=False)
            encoded.update(zip(keys, result["input_ids"], strict=True))
    return encoded


def _ends(ids: NDArray[np.int32], mask: NDArray[np.bool_], ends: Collection[int]) -> bool:
    """Whether the last run of trained tokens has one at which the model stops."""
    trained = np.flatnonzero(mask)
    if not len(trained):
        return True
    gaps = np.flatnonzero(np.diff(trained) > 1)
    last = trained
    if len(gaps):
        last = trained[gaps[-1] + 1 :]
    return not frozenset(ends).isdisjoint(ids[last].tolist())


def _row(
    example: Example, encode: dict[tuple[bool, str], list[int]], eos: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
    """The ids and the mask of a row, and whether the boundary of a prompt moved."""
    ids = encode[example.chat, example.text]
    if not example.chat and ids[-1:] != [eos]:
        ids = [*ids, eos]
    mask = np.zeros(len(ids), bool)
    moved = False
    for first, last in example.trained:
        begin, end = 0, len(ids)
        if first:
            prefix = encode[example.chat, example.text[:first]]
            begin = common_length(prefix, ids)
            # Some tokenizers end every text with EOS, also the prompt alone. That is not a moved boundary.
            moved |= begin < len(prefix) and prefix[begin:] != [eos]
        if last < len(example.text):
            end = common_length(encode[example.chat, example.text[:last]], ids)
        mask[begin:end] = True
    return np.array(ids, np.int32), mask, moved
