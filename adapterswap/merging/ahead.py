"""Run an iterator ahead of its consumer, in a thread of its own: reading, arithmetic and writing overlap.

Chained, `ahead(compute(ahead(read())))` is a pipeline whose stages hold a few items each. Knows nothing of tensors.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

__all__ = ["ahead"]

_Item = TypeVar("_Item")


def ahead(items: Iterable[_Item], depth: int) -> Generator[_Item, None, None]:
    """Yield the items, of which up to `depth` are made before they are asked for.

    An exception of the producer is raised at the consumer. When the consumer stops early, so does the producer, and
    `items` is closed before this generator is.
    """
    slots: queue.Queue[tuple[_Item | None, BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: _Item | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                slots.put((item, error), timeout=0.05)
            except queue.Full:
                continue
            return

    def produce() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    break
        except BaseException as error:
            put(None, error)
        else:
            put(None, StopIteration())
        finally:
            if isinstance(items, Generator):
                items.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, error = slots.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # there is an item wherever there is no error
            del item
    finally:
        stopped.set()
        thread.join()
