"""How commands print: data to stdout, everything else to stderr, JSON where asked for."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["human_bytes", "note", "print_json"]


def print_json(content: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


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
