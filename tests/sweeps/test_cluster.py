"""Workers over Ray beside a single process: the same folder, also where one of them is killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
from click.testing import Result

from adapterswap import AdapterswapError
from adapterswap.sweeps import Progress, SweepRecipe, prepare, sweep
from adapterswap.sweeps.cluster import over_ray

from .conftest import plain

Content = Callable[..., dict[str, Any]]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
FAMILIES = [{"bottom": [1, 2], "top": [0, 1]}, {"method": "ties", "density": 0.5, "max_rank": 4}]


def processes() -> set[psutil.Process]:
    """Those that Ray started: a browser of other tests may start some of its own meanwhile."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("/ray/" in part or part.startswith("ray::") for part in child.cmdline()):
                found.add(child)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = processes()
    yield
    _, left = psutil.wait_procs(processes() - before, timeout=20)  # some end a moment later
    assert left == []


def workers(doing: str = "") -> list[int]:
    """The processes of workers; Ray writes into a process's name what it does."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if f"ray::_Worker{doing}" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


@contextmanager
def dying_workers() -> Iterator[None]:
    """Every worker is killed as soon as it is seen."""
    over = Event()

    def kill() -> None:
        while not over.wait(0.02):
            for worker in workers(".open"):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)

    thread = Thread(target=kill)
    thread.start()
    yield
    over.set()
    thread.join()


@needs_ray
def test_two_workers_one_killed_write_what_one_process_writes(
    content: Content, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe names folders from here; workers may begin elsewhere."""
    monkeypatch.chdir(world)
    again = {"name": "again", "bottom": 1, "top": 1}
    recipe = SweepRecipe.model_validate(
        content(base_model="base", task_experts={"math1": "math1"}, compositions=[*FAMILIES, again])
    )
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.done == 3 and not killed:
            assert len(workers()) == 2
            while not (judging := workers(".judge")):
                time.sleep(0.001)
            killed.append(judging[0])
            os.kill(judging[0], signal.SIGKILL)

    run = sweep(recipe, tmp_path / "two", device="cpu", ray="local", workers=2, tell=kill)
    assert len(killed) == 1
    assert run.unfinished == ()
    sweep(recipe, tmp_path / "one", device="cpu")
    assert plain(tmp_path / "two") == plain(tmp_path / "one")


@needs_ray
def test_mistakes_come_back_as_they_are(content: Content, tmp_path: Path, world: Path) -> None:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        prepared = prepare(SweepRecipe.model_validate(content()))
        with pytest.raises(AdapterswapError, match="no GPU to run a worker on"), over_ray(prepared, "local"):
            pass
        with pytest.raises(AdapterswapError, match="has 1 CPUs"), over_ray(prepared, "local", workers=2):
            pass
        with pytest.raises(AdapterswapError, match="'abacus'"):
            sweep(prepared, tmp_path / "run", ray="local", workers=1, dtype="abacus")
        assert not (tmp_path / "run").exists()
        other = prepare(SweepRecipe.model_validate(content(task_experts={"math1": str(world / "math2")})))
        mixed = prepared.__class__(**{**vars(prepared), "described": other.described})
        with pytest.raises(AdapterswapError, match="a worker finds other experts"), over_ray(mixed, "local", workers=1):
            pass
        with dying_workers(), pytest.raises(AdapterswapError, match="3 workers died while they loaded"):
            sweep(prepared, tmp_path / "run", ray="local", workers=1)
        assert ray.is_initialized()  # what was there before stays
    finally:
        ray.shutdown()


def test_workers_go_with_an_address(run: Callable[..., Result], content: Content, tmp_path: Path) -> None:
    told = run("sweep", "recipe.yaml", "-o", tmp_path / "run", "--workers", 2)
    assert told.exit_code == 2
    assert "--workers goes with --ray" in told.stderr
    with pytest.raises(AdapterswapError, match="no address is given"):
        sweep(SweepRecipe.model_validate(content()), tmp_path / "run", workers=2)


def test_without_ray_its_extra_is_named(content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AdapterswapError, match=r"pip install 'adapterswap\[ray\]'"):
        sweep(SweepRecipe.model_validate(content()), tmp_path / "run", ray="local", workers=2)
    assert not (tmp_path / "run").exists()


@needs_ray
def test_an_address_where_nobody_listens_is_told(content: Content, tmp_path: Path) -> None:
    prepared = prepare(SweepRecipe.model_validate(content()))
    with pytest.raises(AdapterswapError, match=r"no Ray cluster is reached at 127\.0\.0\.1:9: "):
        sweep(prepared, tmp_path / "run", ray="127.0.0.1:9", workers=1)
