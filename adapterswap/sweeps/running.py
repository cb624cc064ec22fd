"""Run a sweep: cell after cell is judged, in this process or over Ray, and each is recorded when it is finished.

Cells are recorded in the order in which they are asked for, whoever judges them. Knows how a sweep's parts work
together, and nothing of models, searches or clusters themselves. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from adapterswap.errors import AdapterswapError
from adapterswap.sweeps.judging import Judge, LocalJudge
from adapterswap.sweeps.preparing import Prepared, prepare
from adapterswap.sweeps.recipe import SweepRecipe, read_sweep_recipe
from adapterswap.sweeps.recording import Recording, recording
from adapterswap.sweeps.results import Cell, CellResult, Run, read_run
from adapterswap.sweeps.search import batches, expected
from adapterswap.sweeps.summary import better, cell_value

__all__ = ["Progress", "sweep"]


@dataclass(frozen=True)
class Progress:
    """How far a sweep is.

    Attributes:
        done, total: cells; of a search, as many as it will judge.
        cell: the short name of the one that is being judged; empty when there is none.
        requests, requests_total: of that cell; none where other processes judge.
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
    ray: str | None = None,
    workers: int | None = None,
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
        ray: judge in worker processes over Ray: the address of a cluster, or `local` for one that is started here.
        workers: how many; None for one on each GPU.
        tell: called as it goes on.

    Raises:
        AdapterswapError: see `prepare`, `recording`, `choose_device`, `load_weights`, `LiveComposer.load_expert`,
            `evaluate`, `batches` and `over_ray`; `workers` without `ray`. What is finished stays.
    """
    if workers is not None and ray is None:
        raise AdapterswapError("workers are processes over Ray, and no address is given", "Give --ray local")
    if isinstance(recipe, str | Path):
        recipe = read_sweep_recipe(recipe)
    prepared = prepare(recipe) if isinstance(recipe, SweepRecipe) else recipe

    def opened() -> AbstractContextManager[Judge]:
        if ray is None:
            return nullcontext(LocalJudge(prepared, device, dtype))
        from adapterswap.sweeps.cluster import over_ray

        return over_ray(prepared, ray, workers=workers, device=device, dtype=dtype)

    with recording(out_path, prepared.described, overwrite=overwrite, inputs=prepared.inputs) as record:
        _complete(prepared, record, opened, tell)
    return read_run(out_path)


def _complete(
    prepared: Prepared, record: Recording, opened: Callable[[], AbstractContextManager[Judge]], tell: Tell
) -> None:
    """Judge what is not recorded yet; `opened` makes the judge, where there is something to judge."""
    results = {result.cell.cell: result for result in record.results}
    alike = {_identity(result.cell): result for result in record.results}
    total = len(expected(prepared, results))
    judge: Judge | None = None
    best: CellResult | None = None
    for finished in record.results:
        best = better(best, finished, prepared.tasks)

    def so_far(judging: str = "") -> Progress:
        if best is None:
            return Progress(len(results), total, judging)
        return Progress(len(results), total, judging, best=best.cell, value=cell_value(best, prepared.tasks))

    now = so_far()

    def on_progress(done: int, of: int) -> None:
        tell(replace(now, requests=done, requests_total=of))

    with ExitStack() as stack:
        for batch in batches(prepared, results):
            pending = [cell for cell in batch if cell.cell not in results]
            if not pending:
                continue
            if judge is None:
                judge = stack.enter_context(opened())
                record.begin(judge.described)
            new = {_identity(cell): cell for cell in reversed(pending) if _identity(cell) not in alike}
            found = judge.judged([cell for cell in pending if new.get(_identity(cell)) is cell], on_progress)
            for cell in pending:
                now = so_far(cell.short)
                tell(now)
                if (like := alike.get(_identity(cell))) is not None:
                    result = replace(like, cell=cell, seconds={"switch": 0.0, "evaluate": 0.0})
                    record.add_copy(result, like)
                else:
                    judged = next(found)
                    for task, prompts in judged.prompts.items():
                        record.keep_prompts(task, prompts)
                    result = judged.result
                    record.add(result, judged.samples)
                    alike[_identity(cell)] = result
                results[cell.cell] = result
                best = better(best, result, prepared.tasks)
    tell(so_far())


def _identity(cell: Cell) -> str:
    """What makes two cells of different families the same."""
    return repr((sorted(cell.composition.items()), sorted(cell.output.items()), cell.tasks))
