"""Processes that are killed at a step of their work: whenever they touch a file below a folder.

Nothing here waits for a number of seconds or looks for processes by name, so a busy machine changes no result.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

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


def listening(
    prefix: str, work: Callable[[], int | None], act: Callable[[int], object], hear: Callable[[int, BinaryIO], Any]
) -> tuple[int, Any]:
    """Do `work` in a child that calls `act` whenever it touches what is below `prefix`, and listen to it.

    Args:
        prefix: as for `on_touch`.
        work: what the child does.
        act: gets the stream to which the child may write.
        hear: gets the child's process id and what it writes, which ends when the child does.

    Returns:
        How the child ended, as `result` does, and what `hear` returned.
    """
    heard, told = os.pipe()

    def watched() -> int | None:
        on_touch(prefix, lambda: act(told))
        return work()

    child = forked(watched)
    os.close(told)
    with os.fdopen(heard, "rb") as stream:
        found = hear(child, stream)
    return result(child), found


def count_steps(prefix: str, work: Callable[[], int | None]) -> int:
    """How often a child that does `work` touches what is below `prefix`."""
    ended, steps = listening(prefix, work, lambda told: os.write(told, b"."), lambda child, stream: stream.read())
    assert ended == 0
    return len(steps)


def killed_at(
    step: int, prefix: str, work: Callable[[], int | None], how: How, ready: Callable[[], bool] = lambda: True
) -> int:
    """Do `work` in a child that is killed at its `step`-th touch; return how it ended, as `result` does.

    It kills itself, or this process kills it: while it is held there, or as soon as this process hears of it, wherever
    the child has got to by then. Touches count once it is `ready`.
    """
    left = step

    def act(told: int) -> None:
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

    def kill(child: int, stream: BinaryIO) -> None:
        if stream.readline():  # empty once the child has ended without a word
            os.kill(child, signal.SIGKILL)

    return listening(prefix, work, act, kill)[0]
