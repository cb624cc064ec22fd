"""Read the folder of a sweep or of a lab run into the same data.

A lab run becomes a run of cells without selection documents: each seed is a unit, its methods are families with one
cell each, and its configurations were already chosen on a development set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
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
    for path, source in zip(folders, sources, strict=True):
        if source.kind != "sweep":
            raise ArgumentError(
                f"{path} is a lab run, but only sweeps can be reported together",
                "Report it on its own",
                parameter="run",
            )
    return ReportSource(
        combined([source.run for source in sources]),
        "sweep",
        tuple(name for source in sources for name in source.names),
        "pairs",
        tuple(command for source in sources for command in source.commands),
        tuple(dict.fromkeys(remark for source in sources for remark in source.remarks)),
        tuple(source.run for source in sources),
    )


def _open_one(folder: Path) -> ReportSource:
    if os.path.exists(folder / _SWEEP_FILE):
        run = Run.read(folder)
        if not run.results:
            raise DataError(
                f"No cell of {folder} is finished", "Run the sweep again; it resumes where it stopped", parameter="run"
            )
        name = folder.resolve().name
        return ReportSource(
            run,
            "sweep",
            (name,),
            "pairs",
            (f"adapterswap sweep recipe.yaml --out-path {name}",),
            (*_searched(run), *run.remarks),
        )
    if os.path.exists(folder / RESULTS) and os.path.exists(folder / ANSWERS):
        try:
            files_inside(folder, [RESULTS, ANSWERS], kind=DataError)
            content = read_json(folder / RESULTS, _REMEDY, kind=DataError)
            with open_regular(folder / ANSWERS, _REMEDY, kind=DataError) as file:
                answers = file.read()
        except DataError as error:
            raise error.recast(parameter="run") from None
        if content.get("format") == _LAB:
            return _lab_run(folder, content, answers)
    raise NotFoundError(f"{folder} is neither a sweep's folder nor a lab run's", _REMEDY, parameter="run")


def _searched(run: Run) -> Iterator[str]:
    """Remarks on families that a search evaluated only in part."""
    search = run.described.get("recipe", {}).get("search")
    if not search:
        return
    finished = [result.cell for result in run.results]
    for family in dict.fromkeys(cell.family for cell in run.cells):
        requested, evaluated, given_up = (
            {cell.configuration for cell in cells if cell.family == family}
            for cells in (run.cells, finished, run.given_up)
        )
        if len(evaluated) < len(requested):
            stopped = len(given_up - evaluated)
            dropped = f", and stopped {stopped} more after some documents" if stopped else ""
            yield (
                f"{family}: a search ({search.get('sampler', 'tpe')}) evaluated {len(evaluated)} of {len(requested)} "
                f"configurations{dropped}. Its rows cover only those; minimum and mean do not hold for the whole grid."
            )


def _lab_run(folder: Path, content: Mapping[str, Any], answers: bytes) -> ReportSource:
    try:
        rows = [*json_lines(answers.splitlines(), dict)]
        return lab_source(folder, content, rows, name=folder.resolve().name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder} is damaged: {error!r}", "Run the lab again with `overwrite=True`", parameter="run"
        ) from None


def lab_source(
    folder: Path, content: Mapping[str, Any], answers: Iterable[Mapping[str, Any]], *, name: str
) -> ReportSource:
    """A lab run from the content of its results.json and the rows of its answers.jsonl; `name` is its folder's name.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is damaged.
    """
    number = int(content["problems"])
    tasks = {
        code: TaskInfo(f"math, {code}", role, code, ("exact_match", "none"), True, number, (), tuple(range(number)))
        for code, role in (("xx", "target"), ("en", "retention"))
    }
    chosen = {seed["seed"]: f"bottom={seed['bottom']},top={seed['top']}" for seed in content["seeds"]}
    scales = {seed["seed"]: f"scale={seed['scale']:g}" for seed in content["seeds"]}
    configurations = {"layer swap": chosen, "inverse swap": chosen, "reset": chosen, "tuned sum": scales}
    right: dict[tuple[int, str], dict[str, TaskValue]] = {}
    for row in answers:
        docs = {place: float("01".index(mark)) for place, mark in enumerate(row["right"])}
        if len(docs) != number:
            raise ValueError(f"{len(docs)} answers of {number}")
        mean = sum(docs.values()) / number
        value = TaskValue(mean, None, {"exact_match,none": mean}, docs)
        right.setdefault((row["seed"], row["method"]), {})[tasks[row["language"]].name] = value
    results = []
    for method in content["methods"]:
        for seed in chosen:
            configuration = configurations.get(method, {}).get(seed, "")
            cell = Cell(
                cell=f"seed-{seed}/{method}",
                family=method,
                task_expert=(),
                language_expert=(),
                composition={"chosen": configuration},
                short=f"seed {seed}@{configuration}",
                default=False,
                tasks=tuple(task.name for task in tasks.values()),
            )
            results.append(CellResult(cell, right[seed, method], {}))
    described = {"recipe": {"scene": content["scene"], "methods": content["methods"]}, "versions": content["versions"]}
    tasks_by_name = {task.name: task for task in tasks.values()}
    run = Run(folder, described, tasks_by_name, tuple(result.cell for result in results), tuple(results))
    grids = [{(cell["bottom"], cell["top"]): cell["xx"] for cell in s["development"]["grid"]} for s in content["seeds"]]
    return ReportSource(
        run,
        "lab",
        (name,),
        "seeds",
        (f"adapterswap lab --seeds {len(chosen)} --scene {content['scene']['name']}",),
        (f"The question: {content['scene']['question']}", content["caveat"]),
        development={zone: sum(grid[zone] for grid in grids) / len(grids) for zone in grids[0]},
    )
