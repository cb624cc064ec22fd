"""Evaluate cells in vLLM, several at once; see `Judge`.

Each composition is an adapter in a temporary folder while its cell is in flight. What an adapter cannot hold there is
merged, and evaluated alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adapterswap.experiments.sweeps.grid import Assignment, Cell
from adapterswap.experiments.sweeps.judge import Judge, Judged, LocalJudge, OnProgress, as_judged, way_of
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.recipe import EngineByKind
from adapterswap.experiments.sweeps.results import CellResult
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import UnsupportedError

if TYPE_CHECKING:
    from adapterswap.core import Plan
    from adapterswap.experiments.evaluation.engine import Job
    from adapterswap.experiments.evaluation.exam import Exam
    from adapterswap.experiments.evaluation.vllm_engine import Needs, VLLMEngine

    Asked = Mapping[tuple[tuple[str, ...], Any], Exam]


@contextmanager
def opened_judge(prepared: PreparedSweep, device: str, dtype: str) -> Iterator[Judge]:
    """The judge of a sweep in this process, by its engine; for `device` and `dtype` see `sweep`."""
    if prepared.settings.engine == "transformers":
        yield LocalJudge(prepared, device, dtype)
        return
    from adapterswap.experiments.evaluation.vllm_engine import VLLMEngine

    require("vllm")
    _check_merged(prepared)
    settings = prepared.settings
    asked = asked_of_all(prepared)
    held = needs(prepared, asked)
    split = isinstance(prepared.recipe.settings.engine, EngineByKind)
    local = replace(prepared, settings=replace(settings, engine="transformers", engine_args={}))
    others = LocalJudge(local, device, dtype) if split else None  # first, so that vLLM sees what memory is left
    with VLLMEngine(
        prepared.base, held, settings.engine_args, device=device, dtype=dtype, seed=settings.seed
    ) as engine:
        judge = EngineJudge(prepared, engine, asked)
        yield judge if others is None else SplitJudge(judge, others, _generating(prepared))


def asked_of_all(prepared: PreparedSweep) -> Asked:
    """What the tasks ask vLLM of cells on all documents, by the cells' tasks."""
    mine = _generating(prepared) if isinstance(prepared.recipe.settings.engine, EngineByKind) else prepared.tasks
    by_cell = (tuple(task for task in cell.tasks if task in mine) for cell in prepared.grid.cells)
    return {(tasks, None): prepared.exam(tasks) for tasks in dict.fromkeys(by_cell) if tasks}


def _generating(prepared: PreparedSweep) -> frozenset[str]:
    """The tasks whose answers are generated."""
    return frozenset(
        name for name, task in prepared.harness_tasks.tasks.items() if task.OUTPUT_TYPE == "generate_until"
    )


def needs(prepared: PreparedSweep, asked: Asked) -> Needs:
    """What vLLM must be able to hold for all cells of a sweep."""
    from adapterswap.experiments.evaluation.vllm_engine import Needs

    requests = (request for exam in asked.values() for request in exam.requests)
    return Needs.of(_as_adapters(prepared), requests, prepared.recipe.settings.in_flight, prepared.base)


def _as_adapters(prepared: PreparedSweep) -> dict[str, tuple[Plan, Mapping[str, Any]]]:
    """The compositions that vLLM holds as adapters, by their short names, and how each is reduced.

    Of those that differ only in their zones, the checked ones: they have every layer with each of its rules.
    """
    return {
        cell.short: (plan, cell.output)
        for cell in prepared.plans.checked
        if (plan := prepared.plans[cell.cell]) is not None and way_of(prepared, cell) != "merged"
    }


def needed(prepared: PreparedSweep) -> dict[str, Any]:
    """vLLM's settings for a sweep, the numbers in its slots for adapters, and the cell with the highest rank."""
    all_needs = needs(prepared, asked_of_all(prepared))
    ranks = all_needs.ranks
    highest = max(ranks, key=lambda name: ranks[name], default=None)
    settings = {**all_needs.settings(), **prepared.settings.engine_args}
    return {**settings, "slots": all_needs.slots(), "highest_rank": highest and {highest: ranks[highest]}}


