"""Examine many models, each in a process of its own, and keep what came of each: for scripts that try all of them.

A model may run out of memory, never end, or end the process that it is in. The results are lines of a file. A model
that the file has is not examined again, so the same command resumes a run that was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

Case = Mapping[str, str]
"""What identifies a model among the results, such as its type: columns of its rows."""
Row = dict[str, Any]


def parser(description: str | None, *, results: str, seconds: int) -> argparse.ArgumentParser:
    """A parser with the options that `examined` reads; `description` is a script's docstring."""
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("--only", default="", help="regex of what each line of the output begins with")
    options.add_argument("--results", type=Path, default=Path(results))
    options.add_argument("--seconds", type=int, default=seconds)
    return options


def quiet() -> None:
    """No warnings and bars, and one thread, as processes that run side by side need it."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def examined(
    cases: Mapping[str, Case],
    options: argparse.Namespace,
    examine: Callable[[Case, Path], Sequence[Row]],
    summary: Callable[[Sequence[Row]], str],
    crashed: Callable[[str], Row],
) -> list[Row]:
    """The rows of all cases that `options.only` selects, from the file of results or from their examination.

    Args:
        cases: each by the label that the output shows and `options.only` searches.
        options: of `parser`.
        examine: what came of a case; the folder is empty and its own.
        summary: what the output says about a case.
        crashed: the row of a case whose process ended early, or took longer than `options.seconds`; from the reason.
    """
    rows: list[Row] = []
    if options.results.exists():
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    chosen: list[Row] = []

    for label, case in cases.items():
        if not re.search(options.only, label):
            continue
        known = [row for row in rows if case.items() <= row.items()]
        if known:
            chosen += known
            continue

        start = time.monotonic()
        found = _in_a_fork(case, examine, options.seconds)
        if isinstance(found, str):
            found = [crashed(found)]
        found = [{**case, **row} for row in found]
        with options.results.open("a") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in found)
        chosen += found
        print(f"{time.monotonic() - start:5.1f} s  {label:36} {summary(found)}", flush=True)
    return chosen


def _in_a_fork(case: Case, examine: Callable[[Case, Path], Sequence[Row]], seconds: int) -> list[Row] | str:
    """The rows from a fork of this process, which has imported everything already; or why there are none."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        answer = folder / "rows.json"
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            try:
                answer.write_text(json.dumps(list(examine(case, folder))))
            except BaseException:
                traceback.print_exc()
            os._exit(0)

        _, status = os.waitpid(child, 0)
        if answer.exists():
            return list(json.loads(answer.read_text()))
    reason = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "see above"
    return f"{reason} (SIGALRM: over {seconds} seconds)"
