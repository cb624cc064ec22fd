"""Evaluate cells over one base in memory, with all adapters of a sweep loaded, in one process or several.

Between most cells only LoRA layers are switched; nothing is loaded or written. Compositions that need their own tensors
are the exception. With a bound on the rank (TIES, DARE, pruning) they are reduced to an adapter in a temporary folder,
which is loaded beside the experts and removed after the cell. Compositions of full checkpoints, and families at full
rank, are merged into a temporary folder as by `merge`. The merged model replaces the base and its adapters, so that
only one model is in memory at a time.

With several processes, the main process runs the sweep as if it were alone, and records the results. It sends each
assignment to the other processes, which have loaded the same base and experts, and the cell's batches are divided among
all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from adapterswap.core import Plan
from adapterswap.experiments.sweeps.grid import Assignment, Cell
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.results import LARGEST, CellResult, Run, TaskValue
from adapterswap.kit.errors import RunError
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.processes import Processes

if TYPE_CHECKING:
    from adapterswap.engines.live import LiveComposer
    from adapterswap.experiments.evaluation import EvaluationResult

OnProgress = Callable[[int, int], None]
"""Called with the number of finished requests of an assignment, and the number of all its requests."""

Way = Literal["switched", "reduced", "merged"]
"""How a cell's composition is put into the model."""


@dataclass(frozen=True)
class Judged:
    """The results of an assignment, with its samples and prompts.

    Attributes:
        result: the scores on the assignment's tasks and documents.
        samples: the lines of samples/CELL.jsonl.
        questions: task → doc_id, prompt and target of each document, and the choices if likelihoods are compared.
    """

    result: CellResult
    samples: list[dict[str, Any]]
    questions: Mapping[str, Sequence[Mapping[str, Any]]]


class Judge(Protocol):
    """Evaluates cells.

    Attributes:
        described: everything that the results depend on, for sweep.json.
    """

    @property
    def described(self) -> Mapping[str, Any]: ...

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Evaluate the assignments; the results are in the same order."""
        ...


def way_of(prepared: PreparedSweep, cell: Cell) -> Way:
    """Whether a cell is evaluated by switching alone, is first reduced to an adapter, or merged into full weights.

    vLLM switches between adapters that are written first.
    """
    composition = cell.parsed
    if composition is None:
        return "switched"
    experts = set(composition.expert_names)
    if not experts <= prepared.adapters.keys() or cell.output.get("full_rank"):
        return "merged"
    if prepared.settings.engine == "vllm":
        return "merged" if prepared.beyond_vllm & experts else "reduced"
    if not cell.output and prepared.plans.is_live(cell):
        return "switched"
    return "reduced"


def agreed(known: Mapping[str, Any], described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that one of several judges has the same description as the others, and return it.

    Args:
        known: the description so far. Its recipe, and keys that it lacks, are not compared.
    """
    differing = [key for key in known if key not in ("recipe", "settings") and known[key] != described[key]]
    differing += [key for key, value in known["settings"].items() if described["settings"][key] != value]
    if differing:
        raise RunError(
            f"A worker differs from the others in {', '.join(differing)}",
            "Use the same files and the same versions on all machines",
        )
    return described


class LocalJudge:
    """A base and all adapters of a sweep in this process; see `Judge`.

    Args:
        prepared: the sweep.
        device, dtype: as for `sweep`.
        processes: the processes that evaluate together, each with its own `LocalJudge`; None for this one alone.
    """

    def __init__(self, prepared: PreparedSweep, device: str, dtype: str, *, processes: Processes | None = None) -> None:
        from adapterswap.core import choose_device
        from adapterswap.experiments.evaluation.evaluator import surroundings

        self._prepared = prepared
        self._processes = processes
        self._device = choose_device(device)
        self._dtype = dtype
        self._model: Any = None
        self._composer: LiveComposer | None = None
        self._load()

        batched_tasks = prepared.harness_tasks.tasks.values() if prepared.settings.batch_size > 1 else ()
        around = surroundings(self._model, batched_tasks)
        versions = around.pop("versions")
        settings = {**prepared.described["settings"], **around}
        self.described = {**prepared.described, "settings": settings, "versions": versions}

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Evaluate cells lazily, one for each `next`. A cell's composition is removed from the model after it."""
        for assignment in assignments:
            yield self._judge(assignment, on_progress)

    def _judge(self, assignment: Assignment, on_progress: OnProgress) -> Judged:
        """Put the cell into the model, and evaluate it."""
        prepared = self._prepared
        cell, documents = assignment.cell, assignment.documents
        tasks = cell.tasks if documents is None else tuple(documents)

        started = time.perf_counter()
        with self._composed(cell) as relative_error:
            switched = time.perf_counter()
            exam = prepared.exam(tasks, documents)
            evaluation = exam.evaluate(self._model, processes=self._processes, on_progress=on_progress)
            seconds = {"switch": switched - started, "evaluate": time.perf_counter() - switched}
        return as_judged(cell, evaluation, prepared, seconds, relative_error)

    def _load(self) -> None:
        """Load the base with all adapters, unless it is in memory: a merged model may have replaced it."""
        from adapterswap.engines.live import LiveComposer

        if self._model is not None:
            return
        gc.collect()
        model = self._prepared.base.load_weights(dtype=self._dtype).to(self._device)
        if self._prepared.adapters:
            self._composer = LiveComposer.from_experts(model, self._prepared.adapters)
            model = self._composer.model
        self._model = model.eval()

    @contextmanager
    def _composed(self, cell: Cell) -> Iterator[float | None]:
        """Put a cell's composition into the model; yields its relative error, see `CellResult`."""
        from adapterswap.core import Form, prepare

        plan, way = self._prepared.plans[cell.cell], way_of(self._prepared, cell)
        if plan is not None and way == "merged":
            with self._merged(plan):
                yield None
            return

        # By switching; without adapters only the base is left to evaluate here
        self._load()
        if self._composer is None:
            yield None
            return
        if plan is None or way == "switched":
            with self._composer.use(plan):
                yield None
            return

        # As an adapter in a temporary folder
        adapter = prepare(plan, Form(**cell.output))
        relative_error = None
        if cell.output:
            relative_error = max(adapter.errors.values(), default=0.0)
        name = f"cell-{cell.cell}"
        with ExitStack() as stack:
            place = stack.enter_context(scratch_folder("sweep"))
            self._composer.load_expert(adapter.write(place / "composed", companions=False), name)
            try:
                with self._composer.use(name):
                    yield relative_error
            finally:
                self._composer.model.delete_adapter(name)

    @contextmanager
    def _merged(self, plan: Plan) -> Iterator[None]:
        """Replace the model in memory by the one that `merge` writes for a plan, until the cell is evaluated."""
        from adapterswap.experiments.evaluation.engine import merged_folder

        self._model = self._composer = None
        gc.collect()  # the composer's hooks are a reference cycle, and the device has room for only one model
        with merged_folder(plan, self._prepared.recipe.base_model) as folder:
            base = self._prepared.base
            merged = replace(base, reference=str(folder), source=replace(base.source, folder=folder, revision=None))
            self._model = merged.load_weights(dtype=self._dtype).to(self._device).eval()
            try:
                yield
            finally:
                self._model = None


