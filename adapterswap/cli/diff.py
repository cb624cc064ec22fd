"""`adapterswap diff`: how far apart two adapters' ΔW are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.printing import print_json, print_table

if TYPE_CHECKING:
    from adapterswap.checking.comparing import Difference


@click.command("diff")
@click.argument("one")
@click.argument("other")
@click.option("--modules", "by_module", is_flag=True, help="A row per module, not per layer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def command(one: str, other: str, by_module: bool, as_json: bool) -> None:
    """Compare two adapters: distance and cosine of their ΔW.

    ONE and OTHER are PEFT LoRA folders or Hub ids. The distance is ‖ΔW₁ - ΔW₂‖ / ‖ΔW₁‖; a module that one of them lacks
    counts as ΔW = 0.
    """
    from adapterswap.checking.comparing import compare, total
    from adapterswap.experts.adapters import open_adapter

    found = compare(open_adapter(one), open_adapter(other))
    layers: dict[int | None, list[Difference]] = {}
    for each in found:
        layers.setdefault(each.layer, []).append(each)
    rows = [total(group, "no layer" if layer is None else str(layer)) for layer, group in layers.items()]
    if as_json:
        print_json(
            {
                "total": _numbers(total(found)),
                "layers": {row.name: _numbers(row) for row in rows},
                "modules": {each.name: _numbers(each) for each in found},
            }
        )
        return
    _print([*(found if by_module else rows), total(found)], "module" if by_module else "layer")


def _numbers(row: Difference) -> dict[str, Any]:
    distance = row.distance if row.norms[0] else None  # JSON has no infinity
    return {"norms": list(row.norms), "distance": distance, "cosine": row.cosine}


def _print(rows: list[Difference], what: str) -> None:
    from rich.table import Table

    table = Table(what, box=None, header_style="bold")
    for name in ("‖ΔW₁‖", "‖ΔW₂‖", "distance", "cosine"):
        table.add_column(name, justify="right")
    for row in rows:
        cosine = "–" if row.cosine is None else f"{row.cosine:.4f}"
        table.add_row(row.name, f"{row.norms[0]:.4g}", f"{row.norms[1]:.4g}", f"{row.distance:.4f}", cosine)
    print_table(table)
