"""Stop a run that receives SIGTERM, as Slurm and Kubernetes send it, after its step and with a checkpoint.

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
    """Ends training after the current step, with a checkpoint, if any process of the run has received SIGTERM.

    Attributes:
        stopped: the last step, if training was ended in this way.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._received = False
        self.stopped: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signal inside the block. Python allows this in the main thread only; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _receive(self, number: int, frame: Any) -> None:
        self._received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._processes.any(self._received) and state.global_step < state.max_steps:
            self.stopped = state.global_step
            control.should_save = control.should_log = control.should_training_stop = True
