"""`adapterswap methods`: the registry of methods."""

from __future__ import annotations

import click

from adapterswap.cli.printing import echo, print_json, print_table
from adapterswap.methods.registry import BUILT_IN, all_methods, in_adapters


@click.command("methods")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with formulas.")
def command(as_json: bool) -> None:
    """List the methods that combine experts, with their parameters and references.

    Some methods are exact in an adapter. The results of others are reduced to a rank there (--max-rank, --max-error).
    Methods on whole weights need full weights (adapterswap merge), where every method is exact. Installed packages can
    add methods.
    """
    methods = all_methods()
    if as_json:
        print_json(
            {
                name: {
                    "formula": method.formula,
                    "parameters": [parameter.name for parameter in method.parameters],
                    "defaults": {p.name: None if p.required else p.default for p in method.parameters},
                    "linear": method.linear,
                    "in_adapters": in_adapters(method),
                    "acts_on": method.acts_on,
                    "weighted": method.weighted,
                    "experts": list(method.sides),
                    "notes": method.notes,
                    "normalizes": method.normalizes,
                    "in_rules": method.in_rules,
                    "as_composition": method.as_composition,
                    "reference": method.reference,
                    "built_in": name in BUILT_IN,
                }
                for name, method in methods.items()
            }
        )
        return
    from rich.table import Table

    table = Table("method", "in an adapter", "parameters", "reference", box=None, header_style="bold")
    for name, method in methods.items():
        parameters = ", ".join(parameter.name for parameter in method.parameters)
        table.add_row(name, in_adapters(method), parameters or "–", method.reference)
    print_table(table)
    echo("")
    for name, method in methods.items():
        echo(f"{name}: {method.formula}")
