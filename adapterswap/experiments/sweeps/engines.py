"""Evaluate cells in vLLM, several at once; see `Judge`.

Each composition is an adapter in a temporary folder while its cell is in flight. What an adapter cannot hold there is
merged, and evaluated alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from adapterswap.experiments.sweeps.grid import Assignment, Cell
from adapterswap.experiments.sweeps.judge import Judge, Judged, LocalJudge, OnProgress, as_judged, way_of
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.recipe import EngineByKind
from adapterswap.experiments.sweeps.results import CellResult, TaskValue
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import UnsupportedError

if TYPE_CHECKING:
    from adapterswap.core import Plan
    from adapterswap.experiments.evaluation.engine import Job
    from adapterswap.experiments.evaluation.exam import Exam
    from adapterswap.experiments.evaluation.vllm_engine import Needs, VLLMEngine

    Exams = Mapping[tuple[tuple[str, ...], Any], Exam]


@contextmanager
def opened_judge(prepared: PreparedSweep, device: str, dtype: str) -> Iterator[Judge]:
    """The judge of a sweep in this process, by its engine; for `device` and `dtype` see `sweep`."""
    settings = prepared.settings
    if settings.engine == "transformers":
        yield LocalJudge(prepared, device, dtype)
        return
    from adapterswap.experiments.evaluation.vllm_engine import VLLMEngine

    require("vllm")
    _check_merged(prepared)
    exams = exams_of_all(prepared)
    held = needs(prepared, exams)

    # transformers' model is loaded first, so that vLLM sees what memory is left
    local = None
    if isinstance(prepared.recipe.settings.engine, EngineByKind):
        in_transformers = replace(settings, engine="transformers", engine_args={})
        local = LocalJudge(replace(prepared, settings=in_transformers), device, dtype)
    with VLLMEngine(
        prepared.base, held, settings.engine_args, device=device, dtype=dtype, seed=settings.seed
    ) as engine:
        judge = EngineJudge(prepared, engine, exams)
        if local is None:
            yield judge
        else:
            yield SplitJudge(judge, local, _generating(prepared))


def exams_of_all(prepared: PreparedSweep) -> Exams:
    """The requests to vLLM for cells on all documents, by the cells' tasks."""
    in_vllm: Collection[str] = prepared.tasks
    if isinstance(prepared.recipe.settings.engine, EngineByKind):
        in_vllm = _generating(prepared)

    exams = {}
    for cell in prepared.grid.cells:
        tasks = tuple(task for task in cell.tasks if task in in_vllm)
        if tasks and (tasks, None) not in exams:
            exams[tasks, None] = prepared.exam(tasks)
    return exams


def _generating(prepared: PreparedSweep) -> frozenset[str]:
    """The tasks whose answers are generated."""
    generating = set()
    for name, task in prepared.harness_tasks.tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            generating.add(name)
    return frozenset(generating)


def needs(prepared: PreparedSweep, exams: Exams) -> Needs:
    """What vLLM must be able to hold for all cells of a sweep."""
    from adapterswap.experiments.evaluation.vllm_engine import Needs

    # The compositions that vLLM holds as adapters, by their short names, and how each is reduced. Of those that differ
    # only in their zones, the checked ones: they have every layer with each of its rules.
    adapters: dict[str, tuple[Plan, Mapping[str, Any]]] = {}
    for cell in prepared.plans.checked:
        plan = prepared.plans[cell.cell]
        if plan is not None and way_of(prepared, cell) != "merged":
            adapters[cell.short] = plan, cell.output

    requests = chain.from_iterable(exam.requests for exam in exams.values())
    return Needs.of(adapters, requests, prepared.recipe.settings.in_flight, prepared.base)


def needed(prepared: PreparedSweep) -> dict[str, Any]:
    """vLLM's settings for a sweep, the numbers in its slots for adapters, and the cell with the highest rank."""
    all_needs = needs(prepared, exams_of_all(prepared))
    settings = {**all_needs.settings(), **prepared.settings.engine_args}

    ranks = all_needs.ranks
    highest = max(ranks, key=lambda name: ranks[name], default=None)
    return {**settings, "slots": all_needs.slots(), "highest_rank": highest and {highest: ranks[highest]}}


