"""Run a sweep: one base and all experts loaded once, cell after cell judged live, each recorded when it is finished.

Between cells the model's LoRA layers are switched and nothing is loaded or written, but for compositions that need
tensors of their own (TIES, DARE, pruning, a bound on the rank): these are reduced to an adapter in a temporary folder,
loaded beside the experts, and removed again. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from adapterswap.sweeps.preparing import Prepared, prepare
from adapterswap.sweeps.recipe import SweepRecipe, read_sweep_recipe
from adapterswap.sweeps.recording import recording
from adapterswap.sweeps.results import Cell, CellResult, Run, TaskValue, read_run
from adapterswap.sweeps.summary import better, cell_value

if TYPE_CHECKING:
    from adapterswap.evaluation import EvaluationResult
    from adapterswap.live import LiveComposer

__all__ = ["Progress", "is_live", "sweep"]


@dataclass(frozen=True)
class Progress:
    """How far a sweep is.

    Attributes:
        done, total: cells.
        cell: the short name of the one that is being judged; empty when there is none.
        requests, requests_total: of that cell.
        best: the best cell so far, by the mean of its target tasks.
        value: that mean.
    """

    done: int
    total: int
    cell: str = ""
    requests: int = 0
    requests_total: int = 0
    best: Cell | None = None
    value: float | None = None


Tell = Callable[[Progress], None]


def sweep(
    recipe: SweepRecipe | str | Path | Prepared,
    out_path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    tell: Tell = lambda progress: None,
) -> Run:
    """Judge everything that a recipe asks for, and write or complete the folder of the sweep.

    A folder in which the same sweep was begun is gone on with: its finished cells stay.

    Args:
        recipe: a recipe, its file, or what `prepare` made of it.
        out_path: the folder.
        device: see `bases.choose_device`.
        dtype: of the base's weights: float32, bfloat16, float16, or auto for the one they are stored in.
        overwrite: begin anew where the folder holds a sweep.
        tell: called as it goes on.

    Raises:
        AdapterswapError: see `prepare`, `recording`, `choose_device`, `load_weights`, `LiveComposer.load_expert` and
            `evaluate`. What is finished stays.
    """
    if isinstance(recipe, str | Path):
        recipe = read_sweep_recipe(recipe)
    prepared = prepare(recipe) if isinstance(recipe, SweepRecipe) else recipe
    cells = prepared.grid.cells
    with recording(out_path, prepared.described, overwrite=overwrite, inputs=prepared.inputs) as record:
        done = {result.cell.cell for result in record.results}
        pending = [cell for cell in cells if cell.cell not in done]
        if pending:
            judge = _Judge(prepared, device, dtype)
            record.begin(judge.described)
        alike = {_identity(result.cell): result for result in record.results}
        best: CellResult | None = None
        for finished in record.results:
            best = better(best, finished, prepared.tasks)
        for cell in pending:
            now = _progress(record.results, best, prepared, cell)
            tell(now)
            if (like := alike.get(_identity(cell))) is not None:
                record.add_copy(replace(like, cell=cell, seconds={"switch": 0.0, "evaluate": 0.0}), like)
            else:
                found, result = judge.judge(cell, _requests(now, tell))
                for task in cell.tasks:
                    record.keep_prompts(task, {s.doc_id: s.prompt for s in found.samples if s.task == task})
                record.add(result, _samples(found))
                alike[_identity(cell)] = result
            best = better(best, record.results[-1], prepared.tasks)
        tell(_progress(record.results, best, prepared))
    return read_run(out_path)


def is_live(prepared: Prepared, cell: Cell) -> bool:
    """Whether a cell is judged by switching alone; else it is reduced to an adapter first."""
    from adapterswap.live import why_not_live

    plan = prepared.plans[cell.cell]
    return plan is None or (not cell.output and why_not_live(plan) is None)


def _progress(
    results: Sequence[CellResult], best: CellResult | None, prepared: Prepared, cell: Cell | None = None
) -> Progress:
    value = None if best is None else cell_value(best, prepared.tasks)
    total = len(prepared.grid.cells)
    return Progress(len(results), total, cell.short if cell else "", best=best.cell if best else None, value=value)


def _requests(now: Progress, tell: Tell) -> Callable[[int, int], None]:
    return lambda done, total: tell(replace(now, requests=done, requests_total=total))


def _identity(cell: Cell) -> str:
    """What makes two cells of different families the same."""
    return repr((sorted(cell.composition.items()), sorted(cell.output.items()), cell.tasks))


class _Judge:
    """A base in memory with all experts of a sweep loaded beside each other."""

    def __init__(self, prepared: Prepared, device: str, dtype: str) -> None:
        from adapterswap.bases import choose_device, load_weights
        from adapterswap.evaluation.evaluating import surroundings
        from adapterswap.live import LiveComposer

        target = choose_device(device)
        model = load_weights(prepared.base, dtype=dtype).to(target)
        self._prepared = prepared
        self._composer: LiveComposer = LiveComposer.from_experts(model, prepared.experts)
        self._composer.model.eval()
        around = surroundings(self._composer.model)
        versions = around.pop("versions")
        settings = {**prepared.described["settings"], **around}
        self.described = {**prepared.described, "settings": settings, "versions": versions}

    def judge(self, cell: Cell, on_progress: Callable[[int, int], None]) -> tuple[EvaluationResult, CellResult]:
        """Judge one cell; the model is left as it was."""
        from adapterswap.evaluation import evaluate

        prepared, model = self._prepared, self._composer.model
        started = time.perf_counter()
        with self._composed(cell):
            switched = time.perf_counter()
            found = evaluate(model, prepared.base.tokenizer, cell.tasks, prepared.settings, on_progress=on_progress)
            seconds = {"switch": switched - started, "evaluate": time.perf_counter() - switched}
        rounded = {name: round(value, 6) for name, value in seconds.items()}
        return found, CellResult(cell, _values(found, prepared), rounded)

    @contextmanager
    def _composed(self, cell: Cell) -> Iterator[None]:
        from adapterswap.writing import write_adapter

        plan = self._prepared.plans[cell.cell]
        if plan is None or is_live(self._prepared, cell):
            with self._composer.use(plan):
                yield
            return
        name = f"cell-{cell.cell}"
        with ExitStack() as stack:
            place = Path(stack.enter_context(TemporaryDirectory()))
            self._composer.load_expert(write_adapter(plan, place / "composed", **cell.output), name)
            try:
                with self._composer.use(name):
                    yield
            finally:
                self._composer.model.delete_adapter(name)


def _values(found: EvaluationResult, prepared: Prepared) -> dict[str, TaskValue]:
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
        values[name] = TaskValue(
            primary["value"], primary["stderr"], {key: score["value"] for key, score in scores.items()}, docs
        )
    return values


def _samples(found: EvaluationResult) -> Iterator[Mapping[str, Any]]:
    for sample in found.samples:
        content = sample.as_json()
        yield {key: content[key] for key in ("task", "doc_id", "target", "output", "answers", "scores")}
