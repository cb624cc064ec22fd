"""Options of an engine that adapterswap sets itself, so that a user's own arguments for the engine cannot set them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from adapterswap.kit.errors import ArgumentError


class Reserved(NamedTuple):
    """An option that adapterswap decides: with another value, the engine would not serve what was checked.

    Attributes:
        option: its name.
        reason: why it cannot be passed.
        remedy: what to do instead.
    """

    option: str
    reason: str
    remedy: str = "Leave it out"


def check_reserved(arguments: Iterable[str], rows: Sequence[Reserved], *, engine: str, parameter: str) -> None:
    """Raise an `ArgumentError` for the first argument that is a reserved option of the engine.

    Args:
        arguments: the user's own, as they go to the engine.
        rows: the engine's reserved options.
        engine: its name in the message.
        parameter: the parameter that holds the arguments.
    """
    rows_by_option = {row.option: row for row in rows}
    for argument in arguments:
        row = rows_by_option.get(option_of(argument))
        if row is not None:
            raise ArgumentError(
                f"{argument} cannot be passed to {engine} here: {row.reason}", row.remedy, parameter=parameter
            )


def option_of(argument: str) -> str:
    """The option that an argument names, with dashes: both engines read `--max_loras=4` as `--max-loras`."""
    name = argument.partition("=")[0]
    if not name.startswith("--"):
        return name
    return name.replace("_", "-")
