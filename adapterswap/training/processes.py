"""The processes of one run, as torchrun or `accelerate launch` started them; one alone where nobody did.

accelerate reads the environment and opens the group (gloo on CPUs, NCCL on CUDA). Knows nothing of what they train.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from adapterswap.errors import AdapterswapError

__all__ = ["Processes", "count_processes", "first_to_tell", "joined", "leave"]

_Value = TypeVar("_Value")
_PATIENCE = 0.5  # seconds between two looks into the store


def count_processes() -> int:
    """How many processes the launcher says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Processes:
    """This process among those of the run.

    Attributes:
        count: how many there are.
        rank: which one this is.
        main: whether it is the one that writes and tells.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.count: int = state.num_processes
        self.rank: int = state.process_index
        self.main: bool = state.is_main_process

    def wait(self) -> None:
        """Return when all processes have come here."""
        self._state.wait_for_everyone()

    def from_main(self, value: _Value) -> _Value:
        """The main process's `value`, a small one, in all of them."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]  # type: ignore[no-any-return]

    def when_main_has(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gave on the main process, as JSON has it, in all of them; the others wait as long as it takes.

        They ask the store that all share, now and then: the wait of a broadcast ends after some minutes.

        Args:
            key: names this value among all that a run asks for.
        """
        if self.count == 1:
            return make()
        store, key = _store(), f"adapterswap/{key}"
        if self.main:
            store.set(key, json.dumps(make()))
        while not store.check([key]):
            time.sleep(_PATIENCE)
        return json.loads(store.get(key))

    def any(self, value: bool) -> bool:
        """Whether `value` is true in one process at least; all must ask."""
        if self.count == 1:
            return value
        import torch

        flag = torch.tensor(int(value), device=self._state.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the other processes of the run, if there are any; the group stays until `leave`.

    Raises:
        AdapterswapError: another process ended before this one; what happened there is told there.
    """
    from accelerate import PartialState

    processes = Processes(PartialState(cpu=device == "cpu"))
    try:
        yield processes
    except RuntimeError as error:
        if processes.count > 1 and _is_of_a_peer(error):
            raise AdapterswapError(
                f"process {processes.rank} lost the others: {' '.join(str(error).split())[:200]}",
                "See what ended them; go on with --resume",
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
