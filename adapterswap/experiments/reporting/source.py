"""Read the folder of a sweep or of a lab run into the same data.

A lab run becomes a run of cells without selection documents: each seed is a unit, its methods are families with one
cell each, and its configurations were already chosen on a development set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterswap.experiments.reporting.combined import combined
from adapterswap.experiments.sweeps import Cell, CellResult, Run, TaskInfo, TaskValue
from adapterswap.kit.errors import ArgumentError, DataError, NotFoundError
from adapterswap.kit.files.inside import files_inside
from adapterswap.kit.files.text import expand, json_lines, open_regular, read_json

RESULTS, ANSWERS = "results.json", "answers.jsonl"
_LAB = "adapterswap-lab/1"
_SWEEP_FILE = "sweep.json"
_REMEDY = "Pass the folder that `adapterswap sweep` or `adapterswap lab` wrote"


@dataclass(frozen=True)
class ReportSource:
    """A run, and what a report needs to know about it.

    Attributes:
        run: tasks and cells.
        kind: `sweep` or `lab`.
        names: the folders' own names, in the order in which they were passed.
        units: what methods are averaged over: `pairs` of experts, or `seeds`.
        commands: the commands that made the run.
        remarks: notes for the reader.
        parts: the runs that were combined; empty for a single run.
        development: (bottom, top) → score on the lab's development problems; empty for a sweep.
    """

    run: Run
    kind: str
    names: tuple[str, ...]
    units: str
    commands: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    parts: tuple[Run, ...] = ()
    development: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The report's name: `swahili`, or `swahili + ties` for several runs."""
        return " + ".join(self.names)


def open_source(folder: str | Path, *more: str | Path) -> ReportSource:
    """The sweep or lab run in `folder`, or several sweeps with comparable scores as one.

    Raises:
        ArgumentError: one of several folders is passed twice or holds a lab run.
        DataError: a folder is damaged, no cell is finished, or the sweeps differ in a setting; see `combined`.
        NotFoundError: a folder holds neither a sweep nor a lab run.
    """
    if not more:
        return _open_one(expand(folder))
    folders = [expand(path) for path in (folder, *more)]
    if len({path.resolve() for path in folders}) < len(folders):
        raise ArgumentError("The same run is given twice", "Pass each run once", parameter="run")

    sources = [_open_one(path) for path in folders]
    names: list[str] = []
    commands: list[str] = []
    remarks: dict[str, None] = {}
    for path, source in zip(folders, sources, strict=True):
        if source.kind != "sweep":
            raise ArgumentError(
                f"{path} is a lab run, but only sweeps can be reported together",
                "Report it on its own",
                parameter="run",
            )
        names += source.names
        commands += source.commands
        remarks |= dict.fromkeys(source.remarks)

    runs = tuple(source.run for source in sources)
    return ReportSource(
        run=combined(runs),
        kind="sweep",
        names=tuple(names),
        units="pairs",
        commands=tuple(commands),
        remarks=tuple(remarks),
        parts=runs,
    )


def _open_one(folder: Path) -> ReportSource:
    """The sweep or lab run in a folder."""
    if os.path.exists(folder / _SWEEP_FILE):
        run = Run.read(folder)
        if not run.results:
            raise DataError(
                f"No cell of {folder} is finished", "Run the sweep again; it resumes where it stopped", parameter="run"
            )
        name = folder.resolve().name
        return ReportSource(
            run=run,
            kind="sweep",
            names=(name,),
            units="pairs",
            commands=(f"adapterswap sweep recipe.yaml --out-path {name}",),
            remarks=(*_searched(run), *run.remarks),
        )

    if os.path.exists(folder / RESULTS) and os.path.exists(folder / ANSWERS):
        try:
            files_inside(folder, [RESULTS, ANSWERS], kind=DataError)
            content = read_json(folder / RESULTS, _REMEDY, kind=DataError)
            with open_regular(folder / ANSWERS, _REMEDY, kind=DataError) as file:
                answers = file.read()
        except DataError as error:
            raise error.recast(parameter="run") from None
        # Other files may have these names.
        if content.get("format") == _LAB:
            try:
                rows = list(json_lines(answers.splitlines(), dict))
                return lab_source(folder, content, rows, name=folder.resolve().name)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{folder} is damaged: {error!r}", "Run the lab again with `overwrite=True`", parameter="run"
                ) from None
    raise NotFoundError(f"{folder} is neither a sweep's folder nor a lab run's", _REMEDY, parameter="run")


