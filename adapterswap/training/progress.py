"""Progress on stderr: a bar at a terminal, a line now and then in a log. Knows nothing of what is trained."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Bar"]

_LOG_EVERY = 60.0  # seconds between lines, where stderr is no terminal


class Bar:
    """Steps, loss and tokens per second; with `shown=False` it does nothing. Use as a context manager."""

    def __init__(self, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._logs = shown and not self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not shown or self._logs,
            transient=True,
        )
        self._task: Any = None
        self._steps = self._done = self._tokens = 0
        self._since = self._told = time.monotonic()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def phase(self, name: str) -> None:
        """Say what is being done, where its length is not known."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=None, numbers="")

    def begin(self, steps: int, done: int, tokens: int) -> None:
        """Start counting steps, of which some may be done, and tokens."""
        self.phase("training")
        self._progress.update(self._task, total=steps, completed=done)
        self._steps, self._done, self._tokens = steps, done, tokens
        self._since = self._told = time.monotonic()

    def step(self, done: int) -> None:
        self._done = done
        self._progress.update(self._task, completed=done)

    def loss(self, value: float, tokens: int) -> None:
        """Show the loss, and the rate at which `tokens` grew."""
        now = time.monotonic()
        rate = (tokens - self._tokens) / max(now - self._since, 1e-9)
        numbers = f"loss {value:.3f}  {rate:,.0f} tokens/s"
        self._progress.update(self._task, numbers=numbers)
        if self._logs and now - self._told >= _LOG_EVERY:
            self._told = now
            self._console.print(f"step {self._done:,} of {self._steps:,}  {numbers}", highlight=False)
