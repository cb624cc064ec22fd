"""A run that receives SIGTERM, as Slurm and Kubernetes send it, ends after its step, with a checkpoint.

Importing this module imports transformers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from adapterswap.processes import Processes

__all__ = ["Stopping"]


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Ends training after the step at hand, with a checkpoint, once any process of the run was sent SIGTERM.

    Attributes:
        stopped: the last step, where training was ended so.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._asked = False
        self.stopped: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Heed the signal inside the block. Only the main thread may; in others it does what it always did."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._processes.any(self._asked) and state.global_step < state.max_steps:
            self.stopped = state.global_step
            control.should_save = control.should_log = control.should_training_stop = True
