"""Restore the process state that trainers change: random generators, loggers, environment variables, progress bars.

Knows nothing of training itself.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["isolated"]


@contextmanager
def isolated() -> Iterator[None]:
    """Silence the libraries' progress bars and logs inside the block, and restore everything they changed after it.

    Restored: the random generators (Python, NumPy, torch on CPU and CUDA), the environment, transformers' verbosity and
    progress bars, datasets' progress bars, warning filters. accelerate's process-wide state is reset.
    """
    import datasets
    import numpy
    import torch
    import transformers.utils.logging as transformers_logging
    from accelerate.state import AcceleratorState

    generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    environment = dict(os.environ)
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    data_bars = datasets.are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 and TRL 1.16 use names that transformers 5.23 renamed; users can do nothing about it.
            warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
            yield
    finally:
        random.setstate(generators[0])
        numpy.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        if not data_bars:
            datasets.enable_progress_bars()
        AcceleratorState._reset_state(reset_partial_state=True)
