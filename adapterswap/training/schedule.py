"""The number of steps of a run, and the schedule of its learning rate. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from adapterswap.errors import FieldError
from adapterswap.training.recipe import TrainingOptions

__all__ = ["Schedule", "choose_schedule", "rows_a_step", "simultaneous_steps", "steps_between", "total_steps"]

Schedule = tuple[str, int, dict[str, Any]]


def rows_a_step(options: TrainingOptions, processes: int = 1) -> int:
    """The effective batch size: how many rows (or packed sequences) enter one update of the weights."""
    return options.batch_size * options.gradient_accumulation * processes


def steps_between(samples: int | None, options: TrainingOptions, processes: int = 1) -> int:
    """How many steps train on about `samples` rows, at least one; for example between two checkpoints."""
    return max(1, (samples or 0) // rows_a_step(options, processes))


def total_steps(rows: int, options: TrainingOptions, *, processes: int = 1) -> int:
    """How many steps `rows` rows (or packed sequences) take, as the transformers Trainer counts them."""
    if options.max_steps is not None:
        return options.max_steps
    batches = math.ceil(math.ceil(rows / options.batch_size) / processes)  # for each process
    return math.ceil(options.epochs * math.ceil(batches / options.gradient_accumulation))


def simultaneous_steps(
    parts: Sequence[int], options: TrainingOptions, *, steps_per_switch: int, processes: int = 1
) -> int:
    """How many steps a run with alternating sides has. An epoch ends once all rows of the larger side were used.

    The smaller side starts again when its rows are used up. Both sides have the same number of steps, unless max_steps
    is set.

    Args:
        parts: how many rows each side has.
    """
    if options.max_steps is not None:
        return options.max_steps
    steps_per_side = math.ceil(options.epochs * math.ceil(max(parts) / rows_a_step(options, processes)))
    return 2 * steps_per_switch * math.ceil(steps_per_side / steps_per_switch)


def choose_schedule(options: TrainingOptions, steps: int) -> Schedule:
    """The scheduler's name in transformers, its number of warmup steps, and its other arguments.

    Raises:
        FieldError: warmup and decay together are longer than the run.
    """
    warmup = _steps(options.warmup, steps)
    decay = _steps(options.decay, steps) if options.schedule == "warmup_stable_decay" else 0
    if warmup + decay > steps:
        lengths = f"{warmup} steps of training.warmup" + (f" and {decay} of training.decay" if decay else "")
        raise FieldError(
            f"{lengths} do not fit into the {steps} steps of the run",
            "Set them to shares, such as 0.1",
            parameter="training.warmup",
        )
    if options.schedule == "warmup_stable_decay":
        return options.schedule, warmup, {"num_decay_steps": decay, "decay_type": "linear"}
    return "constant_with_warmup" if options.schedule == "constant" else options.schedule, warmup, {}


def _steps(value: float, steps: int) -> int:
    """`value` as a number of steps. Below 1 it is a share of `steps`, rounded up as in transformers."""
    return math.ceil(value * steps) if value < 1 else int(value)
