"""Hold torch and BLAS to some of the processor's cores, where other threads need the rest.

Both take a thread for each core, and these spin while they wait for one of theirs that has none. Knows nothing of what
is computed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["cores", "map_in_threads", "one_blas_thread", "torch_threads"]

_THREADS = 4  # each holds a few copies of the largest weight's factors

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Inside the block numpy's products of matrices take one thread each; their last digits then depend on no count."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


def map_in_threads(compute: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`compute` of every item, in order, on a thread for each core, up to four; products of matrices take one each.

    No more than two items for each thread are computed or wait to be taken, so memory does not grow with their number.
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