def as_judged(
    cell: Cell,
    evaluation: EvaluationResult,
    prepared: PreparedSweep,
    seconds: Mapping[str, float],
    relative_error: float | None,
) -> Judged:
    """An evaluation as it is recorded."""
    questions: dict[str, list[dict[str, Any]]] = {}
    samples = []
    for sample in evaluation.samples:
        content = sample.as_json()
        samples.append({key: content[key] for key in ("task", "doc_id", "target", "output", "answers", "scores")})
        question = {"doc_id": sample.doc_id, "prompt": sample.prompt, "target": content["target"]}
        if sample.choices:
            question["choices"] = list(sample.choices)
        questions.setdefault(sample.task, []).append(question)

    rounded = {name: round(value, 6) for name, value in seconds.items()}
    if relative_error is not None:
        relative_error = float(f"{relative_error:.6g}")
    return Judged(CellResult(cell, _values(evaluation, prepared), rounded, relative_error), samples, questions)


def _values(evaluation: EvaluationResult, prepared: PreparedSweep) -> dict[str, TaskValue]:
    """The scores of one evaluation, as recorded; one that is not a finite number, or is huge, becomes None."""
    plain = {task["name"]: task["scores"] for task in evaluation.as_json()["tasks"]}
    values = {}
    for name, task in evaluation.tasks.items():
        # All scores, and the primary one with its standard error
        scores = {f"{score['metric']},{score['filter']}": score for score in plain[name]}
        plain_scores = {key: _usable(score["value"]) for key, score in scores.items()}
        metric, filter_name = prepared.tasks[name].primary
        primary = scores.get(f"{metric},{filter_name}", {"value": None, "stderr": None})
        value, stderr = _usable(primary["value"]), _usable(primary["stderr"])

        # A perplexity's documents have log-likelihoods, of which more is better
        docs = {}
        if prepared.tasks[name].averaged:
            for sample in evaluation.samples:
                sample_scores = sample.scores.get(filter_name, {})
                if sample.task == task.name and metric in sample_scores:
                    docs[sample.doc_id] = sample_scores[metric]

        # Without the score of a document the mean cannot be compared
        if None in map(_usable, docs.values()):
            value, stderr, docs = None, None, {}
            plain_scores[f"{metric},{filter_name}"] = None
        values[name] = TaskValue(value, stderr, plain_scores, docs, task.cut)
    return values


def _usable(score: float | None) -> float | None:
    if score is None or not abs(score) <= LARGEST:  # NaN is not
        return None
    return score


def lead(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> Judge:
    """The judge of the main process; the others follow."""
    processes.from_main(None)
    return _Leader(_opened(prepared, processes, device, dtype), processes)


def follow(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> Run:
    """Evaluate the main process's assignments with it, until it sends the results. Loads nothing before the first."""
    judge: LocalJudge | None = None
    message: Assignment | Run | None = None
    while True:
        message = processes.from_main(message)
        if isinstance(message, Run):
            return message
        if message is None:  # `lead` was called, so assignments will follow
            judge = _opened(prepared, processes, device, dtype)
        else:
            assert judge is not None
            for _ in judge.judged([message], lambda done, total: None):
                pass  # the main process records the results


def _opened(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> LocalJudge:
    """The judge of this process. Checks that all processes have the same description."""
    judge = LocalJudge(prepared, device, dtype, processes=processes)
    first, *others = processes.shared(range(processes.count), lambda _: judge.described)
    for described in others:
        agreed(first, described)
    return judge


class _Leader:
    """See `Judge`."""

    def __init__(self, judge: LocalJudge, processes: Processes) -> None:
        self._judge, self._processes = judge, processes
        self.described = judge.described

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Evaluate the assignments lazily, one for each `next`."""
        for assignment in assignments:
            yield from self._judge.judged([self._processes.from_main(assignment)], on_progress)
