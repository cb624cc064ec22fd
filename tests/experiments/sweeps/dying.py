"""Run a sweep in child processes that are killed. test_dying starts it as a separate program, so that it can fork:
libraries are imported and the sweep is prepared once, and a child costs little more than its cells.

Usage: dying.py '{"recipe": {…}, "kill": {"folder": …, "kills": 6, "seed": 0}, "fill": {"folder": …, "steps": […]}}',
       with `kill` or `fill` or both; prints JSON.
       dying.py held '{"folder": …, "cells": 4, "arguments": ["sweep", …]}', by torchrun: runs the command line, and
       the first process prints a line and stops once so many cells are written.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killing import How, forked, hold, killed_at, on_touch, result


def count_cells(folder: Path) -> int:
    lines = folder / "cells.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def kill(work: Callable[[], None], folder: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill at random accesses to the folder: from the start, or after each new cell, to make progress.

    The last two come while the process goes on, and may come too late.
    """
    chosen, killed = random.Random(seed), []
    for number in range(kills):
        how: How = "going on" if number >= kills - 2 else "held" if number % 2 else "itself"
        until = count_cells(folder) + (how != "itself")
        step = chosen.randint(1, 5) if how != "itself" else chosen.randint(4, 25)
        code = killed_at(step, str(folder), work, how, lambda until=until: count_cells(folder) >= until)
        killed.append((code, count_cells(folder)))
    last = forked(work)
    return {"killed_at": killed, "last": result(last)}


def fill(work: Callable[[], None], folder: Path, *, steps: list[int]) -> dict[str, Any]:
    """The disk counts as full once a file reaches a size: RLIMIT_FSIZE stops a write in the middle."""
    reports = []
    for size in steps:

        def limited(size: int = size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            from adapterswap.kit.errors import AdapterswapError, OutputError

            try:
                work()
            except AdapterswapError as error:
                os._exit(3 if type(error) is OutputError else 4)

        code = result(forked(limited))
        raw = (folder / "cells.jsonl").read_bytes() if (folder / "cells.jsonl").exists() else b""
        left = sorted(path.name for path in folder.rglob("*.tmp")) if folder.exists() else []
        reports.append(
            {"code": code, "cells": count_cells(folder), "whole": raw.endswith(b"\n") or not raw, "left": left}
        )
    last = forked(work)
    return {"found": reports, "last": result(last)}


def held(folder: str, cells: int, arguments: list[str]) -> None:
    from adapterswap.cli import main as command

    def act() -> None:
        if count_cells(Path(folder)) >= cells:
            hold()

    if os.environ["RANK"] == "0":
        on_touch(f"{folder}/", act)
    command(arguments)


def main() -> None:
    if sys.argv[1] == "held":
        held(**json.loads(sys.argv[2]))
        return
    import torch

    from adapterswap.experiments.sweeps import SweepRecipe, prepare, sweep

    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    prepared, found = prepare(SweepRecipe.model_validate(settings.pop("recipe"))), {}
    gc.freeze()  # each cell collects garbage, and each child would search through all imports
    for mode, options in settings.items():
        folder = Path(options.pop("folder"))

        def work(folder: Path = folder) -> None:
            sweep(prepared, folder, device="cpu")

        found[mode] = {"kill": kill, "fill": fill}[mode](work, folder, **options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
