"""How many steps a run has, on how many processes, and what the learning rate does in them. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from adapterswap.errors import FieldError
from adapterswap.training.recipe import TrainingOptions

__all__ = ["Schedule", "choose_schedule", "rows_a_step", "simultaneous_steps", "steps_between", "total_steps"]

Schedule = tuple[str, int, dict[str, Any]]


def rows_a_step(options: TrainingOptions, processes: int = 1) -> int:
    """Rows (or packed sequences) that one update of the weights is computed on: the effective batch size."""
    return options.batch_size * options.gradient_accumulation * processes


def steps_between(samples: int | None, options: TrainingOptions, processes: int = 1) -> int:
    """Steps in which about so many rows are trained on, one at least: from one checkpoint to the next, say."""
    return max(1, (samples or 0) // rows_a_step(options, processes))


def total_steps(rows: int, options: TrainingOptions, *, processes: int = 1) -> int:
    """Steps for `rows` rows (or packed sequences), as the transformers Trainer counts them."""
    if options.max_steps is not None:
        return options.max_steps
    batches = math.ceil(math.ceil(rows / options.batch_size) / processes)  # to each process
    return math.ceil(options.epochs * math.ceil(batches / options.gradient_accumulation))


def simultaneous_steps(
    parts: Sequence[int], options: TrainingOptions, *, steps_per_switch: int, processes: int = 1
) -> int:
    """Steps of a run that takes turns: an epoch is over when the side with more rows has been seen once.

    The other side starts over meanwhile. Both have the same number of steps, unless max_steps says otherwise.

    Args:
        parts: rows of either side.
    """
    if options.max_steps is not None:
        return options.max_steps
    of_a_side = math.ceil(options.epochs * math.ceil(max(parts) / rows_a_step(options, processes)))
    return 2 * steps_per_switch * math.ceil(of_a_side / steps_per_switch)


def choose_schedule(options: TrainingOptions, steps: int) -> Schedule:
    """The scheduler's name in transformers, its steps of warmup, and its further arguments.

    Raises:
        FieldError: warmup and decay together are longer than the run.
    """
    warmup = _steps(options.warmup, steps)
    decay = _steps(options.decay, steps) if options.schedule == "warmup_stable_decay" else 0
    if warmup + decay > steps:
        what = f"{warmup} steps of training.warmup" + (f" and {decay} of training.decay" if decay else "")
        raise FieldError(
            f"{what} do not fit into the {steps} steps of the run",
            "Write them as shares, such as 0.1",
            parameter="training.warmup",
        )
    if options.schedule == "warmup_stable_decay":
        return options.schedule, warmup, {"num_decay_steps": decay, "decay_type": "linear"}
    return "constant_with_warmup" if options.schedule == "constant" else options.schedule, warmup, {}


def _steps(value: float, steps: int) -> int:
    """A share of `steps` below 1 (rounded up, as transformers does), else a number of steps."""
    return math.ceil(value * steps) if value < 1 else int(value)
