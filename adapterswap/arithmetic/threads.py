"""Limit torch and BLAS to some of the processor's cores if other threads need the rest.

By default both start one thread per core, and threads that wait for a core spin. Knows nothing of what is computed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["cores", "map_in_threads", "one_blas_thread", "torch_threads"]

_THREADS = 4  # each keeps a few copies of the largest weight's factors in memory

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def cores() -> int:
    """The number of processor cores."""
    return os.cpu_count() or 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """In the block, and in threads started there, torch uses `count` threads, or fewer if it was limited before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, count)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """In the block numpy's matrix products use one thread, so that their last digits do not vary with the cores."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


def map_in_threads(compute: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`compute` of every item, in order, on one thread per core, up to four. Matrix products use one thread each.

    At most two items per thread are in progress or waiting, so memory does not grow with the number of items.
    """
    threads = min(_THREADS, cores())
    waiting: deque[Future[_Result]] = deque()
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(compute, item))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
