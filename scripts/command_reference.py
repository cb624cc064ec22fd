"""Write docs/commands.md from the commands' --help; `--check` fails if the file is out of date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
from click.testing import CliRunner

from adapterswap.cli import COMMANDS, main

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"


def reference() -> str:
    """The page: `adapterswap -h`, then each command's help, in the order in which they are listed."""
    parts = ["# Commands\n\nWritten by `python scripts/command_reference.py` from each command's `--help`.\n"]
    for name in ("", *_names()):
        arguments = [*name.split(), "--help"]
        shown = CliRunner().invoke(main, arguments, prog_name="adapterswap", terminal_width=100, color=False)
        parts.append(f"## adapterswap {name}".rstrip() + f"\n\n```text\n{shown.output.rstrip()}\n```\n")
    return "\n".join(parts)


def _names() -> Iterator[str]:
    """Every command, followed by its subcommands."""
    for name in COMMANDS:
        yield name
        command = import_module(f"adapterswap.cli.{name}").command
        if isinstance(command, click.Group):
            yield from (f"{name} {below}" for below in command.commands)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(reference(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != reference():
        sys.exit(f"{PAGE.name} has drifted from --help: run python scripts/command_reference.py")
