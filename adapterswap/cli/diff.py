"""`adapterswap diff`: how far apart two adapters are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.paths import PATH
from adapterswap.cli.printing import print_json, print_table

if TYPE_CHECKING:
    from adapterswap.checking.comparing import Difference, SavedDifference
    from adapterswap.experts.adapters import Adapter

_NOISE = 1e-7  # a distance of ΔW is known up to about 1e-8, see `compare`


@click.command("diff")
@click.argument("one", type=PATH)
@click.argument("other", type=PATH)
@click.option("--modules", "by_module", is_flag=True, help="A row per module, not per layer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def command(one: str, other: str, by_module: bool, as_json: bool) -> None:
    """Compare two adapters: distance and cosine of their ΔW.

    ONE and OTHER are PEFT LoRA folders or Hub ids. The distance is ‖ΔW₁ - ΔW₂‖ / ‖ΔW₁‖; a module that one of them lacks
    counts as ΔW = 0. Modules trained in full (modules_to_save) are compared by their whole weights,
    ‖W₁ - W₂‖ / ‖W₁‖.
    """
    from adapterswap.checking.comparing import compare, compare_saved, total

    adapters = _open(one), _open(other)
    found, saved = compare(*adapters), compare_saved(*adapters)
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
                "saved": {each.name: _saved_numbers(each) for each in saved},
            }
        )
        return
    if found:
        _print([*(found if by_module else rows), total(found)], "module" if by_module else "layer")
    if saved:
        _print_saved(saved)


def _open(reference: str) -> Adapter:
    from adapterswap.errors import AdapterswapError
    from adapterswap.experts.adapters import Adapter
    from adapterswap.experts.opening import open_expert

    opened = open_expert(reference)
    if isinstance(opened, Adapter):
        return opened
    raise AdapterswapError(
        f"{reference} is a full checkpoint, and `diff` compares adapters",
        "Cut an adapter out of it with `adapterswap extract`, or measure it with `adapterswap analyze --base-model`",
    )


def _numbers(row: Difference) -> dict[str, Any]:
    distance = row.distance if math.isfinite(row.distance) else None  # JSON has no infinity
    return {"norms": list(row.norms), "distance": distance, "cosine": row.cosine}


def _saved_numbers(row: SavedDifference) -> dict[str, Any]:
    distance = None if row.distance is None or math.isinf(row.distance) else row.distance
    remark = _remark(row)
    return {
        "shape": row.shape,
        "norms": list(row.norms),
        "apart": row.apart,
        "distance": distance,
        **({"remark": remark} if remark else {}),
    }


def _remark(row: SavedDifference) -> str:
    """Why there is no distance; empty where there is one."""
    if row.apart is not None:
        return ""
    holder, lacking = ("first", "second") if row.norms[1] is None else ("second", "first")
    rest = f"; the {lacking} has LoRA on it" if row.lora else ""
    return f"trained in full in the {holder} only{rest}: the change is unknown without the base"


def _print(rows: list[Difference], what: str) -> None:
    from rich.table import Table

    table = Table(what, box=None, header_style="bold")
    for name in ("‖ΔW₁‖", "‖ΔW₂‖", "distance", "cosine"):
        table.add_column(name, justify="right")
    for row in rows:
        cosine = "–" if row.cosine is None else f"{row.cosine:.4f}"
        table.add_row(
            row.name, f"{row.norms[0]:.4g}", f"{row.norms[1]:.4g}", _distance_text(row.distance, _NOISE), cosine
        )
    print_table(table)


def _distance_text(distance: float, noise: float = 0.0) -> str:
    """Four decimals, or `< 0.0001` where these would hide a distance that is more than `noise`."""
    return "< 0.0001" if noise < distance < 0.00005 else f"{distance:.4f}"


def _print_saved(rows: list[SavedDifference]) -> None:
    from rich.table import Table

    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else f"{value:{form}}"

    table = Table("trained in full", "shape", box=None, header_style="bold")
    for name in ("‖W₁‖", "‖W₂‖", "‖W₁ - W₂‖", "distance"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = [shown(value, ".4g") for value in (*row.norms, row.apart)]
        distance = "–" if row.distance is None else _distance_text(row.distance)
        table.add_row(row.name, row.shape, *numbers, distance)
    print_table(table)
    for row in rows:
        if remark := _remark(row):
            click.echo(f"{row.name}: {remark}")
