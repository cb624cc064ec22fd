"""Train two partitions in turns: which side a step trains, on which rows, and which parameters it may change.

The parameters of the other side are frozen and have no gradient. AdamW skips parameters without a gradient, so their
weights, moments and step counts stay the same, bit for bit. A gradient of zero would change them, through the moments
and weight decay. Importing this module imports torch and transformers.
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
    """The side that a step trains, counted from 0. The task side comes first."""
    return SIDES[step // steps_per_switch % 2]


class RowsInTurns(Sampler[int]):
    """The order of the rows of a whole run. All rows of a step belong to the side that the step trains.

    The rows of a side are shuffled again for each pass over them.

    Args:
        parts: how many rows each side has; in the dataset the task's come first.
        steps: how many steps the run has.
        rows_a_step: how many rows a step has, on all processes together.
        steps_per_switch: how many steps one side trains before the other takes over.
        seed: for shuffling.
    """

    def __init__(self, parts: Sequence[int], *, steps: int, rows_a_step: int, steps_per_switch: int, seed: int) -> None:
        self._rows = np.empty((steps, rows_a_step), np.int64)
        turns = np.arange(steps) // steps_per_switch % 2
        for side, (first, count) in enumerate(zip((0, parts[0]), parts, strict=True)):
            own_steps = turns == side
            drawn = _passes(count, int(own_steps.sum()) * rows_a_step, np.random.default_rng([seed, side]))
            self._rows[own_steps] = first + drawn.reshape(-1, rows_a_step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows.ravel().tolist())

    def __len__(self) -> int:
        return self._rows.size


def _passes(count: int, length: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """`length` numbers below `count`, from one permutation after the other."""
    passes = [chance.permutation(count) for _ in range(-(-length // count))]
    return np.concatenate([np.empty(0, np.int64), *passes])[:length]


class Turns(TrainerCallback):  # type: ignore[misc]
    """Before each step, freezes the parameters of one side and unfreezes those of the other.

    Args:
        model: the model, before it is wrapped for several processes.
        targets: says which side a parameter belongs to.
        steps_per_switch: how many steps one side trains before the other takes over.
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
