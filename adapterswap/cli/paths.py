"""Paths as command-line options: a leading `~` is the home folder, however the shell passed it on.

A shell leaves `--out-path=~/x` as it is. Hub ids pass through unchanged.
"""

from __future__ import annotations

import click

__all__ = ["PATH"]


class _LocalPath(click.ParamType[str]):
    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from adapterswap.files.smallfiles import expand_text

        return expand_text(value)


PATH = _LocalPath()
