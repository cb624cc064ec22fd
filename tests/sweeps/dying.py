"""Run a sweep in child processes that die. Started by test_dying as a program of its own, so that it may fork:
libraries are imported and the sweep is prepared once, and a child costs little more than its cells.

Usage: dying.py kill|fill '{"recipe": {…}, "folder": …, …}'; prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What touches the file system, as Python's audit events name it.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate")


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        work()
        os._exit(0)
    return child


def result(child: int) -> int:
    """The exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def cells(folder: Path) -> int:
    lines = folder / "cells.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def dying_at(count: int, folder: Path, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, killed just before the `count`-th time that something in `folder` is touched."""
    left = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def hooked() -> None:
        sys.addaudithook(hook)
        work()

    return hooked


def kill(work: Callable[[], None], folder: Path, kills: int, seed: int, spread: int = 1) -> dict[str, Any]:
    """Half of the kills come at a random touch of the folder, half at a random moment, up to `spread` cells later."""
    chosen, killed_at = random.Random(seed), []
    while len(killed_at) < kills:
        if len(killed_at) % 2:
            until = cells(folder) + chosen.randint(1, spread)
            child = forked(work)
            while cells(folder) < until and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.001)
            time.sleep(chosen.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        else:
            child = forked(dying_at(chosen.randint(4, 4 + 16 * spread), folder, work))
        killed_at.append((result(child), cells(folder)))
    last = forked(work)
    return {"killed_at": killed_at, "last": result(last)}


def fill(work: Callable[[], None], folder: Path, steps: list[int]) -> dict[str, Any]:
    """The disk is full once a file has so many bytes: RLIMIT_FSIZE stops a write in its middle."""
    found = []
    for size in steps:

        def limited(size: int = size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            from adapterswap import AdapterswapError

            try:
                work()
            except AdapterswapError as error:
                os._exit(3 if "cannot be written: " in str(error) else 4)

        code = result(forked(limited))
        raw = (folder / "cells.jsonl").read_bytes() if (folder / "cells.jsonl").exists() else b""
        left = sorted(path.name for path in folder.rglob("*.tmp")) if folder.exists() else []
        found.append({"code": code, "cells": cells(folder), "whole": raw.endswith(b"\n") or not raw, "left": left})
    last = forked(work)
    return {"found": found, "last": result(last)}


def main() -> None:
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    import torch

    from adapterswap.sweeps import SweepRecipe, prepare, sweep

    torch.set_num_threads(1)
    prepared, folder = prepare(SweepRecipe.model_validate(settings.pop("recipe"))), Path(settings.pop("folder"))

    def work() -> None:
        sweep(prepared, folder, device="cpu")

    print(json.dumps({"kill": kill, "fill": fill}[mode](work, folder, **settings)))


if __name__ == "__main__":
    main()
