"""Process independent items in several threads. The first error, or the user's interrupt, stops them all.

Each thread reads, computes and writes its own items, so that one can read while another computes. Knows nothing of
tensors.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

__all__ = ["Stopped", "work_off"]

_Item = TypeVar("_Item")

Stopped = Callable[[], bool]


def work_off(items: Iterable[_Item], do: Callable[[_Item, Stopped], None], workers: int) -> None:
    """Call `do` for every item, in up to `workers` threads. Items are started in order.

    Args:
        items: the items, independent of each other.
        do: called with an item and a function that returns whether to stop. Its errors are raised here.
        workers: the number of threads, one or more.
    """
    waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            do(item, stopped.is_set)

    with ThreadPoolExecutor(workers) as pool:
        try:
            for finished in as_completed([pool.submit(run) for _ in range(workers)]):
                finished.result()
        finally:
            stopped.set()  # the other threads stop at their next block
