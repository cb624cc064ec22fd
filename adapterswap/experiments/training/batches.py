"""Less to compute in a step: rows of similar length side by side, a batch in parts, logits only where there is a label.

None of this changes which rows a step has, so losses stay equal up to rounding. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from accelerate.data_loader import SeedableRandomSampler
from numpy.typing import NDArray
from torch.utils.data import Sampler


class RowsInSteps(Sampler[int]):
    """The Trainer's own random order, in which the rows of each step are sorted by length.

    The batches of a step, and the processes that compute them, then need less padding.

    Args:
        lengths: tokens of each row.
        rows: how many rows a step has, on all processes together.
        seed: for shuffling.
    """

    def __init__(self, lengths: NDArray[np.int64], *, rows: int, seed: int) -> None:
        self._lengths, self._rows = lengths, rows
        self._random = SeedableRandomSampler(range(len(lengths)), data_seed=seed)

    def set_epoch(self, epoch: int) -> None:
        self._random.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        order = np.fromiter(self._random, np.int64, len(self))
        for start in range(0, len(order), self._rows):
            yield from by_length(order[start : start + self._rows], self._lengths).tolist()

    def __len__(self) -> int:
        return len(self._lengths)


def by_length(rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of each step (…, rows), sorted by length; equally long rows keep their order."""
    return np.take_along_axis(rows, np.argsort(lengths[rows], axis=-1, kind="stable"), axis=-1)


@contextmanager
def only_labelled(backbone: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inputs for a model with TRL's fused head, which then computes logits only where there is a label.

    TRL does so by itself where it has Triton; elsewhere it computes the logits of every token. Here the backbone no
    longer returns the other tokens' states: hidden states (1, labelled tokens, width), beside as many labels.
    """
    labels = inputs["labels"][:, 1:]
    labelled = labels != -100

    def keep(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, :-1][labelled].unsqueeze(0)
        return output

    others = {name: value for name, value in inputs.items() if name != "labels"}
    handle = backbone.register_forward_hook(keep)
    try:
        yield {**others, "shift_labels": labels[labelled].unsqueeze(0)}
    finally:
        handle.remove()
