"""The processes of a run started with torchrun or `accelerate launch`, and what they do on SIGTERM.

Without a launcher there is one process. accelerate reads the environment and opens the group (gloo on CPUs, NCCL on
CUDA). torch gives up on a message between processes after some minutes. So before they exchange one, all processes meet
in a shared store, however long that takes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from adapterswap.kit.errors import ArgumentError, RunError

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

_PATIENCE = 0.5  # seconds between two checks of the store, at most
_meetings = count(1)  # how often this process has met all others


class TerminationHandler:
    """What this process does on SIGTERM; a process that a library forks from it ends at once, as by default.

    A forked process that waits for a lock can miss a handler written in Python, and `multiprocessing.Pool`, which
    lm-evaluation-harness uses for standard errors, would wait for its end forever. `_Fork` covers the moment before.

    Attributes:
        received: whether this process has received the signal, whatever it did then.
    """

    received = False

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __call__(self, number: int, frame: object) -> None:
        TerminationHandler.received = True
        self.act()


class _Fork(threading.local):
    """SIGTERM waits while a thread forks: Python drops what reaches a new process before its first instruction."""

    mask: Iterable[int] = ()

    def begin(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def end(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def end_in_child(self) -> None:
        if isinstance(signal.getsignal(signal.SIGTERM), TerminationHandler):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.end()


if hasattr(os, "register_at_fork"):
    _fork = _Fork()
    os.register_at_fork(before=_fork.begin, after_in_parent=_fork.end, after_in_child=_fork.end_in_child)


class Processes:
    """This process, as one of those in the run.

    Args:
        state: accelerate's state, once the processes have joined; without it this process is on its own.

    Attributes:
        count: how many processes there are.
        rank: this one's number, from 0.
        main: whether this one writes files and prints.
    """

    def __init__(self, state: Any = None) -> None:
        self._state = state
        self.count: int = state.num_processes if state else 1
        self.rank: int = state.process_index if state else 0
        self.main: bool = self.rank == 0

    def wait(self) -> None:
        """Wait until all processes have reached this call, however long that takes."""
        if self.count > 1:
            self._meet()
            self._state.wait_for_everyone()  # the process that holds the store must not end while others read it

    def from_main(self, value: _Value) -> _Value:
        """The main process's `value`, in every process; the others wait for it, however long that takes."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        self._meet()
        return broadcast_object_list([value])[0]  # type: ignore[no-any-return]

    def shared(self, items: Sequence[_Item], function: Callable[[_Item], _Value]) -> list[_Value]:
        """Call `function` on each item, with the items divided among the processes.

        Args:
            items: the same in all processes.
            function: returns something that can be pickled.

        Returns:
            All results in the items' order, in every process.
        """
        mine = [function(item) for item in items[self.rank :: self.count]]
        if self.count == 1:
            return mine
        from accelerate.utils import gather_object

        self._meet()
        shares: list[list[_Value]] = gather_object([mine])
        return [shares[place % self.count][place // self.count] for place in range(len(items))]

    def any(self, value: bool) -> bool:
        """Whether `value` is true in at least one process. All processes must call this."""
        if self.count == 1:
            return value
        import torch

        flag = torch.tensor(int(value), device=self._state.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def _meet(self) -> None:
        store, here = _store(), next(_meetings) * self.count
        store.add("adapterswap/met", 1)
        pause = 0.001
        while store.add("adapterswap/met", 0) < here:
            time.sleep(pause)
            pause = min(2 * pause, _PATIENCE)

    @staticmethod
    def started() -> int:
        """How many processes the launcher started."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @staticmethod
    def is_first() -> bool:
        """Whether this is the process of the run that prints. Works before the processes have joined."""
        return os.environ.get("RANK", "0") == "0"

    @staticmethod
    def first_to_report() -> bool:
        """Whether this process is the first with an error, and so the one that prints it.

        An error before the processes have joined is the same in all of them; the first of each machine prints it.
        """
        if Processes.started() == 1:
            return True
        import torch

        if not torch.distributed.is_initialized():
            return os.environ.get("LOCAL_RANK", "0") == "0"
        try:
            return bool(_store().add("adapterswap/reported", 1) == 1)
        except RuntimeError:  # the store ends with its process, which may have printed the error
            return False

    @staticmethod
    @contextmanager
    def joined(device: str) -> Iterator[Processes]:
        """Join the other processes of the run, if there are any; the group remains until `leave`.

        Args:
            device: what each process computes on: auto, cpu, cuda or another device that torch knows. If there are
                several of a kind, each process gets its own, and torch's current device is set to it.
        """
        import torch
        from accelerate import PartialState

        cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
        if ":" in device and Processes.started() > 1:
            raise ArgumentError(
                f"{Processes.started()} processes were started, but {device} is a single device",
                "Use auto, cuda or cpu",
                parameter="device",
            )
        processes = Processes(PartialState(cpu=cpu))
        if processes.count != Processes.started():
            raise ArgumentError(
                f"{Processes.started()} processes were started, but they cannot join on the device {device!r}",
                "Use cuda with a GPU for each process, or cpu",
                parameter="device",
            )
        try:
            yield processes
        except RuntimeError as error:
            # Not all errors between processes have a class of their own; the others name the library.
            is_between = isinstance(error, torch.distributed.DistError) or "gloo" in str(error) or "NCCL" in str(error)
            if processes.count > 1 and is_between:
                raise RunError(
                    f"Process {processes.rank} lost its connection to the others: {' '.join(str(error).split())[:200]}",
                    "Check their output for what ended them, then run the same command again "
                    "(train: with `resume=True`)",
                ) from None
            raise

    @staticmethod
    def leave() -> None:
        """Leave the group at the end of this process. A process that has left cannot join again."""
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _store() -> Any:
    """The key-value store that all processes of the run share; torch has no public name for it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
