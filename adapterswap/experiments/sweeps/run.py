"""Estimate a sweep and run it: cell after cell, here, in several processes or over Ray.

An estimate loads no weights. Cells are recorded in the order in which they are requested, whichever process evaluates
them. Nothing is printed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adapterswap.experiments.sweeps.engines import needed, opened_judge
from adapterswap.experiments.sweeps.grid import Assignment, Cell
from adapterswap.experiments.sweeps.judge import Judge, follow, lead, way_of
from adapterswap.experiments.sweeps.prepared import PreparedSweep, prepare
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.experiments.sweeps.recording import Recording, check_out_path, recording
from adapterswap.experiments.sweeps.results import CellResult, Findings, Run, RungResult
from adapterswap.experiments.sweeps.search import batches, expected
from adapterswap.experiments.sweeps.summary import better, cell_value
from adapterswap.kit.errors import ArgumentError, check_type
from adapterswap.kit.files.yaml import find_recipe
from adapterswap.kit.processes import Processes


@dataclass(frozen=True)
class Estimate:
    """The size of a sweep. All attributes but `families`, `documents` and `seconds` are counts.

    Attributes:
        cells: all cells; for a searched family as many as the search will try.
        finished: cells with results in the folder.
        given_up: cells that successive halving gave up.
        families: row → the number of its cells.
        left_out: compositions that are skipped because their zones need more layers than the base has.
        repeated: duplicates within families.
        documents: task → the number of its documents.
        requests: requests to the model for the remaining cells, if all were evaluated on all documents.
        tokens: tokens of their generated answers, at most.
        switched: remaining cells that only switch LoRA layers.
        reduced: remaining cells that are first reduced to an adapter.
        merged: remaining cells that are first merged into full weights.
        copied: remaining cells that equal another cell and get its results.
        engine: what vLLM must hold, by its own names, and the numbers that its slots for adapters hold; None with
            transformers.
        seconds: the time for the remaining cells, at the rate of the finished ones (on the machine that evaluated
            them), or else for `tokens` at the rate that the user states; None if both are unknown.
    """

    cells: int
    finished: int
    given_up: int
    families: dict[str, int]
    left_out: int
    repeated: int
    documents: dict[str, int]
    requests: int
    tokens: int
    switched: int
    reduced: int
    merged: int
    copied: int
    seconds: float | None
    engine: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        if self.engine is None:
            del content["engine"]
        return content

    @staticmethod
    def of(
        prepared: PreparedSweep,
        out_path: str | Path | None = None,
        *,
        overwrite: bool = False,
        tokens_per_second: float | None = None,
    ) -> Estimate:
        """What `sweep` would do. Builds the prompts, which must fit the model.

        Args:
            prepared: the sweep.
            out_path: the folder of the sweep, whose results count as finished.
            overwrite: see `sweep`.
            tokens_per_second: how fast the engine generates, in all requests together.

        Raises:
            ArgumentError: `tokens_per_second` is not a number above 0.
            AdapterswapError: see `Exam.preview` and `check_out_path`.
        """
        if tokens_per_second is not None and not 0 < tokens_per_second < math.inf:
            raise ArgumentError(
                f"`tokens_per_second` is {tokens_per_second:g}", "Pass a number above 0", parameter="tokens_per_second"
            )
        findings = Findings()
        if out_path is not None:
            findings = check_out_path(out_path, prepared.described, overwrite=overwrite, inputs=prepared.inputs)

        # The cells that remain; of those that are the same composition, one
        cells = expected(prepared, findings.seen)
        families = Counter(cell.family for cell in cells)
        pending = [cell for cell in cells if cell.cell not in findings.seen]
        evaluated = {result.cell.identity for result in findings.results.values()}
        new: dict[str, Cell] = {}
        for cell in pending:
            if cell.identity not in evaluated:
                new.setdefault(cell.identity, cell)
        ways = Counter(way_of(prepared, cell) for cell in new.values())

        # Their requests and tokens
        previews = prepared.exam(prepared.tasks).preview()
        task_requests = {task.name: task.num_requests for task in previews}
        task_tokens = {task.name: task.num_requests * (task.max_gen_toks or 0) for task in previews}
        requests = sum(_of_tasks(cell, task_requests) for cell in new.values())
        tokens = sum(_of_tasks(cell, task_tokens) for cell in new.values())

        # The time that they take, at the rate of the finished ones or at the stated one
        seconds = None
        spent, answered = 0.0, 0
        for result in findings.results.values():
            if result.seconds["evaluate"] > 0:
                spent += sum(result.seconds.values())
                answered += _of_tasks(result.cell, task_requests)
        if spent > 0:
            seconds = spent / answered * requests
        elif tokens_per_second is not None and tokens:
            seconds = tokens / tokens_per_second

        engine = None
        if prepared.settings.engine != "transformers":
            engine = needed(prepared)
        return Estimate(
            cells=len(cells),
            finished=len(findings.results),
            given_up=len(findings.seen) - len(findings.results),
            families=dict(families),
            left_out=prepared.grid.left_out,
            repeated=prepared.grid.repeated,
            documents={name: info.num_docs for name, info in prepared.tasks.items()},
            requests=requests,
            tokens=tokens,
            switched=ways["switched"],
            reduced=ways["reduced"],
            merged=ways["merged"],
            copied=len(pending) - len(new),
            seconds=seconds,
            engine=engine,
        )


def _of_tasks(cell: Cell, numbers: Mapping[str, int]) -> int:
    """The sum of the numbers of a cell's tasks."""
    return sum(numbers[task] for task in cell.tasks)


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep.

    Attributes:
        done, total: numbers of cells. A search counts the cells that it will try; those that it gave up count as done.
        cell: the short name of the cell that is being evaluated; empty if there is none.
        requests, requests_total: numbers of that cell's requests; 0 over Ray, whose workers do not report them.
        best: the best cell so far, by the mean of its primary scores over its target tasks.
        value: the mean of `best`.
    """

    done: int
    total: int
    cell: str = ""
    requests: int = 0
    requests_total: int = 0
    best: Cell | None = None
    value: float | None = None


Tell = Callable[[SweepProgress], None]


def sweep(
    recipe: SweepRecipe | str | Path | PreparedSweep,
    out_path: str | Path,
    *,
    overrides: Iterable[str] = (),
    trust_task_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    ray: str | None = None,
    workers: int | None = None,
    processes: Processes | None = None,
    tell: Tell = lambda progress: None,
) -> Run:
    """Evaluate every cell of a recipe, and write the folder of the sweep.

    If the folder contains the same sweep, it is resumed, and finished cells are not evaluated again.

    Args:
        recipe: a recipe, the path of its file, the name of a shipped recipe, or the result of `prepare`.
        out_path: the folder of the sweep.
        overrides: values that replace those in the recipe's file, such as `settings.limit=20`.
        trust_task_code, confirm_run_unsafe_code: see `prepare`; ignored if `recipe` is the result of `prepare`.
        device: see `choose_device`.
        dtype: the dtype of the base's weights: float32, bfloat16, float16, or auto for the stored one.
        overwrite: replace a sweep that is in the folder.
        ray: evaluate in worker processes over Ray. The address of a cluster, or `local` to start one on this machine.
        workers: the number of workers; None for one on each GPU.
        processes: the processes that evaluate every cell together, from `Processes.joined`; None for
            only this one. All call this with the same arguments; the main process writes the folder, and all return the
            result.
        tell: called with the progress, in the main process.

    Returns:
        The content of the folder; `adapterswap.report` makes a report from it.

    Raises:
        ArgumentError: `workers` without `ray`, several processes with `ray`, or `overrides` without a recipe's file.
        AdapterswapError: see `prepare`, `recording`, `choose_device`, `load_weights`, `LiveComposer.load_expert`,
            `evaluate`, `batches`, `over_ray` and `lead`. Finished cells stay in the folder.
    """
    processes = processes or Processes()
    if ray is not None and processes.count > 1:
        raise ArgumentError(
            f"{processes.count} processes were started, and each would start a sweep over Ray",
            "Start one process, or leave out `ray`, so that all of them share every cell",
            parameter="ray",
        )
    if workers is not None and ray is None:
        raise ArgumentError(
            f"`workers` is {workers}, but without `ray` there are no workers", "Pass `ray=local`", parameter="workers"
        )
    check_type(
        recipe,
        (SweepRecipe, str, Path, PreparedSweep),
        "recipe",
        "Pass a YAML file, the name of a shipped one, or a recipe",
    )
    check_type(out_path, (str, Path), "out_path", "Pass the path of the folder to write")
    overrides = tuple(overrides)
    if isinstance(recipe, str | Path):
        recipe = SweepRecipe.read(find_recipe(recipe, "sweep"), overrides)
    elif overrides:
        raise ArgumentError(
            "`overrides` apply only to a recipe that is read from a file",
            "Change the recipe itself",
            parameter="overrides",
        )
    if isinstance(recipe, SweepRecipe):
        recipe = prepare(
            recipe,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            trust_task_code=trust_task_code,
            out_path=out_path,
            overwrite=overwrite,
        )
    prepared = recipe
    prepared.settings.check_processes(processes.count)
    if not processes.main:
        return follow(prepared, processes, device, dtype)

    def open_judge() -> AbstractContextManager[Judge]:
        if processes.count > 1:
            return nullcontext(lead(prepared, processes, device, dtype))
        if ray is None:
            return opened_judge(prepared, device, dtype)
        from adapterswap.experiments.sweeps.cluster import over_ray

        return over_ray(prepared, ray, workers=workers, device=device, dtype=dtype)

    with recording(out_path, prepared.described, overwrite=overwrite, inputs=prepared.inputs) as record:
        _Completion(prepared, record, tell).run(open_judge)
    return processes.from_main(Run.read(out_path))


class _Completion:
    """Evaluates and records the cells that are not recorded yet, and reports progress."""

    def __init__(self, prepared: PreparedSweep, record: Recording, tell: Tell) -> None:
        self._prepared = prepared
        self._record = record
        self._findings = record.findings
        self._tell = tell
        self._total = len(expected(prepared, self._findings.seen))
        self._progress = SweepProgress(0, self._total)

        self._by_identity: dict[str, CellResult] = {}
        self._best: CellResult | None = None
        for result in self._findings.results.values():
            self._by_identity[result.cell.identity] = result
            self._best = better(self._best, result, prepared.tasks)

    def run(self, open_judge: Callable[[], AbstractContextManager[Judge]]) -> None:
        """Evaluate the remaining cells. `open_judge` is called only if there are any."""
        judge: Judge | None = None
        with ExitStack() as stack:
            for batch in batches(self._prepared, self._findings):
                pending = [assignment for assignment in batch if self._findings.get(assignment) is None]
                if not pending:
                    continue
                if judge is None:
                    judge = stack.enter_context(open_judge())
                    self._record.begin(judge.described)

                if pending[0].rung is None:
                    self._run_full(pending, judge)
                else:
                    self._run_rung(pending, judge)
        self._begin("", ())

    def _run_full(self, pending: Sequence[Assignment], judge: Judge) -> None:
        """Evaluate cells on all documents. Of several cells with the same composition, only one is evaluated."""
        if self._prepared.settings.engine != "transformers":  # what must be alone in the engine goes last
            pending = sorted(pending, key=lambda assignment: way_of(self._prepared, assignment.cell) == "merged")
        new: dict[str, Assignment] = {}
        for assignment in pending:
            if assignment.cell.identity not in self._by_identity:
                new.setdefault(assignment.cell.identity, assignment)
        outcomes = judge.judged(list(new.values()), self._on_progress)

        for assignment in pending:
            cell = assignment.cell
            self._begin(cell.short, pending)
            finished = self._by_identity.get(cell.identity)
            if finished is not None:
                result = replace(finished, cell=cell, seconds={"switch": 0.0, "evaluate": 0.0})
                self._record.add_copy(result, finished)
            else:
                outcome = next(outcomes)
                for task, questions in outcome.questions.items():
                    self._record.keep_questions(task, questions)
                result = outcome.result
                self._record.add(result, outcome.samples)
                self._by_identity[cell.identity] = result
            self._best = better(self._best, result, self._prepared.tasks)

    def _run_rung(self, pending: Sequence[Assignment], judge: Judge) -> None:
        """Evaluate cells on the documents of a rung only."""
        outcomes = judge.judged(pending, self._on_progress)
        for assignment in pending:
            assert assignment.rung is not None
            self._begin(f"{assignment.cell.short} on {assignment.rung} documents", pending)
            outcome = next(outcomes).result
            result = RungResult(assignment.cell.cell, assignment.rung, outcome.results, outcome.seconds)
            self._record.add_rung(result)

    def _begin(self, cell: str, pending: Sequence[Assignment]) -> None:
        """Report which cell is evaluated now. Cells that were given up count as finished."""
        unfinished = {assignment.cell.cell for assignment in pending} - self._findings.results.keys()
        finished = len(self._findings.seen - unfinished)
        self._progress = SweepProgress(finished, self._total, cell)
        if self._best is not None:
            value = cell_value(self._best, self._prepared.tasks)
            self._progress = replace(self._progress, best=self._best.cell, value=value)
        self._tell(self._progress)

    def _on_progress(self, finished: int, total: int) -> None:
        self._tell(replace(self._progress, requests=finished, requests_total=total))
