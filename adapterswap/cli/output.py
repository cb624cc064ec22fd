"""How commands print: data to stdout, everything else to stderr, JSON with --json, parameters as their flags.

Errors name parameters as Python users type them, in backticks (see `adapterswap.kit.errors`).
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from adapterswap.kit.errors import visible
from adapterswap.kit.progress import Progress, ProgressRow

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

_PARAMETER = re.compile(r"`(?P<name>[a-z]\w*)(=(?P<value>[^`]*))?`")
_ENTRY = re.compile(r"\{'(?P<key>[^']*)': (?P<value>.*)\}")  # the value of an option that is repeated: NAME=VALUE


def with_flags(text: str, command: click.Command) -> str:
    """`text` with each parameter that `command` has as an option replaced by its flag.

    `overwrite=True` becomes --overwrite, `num_layers` --num-layers, `max_rank=64` --max-rank 64 and
    `experts={'math': PATH}` --expert math=PATH, and a list after such a name is joined by commas. All other text in
    backticks stays as it is.
    """
    options = _options(command)

    def flag(match: re.Match[str]) -> str:
        option = options.get(match["name"])
        if option is None:
            return match[0]
        name = max(option.opts, key=len)
        if option.is_flag or match["value"] is None:
            return name
        return f"{name} {_ENTRY.sub(_entry, match['value'])}"

    return _PARAMETER.sub(flag, text)


def _entry(match: re.Match[str]) -> str:
    """NAME=VALUE for `{'NAME': VALUE}`, and NAME=A,B for `{'NAME': ['A', 'B']}`."""
    value = match["value"]
    if value.startswith("["):
        value = ",".join(item.strip("' ") for item in value.strip("[]").split(","))
    return f"{match['key']}={value}"


# Words that begin a message. Messages may begin with a name as well, and a name is printed as it is.
_OPENING = re.compile(
    "(the|an?|no|there|its?|this|all|both|neither|none|two|only|every|everything|another|nothing|too|cannot|could|"
    "unknown|exactly|rule|line|process|zones|tokens|texts|adapters|magnitude|tasks|scaled|at|recipes|rules)(?= )"
)


def print_errors(problems: Iterable[object], command: click.Command | None = None) -> None:
    """Print a line per problem to stderr, with parameters as the flags of `command`, if it is known."""
    for problem in problems:
        text = str(problem)
        if command is not None:
            text = with_flags(text, command)
        if _OPENING.match(text):
            text = text[:1].upper() + text[1:]
        click.echo(f"Error: {text}", err=True)


def _options(command: click.Command) -> dict[str, click.Option]:
    """Parameter → option; for a group, those of all its commands."""
    if isinstance(command, click.Group):
        options: dict[str, click.Option] = {}
        for subcommand in command.commands.values():
            options |= _options(subcommand)
        return options
    return {option.name: option for option in command.params if isinstance(option, click.Option) and option.name}


_OBJECTS = 200_000  # new objects between two searches; Python's default is 700


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for cycles less often: a mixture's 18,000 modules make millions of objects that all stay in use.

    It saves a quarter of the processor time there. Not for commands that run torch: cycles may hold tensors.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_QUIET = "adapterswap.quiet"


def print_json(content: Any) -> None:
    """Print one JSON document to stdout; if its encoding is not UTF-8, everything but ASCII is escaped."""
    is_utf8 = "utf" in (sys.stdout.encoding or "").lower()
    click.echo(visible(json.dumps(content, indent=2, ensure_ascii=not is_utf8, allow_nan=False)))


def be_quiet() -> None:
    """Print no remarks and no progress in this command: --quiet."""
    click.get_current_context().meta[_QUIET] = True


VERBOSE = "adapterswap.verbose"


def is_verbose() -> bool:
    """Whether the command was called with --verbose."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(VERBOSE))


def is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


@contextmanager
def only_warnings() -> Iterator[None]:
    """Print warnings, and nothing else, inside the block; for what JSON has already said."""
    was_quiet = is_quiet()
    be_quiet()
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        click.get_current_context().meta[_QUIET] = was_quiet


