"""How commands print: data to stdout, everything else to stderr, JSON where asked for."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, ProgressColumn

__all__ = [
    "count_bar",
    "human_bytes",
    "live_bars",
    "note",
    "note_dry_run",
    "note_output",
    "print_json",
    "print_table",
    "progress_bar",
]

LINE_EVERY_S = 10.0  # where nobody watches a bar, such as in a log


def print_json(content: Any) -> None:
    """One JSON document on stdout; in other encodings than UTF-8 all but ASCII is escaped."""
    is_utf8 = "utf" in (sys.stdout.encoding or "").lower()
    click.echo(json.dumps(content, indent=2, ensure_ascii=not is_utf8, allow_nan=False))


def note(text: str) -> None:
    """A remark to the person at the terminal, on stderr."""
    click.echo(text, err=True)


def note_dry_run(undone: str = "written") -> None:
    """The last line of a dry run, after what the command would have done: written, measured, trained."""
    note(f"nothing {undone} (--dry-run)")


def note_output(out_path: str | Path, contents: str = "", *, dry_run: bool = False) -> None:
    """The last line of a command that writes: where its output is, or that a dry run wrote none.

    Args:
        out_path: the folder or file.
        contents: what there is to say of it, after a colon.
        dry_run: whether this was one.
    """
    if dry_run:
        note_dry_run()
    else:
        note(f"written to {out_path}" + (f": {contents}" if contents else ""))


def human_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: `336.0 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def print_table(*tables: Any, width: int = 120) -> None:
    """rich tables on stdout: as wide as the terminal, or `width` characters where there is none."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else width)
    for table in tables:
        console.print(table)


@contextmanager
def live_bars(*columns: str | ProgressColumn, shown: bool = True) -> Iterator[Progress | None]:
    """rich's bars on stderr, which vanish at the end; None where stderr is no terminal, or they are not to be shown.

    Args:
        columns: by default the task, its bar, how many of how many, and the time that is left.
        shown: whether this process shows them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield None
        return
    columns = columns or (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield bars


@contextmanager
def count_bar(
    what: str, total: int | None = None, *, shown: bool = True, first_line: str = ""
) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, or a line every ten seconds where that is not a terminal.

    Args:
        what: what is counted.
        total: how many there are, where that is known before the first is done.
        shown: whether this process shows them.
        first_line: the line for when none is done yet, with `{total}` in it; no line by default.

    Yields:
        The function to call with how many are done, and how many there are.
    """
    with live_bars(shown=shown) as bars:
        if bars is not None:
            task = bars.add_task(what, total=total)
            yield lambda done, of: bars.update(task, completed=done, total=of)
            return
        last = time.monotonic()

        def report(done: int, of: int) -> None:
            nonlocal last
            if not shown:
                return
            if done == 0 and first_line:
                note(first_line.format(total=of))
            elif time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                note(f"{what}: {done} of {of}")

        yield report


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """As `count_bar`, of which the total is known; yields the function that advances it by one."""
    if total == 0:
        yield lambda: None
        return
    with count_bar(what, total) as report:
        done = itertools.count(1)
        yield lambda: report(next(done), total)
