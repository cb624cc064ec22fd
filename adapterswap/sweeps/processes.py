"""Evaluate each cell with all processes that a launcher started.

The main process runs the sweep as if it were alone, and records the results. It sends each assignment to the other
processes, which have loaded the same base and experts, and the cell's batches are divided among all of them. Knows
judges and processes; knows nothing of the folder, or of which cells there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from adapterswap.processes import Processes
from adapterswap.sweeps.cells import Assignment
from adapterswap.sweeps.judging import Judge, Judged, LocalJudge, OnProgress, agreed
from adapterswap.sweeps.preparing import PreparedSweep

if TYPE_CHECKING:
    from adapterswap.sweeps.results import Run

__all__ = ["follow", "lead"]


def lead(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> Judge:
    """The judge of the main process; the others follow.

    Raises:
        AdapterswapError: see `LocalJudge`; a process has other experts or versions than the others.
    """
    processes.from_main(None)
    return _Leader(_opened(prepared, processes, device, dtype), processes)


def follow(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> Run:
    """Evaluate the main process's assignments with it, until it sends the results. Loads nothing before the first.

    Raises:
        AdapterswapError: as `lead`; see `evaluate`.
    """
    from adapterswap.sweeps.results import Run

    judge: LocalJudge | None = None
    message: Assignment | Run | None = None
    while not isinstance(message := processes.from_main(message), Run):
        if message is None:  # `lead` was called, so assignments will follow
            judge = _opened(prepared, processes, device, dtype)
        else:
            assert judge is not None
            deque(judge.judged([message], lambda done, total: None), maxlen=0)
    return message


def _opened(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> LocalJudge:
    """The judge of this process. Checks that all processes have the same description."""
    judge = LocalJudge(prepared, device, dtype, processes=processes)
    first, *others = processes.shared(range(processes.count), lambda _: judge.described)
    for described in others:
        agreed(first, described)
    return judge


class _Leader:
    """See `Judge`."""

    def __init__(self, judge: LocalJudge, processes: Processes) -> None:
        self._judge, self._processes = judge, processes
        self.described = judge.described

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Evaluate the assignments lazily, one for each `next`.

        Raises:
            AdapterswapError: see `evaluate`.
        """
        for assignment in assignments:
            yield from self._judge.judged([self._processes.from_main(assignment)], on_progress)
