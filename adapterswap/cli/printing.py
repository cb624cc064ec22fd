"""How commands print: data to stdout, everything else to stderr, JSON where asked for."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

__all__ = ["human_bytes", "note", "print_json", "print_table", "progress_bar", "progress_lines"]

LINE_EVERY_S = 10.0  # where nobody watches a bar, such as in a log


def print_json(content: Any) -> None:
    """One JSON document on stdout; in other encodings than UTF-8 all but ASCII is escaped."""
    is_utf8 = "utf" in (sys.stdout.encoding or "").lower()
    click.echo(json.dumps(content, indent=2, ensure_ascii=not is_utf8, allow_nan=False))


def note(text: str) -> None:
    """A remark to the person at the terminal, on stderr."""
    click.echo(text, err=True)


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
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, or lines where that is not a terminal; yields the function that advances it by one."""
    if total == 0:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        report, done = progress_lines(what), itertools.count(1)
        yield lambda: report(next(done), total)
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def progress_lines(what: str) -> Callable[[int, int], None]:
    """A function of what is done and how much there is, which prints a line on stderr every ten seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            note(f"{what}: {done} of {total}")

    return report
