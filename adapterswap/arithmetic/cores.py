"""Leave cores to threads that read, hash and write while torch computes.

torch takes a thread for each core, and they spin while they wait for one of theirs that has none. Knows nothing of what
is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["spared_cores"]


@contextmanager
def spared_cores(count: int) -> Iterator[None]:
    """torch computes on `count` cores fewer than it would inside the block, and on one at least."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
