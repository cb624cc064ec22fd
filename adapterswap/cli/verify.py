"""`adapterswap verify`: is this adapter, or model, still what its sources give?"""

from __future__ import annotations

import sys

import click

from adapterswap.cli.printing import note, print_json


@click.command("verify")
@click.argument("path")
@click.option("--expert", "experts", multiple=True, metavar="NAME=PATH", help="Where a source lies; repeatable.")
@click.option("--base-model", metavar="PATH|ID", help="The base, where its weights entered.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, experts: tuple[str, ...], base_model: str | None, as_json: bool) -> None:
    """Recompute what was composed or merged from its sources and compare.

    PATH is an adapter or a model that adapterswap wrote. Its adapterswap.json names the sources; those from the Hub are
    found by themselves, folders are given with --expert. Exits with 1 if anything differs.
    """
    from adapterswap.checking.verifying import verify

    given = {}
    for item in experts:
        name, equals, folder = item.partition("=")
        if not equals or not name or not folder:
            raise click.UsageError(f"--expert {item!r} is not NAME=PATH.")
        given[name] = folder
    found = verify(path, given, base_model=base_model)
    if as_json:
        print_json(
            {
                "equal": found.equal,
                "changed_sources": dict(found.changed_sources),
                "differing": list(found.differing),
                "config_differs": found.config_differs,
            }
        )
    elif found.equal:
        click.echo("equal: every tensor and the config are what the sources give")
    else:
        for name, file in found.changed_sources.items():
            click.echo(f"source changed: {name}'s {file} differs from what was composed (SHA-256)")
        for key in found.differing:
            click.echo(f"differs: {key}")
        if found.config_differs:
            click.echo(f"differs: {found.config}")
    if not found.equal:
        note("Error: it is not what its sources give. Compose or merge it again, or find the sources it was made of.")
        sys.exit(1)
