"""A progress bar on stderr: steps, loss and tokens per second. Knows nothing of what is trained."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Bar"]


class Bar:
    """A rich progress bar; with `shown=False` it does nothing. Use as a context manager."""

    def __init__(self, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
            transient=True,
        )
        self._task: Any = None
        self._since = 0.0
        self._tokens = 0

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
        """Start counting steps."""
        self.phase("training")
        self._progress.update(self._task, total=steps, completed=done)
        self._since, self._tokens = time.monotonic(), tokens

    def step(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def loss(self, value: float, tokens: int) -> None:
        """Show the loss, and the rate at which `tokens` grew."""
        rate = (tokens - self._tokens) / max(time.monotonic() - self._since, 1e-9)
        self._progress.update(self._task, numbers=f"loss {value:.3f}  {rate:,.0f} tokens/s")
