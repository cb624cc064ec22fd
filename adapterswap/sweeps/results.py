"""What a sweep found, read back from its folder: what was asked, each finished cell's scores, its samples.

The folder holds sweep.json (what was asked), cells.jsonl (a line for each finished cell), `samples/` (a file for each
cell), `prompts/` (a file for each task) and, of a search that halves, rungs.jsonl. A sweep that still runs, or was
killed, can be read too: a last line may be torn, and is then left out. Knows nothing of models or of making cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from adapterswap.errors import AdapterswapError
from adapterswap.files.smallfiles import exists, expand, open_regular, read_json
from adapterswap.sweeps.cells import Cell
from adapterswap.sweeps.values import CellResult, RungResult, TaskInfo

__all__ = [
    "CELLS",
    "FORMAT",
    "PROMPTS",
    "RUNGS",
    "SAMPLES",
    "SWEEP",
    "Run",
    "prompts_file",
    "read_prompts",
    "read_run",
    "read_samples",
]

SWEEP, CELLS, RUNGS, SAMPLES, PROMPTS = "sweep.json", "cells.jsonl", "rungs.jsonl", "samples", "prompts"
FORMAT = 1
_MEND = "Give the folder that adapterswap sweep wrote"
_Line = TypeVar("_Line")


@dataclass(frozen=True)
class Run:
    """A sweep's folder.

    Attributes:
        folder: where it lies.
        described: sweep.json as it stands: recipe, base, experts, settings, versions.
        tasks: by name, target tasks first.
        cells: everything that was asked for, in order.
        results: what is finished, in order.
        rungs: what a search that halves saw of cells on some documents, in order.
    """

    folder: Path
    described: Mapping[str, Any]
    tasks: Mapping[str, TaskInfo]
    cells: tuple[Cell, ...]
    results: tuple[CellResult, ...]
    rungs: tuple[RungResult, ...] = ()

    @property
    def given_up(self) -> tuple[Cell, ...]:
        """Cells that were judged on some documents, and not on all."""
        seen = {rung.cell for rung in self.rungs} - {result.cell.cell for result in self.results}
        return tuple(cell for cell in self.cells if cell.cell in seen)

    @property
    def unfinished(self) -> tuple[Cell, ...]:
        """Cells that are still to be judged; none are known where a search asks as it goes on."""
        if self.described.get("recipe", {}).get("search"):
            return ()
        done = {result.cell.cell for result in self.results}
        return tuple(cell for cell in self.cells if cell.cell not in done)


def read_run(folder: str | Path) -> Run:
    """Read the folder of a sweep, finished or not.

    Raises:
        AdapterswapError: it is none, is of another format, or a line in it is damaged.
    """
    folder = expand(folder)
    if not exists(folder / SWEEP):
        raise AdapterswapError(f"{folder} holds no {SWEEP}, so it is no sweep's folder", _MEND)
    described = read_json(folder / SWEEP, _MEND)
    if described.get("format") != FORMAT:
        raise AdapterswapError(
            f"{folder / SWEEP} has the format {described.get('format')!r}, and this version reads {FORMAT}",
            "Read it with the version of adapterswap that wrote it",
        )
    try:
        tasks = {name: TaskInfo.from_json(name, content) for name, content in described["tasks"].items()}
        cells = tuple(Cell.from_json(content) for content in described["cells"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdapterswapError(
            f"{folder / SWEEP} is damaged: {error!r}", "Run the sweep again with `overwrite=True`"
        ) from None
    results, rungs = _parse(folder / CELLS, CellResult.from_json), _parse(folder / RUNGS, RungResult.from_json)
    return Run(folder, described, tasks, cells, tuple(results), tuple(rungs))


def _parse(path: Path, read: Callable[[dict[str, Any]], _Line]) -> list[_Line]:
    """The whole lines of a file, none if there is none; what follows the last newline was torn off."""
    if not exists(path):
        return []
    with open_regular(path, _MEND) as file:
        raw = file.read()
    found = []
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), 1):
        try:
            found.append(read(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterswapError(
                f"{path}: line {number} is damaged: {error!r}", "Delete that line, and run the same sweep again"
            ) from None
    return found


def read_samples(folder: str | Path, cell: str) -> list[dict[str, Any]]:
    """The samples of a finished cell: task, doc_id, target, output, answers, scores; task by task, by document.

    Raises:
        AdapterswapError: there is no such file, or it is damaged.
    """
    return _read_lines(Path(folder) / SAMPLES / f"{cell}.jsonl")


def read_prompts(folder: str | Path, task: str) -> dict[int, str]:
    """The prompts of a task by document; errors as for `read_samples`."""
    return {row["doc_id"]: row["prompt"] for row in _read_lines(prompts_file(Path(folder), task))}


def prompts_file(folder: Path, task: str) -> Path:
    """Where a task's prompts lie, whatever characters its name has."""
    return folder / PROMPTS / f"{quote(task, safe='')}.jsonl"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with open_regular(path, _MEND) as file:
        try:
            return [json.loads(line) for line in file]
        except ValueError as error:
            raise AdapterswapError(f"{path} is damaged: {error}", "Run the sweep again with `overwrite=True`") from None
