"""A first-come, first-served queue for one model, and an event per visitor that stops their running work.

Knows nothing of models or pages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns", "Visitors"]


class Turns:
    """A lock that is acquired in the order of requests.

    A long task that holds it can let others go first between its steps with `step_aside`.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False

    @property
    def waiting(self) -> int:
        """The number of waiting threads."""
        return len(self._waiting)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the lock and hold it inside the block."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def step_aside(self) -> None:
        """Let everyone who is waiting now go first; call it only while holding the lock."""
        if self._waiting:
            self._release()
            self._acquire()

    def _acquire(self) -> None:
        with self._guard:
            if not self._held and not self._waiting:
                self._held = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def _release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()  # the lock passes to the next thread
            else:
                self._held = False


class Visitors:
    """For each visitor, the event that stops what is running for them."""

    def __init__(self) -> None:
        self._ends: dict[str, threading.Event] = {}
        self._guard = threading.Lock()

    @contextmanager
    def work(self, visitor: str) -> Iterator[threading.Event]:
        """Stop what is running for the visitor, and yield the event that stops the work inside the block."""
        self.leave(visitor)
        self._ends[visitor] = mine = threading.Event()
        try:
            yield mine
        finally:
            mine.set()
            with self._guard:
                if self._ends.get(visitor) is mine:
                    del self._ends[visitor]

    def leave(self, visitor: str) -> None:
        """Stop what is running for the visitor."""
        with self._guard:
            if (before := self._ends.pop(visitor, None)) is not None:
                before.set()
