"""`adapterswap diff`: how far apart two adapters are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import click

from adapterswap.cli.options import Expert, Json
from adapterswap.cli.printing import echo, print_errors, print_json, print_rows, rare_collections, working
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from adapterswap.tools.comparing import Comparison, Difference, SavedDifference

_NOISE = 1e-7  # a distance of ΔW is known up to about 1e-8, see `compare`


@declare("diff")
@rare_collections()
def command(
    one: Expert,
    other: Expert,
    *,
    by_module: Annotated[bool, "--modules"] = False,
    max_distance: float | None = None,
    as_json: Json = False,
) -> None:
    """Compare two adapters: distance and cosine of their ΔW.

    ONE and OTHER are PEFT LoRA folders or Hub ids. The distance is ‖ΔW₁ - ΔW₂‖ / ‖ΔW₁‖; a module that one of them lacks
    counts as ΔW = 0. Modules trained in full (modules_to_save) are compared by their whole weights,
    ‖W₁ - W₂‖ / ‖W₁‖. With --max-distance, a module that only one adapter holds in full counts as too far.

    Args:
        by_module: Print a row per module instead of per layer.
        max_distance: Exit with 1 if the distance of all modules together, or of one trained in full, is more than X.
    """
    from adapterswap.tools.comparing import diff

    if max_distance is not None and not max_distance >= 0:  # click lets `nan` pass
        raise click.UsageError(f"--max-distance is {max_distance:g}, but must be 0 or more.")
    with working("comparing"):
        comparison = diff(one, other)
    if as_json:
        print_json(comparison.as_json())
    else:
        if comparison.modules:
            rows = comparison.modules if by_module else comparison.layers
            _print([*rows, comparison.total], "module" if by_module else "layer")
        if comparison.saved:
            _print_saved(comparison.saved)
    if max_distance is not None and (farther := _farther(comparison, max_distance)):
        print_errors(f"{line}." for line in farther)
        sys.exit(1)


def _farther(comparison: Comparison, limit: float) -> list[str]:
    """A line for everything that is, or may be, farther apart than `limit`; rounding does not count."""
    total = comparison.total.distance
    lines = [f"the distance of ΔW is {total:.4g}, more than {limit:g}"] * (total > max(limit, _NOISE))
    for row in comparison.saved:
        if row.distance is None:
            lines.append(f"{row.name} is {row.remark}, so its distance may be more than {limit:g}")
        elif row.distance > limit:
            lines.append(f"the distance of {row.name} is {row.distance:.4g}, more than {limit:g}")
    return lines


def _print(rows: Iterable[Difference], heading: str) -> None:
    cells: list[list[str]] = []
    for row in rows:
        norms = [f"{norm:.4g}" for norm in row.norms]
        cells.append([row.name, *norms, _distance_text(row.distance, _NOISE), _shown(row.cosine, ".4f")])
    print_rows(heading, "‖ΔW₁‖", "‖ΔW₂‖", "distance", "cosine", rows=cells)


def _distance_text(distance: float | None, noise: float = 0.0) -> str:
    """Four decimals, or `< 0.0001` where these would hide a distance that is more than `noise`."""
    return "< 0.0001" if distance is not None and noise < distance < 0.00005 else _shown(distance, ".4f")


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _print_saved(rows: Sequence[SavedDifference]) -> None:
    cells: list[list[str]] = []
    for row in rows:
        numbers = [_shown(value, ".4g") for value in (*row.norms, row.apart)]
        cells.append([row.name, row.shape, *numbers, _distance_text(row.distance)])
    print_rows("trained in full", "shape", "‖W₁‖", "‖W₂‖", "‖W₁ - W₂‖", "distance", rows=cells, left=2)
    for row in rows:
        if row.remark:
            echo(f"{row.name}: {row.remark}")
