"""Restore the state of the process and the model: modes, random generators, loggers and progress bars.

Knows nothing of tasks and scores.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

__all__ = ["compiled_once", "restored_modes", "seeded", "silenced"]


@contextmanager
def restored_modes(model: Any) -> Iterator[None]:
    """Restore the modes of a model's modules; the harness leaves them in eval mode."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def silenced() -> Iterator[None]:
    """Silence the harness's bars, prints and warnings (it warns of models passed as objects); errors stay."""
    import tqdm  # type: ignore[import-untyped]
    from lm_eval.api import metrics, task

    class NoBar(tqdm.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    logger, bar = logging.getLogger("lm_eval"), tqdm.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    task.tqdm = tqdm.tqdm = NoBar  # bootstrapped standard errors have a bar of their own, and print
    metrics.print = lambda *_: None
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = tqdm.tqdm = bar
        vars(metrics).pop("print", None)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Compile each template of a task once; the harness compiles it for every field of every document."""
    from lm_eval.utils import env

    env.from_string = lru_cache(maxsize=256)(env.from_string)
    try:
        yield
    finally:
        del env.from_string  # makes the class's own method visible again


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch inside the block, and restore their states afterwards."""
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
