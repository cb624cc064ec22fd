"""How commands print: data to stdout, everything else to stderr, JSON where asked for."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from adapterswap.progress import Progress, ProgressRow

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "be_quiet",
    "count_bar",
    "human_bytes",
    "is_quiet",
    "note",
    "note_dry_run",
    "note_output",
    "print_json",
    "print_table",
    "progress_bar",
    "working",
]

_QUIET = "adapterswap.quiet"


def print_json(content: Any) -> None:
    """One JSON document on stdout; in other encodings than UTF-8 all but ASCII is escaped."""
    is_utf8 = "utf" in (sys.stdout.encoding or "").lower()
    click.echo(json.dumps(content, indent=2, ensure_ascii=not is_utf8, allow_nan=False))


def be_quiet() -> None:
    """Print no remarks and no progress in this command: --quiet."""
    click.get_current_context().meta[_QUIET] = True


def is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def note(text: str) -> None:
    """A remark to the person at the terminal, on stderr; none with --quiet, except for warnings and errors."""
    if text.startswith(("Warning: ", "Error: ")) or not is_quiet():
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
def working(what: str, *, shown: bool = True) -> Iterator[ProgressRow]:
    """Show that something goes on whose end is not known; nothing may be printed meanwhile.

    Args:
        what: what is done, such as `verifying`.
        shown: whether this process shows it.
    """
    with Progress(shown=shown and not is_quiet()) as progress:
        yield progress.row(what)


@contextmanager
def count_bar(what: str, *, shown: bool = True, first_line: str = "") -> Iterator[Callable[[int, int], None]]:
    """As `working`, where the number of steps is known once the first is reported.

    Args:
        what: what is counted.
        shown: whether this process shows it.
        first_line: for a log, the line for when none is done yet, with `{total}` in it.

    Yields:
        The function to call with how many are done, and how many there are.
    """
    with working(what, shown=shown) as row:

        def report(done: int, of: int) -> None:
            if done:
                row.update(done, of)
                return
            if shown and first_line and not sys.stderr.isatty():
                note(first_line.format(total=of))
            row.begin(what, of)

        yield report


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """As `working`, where the number of steps is known; yields the function that advances it by one."""
    if total == 0:
        yield lambda: None
        return
    with working(what) as row:
        row.begin(what, total)
        done = itertools.count(1)
        yield lambda: row.update(next(done))
