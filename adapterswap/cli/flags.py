"""The library's parameters as the flags of a command: `overwrite=True` → --overwrite.

Errors name parameters as Python users type them, in backticks (see `adapterswap.errors`). Knows click's commands; knows
nothing of the errors themselves.
"""

from __future__ import annotations

import re

import click

__all__ = ["with_flags"]

_PARAMETER = re.compile(r"`(?P<name>[a-z]\w*)(=(?P<value>[^`]*))?`")
_ENTRY = re.compile(r"\{'(?P<key>[^']*)': (?P<value>.*)\}")  # the value of an option that is repeated: NAME=VALUE


def with_flags(text: str, command: click.Command) -> str:
    """`text` with each parameter that `command` has as an option replaced by its flag.

    `overwrite=True` becomes --overwrite, `num_layers` --num-layers, `max_rank=64` --max-rank 64 and
    `experts={'math': PATH}` --expert math=PATH. All other text in backticks stays as it is.
    """
    options = _options(command)

    def flag(match: re.Match[str]) -> str:
        option = options.get(match["name"])
        if option is None:
            return match[0]
        name = max(option.opts, key=len)
        if option.is_flag or match["value"] is None:
            return name
        value = _ENTRY.sub(r"\g<key>=\g<value>", match["value"])
        return f"{name} {value}"

    return _PARAMETER.sub(flag, text)


def _options(command: click.Command) -> dict[str, click.Option]:
    """Parameter → option; for a group, those of all its commands."""
    if isinstance(command, click.Group):
        return {
            name: option for subcommand in command.commands.values() for name, option in _options(subcommand).items()
        }
    return {option.name: option for option in command.params if isinstance(option, click.Option) and option.name}