def echo(*lines: str, err: bool = False) -> None:
    """Print lines to stdout. They may quote paths and files, so control characters are written as their codes."""
    for line in lines:
        click.echo(visible(line).replace("\n", "\\n"), err=err)


def note(text: str) -> None:
    """Print a remark of one line to stderr; with --quiet, only warnings and errors."""
    if text.startswith(("Warning: ", "Error: ")) or not is_quiet():
        echo(text, err=True)


def note_dry_run(undone: str = "written") -> None:
    """Print the last line of a dry run; `undone` is what did not happen: written, measured, trained."""
    note(f"nothing {undone} (--dry-run)")


def note_output(out_path: str | Path, contents: str = "", *, dry_run: bool = False) -> None:
    """Print the last line of a command that writes: where its output is, or that a dry run wrote nothing."""
    if dry_run:
        note_dry_run()
    else:
        if contents:
            contents = f": {contents}"
        note(f"written to {out_path}{contents}")


def human_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: `336.0 MB`."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000 or unit == "GB":
            break
    return f"{count:.1f} {unit}"


def number_text(value: float | None, form: str = ".3f", *, missing: str = "–") -> str:
    """A number in a format, or a dash for one that there is not."""
    if value is None:
        return missing
    return format(value, form)


def table(*heads: str, rows: Iterable[Iterable[Any]], left: int = 1, title: str | None = None) -> Table:
    """A table for `print_table`: its first `left` columns hold words, the others numbers.

    Cells and the title may quote files, as in `echo`.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, header_style="bold", title=title and Text(visible(title)), title_justify="left")
    for head in heads[:left]:
        made.add_column(Text(visible(head)), justify="left", overflow="fold")
    for head in heads[left:]:
        made.add_column(Text(visible(head)), justify="right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(str(cell))) for cell in row))
    return made


def print_table(*tables: Table, width: int = 120) -> None:
    """Print tables to stdout: as wide as the terminal, or `width` characters without one."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    if not sys.stdout.isatty():
        console.width = width
    for shown in tables:
        console.print(shown)


def print_rows(*heads: str, rows: Iterable[Iterable[Any]], left: int = 1, title: str | None = None) -> None:
    """Print one table; see `table`."""
    print_table(table(*heads, rows=rows, left=left, title=title))


def print_line(label: str, text: str) -> None:
    """Print a text in a column beside its label."""
    echo(f"{label:<12}{text}")


@contextmanager
def resumable(*, overwrite: bool, shown: bool = True) -> Iterator[None]:
    """After Ctrl-C, say that what is finished is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if not shown:
            raise
        again = "the command again"
        if overwrite:
            again += ", without `overwrite`,"
        raise KeyboardInterrupt(f"What was finished is kept. Run {again} to resume.") from None


@contextmanager
def all_or_nothing(remark: str) -> Iterator[None]:
    """After Ctrl-C, say why nothing is kept, and that the same command starts over."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{remark} Run the command again to start over.") from None


@contextmanager
def working(label: str, *, shown: bool = True) -> Iterator[ProgressRow]:
    """Show progress of unknown length; nothing may be printed meanwhile."""
    with Progress(shown=shown and not is_quiet()) as progress:
        yield progress.row(label)


@contextmanager
def count_bar(label: str, *, shown: bool = True, first_line: str = "") -> Iterator[Callable[[int, int], None]]:
    """Like `working`, with a number of steps that the first report sets.

    Args:
        label: the activity or what it counts, such as `extracting` or `requests`.
        shown: whether this process shows it.
        first_line: without a terminal, the line to print before the first step, with `{total}` in it.

    Yields:
        The function to call with the number of finished steps and the total.
    """
    with working(label, shown=shown) as row:

        def report(finished: int, total: int) -> None:
            if finished:
                row.update(finished, total)
                return
            if shown and first_line and not sys.stderr.isatty():
                note(first_line.format(total=total))
            row.begin(label, total)

        yield report


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Like `working`, with a known number of steps; yields the function that advances it by one."""
    if total == 0:
        yield lambda: None
        return
    with working(label) as row:
        row.begin(label, total)
        steps = itertools.count(1)
        yield lambda: row.update(next(steps))
