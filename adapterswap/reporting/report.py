"""A report as plain data: the content of its page, its tables and its JSON.

Knows what belongs in a report; knows nothing of how it is shown.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from adapterswap import __version__
from adapterswap.errors import ArgumentError, DataError, DependencyError
from adapterswap.reporting.choosing import Choice, choices, table_choice
from adapterswap.reporting.commands import compose_command, evaluate_command
from adapterswap.reporting.examples import Disagreements, disagreements
from adapterswap.reporting.headline import Target, target_table
from adapterswap.reporting.including import included_methods, is_single, with_units
from adapterswap.reporting.reading import ReportSource
from adapterswap.reporting.relations import (
    GridCell,
    Indicator,
    Ranking,
    ZoneGrid,
    grids,
    indicators,
    ranking,
)
from adapterswap.reporting.selection import SelectionCurve, Truncations, selection_curves, truncations
from adapterswap.sweeps import Run
from adapterswap.sweeps.freezing import Preregistration, default_reference, read_frozen

__all__ = ["DRAWS", "REPORT_FORMAT", "Report", "make_report"]

DRAWS = 10_000
REPORT_FORMAT = "adapterswap-report/1"
_LIBRARIES = ("jinja2", "matplotlib", "scipy")
_LEADS = ("layer_swap", "layer swap")


@dataclass(frozen=True)
class Report:
    """The content of a report.

    Attributes:
        name: the name of the run's folder, or the names of several: `swahili + ties`.
        kind, units, remarks: see `ReportSource`.
        reference: the family with which the others are compared.
        lead: the family whose landscape, indicators and examples are shown first.
        cells, finished: the number of cells in the run, and of finished ones.
        missing: family → the number of its unfinished cells.
        targets: a table for each target task.
        ranking: over all targets and units; None if too few settings are complete.
        indicators: correlations of experts' own scores with their compositions'.
        grids: landscapes of bottom and top layers.
        curves: the course of each selection, by number of configurations.
        truncations: the errors and scores of compositions that were reduced to a lower rank.
        disagreements: by target task.
        commands: the commands that run it again.
        compositions: (row, command to compose, command to evaluate) for each cell of the lead's last row.
        draws, seed: of the bootstrap.
        preregistration: what was registered before the run, and what differs from it; None if nothing was registered.
        experts, recipe, settings, versions: as recorded by the run.
    """

    name: str
    kind: str
    units: str
    remarks: tuple[str, ...]
    reference: str
    lead: str
    cells: int
    finished: int
    missing: Mapping[str, int]
    targets: tuple[Target, ...]
    ranking: Ranking | None
    indicators: tuple[Indicator, ...]
    grids: tuple[ZoneGrid, ...]
    curves: tuple[SelectionCurve, ...]
    truncations: tuple[Truncations, ...]
    disagreements: tuple[Disagreements, ...]
    commands: tuple[str, ...]
    compositions: tuple[tuple[str, str, str], ...]
    draws: int
    seed: int
    preregistration: Preregistration | None
    experts: Mapping[str, Any]
    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]

    def __repr__(self) -> str:
        tasks = ", ".join(target.task for target in self.targets)
        return f"<Report of {self.name!r}: {self.finished} of {self.cells} cells; {tasks}; against {self.reference!r}>"

    def as_json(self) -> dict[str, Any]:
        """The content of summary.json: all numbers, but not the examples, whose text is not trusted."""
        content = asdict(self)
        content["disagreements"] = [
            {key: value for key, value in disagreement.items() if key != "examples"}
            for disagreement in content["disagreements"]
        ]
        return {"format": REPORT_FORMAT, "adapterswap_version": __version__, **content}


def make_report(
    source: ReportSource,
    *,
    reference: str | None = None,
    methods: Sequence[str] | None = None,
    units: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Report:
    """Compute the report of a run.

    Args:
        source: from `open_source`.
        reference: a family of the run.
        methods: the families to rank and test, see `included_methods`; tables show all.
        units: the pairs, experts or seeds to compute everything over, see `with_units`.
        draws: of the bootstrap.
        seed: of the bootstrap; the same seed gives the same report.

    Raises:
        ArgumentError: the run has no such family or unit, fewer than two methods are left, or more than one of several
            runs was registered.
        DataError: no target task of the run is finished, or a file of samples or the pre-registration is damaged.
        DependencyError: the `report` extra is not installed.
    """
    _require_libraries()
    source = replace(source, run=with_units(source.run, units))
    run = source.run
    families = list(dict.fromkeys(result.cell.family for result in run.results))
    reference = default_reference(families) if reference is None else reference
    if reference not in families:
        raise ArgumentError(
            f"the run has no method {reference!r}", f"Use one of: {', '.join(families)}", parameter="reference"
        )
    ranked = included_methods(run, methods)
    lead = _lead(run, families, reference)
    targets = [task for task in run.tasks.values() if task.role == "target" and choices(run, task)]
    if not targets:
        raise DataError(
            f"no target task of {source.name} is finished",
            "Run the sweep again; it resumes where it stopped",
            parameter="run",
        )
    tables = [target_table(run, task, reference, draws=draws, seed=seed) for task in targets]
    landscapes = [grid for task in targets for grid in grids(run, task)]
    if source.development and units is None:  # this landscape is a mean over all seeds
        landscapes.append(_development(source))
    compared = [disagreements(run, task, _shown(choices(run, task), lead, reference)) for task in targets]
    described = run.described
    registered = _registered(source, reference, ranked, units)
    ranks = ranking(run, targets, reference, ranked)
    remarks = source.remarks
    if units is not None:
        remarks = *remarks, f"This report covers only some of the run's {source.units}: {', '.join(units)}."
    return Report(
        source.name,
        source.kind,
        source.units,
        remarks,
        reference,
        lead,
        len(run.cells),
        len(run.results),
        dict(Counter(cell.family for cell in run.unfinished)),
        tuple(tables),
        ranks,
        tuple(indicator for task in targets for indicator in indicators(run, task)),
        tuple(landscapes),
        tuple(curve for task in targets for curve in selection_curves(run, task)),
        tuple(truncation for task in targets for truncation in truncations(run, task)),
        tuple(disagreement for disagreement in compared if disagreement is not None),
        (*source.commands, _command(source, reference, seed, methods, units)),
        tuple(_compositions(run, tables, lead)),
        draws,
        seed,
        registered,
        described.get("experts", {}),
        described.get("recipe", {}),
        described.get("settings", {}),
        described.get("versions", {}),
    )


def _registered(
    source: ReportSource, reference: str, methods: Sequence[str], units: Sequence[str] | None
) -> Preregistration | None:
    """The pre-registration of the run. Of several runs, at most one may have one."""
    if source.kind != "sweep":
        return None
    runs = source.parts or (source.run,)
    registrations = [read_frozen(run.folder, run.described, reference, methods, units) for run in runs]
    registered = [registration for registration in registrations if registration is not None]
    if len(registered) > 1:
        raise ArgumentError(
            f"{len(registered)} of the runs were registered separately",
            "Report each on its own",
            parameter="run",
        )
    if not registered or not source.parts:
        return registered[0] if registered else None
    place = next(place for place, registration in enumerate(registrations) if registration is not None)
    other_names = ", ".join(name for at, name in enumerate(source.names) if at != place)
    (only,) = registered
    return replace(only, differences=(*only.differences, f"it is reported together with {other_names}"))


def _require_libraries() -> None:
    from importlib.util import find_spec

    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise DependencyError(
            f"packages that a report needs are not installed: {', '.join(missing)}",
            "Run `pip install 'adapterswap[report]'`",
        )


def _command(
    source: ReportSource, reference: str, seed: int, methods: Sequence[str] | None, units: Sequence[str] | None
) -> str:
    words = ["adapterswap", "report", *source.names, "--reference", reference, "--seed", str(seed)]
    for option, names in (("--methods", methods), ("--units", units)):
        words += [word for name in names or () for word in (option, name)]
    return shlex.join(words)


def _lead(run: Run, families: list[str], reference: str) -> str:
    """Layer swap by its usual names, or else the composition, or else the family, with the most cells."""
    if usual := [name for name in _LEADS if name in families and name != reference]:
        return usual[0]
    candidates = [family for family in families if family != reference] or families
    single = {result.cell.family for result in run.results if is_single(result.cell)}
    composed = [family for family in candidates if family not in single] or candidates
    counts = Counter(result.cell.family for result in run.results)
    return max(composed, key=lambda family: counts[family])


def _shown(all_choices: list[Choice], lead: str, reference: str) -> list[Choice]:
    """The lead, the reference, and what the lead should improve on: the task expert, or else the base."""
    names = dict.fromkeys([lead, reference])
    for name in ("task expert", "base"):
        if len(names) < 3:
            names[name] = None
    shown = [table_choice(all_choices, name) for name in names]
    return [choice for choice in shown if choice is not None] if all(shown[:2]) else []


def _development(source: ReportSource) -> ZoneGrid:
    task = next(iter(source.run.tasks))
    votes = Counter(result.cell.configuration for result in source.run.results if result.cell.family in _LEADS)
    cells = tuple(
        GridCell(bottom, top, mean, sum(votes.values()), votes[f"bottom={bottom},top={top}"])
        for (bottom, top), mean in sorted(source.development.items())
    )
    return ZoneGrid(task, "layer swap", "development problems", cells)


def _compositions(run: Run, tables: list[Target], lead: str) -> list[tuple[str, str, str]]:
    by_id = {result.cell.cell: result.cell for result in run.results}
    compositions: dict[str, tuple[str, str, str]] = {}
    for table in tables:
        rows = [row for row in table.rows if row.family == lead]
        for chosen in rows[-1].chosen if rows else ():
            cell = by_id[chosen.cell]
            if command := compose_command(run, cell):
                compositions.setdefault(chosen.cell, (cell.short, command, evaluate_command(run, cell)))
    return list(compositions.values())
