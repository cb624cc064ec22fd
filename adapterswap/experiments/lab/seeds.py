"""Run seeds in parallel, each in its own process.

A seed is a base and its experts, so seeds are independent; they share their problems. Each seed runs on one thread, so
its numbers do not depend on how many run at once.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from adapterswap.experiments.lab.scenes import Scene
from adapterswap.experiments.lab.seed import DEFAULT_SIZES, SeedResult, Sizes, run_seed
from adapterswap.experiments.lab.study import Study
from adapterswap.kit.errors import RunError

SeedReporter = Callable[[int, str, float], None]
_Result = TypeVar("_Result")
Finished = Callable[[int, _Result], None]
"""Called with a seed and its result, as soon as it has one."""

_SeedFunction = Callable[[int, Callable[[str, float], None]], _Result]
_POLL_SECONDS = 0.2


def run_study(
    scene: Scene,
    seeds: int,
    folder: Path,
    *,
    rebuild_base: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
    jobs: int | None = None,
    tell: SeedReporter = lambda seed, step, share: None,
    finished: Finished[SeedResult] = lambda seed, result: None,
) -> Study:
    """Run seeds 0…`seeds`-1, each in `folder`/seed-N.

    Args:
        rebuild_base: pretrain the bases even if they are shipped.
        sizes: numbers of problems.
        jobs: seeds at once; by default as many as there are cores.
        tell: called with a seed, its current step, and its finished share.
        finished: called with a seed and its result, as soon as it has one.
    """
    run_one = partial(_run_one, scene, folder, rebuild_base, sizes)
    return Study(scene, tuple(run_seeds(run_one, range(seeds), jobs=jobs, tell=tell, finished=finished)))


def run_seeds(
    function: _SeedFunction[_Result],
    seeds: Sequence[int],
    *,
    jobs: int | None = None,
    tell: SeedReporter = lambda seed, step, share: None,
    finished: Finished[_Result] = lambda seed, result: None,
) -> list[_Result]:
    """The results of `function(seed, tell)` for each seed, each in its own process, on one thread.

    Args:
        function: a function that can be pickled.
        jobs, tell, finished: as for `run_study`.
    """
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    news: Any = context.Queue()
    workers = max(1, min(len(seeds), jobs or os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(news,)) as pool:
        futures = {seed: pool.submit(_run, function, seed) for seed in seeds}
        try:
            _follow(futures, news, tell, finished)
            return [future.result() for future in futures.values()]
        except BrokenProcessPool:
            raise RunError(
                "A seed's process was killed", "Free some memory, or use fewer `jobs`", parameter="jobs"
            ) from None
        finally:
            for future in futures.values():
                future.cancel()


_news: Any = None  # in a worker process: the queue to the parent


def _begin_worker(news: Any) -> None:
    """Set up a worker process: its queue and one thread."""
    global _news
    import torch

    _news = news
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback when the user interrupts
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process ends; if it was killed, the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(run_one: _SeedFunction[_Result], seed: int) -> _Result:
    """Run a seed in a worker process, and send its progress to the parent."""

    def tell(step: str, share: float) -> None:
        _news.put((seed, step, share))

    return run_one(seed, tell)


def _run_one(
    scene: Scene, folder: Path, rebuild_base: bool, sizes: Sizes, seed: int, tell: Callable[[str, float], None]
) -> SeedResult:
    """A function of the module, because a local one cannot be pickled."""
    return run_seed(scene, seed, folder / f"seed-{seed}", rebuild_base=rebuild_base, sizes=sizes, tell=tell)


def _follow(futures: dict[int, Future[_Result]], news: Any, tell: SeedReporter, finished: Finished[_Result]) -> None:
    """Pass on the workers' news, and each result when it is there, until all have finished or one has failed."""
    waiting = dict(futures)
    has_failed = False
    while waiting and not has_failed:
        wait(waiting.values(), timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        ended = [seed for seed, future in waiting.items() if future.done()]

        while True:
            try:
                seed, step, share = news.get_nowait()
            except queue.Empty:
                break
            if seed in waiting and seed not in ended:  # a worker's last news may arrive after its result
                tell(seed, step, share)

        for seed in ended:
            future = waiting.pop(seed)
            if future.exception():
                has_failed = True
            else:
                finished(seed, future.result())
