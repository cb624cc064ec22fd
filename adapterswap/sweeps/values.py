"""The results of a sweep: tasks, scores and cells. Plain data that is written as JSON and read back.

Knows nothing of folders, of how cells are made or evaluated, or of statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterswap.sweeps.cells import Assignment, Cell

__all__ = ["CellResult", "Findings", "RungResult", "TaskInfo", "TaskValue"]


@dataclass(frozen=True)
class TaskInfo:
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
        sha256: of its questions and its scoring, see `task_fingerprint`; None in sweeps of older versions.
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

    def as_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "language": self.language,
            "primary": list(self.primary),
            "higher_is_better": self.higher_is_better,
            "num_docs": self.num_docs,
            "split": {"select": list(self.select), "report": list(self.report)},
            **({} if self.sha256 is None else {"sha256": self.sha256}),
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
            sha256=content.get("sha256"),
        )


@dataclass(frozen=True)
class TaskValue:
    """The scores of one cell on one task.

    Attributes:
        value: the primary score over all documents; None if it is not a finite number.
        stderr: its standard error; None if it is unknown.
        scores: every score, by `metric,filter`.
        docs: document → its primary score; empty for scores that only a whole corpus has (BLEU, chrF++), and if `value`
            is None.
        cut: how many outputs ended at the token limit; None for tasks that compare likelihoods, and in sweeps of older
            versions, which did not record it.
    """

    value: float | None
    stderr: float | None
    scores: Mapping[str, float | None]
    docs: Mapping[int, float]
    cut: int | None = None

    def mean_over(self, doc_ids: tuple[int, ...]) -> float | None:
        """The mean primary score of these documents; None if documents have no scores of their own."""
        scores = [self.docs[doc_id] for doc_id in doc_ids if doc_id in self.docs]
        return sum(scores) / len(scores) if scores else None

    def only(self, doc_ids: tuple[int, ...]) -> TaskValue:
        """The scores of these documents alone, without those of the whole task."""
        return TaskValue(None, None, {}, {doc_id: self.docs[doc_id] for doc_id in doc_ids if doc_id in self.docs})

    def as_json(self) -> dict[str, Any]:
        docs = [[doc_id, score] for doc_id, score in self.docs.items()]
        cut = {} if self.cut is None else {"cut": self.cut}
        return {"value": self.value, "stderr": self.stderr, "scores": dict(self.scores), **cut, "docs": docs}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TaskValue:
        return cls(content["value"], content["stderr"], content["scores"], dict(content["docs"]), content.get("cut"))


@dataclass(frozen=True)
class CellResult:
    """A finished cell.

    Attributes:
        cell: what was evaluated.
        results: task → scores.
        seconds: `switch`, for making this composition from the previous one, and `evaluate`.
        relative_error: for a cell with a bounded rank, the largest ‖ΔW − ΔW'‖ / ‖ΔW‖ of a module (Frobenius norm); ΔW'
            is what was evaluated, after rounding; 0 if nothing had to be reduced. None for cells without a bound, which
            are exact, and in sweeps of older versions, which did not record it.
    """

    cell: Cell
    results: Mapping[str, TaskValue]
    seconds: Mapping[str, float] = field(compare=False)
    relative_error: float | None = None

    def as_json(self) -> dict[str, Any]:
        results = {task: value.as_json() for task, value in self.results.items()}
        error = {} if self.relative_error is None else {"relative_error": self.relative_error}
        return {**self.cell.as_json(), **error, "results": results, "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CellResult:
        results = {task: TaskValue.from_json(value) for task, value in content["results"].items()}
        return cls(Cell.from_json(content), results, content["seconds"], content.get("relative_error"))


@dataclass(frozen=True)
class RungResult:
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

    def as_json(self) -> dict[str, Any]:
        results = {task: value.as_json() for task, value in self.results.items()}
        return {"cell": self.cell, "documents": self.documents, "results": results, "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RungResult:
        results = {task: TaskValue.from_json(value) for task, value in content["results"].items()}
        return cls(content["cell"], content["documents"], results, content["seconds"])


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
        return cls(
            {result.cell.cell: result for result in results}, {(rung.cell, rung.documents): rung for rung in rungs}
        )

    @property
    def seen(self) -> set[str]:
        """The cells that were evaluated on at least some documents."""
        return {*self.results, *(cell for cell, _ in self.rungs)}

    def get(self, assignment: Assignment) -> CellResult | RungResult | None:
        """The result of an assignment, if need be from the result of its finished cell; None if there is none."""
        cell, rung = assignment.cell.cell, assignment.rung
        finished = self.results.get(cell)
        if assignment.documents is None or rung is None:
            return finished
        rung_result = self.rungs.get((cell, rung))
        requested = {task: {*doc_ids} for task, doc_ids in assignment.documents.items()}
        # A search with another seed takes other documents, though as many.
        if (
            rung_result is not None
            and {task: {*value.docs} for task, value in rung_result.results.items()} == requested
        ):
            return rung_result
        if finished is None:
            return None
        parts = {task: finished.results[task].only(doc_ids) for task, doc_ids in assignment.documents.items()}
        return RungResult(cell, rung, parts, {})
