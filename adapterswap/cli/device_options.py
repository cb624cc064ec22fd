"""The --device and --dtype options, the same in every command that has them.

Holds names and help only, so that --help does not import torch; `bases.choose_device` checks the value. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from adapterswap.files.dtypes import FLOAT_NAMES

__all__ = ["device_option", "dtype_option"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def device_option(default: str = "auto", *, more: str = "") -> Callable[[_Function], _Function]:
    """Add `--device`; the command receives the name.

    Args:
        default: the name that the option has by default.
        more: text that the help shows after the names.
    """
    help_text = f"auto, cpu, cuda, cuda:N, mps{more}."
    return click.option("--device", default=default, show_default=True, metavar="NAME", help=help_text)


def dtype_option(help_text: str, *, auto: bool = False) -> Callable[[_Function], _Function]:
    """Add `--dtype`; the command receives the name.

    Args:
        help_text: the help, which says whose dtype it is.
        auto: whether `auto` is a choice, and the default; otherwise the option has no default.
    """
    if not auto:
        return click.option("--dtype", type=click.Choice(list(FLOAT_NAMES)), help=help_text)
    return click.option(
        "--dtype", type=click.Choice(["auto", *FLOAT_NAMES]), default="auto", show_default=True, help=help_text
    )
