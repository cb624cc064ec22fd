"""The options that say where torch computes and in which numbers, alike in every command that has them.

Knows names and help alone, so that help needs no torch: `bases.choose_device` judges what was given. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from adapterswap.files.dtypes import FLOAT_NAMES

__all__ = ["device_option", "dtype_option"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def device_option(default: str = "auto", *, more: str = "") -> Callable[[_Function], _Function]:
    """`--device`, of which the function gets the name.

    Args:
        default: the name where none is given.
        more: what the help says after the names.
    """
    told = f"auto, cpu, cuda, cuda:N, mps{more}."
    return click.option("--device", default=default, show_default=True, metavar="NAME", help=told)


def dtype_option(told: str, *, auto: bool = False) -> Callable[[_Function], _Function]:
    """`--dtype`, of which the function gets the name.

    Args:
        told: the help, which says of what.
        auto: `auto` is a dtype too, and the default; else there is none.
    """
    if not auto:
        return click.option("--dtype", type=click.Choice(list(FLOAT_NAMES)), help=told)
    return click.option(
        "--dtype", type=click.Choice(["auto", *FLOAT_NAMES]), default="auto", show_default=True, help=told
    )
