"""`adapterswap verify`: is this adapter, or model, still what its sources give?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from adapterswap.cli.paths import EXPERT
from adapterswap.cli.printing import note, print_json, working

if TYPE_CHECKING:
    from adapterswap.checking.verifying import Verification

_WHERE = {"full": "--expert full=PATH", "base": "--base-model"}  # where the sources of an extraction are said to lie
_SHOWN = 10  # tensors that are named; with a wrong source it is nearly all of them


@click.command("verify")
@click.argument("path", type=EXPERT)
@click.option(
    "--expert", "experts", type=EXPERT, multiple=True, metavar="NAME=PATH", help="Where a source lies; repeatable."
)
@click.option("--base-model", type=EXPERT, metavar="PATH|ID", help="The base, where it came from a folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, experts: tuple[str, ...], base_model: str | None, as_json: bool) -> None:
    """Recompute what was composed or merged from its sources and compare.

    PATH is an adapter, a model or a GGUF file (or a folder of pieces) that adapterswap wrote. Its record names the
    sources; those from the Hub are found by themselves, folders are given with --expert. Of an extracted adapter the
    files are compared by their SHA-256, and with --expert full=PATH and --base-model the error of every module's ΔW.
    Exits with 1 if anything differs.
    """
    from adapterswap.checking.verifying import verify

    given = {}
    for item in experts:
        name, equals, folder = item.partition("=")
        if not equals or not name or not folder:
            raise click.UsageError(f"--expert {item!r} is not NAME=PATH.")
        given[name] = folder
    with working("verifying"):
        found = verify(path, given, base_model=base_model)
    if as_json:
        print_json(found.as_json())
    else:
        _print(found)
    if found.unchecked:
        options = " and ".join(_WHERE[name] for name in found.unchecked)
        names = " and ".join(found.unchecked)
        note(f"Not compared: {names} came from a folder, and nothing says where that is. Pass {options}.")
    if not found.equal:
        note("Error: it is not what its sources give. Make it again, or find the sources it was made of.")
        sys.exit(1)


def _print(found: Verification) -> None:
    if found.equal and not found.extracted:
        click.echo("equal: every tensor, the config and the record are what the sources give")
    elif found.equal:
        more = "" if found.unchecked else ", and every module comes as near to its ΔW"
        click.echo(f"equal: the files are those that were recorded{more}")
    made = "cut" if found.extracted else "composed"
    for name, file in found.changed_sources.items():
        click.echo(f"source changed: {name}'s {file} differs from what was {made} (SHA-256)")
    for key in found.differing[:_SHOWN]:
        click.echo(f"differs: {key}")
    if len(found.differing) > _SHOWN:
        click.echo(f"differs: {len(found.differing) - _SHOWN} more, which --json lists")
    if found.config_differs:
        click.echo(f"differs: {found.config}")
    if found.record_differs:
        click.echo(f"differs: {', '.join(found.record_differs)} in adapterswap.json")
