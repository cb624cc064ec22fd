"""Read a sweep's folder: its description, the scores of each finished cell, and samples.

The folder contains sweep.json (the description), cells.jsonl (a line for each finished cell), `samples/` (a file for
each cell), `prompts/` (a file for each task) and, after successive halving, rungs.jsonl. The folder of a sweep that is
still running or was killed can be read too; an incomplete last line is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

from adapterswap.experiments.sweeps.grid import UNLESS_EMPTY, Assignment, Carrier, Cell
from adapterswap.kit.errors import DataError, NotFoundError
from adapterswap.kit.files.inside import files_inside
from adapterswap.kit.files.readers import field as reading
from adapterswap.kit.files.text import expand, json_lines, open_regular, read_json

LARGEST = 1e50  # in size: fourth powers of larger scores overflow in statistics


def _not_text(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("it is text, not a number")
    return value


def _items(docs: Mapping[int, float]) -> list[list[Any]]:
    return [[document, score] for document, score in docs.items()]


Number = Annotated[float, reading(before=_not_text, ge=-LARGEST, le=LARGEST)]
_IF_KNOWN: Mapping[str, Any] = {"left_out": lambda value: value is None}
_NEVER: Mapping[str, Any] = {"left_out": lambda value: True}


@dataclass(frozen=True)
class TaskInfo(Carrier):
    """A task of a sweep.

    Attributes:
        name: its name.
        role: `target`, or `retention` for a task that is reported but does not choose configurations.
        language: the code of its language, taken from its name (sw, swh_Latn); None if the name has none.
        primary: (metric, filter) of the score that counts.
        higher_is_better: whether a higher score is better.
        num_docs: how many documents it has.
        select: the documents on which configurations are chosen.
        report: the other documents, on which the chosen ones are reported.
        group: the column of the task's rows that names a document's group, such as `template`; None if each document is
            drawn independently of the others.
        groups: the group of each document; empty without a column.
        sha256: of its questions and its scoring, see `LoadedTasks.fingerprint`; None for tasks of the lab.
        averaged: whether the primary score is the mean of the documents' scores, as a perplexity is not. Known while a
            sweep runs; afterwards, `TaskValue.docs` is empty where it is not.
    """

    name: str
    role: str
    language: str | None
    primary: tuple[str, str]
    higher_is_better: bool
    num_docs: int
    select: tuple[int, ...]
    report: tuple[int, ...]
    sha256: str | None = None
    group: str | None = field(default=None, metadata=_IF_KNOWN)
    groups: tuple[str, ...] = field(default=(), metadata=UNLESS_EMPTY)
    averaged: bool = field(default=True, compare=False, metadata=_NEVER)


@dataclass(frozen=True)
class TaskValue(Carrier):
    """The scores of one cell on one task.

    Attributes:
        value: the primary score over all documents; None if it is not a finite number of at most `LARGEST` in size.
        stderr: its standard error; None if it is unknown.
        scores: every score, by `metric,filter`.
        docs: document → its primary score; empty for scores that only a whole corpus has (BLEU, chrF++, perplexity),
            and if `value` is None.
        cut: how many outputs ended at the token limit; None for tasks that compare likelihoods.
    """

    value: Number | None
    stderr: Number | None
    scores: Mapping[str, Number | None]
    docs: Annotated[Mapping[int, Number], reading(before=dict)] = field(metadata={"written": _items})
    cut: int | None = field(default=None, metadata=_IF_KNOWN)

    def mean_over(self, doc_ids: tuple[int, ...]) -> float | None:
        """The mean primary score of these documents; None if documents have no scores of their own."""
        scores = self.only(doc_ids).docs.values()
        if not scores:
            return None
        return sum(scores) / len(scores)

    def only(self, doc_ids: tuple[int, ...]) -> TaskValue:
        """The scores of these documents alone, without those of the whole task."""
        docs = {doc_id: self.docs[doc_id] for doc_id in doc_ids if doc_id in self.docs}
        return TaskValue(None, None, {}, docs)


@dataclass(frozen=True)
class CellResult(Carrier):
    """A finished cell.

    Attributes:
        cell: what was evaluated.
        results: task → scores.
        seconds: `switch`, for making this composition from the previous one, and `evaluate`.
        relative_error: for a cell with a bounded rank, the largest ‖ΔW − ΔW'‖ / ‖ΔW‖ of a module (Frobenius norm); ΔW'
            is what was evaluated, after rounding; 0 if nothing had to be reduced. None for cells without a bound, which
            are exact.
    """

    cell: Cell
    results: Mapping[str, TaskValue]
    seconds: Mapping[str, float] = field(compare=False)
    relative_error: Number | None = field(default=None, metadata=_IF_KNOWN)

    def as_json(self) -> dict[str, Any]:
        """The fields of the cell, and those of its results."""
        content = super().as_json()
        return {**content.pop("cell"), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return super().from_json({**content, "cell": content})


@dataclass(frozen=True)
class RungResult(Carrier):
    """The scores of a cell on a rung of successive halving, before it was evaluated on all documents or given up.

    Attributes:
        cell: the cell's id.
        documents: on how many documents of each target task it was evaluated.
        results: target task → scores over these documents.
        seconds: see `CellResult`.
    """

    cell: str
    documents: int
    results: Mapping[str, TaskValue]
    seconds: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True)
class Findings:
    """The results of a sweep so far.

    Attributes:
        results: cell → its result.
        rungs: (cell, number of documents) → its result.
    """

    results: dict[str, CellResult] = field(default_factory=dict)
    rungs: dict[tuple[str, int], RungResult] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Iterable[CellResult], rungs: Iterable[RungResult]) -> Findings:
        by_cell = {result.cell.cell: result for result in results}
        by_rung = {(rung.cell, rung.documents): rung for rung in rungs}
        return cls(by_cell, by_rung)

    @property
    def seen(self) -> set[str]:
        """The cells that were evaluated on at least some documents."""
        seen = set(self.results)
        for cell, _ in self.rungs:
            seen.add(cell)
        return seen

    def get(self, assignment: Assignment) -> CellResult | RungResult | None:
        """The result of an assignment, if need be from the result of its finished cell; None if there is none."""
        cell, rung = assignment.cell.cell, assignment.rung
        finished = self.results.get(cell)
        if assignment.documents is None or rung is None:
            return finished

        # A search with another seed takes other documents, though as many
        rung_result = self.rungs.get((cell, rung))
        if rung_result is not None:
            requested = {task: set(doc_ids) for task, doc_ids in assignment.documents.items()}
            evaluated = {task: set(value.docs) for task, value in rung_result.results.items()}
            if evaluated == requested:
                return rung_result

        if finished is None:
            return None
        parts = {task: finished.results[task].only(doc_ids) for task, doc_ids in assignment.documents.items()}
        return RungResult(cell, rung, parts, {})


class Question(NamedTuple):
    """What a document asks.

    Attributes:
        prompt: the model's input.
        choices: the texts whose likelihoods are compared; empty for other tasks, and where they were not recorded.
    """

    prompt: str
    choices: tuple[str, ...]


SWEEP, CELLS, RUNGS, SAMPLES, PROMPTS = "sweep.json", "cells.jsonl", "rungs.jsonl", "samples", "prompts"
PREREGISTRATION = "preregistration.json"
FORMAT = 1
_AGAIN = "Run the sweep again with `overwrite=True`"
_REMEDY = "Pass the folder that `adapterswap sweep` wrote"
_Line = TypeVar("_Line")


@dataclass(frozen=True)
class Run:
    """A sweep's folder.

    Attributes:
        folder: its path.
        described: the content of sweep.json: recipe, base, experts, settings, versions.
        tasks: by name, target tasks first.
        cells: all cells of the sweep, in order.
        results: the finished cells, in order.
        rungs: the scores of cells on the rungs of successive halving, in order.
        elsewhere: after `combined`, cell → its folder, for cells that are not in `folder`.
    """

    folder: Path
    described: Mapping[str, Any]
    tasks: Mapping[str, TaskInfo]
    cells: tuple[Cell, ...]
    results: tuple[CellResult, ...]
    rungs: tuple[RungResult, ...] = ()
    elsewhere: Mapping[str, Path] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Run {str(self.folder)!r}: {len(self.results)} of {len(self.cells)} cells; {', '.join(self.tasks)}>"

    def folder_of(self, cell: str) -> Path:
        """The folder that holds a cell's samples."""
        return self.elsewhere.get(cell, self.folder)

    def samples(self, cell: Cell) -> list[dict[str, Any]] | None:
        """What `read_samples` returns for a cell; None if the folder has no samples of it."""
        folder = self.folder_of(cell.cell)
        if not os.path.exists(samples_file(folder, cell)):
            return None
        return read_samples(folder, cell.cell)

    def questions(self, task: str, cell: Cell) -> dict[int, Question] | None:
        """The questions of a task by document, from the folder that holds a cell; None if it has none."""
        path = prompts_file(self.folder_of(cell.cell), task)
        if not os.path.exists(path):
            return None

        questions = {}
        for row in _read_lines(path, {"doc_id": int, "prompt": str}):
            choices = row.get("choices")
            if not isinstance(choices, list):
                choices = []
            questions[row["doc_id"]] = Question(row["prompt"], tuple(map(str, choices)))
        return questions

    @property
    def selects(self) -> bool:
        """Whether a method has several configurations of one pair, of which one is chosen."""
        return len({(cell.family, cell.unit) for cell in self.cells}) < len(self.cells)

    @property
    def as_reported(self) -> Run:
        """The run with the documents that are reported: all of them, if no configuration is chosen on a part."""
        if self.selects:
            return self

        tasks = {}
        for name, task in self.tasks.items():
            tasks[name] = replace(task, select=(), report=tuple(range(task.num_docs)))
        return replace(self, tasks=tasks)

    @property
    def given_up(self) -> tuple[Cell, ...]:
        """Cells that were evaluated on some documents but not on all."""
        tried = {rung.cell for rung in self.rungs} - {result.cell.cell for result in self.results}
        return tuple(cell for cell in self.cells if cell.cell in tried)

    @property
    def unfinished(self) -> tuple[Cell, ...]:
        """Cells that are not evaluated yet. Empty for a search, which chooses its cells while it runs."""
        if self.described.get("recipe", {}).get("search"):
            return ()
        finished = {result.cell.cell for result in self.results}
        return tuple(cell for cell in self.cells if cell.cell not in finished)

    @property
    def remarks(self) -> list[str]:
        """What a reader of the scores should know: batches of one, missing scores, cut outputs, tasks all at 0."""
        lines = []
        if "one_by_one" in self.described.get("settings", {}):
            lines.append(
                "Requests were answered one by one: beside longer ones in a batch, this model answers them differently."
            )

        for task in self.tasks.values():
            values = []
            for result in self.results:
                if task.name in result.results:
                    values.append(result.results[task.name])

            unscored = sum(value.value is None for value in values)
            if unscored:
                lines.append(
                    f"{task.name}: {unscored:,} of {len(values):,} cells have no score: it is not a finite number, or "
                    "beyond 1e50. They are left out, as if they were not finished. Check their outputs in samples/."
                )

            cut = sum(value.cut or 0 for value in values)
            if cut:
                outputs = sum(task.num_docs for value in values if value.cut is not None)
                cells = sum(bool(value.cut) for value in values)
                lines.append(
                    f"{task.name}: {cut:,} of {outputs:,} outputs were cut at the token limit, in {cells:,} of "
                    f"{len(values):,} cells. Raise max_gen_toks if answers come late."
                )

            if values and task.higher_is_better and all(value.value == 0 for value in values):
                cells_text = f"all {len(values):,} cells" if len(values) > 1 else "the only cell"
                lines.append(
                    f"{task.name}: {cells_text} scored 0, so their scores cannot tell compositions apart. Check the "
                    "outputs in samples/, the primary score and the token limit."
                )
        return lines

    @staticmethod
    def read(folder: str | Path) -> Run:
        """Read the folder of a sweep, finished or not.

        Raises:
            NotFoundError: it is not the folder of a sweep.
            DataError: its format is unknown, or a file or line in it is damaged: a field is missing or has another
                type, a score is not a finite number, or a line is of another sweep; or it links to files outside of it.
        """
        folder = expand(folder)
        if not os.path.exists(folder / SWEEP):
            raise NotFoundError(f"{folder} holds no {SWEEP}, so it is not a sweep's folder", _REMEDY, parameter="run")
        files_inside(folder, ["**/*"], kind=DataError)

        described = read_json(folder / SWEEP, _REMEDY, kind=DataError)
        if described.get("format") != FORMAT:
            raise DataError(
                f"{folder / SWEEP} has the format {described.get('format')!r}, and this version reads {FORMAT}",
                "Read it with the version of adapterswap that wrote it",
            )
        try:
            tasks = {name: TaskInfo.from_json(content) for name, content in described["tasks"].items()}
            cells = tuple(Cell.from_json(content) for content in described["cells"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{folder / SWEEP} is damaged: {error!r}", _AGAIN) from None

        # Each line is of another cell of this sweep
        results = _parse(folder / CELLS, CellResult.from_json)
        rungs = _parse(folder / RUNGS, RungResult.from_json)
        by_id = {cell.cell: cell for cell in cells}
        for number, result in enumerate(results, 1):
            if by_id.pop(result.cell.cell, None) != result.cell or set(result.results) != set(result.cell.tasks):
                raise DataError(
                    f"{folder / CELLS}: line {number} repeats a cell, or has another cell or other tasks "
                    "than this sweep",
                    "Delete that line, and run the same sweep again",
                )
        return Run(folder, described, tasks, cells, results, rungs)


def _parse(path: Path, from_json: Callable[[dict[str, Any]], _Line]) -> tuple[_Line, ...]:
    """Parse the complete lines of a file. Text after the last newline is ignored, and a missing file has no lines."""
    if not os.path.exists(path):
        return ()
    with open_regular(path, _REMEDY, kind=DataError) as file:
        raw = file.read()
    try:
        return tuple(json_lines(raw[: raw.rfind(b"\n") + 1].splitlines(), from_json))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", "Delete that line, and run the same sweep again") from None


def read_samples(folder: str | Path, cell: str) -> list[dict[str, Any]]:
    """The samples of a finished cell: task, doc_id, target, output, answers, scores; task by task, by document.

    Raises:
        DataError: the file does not exist, cannot be read or is damaged.
    """
    fields = {"task": str, "doc_id": int, "target": object, "output": object, "answers": dict}
    return _read_lines(_samples_of(Path(folder), cell), fields)


def read_prompts(folder: str | Path, task: str) -> dict[int, str]:
    """The prompts of a task by document; errors as for `read_samples`."""
    rows = _read_lines(prompts_file(Path(folder), task), {"doc_id": int, "prompt": str})
    return {row["doc_id"]: row["prompt"] for row in rows}


def read_questions(folder: str | Path, task: str) -> list[dict[str, Any]]:
    """The doc_id, prompt, target and choices, if any, of each document of a task; errors as for `read_samples`."""
    return _read_lines(prompts_file(Path(folder), task), {})


def samples_file(folder: Path, cell: Cell) -> Path:
    """The path of a cell's samples."""
    return _samples_of(folder, cell.cell)


def _samples_of(folder: Path, cell: str) -> Path:
    """The path of the samples of a cell with this id, which may be any text in a folder of somebody else."""
    return folder / SAMPLES / f"{quote(cell, safe='')}.jsonl"


def prompts_file(folder: Path, task: str) -> Path:
    """The path of a task's prompts. Characters that a path cannot contain are quoted."""
    return folder / PROMPTS / f"{quote(task, safe='')}.jsonl"


def _read_lines(path: Path, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """The rows of a file, each of which has these fields."""
    with open_regular(path, _REMEDY, kind=DataError) as file:
        try:
            rows = [*json_lines(file, dict)]
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}", _AGAIN) from None

    for number, row in enumerate(rows, 1):
        for name, kind in fields.items():
            if name not in row or not isinstance(row[name], kind):
                raise DataError(f"{path} is damaged: row {number} has no valid {name}", _AGAIN, parameter="run")
    return rows
