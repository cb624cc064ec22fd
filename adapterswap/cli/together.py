"""Run a command in several processes, started by torchrun or `accelerate launch`: all compute, one prints.

Knows nothing of what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from adapterswap.errors import AdapterswapError
from adapterswap.processes import Processes, count_processes, first_to_report, joined, leave

__all__ = ["one_voice", "together"]

_GRACE = 30  # seconds


@contextmanager
def one_voice() -> Iterator[None]:
    """Let only one process print an error.

    The launcher stops all processes as soon as one of them exits, so the others wait until the error is printed. A
    process that is still running after the wait is the only one with the error, and raises it.
    """
    try:
        yield
    except (AdapterswapError, click.UsageError):
        if not first_to_report():
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
