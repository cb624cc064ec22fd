"""How a command runs that torchrun or `accelerate launch` started several times: all compute, one tells.

Knows nothing of what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from adapterswap.errors import AdapterswapError
from adapterswap.processes import Processes, count_processes, first_to_tell, joined, leave

__all__ = ["together", "told_once"]


@contextmanager
def told_once() -> Iterator[None]:
    """Let one process tell an error; the others end in silence."""
    try:
        yield
    except (AdapterswapError, click.UsageError) as error:
        if not first_to_tell():
            raise click.exceptions.Exit(getattr(error, "exit_code", 1)) from None
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