def _searched(run: Run) -> Iterator[str]:
    """Remarks on families that a search evaluated only in part."""
    search = run.described.get("recipe", {}).get("search")
    if not search:
        return

    requested = _by_family(run.cells)
    finished = _by_family(result.cell for result in run.results)
    given_up = _by_family(run.given_up)
    for family, configurations in requested.items():
        evaluated = finished.get(family, set())
        if len(evaluated) >= len(configurations):
            continue
        extent = f"{len(evaluated)} of {len(configurations)} configurations"
        stopped = given_up.get(family, set()) - evaluated
        if stopped:
            extent += f", and stopped {len(stopped)} more after some documents"
        yield (
            f"{family}: a search ({search.get('sampler', 'tpe')}) evaluated {extent}. "
            "Its rows cover only those; minimum and mean do not hold for the whole grid."
        )


def _by_family(cells: Iterable[Cell]) -> dict[str, set[str]]:
    """Family → the configurations of its cells."""
    configurations: dict[str, set[str]] = {}
    for cell in cells:
        configurations.setdefault(cell.family, set()).add(cell.configuration)
    return configurations


def lab_source(
    folder: Path, content: Mapping[str, Any], answers: Iterable[Mapping[str, Any]], *, name: str
) -> ReportSource:
    """A lab run from the content of its results.json and the rows of its answers.jsonl; `name` is its folder's name.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is damaged.
    """
    number = int(content["problems"])
    tasks: dict[str, TaskInfo] = {}
    for code, role in (("xx", "target"), ("en", "retention")):
        documents = tuple(range(number))
        metric = ("exact_match", "none")
        tasks[code] = TaskInfo(f"math, {code}", role, code, metric, True, number, (), documents)

    # Method → seed → what the seed's development set chose
    zones: dict[int, str] = {}
    scales: dict[int, str] = {}
    for seed in content["seeds"]:
        zones[seed["seed"]] = f"bottom={seed['bottom']},top={seed['top']}"
        scales[seed["seed"]] = f"scale={seed['scale']:g}"
    configurations = {"layer swap": zones, "inverse swap": zones, "reset": zones, "tuned sum": scales}

    # Seed and method → task → its scores; `right` is a text with 1 for each right answer and 0 for each wrong one
    right: dict[tuple[int, str], dict[str, TaskValue]] = {}
    for row in answers:
        docs = {}
        for place, mark in enumerate(row["right"]):
            docs[place] = float("01".index(mark))
        if len(docs) != number:
            raise ValueError(f"{len(docs)} answers of {number}")
        mean = sum(docs.values()) / number
        value = TaskValue(mean, None, {"exact_match,none": mean}, docs)
        right.setdefault((row["seed"], row["method"]), {})[tasks[row["language"]].name] = value

    names_of_tasks = tuple(task.name for task in tasks.values())
    results = []
    for method in content["methods"]:
        for seed in zones:
            configuration = configurations.get(method, {}).get(seed, "")
            cell = Cell(
                cell=f"seed-{seed}/{method}",
                family=method,
                task_expert=(),
                language_expert=(),
                composition={"chosen": configuration},
                short=f"seed {seed}@{configuration}",
                default=False,
                tasks=names_of_tasks,
            )
            results.append(CellResult(cell, right[seed, method], {}))

    run = Run(
        folder=folder,
        described={
            "recipe": {"scene": content["scene"], "methods": content["methods"]},
            "versions": content["versions"],
        },
        tasks={task.name: task for task in tasks.values()},
        cells=tuple(result.cell for result in results),
        results=tuple(results),
    )
    return ReportSource(
        run=run,
        kind="lab",
        names=(name,),
        units="seeds",
        commands=(f"adapterswap lab --seeds {len(zones)} --scene {content['scene']['name']}",),
        remarks=(f"The question: {content['scene']['question']}", content["caveat"]),
        development=_development(content["seeds"]),
    )


def _development(seeds: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], float]:
    """(bottom, top) → the mean score over seeds on their development sets."""
    grids = []  # of each seed: (bottom, top) → score
    for seed in seeds:
        cells = seed["development"]["grid"]
        grids.append({(cell["bottom"], cell["top"]): cell["xx"] for cell in cells})

    means = {}
    for zones in grids[0]:
        means[zones] = sum(grid[zones] for grid in grids) / len(grids)
    return means
