"""Leave the process and the model as they were: modes, random generators, loggers and progress bars.

Knows nothing of tasks and scores.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["restored_modes", "seeded", "silenced"]


@contextmanager
def restored_modes(model: Any) -> Iterator[None]:
    """The harness calls `model.eval()`, once, and leaves it so."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def silenced() -> Iterator[None]:
    """No bars, and no remarks on what is done here on purpose (a model passed as an object); errors stay."""
    from lm_eval.api import task

    logger, bar = logging.getLogger("lm_eval"), task.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    task.tqdm = lambda iterable, total: iterable
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = bar


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch inside the block, and put their states back after it."""
    import numpy
    import torch

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)
