"""Lock files: one writer at a time, on file systems with and without locks.

The operating system's lock (`flock`) is free again as soon as its holder dies, however it dies. Some file systems have
none: Lustre mounted without `flock`, some of NFS and FUSE. There, the lock is a file that names its holder's process
and machine. A process on the same machine notices that the holder died; elsewhere its message names the file to remove.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adapterswap.kit.errors import AdapterswapError, OutputError

if TYPE_CHECKING:
    from filelock import BaseFileLock

_WINDOWS = os.name == "nt"

# What `flock` answers where a file system has no locks, or its lock service is away.
HAS_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


@contextmanager
def locked(path: Path, busy: AdapterswapError, *, wait_s: float = 0) -> Iterator[None]:
    """Hold the lock file `path` inside the block, and remove it at the end.

    Args:
        path: the lock file. On a file system without locks a second file is made beside it, and `path` is not kept.
        busy: what to raise if another process holds the lock; see `being_written`.
        wait_s: how long to wait for it, in seconds.

    Raises:
        OSError: the lock file cannot be made.
    """
    lock, marker = _acquired(path, busy, wait_s)
    try:
        yield
    finally:
        # Removed while it is held, so a rival that has opened it notices that it is gone. Windows removes no file that
        # is open: there, an empty lock file stays.
        if not _WINDOWS and marker == path:
            remove(marker)

        # What was written stands by now, and a lock that cannot be released ends with the process.
        with suppress(OSError):
            lock.release()


def being_written(path: Path, writer: str) -> OutputError:
    """The error for an output that another process is writing."""
    return OutputError(
        f"{path} is being written by another {writer}",
        "Wait until it ends or choose another path",
        parameter="out_path",
    )


def marker_of(path: Path) -> Path:
    """The file that stands for the lock file `path` on a file system without locks."""
    return path.with_name(f"{path.name.removesuffix('.lock')}.soft.lock")


def remove(path: Path) -> None:
    """Remove a file or a folder of our own, if it exists; of a folder, as much as can be removed.

    A second attempt follows an error: network file systems fail now and then.
    """
    for _ in range(2):
        with suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
                return


def _acquired(path: Path, busy: AdapterswapError, wait_s: float) -> tuple[BaseFileLock, Path]:
    """The lock that is now held, and its file."""
    from filelock import FileLock, SoftFileLock, Timeout  # here, so that --help stays fast

    existed = path.exists()
    lock = FileLock(path, timeout=wait_s, fallback_to_soft=False)
    try:
        lock.acquire()
        return lock, path
    except Timeout:
        # Where no file can be made, as in /proc, filelock reports a timeout. Making another one, since a rival may hold
        # `path` by now, raises the OSError that says why.
        if not path.exists():
            probe = path.with_suffix(f".{uuid.uuid4().hex[:12]}.tmp")
            probe.touch()
            probe.unlink(missing_ok=True)
        raise busy from None
    except OSError as error:
        # The failed attempt leaves an empty file. One that was there before may be a rival's.
        if not existed:
            remove(path)
        if error.errno not in HAS_NO_LOCKS:
            raise

    marker = marker_of(path)
    soft_lock = SoftFileLock(marker, timeout=wait_s)
    try:
        soft_lock.acquire()
        return soft_lock, marker
    except Timeout:
        reason = f"If no process is writing there, because its machine failed, remove {marker}"
        problems = [problem._replace(remedy=f"{problem.remedy}. {reason}") for problem in busy.found]
        raise type(busy)(problems) from None
