"""Temporary folders that are removed however their process ends. Knows nothing of what they hold."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["scratch_folder"]

_PREFIX = "adapterswap-"
_LOCK = "adapterswap.lock"
_YOUNG_S = 60  # a younger folder may not have been locked yet


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder `adapterswap-PURPOSE-…` inside the block. First removes those that killed processes left."""
    from filelock import FileLock  # here, so that --help stays fast

    _remove_abandoned()
    # Windows keeps files that are still mapped.
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "files").mkdir()
        with FileLock(folder / _LOCK):  # the kernel frees it when the process dies
            yield folder / "files"


def _remove_abandoned() -> None:
    """Remove this user's scratch folders whose lock nobody holds."""
    from filelock import FileLock, Timeout

    user = getattr(os, "geteuid", lambda: 0)()
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError, Timeout):
            owner = lock.parent.lstat().st_uid  # of the link, if another user made one
            if owner == user and time.time() - lock.lstat().st_mtime > _YOUNG_S:
                with FileLock(lock, timeout=0):
                    shutil.rmtree(lock.parent)
