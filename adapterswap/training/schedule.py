"""How many steps a run has, and what the learning rate does in them. Pure arithmetic."""

from __future__ import annotations

import math
from typing import Any

from adapterswap.errors import AdapterswapError
from adapterswap.training.recipe import TrainingOptions

__all__ = ["Schedule", "choose_schedule", "total_steps"]

Schedule = tuple[str, int, dict[str, Any]]


def total_steps(rows: int, options: TrainingOptions) -> int:
    """Steps for `rows` rows (or packed sequences), as the transformers Trainer counts them."""
    if options.max_steps is not None:
        return options.max_steps
    batches = math.ceil(rows / options.batch_size)
    return math.ceil(options.epochs * math.ceil(batches / options.gradient_accumulation))


def choose_schedule(options: TrainingOptions, steps: int) -> Schedule:
    """The scheduler's name in transformers, its steps of warmup, and its further arguments.

    Raises:
        AdapterswapError: warmup and decay together are longer than the run.
    """
    warmup = _steps(options.warmup, steps)
    decay = _steps(options.decay, steps) if options.schedule == "warmup_stable_decay" else 0
    if warmup + decay > steps:
        what = f"{warmup} steps of training.warmup" + (f" and {decay} of training.decay" if decay else "")
        raise AdapterswapError(f"{what} do not fit into the {steps} steps of the run", "Give shares, such as 0.1")
    if options.schedule == "warmup_stable_decay":
        return options.schedule, warmup, {"num_decay_steps": decay, "decay_type": "linear"}
    return "constant_with_warmup" if options.schedule == "constant" else options.schedule, warmup, {}


def _steps(value: float, steps: int) -> int:
    """A share of `steps` below 1 (rounded up, as transformers does), else a number of steps."""
    return math.ceil(value * steps) if value < 1 else int(value)
