"""What a sweep found, read back from its folder: what was asked, each finished cell's scores, its samples.

The folder holds sweep.json (what was asked), cells.jsonl (a line for each finished cell), `samples/` (a file for each
cell) and `prompts/` (a file for each task). A sweep that still runs, or was killed, can be read too: its last line may
be torn, and is then left out. Plain data; knows nothing of models, of how cells are made, or of statistics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adapterswap.errors import AdapterswapError
from adapterswap.files.smallfiles import exists, open_regular, read_json
from adapterswap.sweeps.cells import Cell

__all__ = [
    "CELLS",
    "FORMAT",
    "PROMPTS",
    "SAMPLES",
    "SWEEP",
    "Cell",
    "CellResult",
    "Run",
    "TaskInfo",
    "TaskValue",
    "parse_cells",
    "prompts_file",
    "read_prompts",
    "read_run",
    "read_samples",
]

SWEEP, CELLS, SAMPLES, PROMPTS = "sweep.json", "cells.jsonl", "samples", "prompts"
FORMAT = 1
_MEND = "Give the folder that adapterswap sweep wrote"


@dataclass(frozen=True)
class TaskInfo:
    """A task of a sweep.

    Attributes:
        name: its name.
        role: `target`, or `retention` for a task whose score is reported beside.
        language: the code of its language as its name gives it (sw, swh_Latn); None where it gives none.
        primary: (metric, filter) of the score that counts.
        higher_is_better: whether more of it is better.
        num_docs: how many documents are asked.
        select: the documents on which configurations are chosen.
        report: the others, on which the chosen ones are reported.
    """

    name: str
    role: str
    language: str | None
    primary: tuple[str, str]
    higher_is_better: bool
    num_docs: int
    select: tuple[int, ...]
    report: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "language": self.language,
            "primary": list(self.primary),
            "higher_is_better": self.higher_is_better,
            "num_docs": self.num_docs,
            "split": {"select": list(self.select), "report": list(self.report)},
        }

    @classmethod
    def from_json(cls, name: str, content: Mapping[str, Any]) -> TaskInfo:
        metric, filter_name = content["primary"]
        return cls(
            name=name,
            role=content["role"],
            language=content["language"],
            primary=(metric, filter_name),
            higher_is_better=content["higher_is_better"],
            num_docs=content["num_docs"],
            select=tuple(content["split"]["select"]),
            report=tuple(content["split"]["report"]),
        )


@dataclass(frozen=True)
class TaskValue:
    """The scores of one cell on one task.

    Attributes:
        value: the primary score over all documents; None where it is no number.
        stderr: its standard error; None where it is not known.
        scores: every score, by `metric,filter`.
        docs: document → its primary score; empty for scores that only a whole corpus has (BLEU, chrF++).
    """

    value: float | None
    stderr: float | None
    scores: Mapping[str, float | None]
    docs: Mapping[int, float]

    def mean_over(self, doc_ids: tuple[int, ...]) -> float | None:
        """The mean of the primary score over these documents; None where documents have no scores of their own."""
        found = [self.docs[doc_id] for doc_id in doc_ids if doc_id in self.docs]
        return sum(found) / len(found) if found else None

    def as_json(self) -> dict[str, Any]:
        docs = [[doc_id, score] for doc_id, score in self.docs.items()]
        return {"value": self.value, "stderr": self.stderr, "scores": dict(self.scores), "docs": docs}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TaskValue:
        return cls(content["value"], content["stderr"], content["scores"], dict(content["docs"]))


@dataclass(frozen=True)
class CellResult:
    """A finished cell.

    Attributes:
        cell: what was judged.
        results: by task.
        seconds: `switch`, from one composition to this one, and `evaluate`.
    """

    cell: Cell
    results: Mapping[str, TaskValue]
    seconds: Mapping[str, float] = field(compare=False)

    def as_json(self) -> dict[str, Any]:
        results = {task: value.as_json() for task, value in self.results.items()}
        return {**self.cell.as_json(), "results": results, "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CellResult:
        results = {task: TaskValue.from_json(value) for task, value in content["results"].items()}
        return cls(Cell.from_json(content), results, content["seconds"])


@dataclass(frozen=True)
class Run:
    """A sweep's folder.

    Attributes:
        folder: where it lies.
        described: sweep.json as it stands: recipe, base, experts, settings, versions.
        tasks: by name, target tasks first.
        cells: everything that was asked for, in order.
        results: what is finished, in order.
    """

    folder: Path
    described: Mapping[str, Any]
    tasks: Mapping[str, TaskInfo]
    cells: tuple[Cell, ...]
    results: tuple[CellResult, ...]

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
    folder = Path(folder)
    if not exists(folder / SWEEP):
        raise AdapterswapError(f"{folder} holds no {SWEEP}, so it is no sweep's folder", _MEND)
    described = read_json(folder / SWEEP, _MEND)
    if described.get("format") != FORMAT:
        raise AdapterswapError(
            f"{folder / SWEEP} has the format {described.get('format')!r}, and this version reads {FORMAT}",
            "Read it with the version of adapterswap that wrote it",
        )
    results: list[CellResult] = []
    try:
        tasks = {name: TaskInfo.from_json(name, content) for name, content in described["tasks"].items()}
        cells = tuple(Cell.from_json(content) for content in described["cells"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AdapterswapError(f"{folder / SWEEP} is damaged: {error!r}", "Run the sweep again, --overwrite") from None
    if exists(folder / CELLS):
        with open_regular(folder / CELLS, _MEND) as file:
            results, _ = parse_cells(file.read(), folder / CELLS)
    return Run(folder, described, tasks, cells, tuple(results))


def parse_cells(raw: bytes, where: Path) -> tuple[list[CellResult], int]:
    """The whole lines of cells.jsonl, and how many bytes they take; what follows the last newline was torn off.

    Raises:
        AdapterswapError: a line that is whole is no cell.
    """
    whole = raw.rfind(b"\n") + 1
    found = []
    for number, line in enumerate(raw[:whole].splitlines(), 1):
        try:
            found.append(CellResult.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterswapError(
                f"{where}: line {number} is damaged: {error!r}", "Delete that line, and run the same sweep again"
            ) from None
    return found, whole


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
            raise AdapterswapError(f"{path} is damaged: {error}", "Run the sweep again, --overwrite") from None
