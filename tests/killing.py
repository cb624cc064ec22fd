"""Kill a process at a chosen step. A step is any access to a path below a folder, or a removal within an open one.

Nothing here sleeps or looks for processes by name, so a busy machine does not change the results.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

# Python's audit events for access to the file system.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "os.scandir")

How = Literal["itself", "held", "going on"]


def forked(body: Callable[[], int | None]) -> int:
    """Start `body` in a child whose output is discarded; return its process id."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(body() or 0)
    return child


def result(child: int) -> int:
    """The exit code, or minus the number of the signal that killed the process."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def on_touch(prefix: str, act: Callable[[], None], *, removals: bool = False) -> None:
    """From now on, call `act` just before this process accesses a path that starts with `prefix`.

    With `removals`, also before a file is removed within an open folder, whose path is not known.
    """
    acting = False  # accesses by `act` itself do not count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal acting
        if event not in EVENTS or not arguments or acting:
            return
        touched, within = arguments[0], arguments[-1] if removals and event in ("os.remove", "os.rmdir") else -1
        if within != -1 or (isinstance(touched, str | os.PathLike) and str(touched).startswith(prefix)):
            acting = True
            act()
            acting = False

    sys.addaudithook(hook)


def hold(stream: int = 1) -> None:
    """Write a line to `stream`, then stop all threads until a signal arrives."""
    os.write(stream, b"held\n")
    os.kill(os.getpid(), signal.SIGSTOP)


def listening(
    prefix: str,
    body: Callable[[], int | None],
    act: Callable[[int], object],
    hear: Callable[[int, BinaryIO], Any],
    *,
    removals: bool = False,
) -> tuple[int, Any]:
    """Run `body` in a child that calls `act` at each access below `prefix`, and read what the child writes.

    Args:
        prefix, removals: as for `on_touch`.
        body: what the child runs.
        act: called with the stream that the child may write to.
        hear: called with the child's process id and the stream it writes to, which ends with the child.

    Returns:
        The child's exit code as from `result`, and what `hear` returned.
    """
    heard, message = os.pipe()

    def watched() -> int | None:
        on_touch(prefix, lambda: act(message), removals=removals)
        return body()

    child = forked(watched)
    os.close(message)
    with os.fdopen(heard, "rb") as stream:
        outcome = hear(child, stream)
    return result(child), outcome


def count_steps(prefix: str, body: Callable[[], int | None]) -> int:
    """How often a child that runs `body` accesses paths below `prefix`."""
    ended, steps = listening(prefix, body, lambda pipe: os.write(pipe, b"."), lambda child, stream: stream.read())
    assert ended == 0
    return len(steps)


def killed_at(
    step: int,
    prefix: str,
    body: Callable[[], int | None],
    how: How,
    ready: Callable[[], bool] = lambda: True,
    *,
    removals: bool = False,
) -> int:
    """Run `body` in a child that is killed at its `step`-th access; return its exit code as from `result`.

    It kills itself, or this process kills it: while it waits at that step, or as soon as this process hears of the
    step, wherever the child is by then. Accesses count once `ready` returns True; with `removals`, those in `on_touch`.
    """
    left = step

    def act(pipe: int) -> None:
        nonlocal left
        if not ready():
            return
        left -= 1
        if left == 0 and how == "itself":
            os.kill(os.getpid(), signal.SIGKILL)
        elif left == 0 and how == "held":
            hold(pipe)
        elif left == 0:
            os.write(pipe, b"going on\n")

    def kill(child: int, stream: BinaryIO) -> None:
        if stream.readline():  # empty if the child ended without writing
            os.kill(child, signal.SIGKILL)

    return listening(prefix, body, act, kill, removals=removals)[0]
