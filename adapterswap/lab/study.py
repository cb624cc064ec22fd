"""Run seeds in parallel, each in its own process, and combine their results.

Each seed runs on one thread, so its numbers do not depend on how many run at once. Knows nothing of tables, pictures or
the command line.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from adapterswap.errors import RunError
from adapterswap.lab.scenes import Scene
from adapterswap.lab.seed import DEFAULT_SIZES, SeedResult, Sizes, run_seed
from adapterswap.lab.statistics import PairedDifference, Summary, difference, summarize

__all__ = ["Study", "run_seeds", "run_study"]

Tell = Callable[[int, str, float], None]
_Result = TypeVar("_Result")
_SeedFunction = Callable[[int, Callable[[str, float], None]], _Result]
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Study:
    """The results of all seeds. Accuracies are shares of the test problems, 0…1."""

    scene: Scene
    seeds: tuple[SeedResult, ...]

    def score(self, method: str, language: str) -> Summary:
        """A method's accuracy over seeds."""
        return summarize([float(seed.right[method][language].mean()) for seed in self.seeds])

    def against(self, method: str, *, language: str = "xx", than: str = "layer swap") -> PairedDifference:
        """How much better `than` is than `method`, paired by seed and by problem."""
        return difference(
            [seed.right[than][language] for seed in self.seeds], [seed.right[method][language] for seed in self.seeds]
        )

    def by_unfamiliar(self, method: str) -> dict[str, Summary]:
        """A method's accuracy in xx on problems with 0, 1, and 2 or more unfamiliar words, if there are any."""
        counts = self.seeds[0].unfamiliar
        groups = {"0": counts == 0, "1": counts == 1, "2+": counts >= 2}
        return {
            label: summarize([float(seed.right[method]["xx"][chosen].mean()) for seed in self.seeds])
            for label, chosen in groups.items()
            if chosen.any()
        }

    def mean_grid(self) -> dict[tuple[int, int], float]:
        """Accuracy on the development set by (b, u), averaged over seeds."""
        return {zone: sum(seed.grid[zone] for seed in self.seeds) / len(self.seeds) for zone in self.seeds[0].grid}


def run_study(
    scene: Scene,
    seeds: int,
    folder: Path,
    *,
    rebuild_base: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
    jobs: int | None = None,
    tell: Tell = lambda seed, step, share: None,
) -> Study:
    """Run seeds 0…`seeds`-1, each in `folder`/seed-N.

    Args:
        rebuild_base: pretrain the bases even if they are shipped.
        sizes: numbers of problems.
        jobs: seeds at once; by default as many as there are cores.
        tell: called with a seed, its current step, and its finished share.

    Raises:
        RunError: a seed's process died.
        AdapterswapError: see `run_seed`.
    """
    run_one = partial(_run_one, scene, folder, rebuild_base, sizes)
    return Study(scene, tuple(run_seeds(run_one, range(seeds), jobs=jobs, tell=tell)))


def run_seeds(
    function: _SeedFunction[_Result],
    seeds: Sequence[int],
    *,
    jobs: int | None = None,
    tell: Tell = lambda seed, step, share: None,
) -> list[_Result]:
    """The results of `function(seed, tell)` for each seed, each in its own process, on one thread.

    Args:
        function: a function that can be pickled.
        jobs, tell: as for `run_study`.

    Raises:
        RunError: a seed's process died.
        AdapterswapError: whatever `function` raises.
    """
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    news: Any = context.Queue()
    workers = max(1, min(len(seeds), jobs or os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(news,)) as pool:
        futures = {seed: pool.submit(_run, function, seed) for seed in seeds}
        try:
            _follow(futures, news, tell)
            return [future.result() for future in futures.values()]
        except BrokenProcessPool:
            raise RunError(
                "a seed's process was killed", "Free some memory, or use fewer `jobs`", parameter="jobs"
            ) from None
        finally:
            for future in futures.values():
                future.cancel()


_news: Any = None  # in a worker process: the queue to the parent


def _begin(news: Any) -> None:
    """Set up a worker process: its queue, one thread, and no traceback when the user interrupts."""
    global _news
    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _news = news


def _end_with_parent() -> None:
    """Exit when the parent process ends; if it was killed, the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(run_one: _SeedFunction[_Result], seed: int) -> _Result:
    def tell(step: str, share: float) -> None:
        _news.put((seed, step, share))

    return run_one(seed, tell)


def _run_one(
    scene: Scene, folder: Path, rebuild_base: bool, sizes: Sizes, seed: int, tell: Callable[[str, float], None]
) -> SeedResult:
    return run_seed(scene, seed, folder / f"seed-{seed}", rebuild_base=rebuild_base, sizes=sizes, tell=tell)


def _follow(futures: dict[int, Future[_Result]], news: Any, tell: Tell) -> None:
    """Pass on the workers' news until all have finished or one has failed."""
    pending = set(futures.values())
    while pending and not any(future.done() and future.exception() for future in futures.values()):
        _, pending = wait(pending, timeout=_POLL_SECONDS)
        while True:
            try:
                tell(*news.get_nowait())
            except queue.Empty:
                break
    for seed, future in futures.items():
        if future.done() and not future.exception():
            tell(seed, "done", 1.0)
