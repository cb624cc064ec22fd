"""Evaluate cells in worker processes over Ray, on this machine or many.

Each worker prepares the same sweep itself and loads the base and the experts once. It is refused if its files or
versions differ from this process's. Workers get one cell at a time, and results are returned in the order of the cells.
If a worker dies, another is started in its place, and the next free worker evaluates its cell. If the last node that
can hold a worker dies, the sweep waits ten minutes for another one. Only this process writes.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from socket import create_connection
from time import monotonic
from typing import Any

from adapterswap.experiments.sweeps.engines import opened_judge
from adapterswap.experiments.sweeps.grid import Assignment
from adapterswap.experiments.sweeps.judge import Judge, Judged, OnProgress, agreed
from adapterswap.experiments.sweeps.prepared import PreparedSweep, prepare
from adapterswap.experiments.sweeps.recipe import SweepRecipe, with_places
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import AdapterswapError, ArgumentError, RunError

LOCAL = "local"
_DEATHS = 3  # of workers, on one cell or while loading, before the sweep ends
_PATIENCE, _LOOK = 600.0, 10.0  # seconds without any node for a worker, and between two looks
_AHEAD = 4  # finished cells per worker that wait for an earlier one; killing this process loses them


@contextmanager
def over_ray(
    prepared: PreparedSweep, address: str, *, workers: int | None = None, device: str = "auto", dtype: str = "auto"
) -> Iterator[Judge]:
    """A judge whose workers run over Ray. The workers, and a cluster that was started here, end with the context.

    Args:
        prepared: the sweep. The workers must find its folders at the same paths.
        address: the address of a cluster, as for `ray.init`; `local` starts one on this machine.
        workers: how many, each on a GPU if the cluster has any, otherwise each on a CPU; None for one on each GPU.
        device: as for `sweep`; always `cpu` if the cluster has no GPU.
        dtype: as for `sweep`.
    """
    ray = _ray()
    started_here = not ray.is_initialized()
    try:
        if started_here:
            _connect(address, workers)
        gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if workers is None and not gpus:
            raise ArgumentError(
                "The cluster has no GPU to run a worker on",
                "Pass `workers`, the number of processes to run on CPUs",
                parameter="workers",
            )
        if (workers or 1) > (gpus or cpus):
            available = f"{gpus} GPUs" if gpus else f"{cpus} CPUs"
            raise ArgumentError(
                f"`workers` is {workers}, but the cluster has {available}",
                f"Use at most {gpus or cpus}",
                parameter="workers",
            )

        # Processes that start in other folders need absolute paths
        recipe = with_places(
            prepared.recipe, lambda place: str(Path(place).absolute()) if os.path.exists(Path(place)) else place
        )
        consent = {name: getattr(prepared.settings, name) for name in ("confirm_run_unsafe_code", "trust_task_code")}
        if gpus:
            resource, on_each = "GPU", ray.remote(num_gpus=1, num_cpus=0, max_restarts=0)
        else:
            resource, on_each, device = "CPU", ray.remote(num_gpus=0, num_cpus=1, max_restarts=0), "cpu"
        yield _Cluster(prepared, on_each(_Worker), (recipe, consent, device, dtype), workers or gpus, resource)
    finally:
        if started_here:
            ray.shutdown()


def _ray() -> Any:
    """The module `ray`, untyped, so that type checks do not depend on whether it is installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    require("ray")
    return import_module("ray")


