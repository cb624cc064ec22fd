"""Processes that are killed at a step of their work: whenever they touch a file below a folder.

Nothing here waits for a number of seconds or looks for processes by name, so a busy machine changes no result.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal

# What touches the file system, as Python's audit events name it.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "os.scandir")

How = Literal["itself", "held", "going on"]


def forked(work: Callable[[], int | None]) -> int:
    """Start `work` in a child whose output goes nowhere; return its process id."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(work() or 0)
    return child


def result(child: int) -> int:
    """The exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def on_touch(prefix: str, act: Callable[[], None]) -> None:
    """From now on call `act` just before this process touches a path that starts with `prefix`."""
    acting = False  # what `act` touches itself does not count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal acting
        touched = arguments[0] if event in EVENTS and arguments and not acting else None
        if isinstance(touched, str | os.PathLike) and str(touched).startswith(prefix):
            acting = True
            act()
            acting = False

    sys.addaudithook(hook)


def hold(stream: int = 1) -> None:
    """Write a line to `stream`, then stop, with all threads, until somebody sends a signal."""
    os.write(stream, b"held\n")
    os.kill(os.getpid(), signal.SIGSTOP)


def count_steps(prefix: str, work: Callable[[], int | None]) -> int:
    """How often a child that does `work` touches what is below `prefix`."""
    heard, told = os.pipe()

    def count() -> None:
        os.write(told, b".")

    def counting() -> int | None:
        on_touch(prefix, count)
        return work()

    child = forked(counting)
    os.close(told)
    with os.fdopen(heard, "rb") as steps:
        found = len(steps.read())
    assert result(child) == 0
    return found


def killed_at(
    step: int, prefix: str, work: Callable[[], int | None], how: How, ready: Callable[[], bool] = lambda: True
) -> int:
    """Do `work` in a child that is killed at its `step`-th touch; return how it ended, as `result` does.

    It kills itself, or this process kills it: while it is held there, or as soon as this process hears of it, wherever
    the child has got to by then. Touches count once it is `ready`.
    """
    heard, told = os.pipe()
    left = step

    def act() -> None:
        nonlocal left
        if not ready():
            return
        left -= 1
        if left == 0 and how == "itself":
            os.kill(os.getpid(), signal.SIGKILL)
        elif left == 0 and how == "held":
            hold(told)
        elif left == 0:
            os.write(told, b"going on\n")

    def dying() -> int | None:
        on_touch(prefix, act)
        return work()

    child = forked(dying)
    os.close(told)
    with os.fdopen(heard, "rb") as line:
        if line.readline():  # empty once the child has ended without a word
            os.kill(child, signal.SIGKILL)
    return result(child)