class EngineJudge:
    """Cells in vLLM, with a window of them in flight; see `Judge`."""

    def __init__(self, prepared: PreparedSweep, engine: VLLMEngine, asked: Asked) -> None:
        self._prepared, self._engine = prepared, engine
        self._in_flight = prepared.recipe.settings.in_flight
        self._asked = dict(asked)
        self._errors: dict[str, float] = {}
        around = engine.described
        versions = around.pop("versions")
        exactly = around["batch_invariant"] or (around["device"] == "cpu" and self._in_flight == 1)
        around["repeats"] = "exactly" if exactly else "up to the engine's rounding"
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
        from adapterswap.experiments.evaluation.engine import Job

        cell, documents = assignment.cell, assignment.documents
        tasks = cell.tasks if documents is None else tuple(documents)
        key = tasks, None if documents is None else tuple(tuple(documents[task]) for task in tasks)
        if key not in self._asked:
            self._asked[key] = self._prepared.exam(tasks, documents)
        prepared = self._prepared
        described = prepared.described["experts"]
        return Job.of_plan(
            f"{cell.short} ({cell.cell})",
            prepared.plans[cell.cell],
            cell.output,
            self._asked[key],
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
        settings = {**engine.described["settings"], "loglikelihood": {key: theirs[key] for key in ("device", "dtype")}}
        self.described: Mapping[str, Any] = {**engine.described, "settings": settings}

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """See `Judge`. The documents of tasks in transformers are evaluated while vLLM waits."""
        pairs = [(self._part(one, True), self._part(one, False)) for one in assignments]
        generated = self._engine.judged([one for one, _ in pairs if one is not None], on_progress)
        compared = self._local.judged([one for _, one in pairs if one is not None], on_progress)
        for assignment, (first, second) in zip(assignments, pairs, strict=True):
            parts = [*([next(generated)] if first else []), *([next(compared)] if second else [])]
            yield _joined(assignment.cell, parts)

    def _part(self, assignment: Assignment, generates: bool) -> Assignment | None:
        """An assignment with one kind of tasks; None without any."""
        cell, documents = assignment.cell, assignment.documents
        tasks = tuple(task for task in cell.tasks if (task in self._generating) is generates)
        if documents is not None:
            tasks = tuple(task for task in tasks if task in documents)
            documents = {task: documents[task] for task in tasks}
        return Assignment(replace(cell, tasks=tasks), documents) if tasks else None


def _joined(cell: Cell, parts: Sequence[Judged]) -> Judged:
    """The results of one cell in two engines."""
    results = {task: value for part in parts for task, value in part.result.results.items()}
    questions = {task: rows for part in parts for task, rows in part.questions.items()}
    order = [task for task in cell.tasks if task in results]
    seconds = {name: sum(part.result.seconds[name] for part in parts) for name in parts[0].result.seconds}
    samples = sorted((row for part in parts for row in part.samples), key=lambda row: order.index(row["task"]))
    error = next((part.result.relative_error for part in parts if part.result.relative_error is not None), None)
    result = CellResult(cell, {task: results[task] for task in order}, seconds, error)
    return Judged(result, samples, {task: questions[task] for task in order})


def _check_merged(prepared: PreparedSweep) -> None:
    """Check what only vLLM needs of cells: full weights, for the base's config; `prepare` has checked the rest."""
    from adapterswap.core import open_checkpoint

    for cell in prepared.plans.checked:
        plan = prepared.plans[cell.cell]
        if plan is None or way_of(prepared, cell) != "merged":
            continue
        if plan.is_model:
            _check_config(cell, plan)
        elif not cell.output.get("full_rank"):
            plan.merged_into(open_checkpoint(prepared.recipe.base_model))


def _check_config(cell: Cell, plan: Plan) -> None:
    """Refuse full weights for a config that computes differently from the base's: vLLM only loads other weights."""
    from adapterswap.core import BASE

    if plan.companions.config != BASE and (differences := plan.companions.other_configs.get(BASE)):
        raise UnsupportedError(
            f"{cell.short}: the configs of {plan.companions.config} and the base compute differently "
            f"({', '.join(differences.values)}), but vLLM keeps the base's while it changes weights",
            "Use `engine=transformers`",
            parameter="engine",
        )
