"""The processes of one run, as torchrun or `accelerate launch` started them; one alone where nobody did.

accelerate reads the environment and opens the group (gloo on CPUs, NCCL on CUDA). torch gives up a message between
processes after some minutes, so all meet in the store that they share, as long as that takes, before they exchange one.
Knows nothing of what they train or judge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from adapterswap.errors import ArgumentError, RunError

__all__ = ["Processes", "count_processes", "first_to_tell", "is_first", "joined", "leave"]

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

_PATIENCE = 0.5  # seconds between two looks into the store, at most
_meetings = count(1)  # of this process, with all others


def count_processes() -> int:
    """How many processes the launcher says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the one process of the run that prints; known before they have joined."""
    return os.environ.get("RANK", "0") == "0"


class Processes:
    """This process among those of the run.

    Args:
        state: accelerate's, of processes that have joined; this one is alone, if none is given.

    Attributes:
        count: how many there are.
        rank: which one this is.
        main: whether it is the one that writes and tells.
    """

    def __init__(self, state: Any = None) -> None:
        self._state = state
        self.count: int = state.num_processes if state else 1
        self.rank: int = state.process_index if state else 0
        self.main: bool = self.rank == 0

    def wait(self) -> None:
        """Return when all processes have come here, as long as that takes."""
        if self.count > 1:
            self._meet()
            self._state.wait_for_everyone()  # or the one that holds the store could be gone while others look into it

    def from_main(self, value: _Value) -> _Value:
        """The main process's `value` in all of them; the others wait as long as it takes."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        self._meet()
        return broadcast_object_list([value])[0]  # type: ignore[no-any-return]

    def shared(self, items: Sequence[_Item], work: Callable[[_Item], _Value]) -> list[_Value]:
        """`work` of each item, done by the processes in turns; all results, in the items' order, in all processes.

        Args:
            items: the same in all processes.
            work: gives something that can be pickled.
        """
        mine = [work(item) for item in items[self.rank :: self.count]]
        if self.count == 1:
            return mine
        from accelerate.utils import gather_object

        self._meet()
        shares: list[list[_Value]] = gather_object([mine])
        return [shares[place % self.count][place // self.count] for place in range(len(items))]

    def any(self, value: bool) -> bool:
        """Whether `value` is true in one process at least; all must ask."""
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


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the other processes of the run, if there are any; the group stays until `leave`.

    Args:
        device: the name of the device that each computes on: auto, cpu, cuda or another that torch knows. Where there
            are several of a kind, each process gets one of its own: torch's current device is set to it.

    Raises:
        ArgumentError: several processes cannot join on this device.
        RunError: another process ended before this one, and printed what happened there.
    """
    import torch
    from accelerate import PartialState

    cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
    if ":" in device and count_processes() > 1:
        raise ArgumentError(
            f"{count_processes()} processes were started, and {device} is one device",
            "Use auto, cuda or cpu",
            parameter="device",
        )
    processes = Processes(PartialState(cpu=cpu))
    if processes.count != count_processes():
        raise ArgumentError(
            f"{count_processes()} processes were started, and cannot join on the device {device!r}",
            "Use cuda, where each has a GPU, or cpu",
            parameter="device",
        )
    try:
        yield processes
    except RuntimeError as error:
        if processes.count > 1 and _is_of_a_peer(error):
            raise RunError(
                f"process {processes.rank} lost the others: {' '.join(str(error).split())[:200]}",
                "See what ended them, and run the same command again (train: with `resume=True`)",
            ) from None
        raise


def leave() -> None:
    """Leave the group of processes, at the end of this one: a group that was left cannot be joined again."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_of_a_peer(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in ("gloo", "NCCL"))


def first_to_tell() -> bool:
    """Whether this process is the first of the run that has an error to tell: the others keep quiet.

    Before they have joined, an error is the same in all, and the first process of each machine tells it.
    """
    if count_processes() == 1:
        return True
    import torch

    if not torch.distributed.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return bool(_store().add("adapterswap/told", 1) == 1)
    except RuntimeError:  # the store can be gone, with the process that told the error
        return False


def _store() -> Any:
    """What all processes of the run share; torch has no public name for it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
