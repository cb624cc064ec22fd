"""Progress on stderr for commands and training: bars at a terminal, a line every ten seconds in a log.

If stderr is not a terminal, a thread writes the lines, so a step that takes minutes is not silent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from adapterswap.kit.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


FIRST_LINE_S = 5.0
LINE_EVERY_S = 10.0
_TERMINALS = {"FORCE_COLOR", "TTY_COMPATIBLE"}  # environment variables


def duration(seconds: float) -> str:
    """A number of seconds in words: `40 s`, `3 min 20 s`, `3.4 h`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if not rest:
        return f"{minutes} min"
    return f"{minutes} min {rest} s"


def rate_text(per_second: float) -> str:
    """A rate per second, minute or hour, in the first unit that makes it 1 or more: `3.2/s`, `14/min`, `2.5/h`."""
    for factor, unit in ((1, "s"), (60, "min")):
        rate = per_second * factor
        if rate >= 10:
            return f"{rate:,.0f}/{unit}"
        if rate >= 1:
            return f"{rate:.1f}/{unit}"
    return f"{per_second * 3600:.1f}/h"


class ProgressRow:
    """One line of progress, with or without a known total. Made by `Progress.row`."""

    def __init__(self, owner: Progress, name: str, total: int | None, *, steady: bool = True) -> None:
        self._owner, self._steady = owner, steady
        self.begin(name, total)

    def begin(self, name: str, total: int | None = None, *, done: int = 0, amount: float = 0) -> None:
        """Start counting something else.

        Args:
            name: what is counted, or the current step.
            total: how many there are; None if unknown.
            done: how many were finished earlier; they do not count towards the rate.
            amount: the current value of another quantity that grows, such as tokens; see `rate_of`.
        """
        self.name, self.total, self.done, self.note = printable(name), total, done, ""
        self._part = 0.0
        self._first, self._amount, self._since = done, amount, time.monotonic()
        self._owner._changed(self)

    def update(
        self,
        done: int,
        total: int | None = None,
        *,
        name: str | None = None,
        note: str | None = None,
        part: float = 0.0,
    ) -> None:
        """Set how many are done.

        Args:
            done: the number.
            total: how many there are, if that has changed.
            name: what is counted, or the current step, if that has changed.
            note: a text that is shown after the numbers.
            part: the share of the current one that is done, from 0 to 1, for the time left.
        """
        self.done, self._part = done, part
        if total is not None:
            self.total = total
        if name is not None:
            self.name = printable(name)
        if note is not None:
            self.note = note
        self._owner._changed(self)

    def rate_of(self, amount: float) -> float:
        """How fast the other quantity has grown since `begin`, per second, now that it is `amount`."""
        return (amount - self._amount) / max(time.monotonic() - self._since, 1e-9)

    @property
    def elapsed(self) -> str:
        """The time since `begin`, in words."""
        return duration(time.monotonic() - self._since)

    @property
    def pace(self) -> str:
        """The rate, the time left and the note, where known."""
        took = time.monotonic() - self._since
        steps = self.done - self._first + self._part
        parts = []

        if not self._steady:
            if self.done != self.total:
                parts.append(f"{duration(took)} so far")
            if self.total and self.total / 5 <= steps < self.total:
                parts.append(f"about {duration((self.total - self.done) * took / steps)} left")
        elif steps > 0 and took > 0:
            parts.append(rate_text(steps / took))
            if self.total is not None and self.total > self.done:
                parts.append(f"{duration((self.total - self.done - self._part) * took / steps)} left")

        if self.note:
            parts.append(self.note)
        return ", ".join(parts)

    def __str__(self) -> str:
        """The line for a log."""
        if self.total is None and self.done == 0:
            return f"{self.name}: {duration(time.monotonic() - self._since)} so far"
        if self.total and not self._steady:
            count = f"{self.done / self.total:.0%}"
        elif self.total is not None:
            count = f"{self.done:,} of {self.total:,}"
        else:
            count = f"{self.done:,}"

        pace = self.pace
        if not pace:
            return f"{self.name}: {count}"
        return f"{self.name}: {count}, {pace}"


class Progress:
    """A context manager that shows rows of progress on stderr; with `shown=False` it shows nothing.

    At a terminal each row is a bar, and all bars disappear at the end. Elsewhere all rows share one line, written after
    five seconds and then every ten, or every `line_every` seconds. `tell` is called with the finished steps and the
    total of a row that has one.
    """

    def __init__(
        self, *, shown: bool = True, tell: Callable[[int, int], None] | None = None, line_every: float | None = None
    ) -> None:
        self._tell, self._line_every = tell, line_every
        self._stream, self._rows = sys.stderr, list[ProgressRow]()
        self._bars: RichProgress | None = None
        self._tasks: dict[ProgressRow, TaskID] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._began = self._last = time.monotonic()
        self._shown, self._started = shown, False

    def __enter__(self) -> Self:
        if not self._shown or self._stream is None:  # a process may have no standard error
            return self

        # rich treats these as a terminal too. Importing it takes as long as a small composition, so logs do without it.
        console = None
        if self._stream.isatty() or _TERMINALS & os.environ.keys():
            from rich.console import Console

            console = Console(stderr=True)

        if console is not None and console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

            name = TextColumn("{task.description}", markup=False)
            pace = TextColumn("{task.fields[pace]}", markup=False)
            columns = (SpinnerColumn(), name, BarColumn(), MofNCompleteColumn(), pace)
            self._bars = Progress(*columns, console=console, transient=True)
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

    def row(self, name: str, total: int | None = None, *, steady: bool = True) -> ProgressRow:
        """Add a row. If the count is not `steady`, the row shows the time taken, and guesses the time left."""
        row = ProgressRow(self, name, total, steady=steady)
        self._rows.append(row)
        return row

    def remove(self, row: ProgressRow) -> None:
        """Take a row away, because what it counts is finished."""
        with self._lock:
            self._rows.remove(row)
        if self._bars is not None and row in self._tasks:
            self._bars.remove_task(self._tasks.pop(row))

    def _changed(self, row: ProgressRow) -> None:
        if self._tell is not None and row.total:
            self._tell(row.done, row.total)
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
            if self._line_every is not None:
                wait = self._line_every
            elif self._started:
                wait = LINE_EVERY_S
            else:
                wait = min(LINE_EVERY_S, FIRST_LINE_S)

            now = time.monotonic()
            if now - self._last < wait or not self._rows:
                return

            self._last, self._started = now, True
            with contextlib.suppress(OSError, ValueError):  # the stream may be closed by now
                self._stream.write("; ".join(map(str, self._rows)) + "\n")
                self._stream.flush()

    def _write_lines(self) -> None:
        """Run in a separate thread, for steps that report nothing for a long time."""
        while not self._stop.wait(0.5):
            self._write_if_due()
