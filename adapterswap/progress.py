"""Progress on stderr: bars at a terminal, and in a log a line every ten seconds. For the commands and for training.

Knows what is counted, how fast, and how long it will take; nothing of what is done. Where stderr is not a terminal, a
thread writes the lines, so that a step that takes minutes is not silent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Progress", "ProgressRow", "duration", "rate_text"]

FIRST_LINE_S = 5.0
LINE_EVERY_S = 10.0
_TERMINALS = {"FORCE_COLOR", "TTY_COMPATIBLE"}  # environment variables


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def duration(seconds: float) -> str:
    """A number of seconds in words: `40 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def rate_text(per_second: float) -> str:
    """A rate in the unit that gives it a number above 1: `3.2/s`, `14/min`, `2.5/h`."""
    for factor, unit in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:,.{0 if per_second * factor >= 10 else 1}f}/{unit}"
    return f"{per_second * 3600:.1f}/h"


class ProgressRow:
    """One thing that is counted, or whose end is not known. Made by `Progress.row`."""

    def __init__(self, owner: Progress, name: str, total: int | None) -> None:
        self._owner = owner
        self.begin(name, total)

    def begin(self, name: str, total: int | None = None, *, done: int = 0, amount: float = 0) -> None:
        """Count something else from now on.

        Args:
            name: what is counted, or what is done now.
            total: how many there are; None where that is not known.
            done: of them, those that were done before; they do not count for the rate.
            amount: of something else that grows, such as tokens; see `rate_of`.
        """
        self.name, self.total, self.done, self.note = name, total, done, ""
        self._first, self._amount, self._since = done, amount, time.monotonic()
        self._owner._changed(self)

    def update(self, done: int, total: int | None = None, *, name: str | None = None, note: str | None = None) -> None:
        """Say how many are done; `note` is shown behind the numbers."""
        self.done, self.total = done, self.total if total is None else total
        self.name = self.name if name is None else name
        self.note = self.note if note is None else note
        self._owner._changed(self)

    def rate_of(self, amount: float) -> float:
        """How much of it a second there was since `begin`."""
        return (amount - self._amount) / max(time.monotonic() - self._since, 1e-9)

    @property
    def pace(self) -> str:
        """The rate, the time left and the note, as far as they are known."""
        took, steps = time.monotonic() - self._since, self.done - self._first
        parts = []
        if steps > 0 and took > 0:
            parts.append(rate_text(steps / took))
            if self.total is not None and self.total > self.done:
                parts.append(f"{duration((self.total - self.done) * took / steps)} left")
        return ", ".join([*parts, *([self.note] if self.note else [])])

    def __str__(self) -> str:
        """The line for a log."""
        if self.total is None and self.done == 0:
            return f"{self.name}: {duration(time.monotonic() - self._since)} so far"
        count = f"{self.done:,}" + (f" of {self.total:,}" if self.total is not None else "")
        return f"{self.name}: {count}" + (f", {self.pace}" if self.pace else "")


class Progress:
    """Rows of progress on stderr, as a context manager; with `shown=False` it shows nothing.

    At a terminal each row is a bar, and all vanish at the end. Elsewhere the rows are one line: after five seconds, and
    then every ten.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self._stream, self._rows = sys.stderr, list[ProgressRow]()
        self._bars: RichProgress | None = None
        self._tasks: dict[ProgressRow, TaskID] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._began = self._last = time.monotonic()
        self._shown, self._started = shown, False

    def __enter__(self) -> Self:
        if not self._shown:
            return self
        # rich takes these for a terminal too. It costs as much as a small composition, so logs do without it.
        if (self._stream.isatty() or _TERMINALS & os.environ.keys()) and (console := _console()).is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bars = Progress(*columns, TextColumn("{task.fields[pace]}"), console=console, transient=True)
            self._bars.start()
        else:
            self._thread = threading.Thread(target=self._write_lines, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._bars is not None:
            self._bars.stop()

    def row(self, name: str, total: int | None = None) -> ProgressRow:
        """Another row."""
        row = ProgressRow(self, name, total)
        self._rows.append(row)
        return row

    def _changed(self, row: ProgressRow) -> None:
        if self._bars is not None:
            if row not in self._tasks:
                self._tasks[row] = self._bars.add_task(row.name, total=row.total, pace="")
            self._bars.update(
                self._tasks[row], total=row.total, completed=row.done, description=row.name, pace=row.pace
            )
        elif self._thread is not None:
            self._write_if_due()

    def _write_if_due(self) -> None:
        with self._lock:
            now = time.monotonic()
            wait = min(LINE_EVERY_S, FIRST_LINE_S) if not self._started else LINE_EVERY_S
            if now - self._last < wait or not self._rows:
                return
            self._last, self._started = now, True
            with contextlib.suppress(OSError, ValueError):  # a stream that is closed by now
                self._stream.write("; ".join(map(str, self._rows)) + "\n")
                self._stream.flush()

    def _write_lines(self) -> None:
        """In a thread of its own, for steps that report nothing for a long time."""
        while not self._stop.wait(0.5):
            self._write_if_due()
