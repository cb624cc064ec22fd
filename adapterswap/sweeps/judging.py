"""Judge cells over one base in memory, with all experts of a sweep loaded beside each other.

Between cells the model's LoRA layers are switched and nothing is loaded or written, but for compositions that need
tensors of their own (TIES, DARE, pruning, a bound on the rank): these are reduced to an adapter in a temporary folder,
loaded beside the experts, and removed again. Knows nothing of the folder that is written, and of other processes only
that they may share a cell's batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from adapterswap.errors import RunError
from adapterswap.processes import Processes
from adapterswap.sweeps.cells import Assignment, Cell
from adapterswap.sweeps.preparing import PreparedSweep
from adapterswap.sweeps.values import CellResult, TaskValue

if TYPE_CHECKING:
    from adapterswap.evaluation import EvaluationResult
    from adapterswap.live import LiveComposer

__all__ = ["Judge", "Judged", "LocalJudge", "OnProgress", "agreed", "is_live"]

OnProgress = Callable[[int, int], None]
"""Told the requests of an assignment that are done, and their number."""


@dataclass(frozen=True)
class Judged:
    """What an assignment gave, with what is kept beside it.

    Attributes:
        result: the scores, of the tasks and documents that were asked.
        samples: as samples/CELL.jsonl has them.
        questions: task → doc_id, prompt and target of each document.
    """

    result: CellResult
    samples: list[dict[str, Any]]
    questions: Mapping[str, Sequence[Mapping[str, Any]]]


class Judge(Protocol):
    """What can judge cells.

    Attributes:
        described: all that the results depend on, for sweep.json.
    """

    @property
    def described(self) -> Mapping[str, Any]: ...

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Judge these; results come in their order."""
        ...


def is_live(prepared: PreparedSweep, cell: Cell) -> bool:
    """Whether a cell is judged by switching alone; else it is reduced to an adapter first."""
    from adapterswap.live import why_not_live

    plan = prepared.plans[cell.cell]
    return plan is None or (not cell.output and why_not_live(plan) is None)


def agreed(known: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What one of several judges says that results depend on, where nothing differs from what is known.

    Raises:
        RunError: something does.
    """
    differing = [key for key in known if key not in ("recipe", "settings") and known[key] != found[key]]
    differing += [key for key, value in known["settings"].items() if found["settings"][key] != value]
    if differing:
        raise RunError(
            f"a worker finds other {', '.join(differing)} than the rest",
            "Use the same files and the same versions on all machines",
        )
    return found


class LocalJudge:
    """A base and all experts of a sweep in this process; see `Judge`.

    Args:
        prepared: the sweep.
        device, dtype: as for `sweep`.
        processes: those that judge together, each with such a judge; this one alone, if none are given.

    Raises:
        AdapterswapError: see `choose_device`, `load_weights` and `LiveComposer.load_expert`.
    """

    def __init__(self, prepared: PreparedSweep, device: str, dtype: str, *, processes: Processes | None = None) -> None:
        from adapterswap.bases import choose_device, load_weights
        from adapterswap.evaluation.evaluating import surroundings
        from adapterswap.live import LiveComposer

        target = choose_device(device)
        model = load_weights(prepared.base, dtype=dtype).to(target)
        self._prepared, self._processes = prepared, processes
        self._composer: LiveComposer = LiveComposer.from_experts(model, prepared.experts)
        self._composer.model.eval()
        around = surroundings(self._composer.model)
        versions = around.pop("versions")
        settings = {**prepared.described["settings"], **around}
        self.described = {**prepared.described, "settings": settings, "versions": versions}

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Judge cells, each when it is asked for; the model is left as it was.

        Raises:
            AdapterswapError: see `evaluate`.
        """
        for assignment in assignments:
            yield self._judge(assignment, on_progress)

    def _judge(self, assignment: Assignment, on_progress: OnProgress) -> Judged:
        from adapterswap.evaluation import evaluate

        prepared, model, tokenizer = self._prepared, self._composer.model, self._prepared.base.tokenizer
        cell, documents = assignment.cell, assignment.documents
        tasks = cell.tasks if documents is None else tuple(documents)
        started = time.perf_counter()
        with self._composed(cell) as relative_error:
            switched = time.perf_counter()
            found = evaluate(
                model, tokenizer, tasks, prepared.settings,
                documents=documents, processes=self._processes, on_progress=on_progress,
            )  # fmt: skip
            seconds = {"switch": switched - started, "evaluate": time.perf_counter() - switched}
        rounded = {name: round(value, 6) for name, value in seconds.items()}
        questions: dict[str, list[dict[str, Any]]] = {task: [] for task in tasks}
        for sample in found.samples:
            target = sample.as_json()["target"]
            questions[sample.task].append({"doc_id": sample.doc_id, "prompt": sample.prompt, "target": target})
        result = CellResult(cell, _values(found, prepared), rounded, relative_error)
        return Judged(result, list(_samples(found)), questions)

    @contextmanager
    def _composed(self, cell: Cell) -> Iterator[float | None]:
        """Put a cell's composition into the model; yields its relative error, see `CellResult`."""
        from adapterswap.arithmetic.outputs import Form
        from adapterswap.writing import prepare, write_prepared

        plan = self._prepared.plans[cell.cell]
        if plan is None or is_live(self._prepared, cell):
            with self._composer.use(plan):
                yield None
            return
        written = prepare(plan, Form(**cell.output))
        errors = (reduced.written_error for reduced in written.reduced.values())
        relative_error = float(f"{max(errors, default=0.0):.6g}") if cell.output else None
        name = f"cell-{cell.cell}"
        with ExitStack() as stack:
            place = Path(stack.enter_context(TemporaryDirectory()))
            self._composer.load_expert(write_prepared(written, place / "composed"), name)
            try:
                with self._composer.use(name):
                    yield relative_error
            finally:
                self._composer.model.delete_adapter(name)


def _values(found: EvaluationResult, prepared: PreparedSweep) -> dict[str, TaskValue]:
    """The scores of one evaluation as they are recorded; numbers that JSON cannot say are None."""
    plain = {task["name"]: task["scores"] for task in found.as_json()["tasks"]}
    values = {}
    for name, task in found.tasks.items():
        metric, filter_name = prepared.tasks[name].primary
        scores = {f"{score['metric']},{score['filter']}": score for score in plain[name]}
        primary = scores.get(f"{metric},{filter_name}", {"value": None, "stderr": None})
        docs = {
            sample.doc_id: sample.scores[filter_name][metric]
            for sample in found.samples
            if sample.task == task.name and metric in sample.scores.get(filter_name, {})
        }
        plain_scores = {key: score["value"] for key, score in scores.items()}
        values[name] = TaskValue(primary["value"], primary["stderr"], plain_scores, docs, task.cut)
    return values


def _samples(found: EvaluationResult) -> Iterator[dict[str, Any]]:
    for sample in found.samples:
        content = sample.as_json()
        yield {key: content[key] for key in ("task", "doc_id", "target", "output", "answers", "scores")}
