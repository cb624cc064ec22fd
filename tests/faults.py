"""Make one call to the operating system fail, in a process of its own, and see what is left.

The functions of `os` that touch a path below a folder are counted; the chosen one raises an error instead of running.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from killing import result

BY_PATH = (
    "open", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "stat", "lstat", "scandir", "listdir", "link",
    "symlink", "utime", "chmod", "truncate",
)  # fmt: skip
BY_DESCRIPTOR = ("fsync", "write", "pwrite", "ftruncate", "copy_file_range", "sendfile")


class Outcome(NamedTuple):
    """What a run did.

    Attributes:
        code: its exit code.
        message: what it wrote to standard error.
        call: the name of the call that failed; "" if the run made fewer calls.
    """

    code: int
    message: str
    call: str


def failing(number: int, error: int, folder: Path, body: Callable[[], int | None]) -> Outcome:
    """Run `body` in a child whose call number `number` (from 1) below `folder` fails with `error`."""
    heard, message = os.pipe()
    named, call = os.pipe()

    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(message, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        _inject(number, error, f"{folder}/", call)
        code = body() or 0
        sys.stderr.flush()
        os._exit(code)

    os.close(message)
    os.close(call)
    with os.fdopen(heard, encoding="utf-8") as stream, os.fdopen(named, encoding="utf-8") as names:
        text, name = stream.read(), names.read()
    return Outcome(result(child), text, name)


def _inject(number: int, error: int, prefix: str, call: int) -> None:
    """Replace the functions. The name of the one that fails is written to the descriptor `call`."""
    left = number
    write, readlink = os.write, os.readlink  # the real ones

    def place_of(arguments: tuple[Any, ...], options: dict[str, Any], by_path: bool) -> str:
        target = arguments[0] if arguments else options.get("path", "")
        if by_path and isinstance(target, str | bytes | os.PathLike):
            within = options.get("dir_fd")
            start = readlink(f"/proc/self/fd/{within}") if within is not None else ""
            return os.path.join(start, os.fsdecode(target))
        descriptor = target if isinstance(target, int) else getattr(target, "fileno", lambda: -1)()
        try:
            return readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return ""

    def wrapped(function: Callable[..., Any], name: str, by_path: bool) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            place = place_of(arguments, options, by_path)
            if place.startswith(prefix):
                left -= 1
                if left == 0:
                    write(call, f"{name} {os.path.relpath(place, prefix)}".encode())
                    raise OSError(error, os.strerror(error), place)
            return function(*arguments, **options)

        return instead

    for name in BY_PATH:
        setattr(os, name, wrapped(getattr(os, name), name, by_path=True))
    for name in BY_DESCRIPTOR:
        setattr(os, name, wrapped(getattr(os, name), name, by_path=False))
    fcntl.flock = wrapped(fcntl.flock, "flock", by_path=False)
    opened = wrapped(io.open, "io.open", by_path=True)
    io.open = opened
    builtins.open = opened
