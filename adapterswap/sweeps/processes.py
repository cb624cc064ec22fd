"""Judge each cell with all processes that a launcher started: one asks and records, the others answer with it.

The main process drives the sweep as if it were alone. Before each question it tells the others, who hold the same base
and experts, which it is; a cell's batches are then dealt among all. Knows judges and processes; knows nothing of the
folder, or of which cells there are.
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
        AdapterswapError: see `LocalJudge`; a process finds other experts or versions than the rest.
    """
    processes.from_main(None)
    return _Leader(_opened(prepared, processes, device, dtype), processes)


def follow(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> Run:
    """Judge with the main process what it asks, until it tells what came of the sweep. Loads nothing before it asks.

    Raises:
        AdapterswapError: as `lead`; see `evaluate`.
    """
    from adapterswap.sweeps.results import Run

    judge: LocalJudge | None = None
    told: Assignment | Run | None = None
    while not isinstance(told := processes.from_main(told), Run):
        if told is None:  # there will be questions
            judge = _opened(prepared, processes, device, dtype)
        else:
            assert judge is not None
            deque(judge.judged([told], lambda done, total: None), maxlen=0)
    return told


def _opened(prepared: PreparedSweep, processes: Processes, device: str, dtype: str) -> LocalJudge:
    """The judge of one process, of which all find the same."""
    judge = LocalJudge(prepared, device, dtype, processes=processes)
    known, *others = processes.shared(range(processes.count), lambda _: judge.described)
    for found in others:
        agreed(known, found)
    return judge


class _Leader:
    """See `Judge`."""

    def __init__(self, judge: LocalJudge, processes: Processes) -> None:
        self._judge, self._processes = judge, processes
        self.described = judge.described

    def judged(self, assignments: Sequence[Assignment], on_progress: OnProgress) -> Iterator[Judged]:
        """Judge these, each when it is asked for.

        Raises:
            AdapterswapError: see `evaluate`.
        """
        for assignment in assignments:
            yield from self._judge.judged([self._processes.from_main(assignment)], on_progress)
