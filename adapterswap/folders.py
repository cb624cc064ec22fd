"""Output folders that are whole or absent.

A folder is built beside its target under a temporary name and renamed into place at the end, so an error, a kill or a
full disk never leaves a half-written one. A lock inside the temporary folder tells a live writer from a dead one's
remains, which the next writer to the same target removes. Knows nothing of what the folders hold.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterswap.errors import AdapterswapError

__all__ = ["atomic_folder", "check_target"]

_LOCK = ".writing.lock"


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `target` when the block ends without an exception.

    Args:
        target: the folder to make. Its parents are made too.
        overwrite: replace `target` if it exists (it stays as it was until the new one is complete).
        inputs: folders that are being read; the target may be none of them, nor inside one, nor around one.

    Raises:
        AdapterswapError: the target exists and `overwrite` is false, touches an input, or cannot be written
            (permissions, a full disk).
    """
    from filelock import FileLock  # here, because asking for help should not pay for it

    target = Path(target)
    check_target(target, overwrite=overwrite, inputs=inputs)
    parent = target.absolute().parent
    building: Path | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent, target.name)
        building = parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
        building.mkdir()
        lock = FileLock(building / _LOCK)
        with lock:
            yield building
            (building / _LOCK).unlink(missing_ok=True)
            _publish(building, target, overwrite=overwrite)
    except OSError as error:
        raise AdapterswapError(*_explain(error, target)) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise `AdapterswapError` where `atomic_folder` would refuse `target`; a dry run calls this too."""
    if (target.exists() or target.is_symlink()) and not overwrite:
        raise AdapterswapError(f"{target} exists, and is not replaced unasked", "Give another path, or --overwrite")
    if target.exists() and not target.is_dir():
        raise AdapterswapError(f"{target} is a file, and the output is a folder", "Give another path")
    resolved = target.resolve()
    for source in inputs:
        source = source.resolve()
        if resolved == source or source in resolved.parents or resolved in source.parents:
            raise AdapterswapError(
                f"the output {target} overlaps the input {source}", "Give an output path outside every input"
            )


def _publish(building: Path, target: Path, *, overwrite: bool) -> None:
    if not overwrite:
        # rename() onto an empty folder succeeds on POSIX, so a rival's output is told apart before it.
        if target.exists():
            raise AdapterswapError(f"{target} appeared while it was being written", "Give another path, or --overwrite")
        building.rename(target)
        return
    retired = building.with_name(building.name.removesuffix(".tmp") + ".old.tmp")
    try:
        target.rename(retired)
    except FileNotFoundError:
        retired = None  # type: ignore[assignment]
    try:
        building.rename(target)
    except OSError:
        if retired is not None:
            retired.rename(target)
        raise
    if retired is not None:
        shutil.rmtree(retired, ignore_errors=True)


def _remove_stale(parent: Path, name: str) -> None:
    """Remove what writers to this target left behind when they were killed (nobody holds their lock)."""
    from filelock import FileLock, Timeout

    for stale in parent.glob(f".{name}.*.tmp"):
        try:
            with FileLock(stale / _LOCK, timeout=0):
                pass
        except (Timeout, OSError):
            continue
        shutil.rmtree(stale, ignore_errors=True)


def _explain(error: OSError, target: Path) -> tuple[str, str]:
    import errno

    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    mend = {
        errno.ENOSPC: "Free some space, or give a path on another disk; nothing was left behind",
        errno.EDQUOT: "Free some space, or give a path on another disk; nothing was left behind",
        errno.EACCES: "Give a path that you may write to",
        errno.EPERM: "Give a path that you may write to",
        errno.EROFS: "Give a path that you may write to",
        errno.ENOTDIR: "Give a path whose parents are folders",
        errno.EEXIST: "Give a path whose parents are folders",
    }.get(error.errno or 0, "Check the path and the disk; nothing was left behind")
    where = f" (at {error.filename})" if error.filename and "tmp" not in str(error.filename) else ""
    return f"{target} cannot be written: {reason}{where}", mend