class EngineJudge:
    """Cells in vLLM, with a window of them in flight; see `Judge`."""

    def __init__(self, prepared: PreparedSweep, engine: VLLMEngine, exams: Exams) -> None:
        self._prepared = prepared
        self._engine = engine
        self._in_flight = prepared.recipe.settings.in_flight
        self._exams = dict(exams)
        self._errors: dict[str, float] = {}

        around = engine.described
        versions = around.pop("versions")
        around["repeats"] = "up to the engine's rounding"
        if around["batch_invariant"] or (around["device"] == "cpu" and self._in_flight == 1):
            around["repeats"] = "exactly"
        settings = {**prepared.described["settings"], **around}
        self.described: Mapping[str, Any] = {**prepared.described, "settings": settings, "versions": versions}

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """See `Judge`. A cell's seconds are those since the one before was finished."""
        jobs = map(self._job, assignments)
        results = self._engine.evaluate(jobs, in_flight=self._in_flight, on_progress=on_progress)
        for assignment, (evaluation, seconds) in zip(assignments, results, strict=True):
            cell = assignment.cell
            yield as_judged(cell, evaluation, self._prepared, seconds, self._errors.pop(cell.cell, None))

    def _job(self, assignment: Assignment) -> Job:
        """What the engine evaluates for an assignment."""
        from adapterswap.experiments.evaluation.engine import Job

        # Cells with the same tasks and documents share their requests
        cell, documents = assignment.cell, assignment.documents
        tasks, doc_ids = cell.tasks, None
        if documents is not None:
            tasks = tuple(documents)
            doc_ids = tuple(tuple(documents[task]) for task in tasks)
        key = tasks, doc_ids
        if key not in self._exams:
            self._exams[key] = self._prepared.exam(tasks, documents)

        prepared = self._prepared
        described = prepared.described["experts"]
        return Job.of_plan(
            f"{cell.short} ({cell.cell})",
            prepared.plans[cell.cell],
            cell.output,
            self._exams[key],
            full=way_of(prepared, cell) == "merged",
            base_model=prepared.recipe.base_model,
            hashes={name: described[name]["sha256"] for name in prepared.adapters},
            tell=lambda error: self._errors.update({cell.cell: error}),
        )


class SplitJudge:
    """Tasks that generate in vLLM, the others in transformers; see `Judge`.

    Args:
        engine, local: the judges of the two kinds.
        generating: the tasks that generate.
    """

    def __init__(self, engine: EngineJudge, local: LocalJudge, generating: Collection[str]) -> None:
        self._engine, self._local, self._generating = engine, local, generating
        theirs = local.described["settings"]
        own = {"device": theirs["device"], "dtype": theirs["dtype"]}
        settings = {**engine.described["settings"], "loglikelihood": own}
        self.described: Mapping[str, Any] = {**engine.described, "settings": settings}

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """See `Judge`. The documents of tasks in transformers are evaluated while vLLM waits."""
        generate = [self._part(assignment, generates=True) for assignment in assignments]
        compare = [self._part(assignment, generates=False) for assignment in assignments]
        generated = self._engine.judged([part for part in generate if part is not None], on_progress)
        compared = self._local.judged([part for part in compare if part is not None], on_progress)

        for assignment, generating, comparing in zip(assignments, generate, compare, strict=True):
            parts = []
            if generating:
                parts.append(next(generated))
            if comparing:
                parts.append(next(compared))
            yield _joined(assignment.cell, parts)

    def _part(self, assignment: Assignment, *, generates: bool) -> Assignment | None:
        """An assignment with one kind of tasks; None without any."""
        cell, documents = assignment.cell, assignment.documents
        tasks = tuple(task for task in cell.tasks if (task in self._generating) is generates)
        if documents is not None:
            tasks = tuple(task for task in tasks if task in documents)
            documents = {task: documents[task] for task in tasks}
        if not tasks:
            return None
        return Assignment(replace(cell, tasks=tasks), documents)


def _joined(cell: Cell, parts: Sequence[Judged]) -> Judged:
    """The results of one cell in two engines."""
    results: dict[str, TaskValue] = {}
    questions: dict[str, Sequence[Mapping[str, Any]]] = {}
    samples: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    errors = []
    for part in parts:
        results |= part.result.results
        questions |= part.questions
        samples += part.samples
        for name, value in part.result.seconds.items():
            seconds[name] = seconds.get(name, 0) + value
        if part.result.relative_error is not None:
            errors.append(part.result.relative_error)

    order = [task for task in cell.tasks if task in results]
    samples.sort(key=lambda row: order.index(row["task"]))
    result = CellResult(cell, {task: results[task] for task in order}, seconds, errors[0] if errors else None)
    return Judged(result, samples, {task: questions[task] for task in order})


def _check_merged(prepared: PreparedSweep) -> None:
    """Check what only vLLM needs of cells: full weights, for the base's config; `prepare` has checked the rest."""
    from adapterswap.core import BASE, open_checkpoint

    for cell in prepared.plans.checked:
        plan = prepared.plans[cell.cell]
        if plan is None or way_of(prepared, cell) != "merged":
            continue
        if not plan.is_model:
            if not cell.output.get("full_rank"):
                plan.merged_into(open_checkpoint(prepared.recipe.base_model))
            continue

        # vLLM only loads other weights, and keeps the base's config
        owner = plan.companions.config
        differences = plan.companions.other_configs.get(BASE)
        if owner != BASE and differences:
            raise UnsupportedError(
                f"{cell.short}: the configs of {owner} and the base compute differently "
                f"({', '.join(differences.values)}), but vLLM keeps the base's while it changes weights",
                "Use `engine=transformers`",
                parameter="engine",
            )
