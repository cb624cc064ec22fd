"""Hold torch to some of the cores, where other threads need the rest.

torch takes a thread for each core, and they spin while they wait for one of theirs that has none. Knows nothing of what
is computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["cores", "torch_threads"]


def cores() -> int:
    """How many there are."""
    return os.cpu_count() or 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside the block, and in threads begun there, torch computes on `count` threads, or on fewer if it did before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, count)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
