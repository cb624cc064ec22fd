"""How a command runs that torchrun or `accelerate launch` started several times: all compute, one tells.

Knows nothing of what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from adapterswap.errors import AdapterswapError
from adapterswap.processes import Processes, count_processes, first_to_tell, joined, leave

__all__ = ["one_voice", "together"]

_GRACE = 30  # seconds


@contextmanager
def one_voice() -> Iterator[None]:
    """Let one process tell an error.

    The others wait to be ended by the launcher, once the one that told has ended: it ends all when the first of them
    does, and that must not be before the error is printed. One that nobody ends knows that nobody else had the error.
    """
    try:
        yield
    except (AdapterswapError, click.UsageError):
        if not first_to_tell():
            time.sleep(_GRACE)
        raise


@contextmanager
def together(device: str) -> Iterator[Processes]:
    """Join the other processes, if there are any, and leave them at the end: see `joined`."""
    if count_processes() == 1:
        yield Processes()
        return
    with joined(device) as processes:
        yield processes
    leave()