def _connect(address: str, workers: int | None) -> None:
    """Connect to a Ray cluster, or start one on this machine."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        quiet |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": 128 * 2**20}
        quiet["num_cpus"] = max(workers or 1, os.cpu_count() or 1)
    host, _, port = address.rpartition(":")
    try:
        if host and "/" not in host and port.isdecimal():  # Ray itself waits for many minutes if nobody listens
            create_connection((host, int(port)), timeout=10).close()
        _ray().init(address=address, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"Could not connect to a Ray cluster at {address}: {reason}",
            "Pass the address that `ray start` printed, or `local`",
            parameter="ray",
        ) from error


class _Worker:
    """A worker. Returns errors instead of raising them, because Ray rewords raised ones."""

    def open(
        self, recipe: SweepRecipe, consent: Mapping[str, Any], device: str, dtype: str
    ) -> Mapping[str, Any] | AdapterswapError:
        """Load everything; returns what the results depend on."""
        try:
            self._place = opened_judge(prepare(recipe, **consent), device, dtype)  # until this process ends
            self._judge = self._place.__enter__()
        except AdapterswapError as error:
            return error
        return self._judge.described

    def judge(self, assignment: Assignment) -> Judged | AdapterswapError:
        try:
            return next(self._judge.judged([assignment], lambda done, total: None))
        except AdapterswapError as error:
            return error


class _Cluster:
    """The workers of a sweep; see `Judge`. Waits until one of them has loaded."""

    def __init__(
        self, prepared: PreparedSweep, remote: Any, arguments: tuple[Any, ...], workers: int, resource: str
    ) -> None:
        self._resource = resource
        self._agreed: Mapping[str, Any] = prepared.described
        self._remote = remote
        self._arguments = arguments
        self._idle: deque[Any] = deque()
        self._busy: dict[Any, tuple[Any, int | None]] = {}  # reference → worker, and its cell, or None while it loads
        self._deaths: Counter[int | None] = Counter()

        for _ in range(workers):
            self._start()
        while not self._idle:
            self._await()
        self.described = self._agreed

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Evaluate cells side by side. Does not call `on_progress`: workers do not report theirs."""
        self._deaths = Counter()
        waiting = deque(range(len(assignments)))
        finished: dict[int, Judged] = {}
        following = 0
        ahead = _AHEAD * (len(self._idle) + len(self._busy))
        while following < len(assignments):
            while self._idle and waiting and waiting[0] < following + ahead:
                worker, number = self._idle.popleft(), waiting.popleft()
                self._busy[worker.judge.remote(assignments[number])] = worker, number
            if following in finished:
                yield finished.pop(following)
                following += 1
                continue

            index, result = self._await()
            if index is not None and result is not None:
                finished[index] = result
            elif index is not None:
                waiting.appendleft(index)

    def _start(self) -> None:
        worker = self._remote.remote()
        self._busy[worker.open.remote(*self._arguments)] = worker, None

    def _await(self) -> tuple[int | None, Judged | None]:
        """Wait for a worker: the number of its cell, None if it was loading; and the result, None if it died."""
        ray = _ray()
        reference = self._ready()
        worker, number = self._busy.pop(reference)
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayActorError:
            self._deaths[number] += 1
            if self._deaths[number] == _DEATHS:
                when = "while loading" if number is None else "on the same cell"
                raise RunError(
                    f"{_DEATHS} workers died {when}",
                    "They probably ran out of memory: use fewer `workers` or a smaller `batch_size`",
                    parameter="workers",
                ) from None
            self._start()
            return number, None

        if isinstance(answer, AdapterswapError):
            raise answer
        self._idle.append(worker)
        if number is None:
            self._agreed = agreed(self._agreed, answer)
            return None, None
        return number, answer

    def _ready(self) -> Any:
        """The reference of the first worker that is ready. Ray itself waits forever for a node that has disappeared."""
        ray = _ray()
        lost: float | None = None
        while True:
            ready, _ = ray.wait(list(self._busy), num_returns=1, timeout=_LOOK)
            if ready:
                return ready[0]

            if ray.cluster_resources().get(self._resource, 0) >= 1:
                lost = None
                continue
            lost = lost or monotonic()
            if monotonic() - lost >= _PATIENCE:
                raise RunError(
                    f"For {_PATIENCE / 60:.2g} minutes no node of the cluster has had a {self._resource} for a worker",
                    "Start a node with `ray start`, and run the same command again to resume",
                    parameter="ray",
                )
