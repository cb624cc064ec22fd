"""Python's search for cycles of objects, made rare while a command handles very many of them.

Knows nothing of commands.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rare_collections"]

_OBJECTS = 200_000  # new objects between two searches; Python's default is 700


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for cycles less often: a mixture's 18,000 modules make millions of objects that all stay in use.

    It saves a quarter of the processor time there. Not for commands that run torch, whose tensors may lie in cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
