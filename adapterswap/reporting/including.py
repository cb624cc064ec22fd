"""The methods and units that enter the statistics, if not all do.

Single experts, the base and controls differ from compositions for other reasons than those under test, and every method
that is far from the others raises Friedman's χ². Knows the cells of a run; knows no statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from adapterswap.errors import ArgumentError, did_you_mean
from adapterswap.reporting.choosing import Unit, matching, unit_of
from adapterswap.sweeps import Cell, Run

__all__ = ["COMPOSITIONS", "full_units", "included_methods", "is_single", "unit_text", "with_units"]

COMPOSITIONS = "compositions"
"""The name that selects every method that composes something."""


def is_single(cell: Cell) -> bool:
    """Whether a cell composes nothing: the base, an expert, another adapter."""
    if cell.family == "base" or cell.family.endswith(" expert"):
        return True
    rules = cell.composition.get("allocation", ())
    return len(rules) == 1 and list(rules[0]) == ["expert"]


def unit_text(unit: Unit) -> str:
    """A unit as text: `math1+sw1`, `seed 3`."""
    return "+".join(part for part in unit if part is not None)


def included_methods(run: Run, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The families to rank and test, in the run's order; all if `methods` is None.

    Args:
        methods: families; `compositions` stands for all that compose something.

    Raises:
        ArgumentError: the run has no such family, or fewer than two are left.
    """
    families = list(dict.fromkeys(result.cell.family for result in run.results))
    if methods is None:
        return tuple(families)
    single = {result.cell.family for result in run.results if is_single(result.cell)}
    wanted: set[str] = set()
    for name in methods:
        if name in families:
            wanted.add(name)
        elif name == COMPOSITIONS:
            wanted |= {family for family in families if family not in single}
        else:
            remedy = did_you_mean(name, families, f"Use some of: {', '.join(families)}; or {COMPOSITIONS}")
            raise ArgumentError(f"the run has no method {name!r}", remedy, parameter="methods")
    if len(wanted) < 2:
        raise ArgumentError(
            f"`methods` leaves {len(wanted)} of the run's methods, but a comparison needs at least two",
            f"Use two or more of: {', '.join(families)}",
            parameter="methods",
        )
    return tuple(family for family in families if family in wanted)


def with_units(run: Run, units: Sequence[str] | None) -> Run:
    """The run with the cells of some units only; a cell without an expert on a side matches every unit.

    Args:
        units: pairs (`math1+sw1`), experts (`sw1`, for all pairs that include them), or seeds of a lab run (`seed 3`);
            None for all.

    Raises:
        ArgumentError: the run has no such unit, or `units` is empty.
    """
    if units is None:
        return run
    listed = full_units({unit_of(result.cell): None for result in run.results})
    selected: dict[Unit, None] = {}
    for name in units:
        matches = [unit for unit in listed if name in (unit_text(unit), *unit)]
        if not matches:
            texts = [unit_text(unit) for unit in listed]
            parts = [part for unit in listed for part in unit if part is not None]
            names = list(dict.fromkeys([*texts, *parts]))
            remedy = did_you_mean(name, names, f"Use some of: {', '.join(names)}")
            raise ArgumentError(f"the run has no finished unit {name!r}", remedy, parameter="units")
        selected |= dict.fromkeys(matches)
    if not selected:
        raise ArgumentError("`units` is empty", "Name a pair, an expert or a seed, or leave it out", parameter="units")

    def stays(cell: Cell) -> bool:
        return next(matching([unit_of(cell)], selected), None) is not None

    return replace(
        run,
        cells=tuple(cell for cell in run.cells if stays(cell)),
        results=tuple(result for result in run.results if stays(result.cell)),
    )


def full_units(units: Iterable[Unit]) -> list[Unit]:
    """The units with the most sides; the other units match them."""
    listed = list(units)
    most = max((sum(side is not None for side in unit) for unit in listed), default=0)
    return [unit for unit in listed if sum(side is not None for side in unit) == most]
