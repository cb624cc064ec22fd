"""Whole processes measured side by side: wall seconds and peak resident memory, medians of interleaved runs."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Medians over runs: wall seconds and processor seconds; and the largest peak of resident memory, in megabytes.

    On a busy machine, compare processor seconds rather than wall seconds.
    """

    seconds: float
    cpu: float
    megabytes: float


def run_once(command: Sequence[object]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak megabytes of one run; raises where the command fails."""
    start = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,  # with compiled modules, as an installed package has them
    )
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{command} failed: {told[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def side_by_side(
    commands: Mapping[str, Sequence[object]], *, runs: int = 5, before_each: Callable[[], None] = lambda: None
) -> dict[str, Measured]:
    """Run each command once to warm up and then `runs` times in turn, A B C A B C …, so that drift hits all alike."""
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            before_each()
            sample = run_once(command)
            if turn:
                samples[name].append(sample)
    return {
        name: Measured(statistics.median(wall), statistics.median(cpu), max(memory))
        for name, (wall, cpu, memory) in ((name, zip(*found, strict=True)) for name, found in samples.items())
    }


def median(call: Callable[[], Any], repeats: int, device: str) -> float:
    """The median time of a call, in milliseconds."""
    import torch

    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1000
