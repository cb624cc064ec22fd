"""Two partitions trained in turns: whose turn a step is, which rows it takes, and which parameters it may change.

A parameter whose turn it is not needs no gradient and so has none, and AdamW passes over parameters without a gradient:
weights, moments, and their count of steps stay as they are, bit for bit. (A gradient of zero would move them: by the
moments, and by weight decay.) Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from transformers import TrainerCallback

from adapterswap.planning.partitions import SIDES, Side
from adapterswap.training.targets import TrainingTargets

__all__ = ["RowsInTurns", "Turns", "side_of_step"]


def side_of_step(step: int, steps_per_switch: int) -> Side:
    """Whose turn step 0, 1, … is: the task begins."""
    return SIDES[step // steps_per_switch % 2]


class RowsInTurns(Sampler[int]):
    """The rows of a whole run, in order: those of a step are all of the side whose turn it is.

    Each side's rows come in an order drawn anew for each pass over them.

    Args:
        parts: rows of either side; the dataset holds the task's first.
        steps: of the run.
        rows_a_step: on all processes together.
        steps_per_switch: steps of one side before the other's turn.
        seed: of the orders.
    """

    def __init__(self, parts: Sequence[int], *, steps: int, rows_a_step: int, steps_per_switch: int, seed: int) -> None:
        self._rows = np.empty((steps, rows_a_step), np.int64)
        turns = np.arange(steps) // steps_per_switch % 2
        for side, (first, count) in enumerate(zip((0, parts[0]), parts, strict=True)):
            mine = turns == side
            drawn = _passes(count, int(mine.sum()) * rows_a_step, np.random.default_rng([seed, side]))
            self._rows[mine] = first + drawn.reshape(-1, rows_a_step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows.ravel().tolist())

    def __len__(self) -> int:
        return self._rows.size


def _passes(count: int, wanted: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """`wanted` numbers below `count`: one permutation of all after the other."""
    passes = [chance.permutation(count) for _ in range(-(-wanted // count))]
    return np.concatenate([np.empty(0, np.int64), *passes])[:wanted]


class Turns(TrainerCallback):  # type: ignore[misc]
    """Before each step, freezes one side's parameters and frees the other's.

    Args:
        model: the model in training, before anything wraps it for several processes.
        targets: whose sides tell the parameters apart.
        steps_per_switch: steps of one side before the other's turn.
    """

    def __init__(self, model: Any, targets: TrainingTargets, steps_per_switch: int) -> None:
        self._steps_per_switch = steps_per_switch
        self.parameters: dict[Side, list[Any]] = {side: [] for side in SIDES}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (side := targets.side_of(name)):
                self.parameters[side].append(parameter)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        active = side_of_step(state.global_step, self._steps_per_switch)
        for side, parameters in self.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(side == active)
