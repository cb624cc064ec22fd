"""Workers over Ray write the same folder as a single process, also if one of them is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from refusals import refused

from adapterswap.experiments.sweeps import SweepProgress, SweepRecipe, prepare, sweep
from adapterswap.experiments.sweeps.cluster import _Cluster, over_ray
from adapterswap.kit.errors import ArgumentError, DependencyError, RunError
from experiments.evaluation.test_task_code import Tasks

from .conftest import SETTINGS, plain

Content = Callable[..., dict[str, Any]]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
FAMILIES = [{"bottom": [1, 2], "top": [0, 1]}, {"method": "ties", "density": 0.5, "max_rank": 4}]


def processes() -> set[psutil.Process]:
    """The processes that Ray started; a browser in other tests may start processes meanwhile."""
    result = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("/ray/" in part or part.startswith("ray::") for part in child.cmdline()):
                result.add(child)
    return result


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = processes()
    yield
    _, left = psutil.wait_procs(processes() - before, timeout=900)  # some end a moment later
    assert left == []


def watched(monkeypatch: pytest.MonkeyPatch, *, dying: bool = False) -> list[_Cluster]:
    """The clusters that are made from now on; where they are `dying`, each worker is killed while it loads."""
    made: list[_Cluster] = []

    class Watched(_Cluster):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

        def _start(self) -> None:
            super()._start()
            if dying:
                import ray

                ray.kill(list(self._busy.values())[-1][0])

    monkeypatch.setattr("adapterswap.experiments.sweeps.cluster._Cluster", Watched)
    return made


@needs_ray
def test_two_workers_one_killed_write_what_one_process_writes(
    content: Content, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe names folders from here, and workers may begin elsewhere; they may run its tasks' code, as we may."""
    monkeypatch.chdir(world)
    own = Tasks(tmp_path)
    requested = content(
        base_model="base", task_experts={"math1": "math1"},
        compositions=[*FAMILIES, {"name": "again", "bottom": 1, "top": 1}],
        tasks=["mgsm_direct_sw", "own_function"], settings=SETTINGS | {"include_path": str(own.folder)},
    )  # fmt: skip
    recipe = prepare(SweepRecipe.model_validate(requested), trust_task_code=True)
    own.marker.unlink()
    clusters, pids, killed = watched(monkeypatch), {}, []

    def kill(progress: SweepProgress) -> None:
        import ray

        (cluster,) = clusters
        if progress.done == 2:  # each answers once it has done what it is at
            workers = {*cluster._idle, *(worker for worker, _ in cluster._busy.values())}
            pids.update({worker: ray.get(worker.__ray_call__.remote(lambda self: os.getpid())) for worker in workers})
        if progress.done == 3 and not killed:
            assert len({os.getpid(), *pids.values()}) == 3
            killed.append(next(pids[worker] for worker, number in cluster._busy.values() if number is not None))
            os.kill(killed[0], signal.SIGKILL)

    run = sweep(recipe, tmp_path / "two", device="cpu", ray="local", workers=2, tell=kill)
    assert len(killed) == 1
    assert run.unfinished == ()
    assert own.ran  # in a worker: the tasks are not loaded here again
    sweep(recipe, tmp_path / "one", device="cpu")
    assert plain(tmp_path / "two") == plain(tmp_path / "one")


@needs_ray
@pytest.mark.full  # `make test` runs test_two_workers_one_killed_write_what_one_process_writes
def test_errors_of_workers_are_reported_unchanged(
    content: Content, tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        prepared = prepare(SweepRecipe.model_validate(content()))
        with refused(ArgumentError, "workers", match="GPU"), over_ray(prepared, "local"):
            pass
        with refused(ArgumentError, "workers", match="1 CPUs"), over_ray(prepared, "local", workers=2):
            pass
        with refused(ArgumentError, "dtype", match="'abacus'"):
            sweep(prepared, tmp_path / "run", ray="local", workers=1, dtype="abacus")
        assert not (tmp_path / "run").exists()
        other = prepare(SweepRecipe.model_validate(content(task_experts={"math1": str(world / "math2")})))
        mixed = prepared.__class__(**{**vars(prepared), "described": other.described})
        with refused(RunError, match="experts"), over_ray(mixed, "local", workers=1):
            pass
        watched(monkeypatch, dying=True)
        with refused(RunError, "workers", match="3 workers"):
            sweep(prepared, tmp_path / "run", ray="local", workers=1)
        assert ray.is_initialized()  # what was there before stays
    finally:
        ray.shutdown()


@needs_ray
@pytest.mark.full
def test_a_node_that_dies_is_replaced_or_missed(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers only fit on a second node, which is killed during a cell: first another one comes, then none."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setattr("adapterswap.experiments.sweeps.cluster._PATIENCE", 3.0)
    monkeypatch.setattr("adapterswap.experiments.sweeps.cluster._LOOK", 1.0)
    recipe = SweepRecipe.model_validate(content(compositions=FAMILIES))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")

        def lose(progress: SweepProgress) -> None:
            if progress.done in {1, 3} and len(nodes) == (progress.done + 1) // 2:
                if progress.done == 1:
                    nodes.append(cluster.add_node(num_cpus=1))
                cluster.remove_node(nodes[progress.done // 2], allow_graceful=False)

        with refused(RunError, "ray", match="no node"):
            sweep(recipe, tmp_path / "two", device="cpu", ray=cluster.address, workers=1, tell=lose)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert 3 <= len((tmp_path / "two" / "cells.jsonl").read_text().splitlines()) < 7
    sweep(recipe, tmp_path / "two", device="cpu")
    sweep(recipe, tmp_path / "one", device="cpu")
    assert plain(tmp_path / "two") == plain(tmp_path / "one")


def test_workers_go_with_an_address(run: Callable[..., Result], content: Content, tmp_path: Path) -> None:
    result = run("sweep", "recipe.yaml", "-o", tmp_path / "run", "--workers", 2)
    assert result.exit_code == 2
    assert "--workers can only be used with --ray" in result.stderr
    with refused(ArgumentError, "workers"):
        sweep(SweepRecipe.model_validate(content()), tmp_path / "run", workers=2)


def test_without_ray_its_extra_is_named(content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(DependencyError, match=r"pip install 'adapterswap\[ray\]'"):
        sweep(SweepRecipe.model_validate(content()), tmp_path / "run", ray="local", workers=2)
    assert not (tmp_path / "run").exists()


@needs_ray
def test_an_address_where_nobody_listens_is_refused(content: Content, tmp_path: Path) -> None:
    prepared = prepare(SweepRecipe.model_validate(content()))
    with refused(RunError, "ray", match=r"127\.0\.0\.1:9"):
        sweep(prepared, tmp_path / "run", ray="127.0.0.1:9", workers=1)
