"""Output folders that are whole or absent.

A folder is built beside its target under a temporary name and renamed into place at the end, so an error, a kill or a
full disk never leaves a half-written one. A lock beside the target keeps a second writer to it out; whoever holds the
lock also clears away what a killed writer left, and puts back a folder that it had set aside. Nothing is forced to the
disk, so this holds for processes that die, not for a machine that loses power. Knows nothing of what the folders hold.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adapterswap.errors import AdapterswapError

__all__ = ["atomic_folder", "check_target", "locked"]


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `target` when the block ends without an exception.

    Args:
        target: the folder to make. Its parents are made too. If it is a symlink, the folder that it points to is meant.
        overwrite: replace `target` if it exists (it stays as it was until the new one is complete).
        inputs: folders that are being read; the target may be none of them, nor inside one, nor around one.

    Raises:
        AdapterswapError: the target exists and `overwrite` is false, touches an input, is being written by another
            process, or cannot be written (permissions, a full disk).
    """
    target, inputs = Path(target), tuple(inputs)
    check_target(target, overwrite=overwrite, inputs=inputs)
    place = Path(os.path.realpath(target))
    with (
        _told(target),
        _parents(place.parent),
        locked(_beside(place, "lock"), f"{target} is being written by another process"),
    ):
        _recover(place)
        check_target(target, overwrite=overwrite, inputs=inputs)  # again: something may have been put back
        building = _beside(place, f"{uuid.uuid4().hex[:12]}.tmp")
        try:
            building.mkdir()
            yield building
            if place.exists() and not overwrite:
                raise AdapterswapError(f"{target} appeared while it was being written", "Give another path")
            _publish(building, place)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise `AdapterswapError` where `atomic_folder` would refuse `target`; a dry run calls this too."""
    with _told(target):
        place = Path(os.path.realpath(target))
        if (target.is_symlink() or place.exists()) and not overwrite:
            raise AdapterswapError(f"{target} already exists", "Choose another path or pass `overwrite=True`")
        if place.exists() and not place.is_dir():
            raise AdapterswapError(f"{target} is a file, and the output is a folder", "Give another path")
        if any(
            Path(os.path.realpath(lived_in)).is_relative_to(place) for lived_in in (os.curdir, os.path.expanduser("~"))
        ):
            raise AdapterswapError(
                f"{target} holds your home or the folder that you are in, which is not replaced",
                "Give the path of a folder in it",
            )
        for source in inputs:
            source = Path(os.path.realpath(source))
            if place.is_relative_to(source) or source.is_relative_to(place):
                raise AdapterswapError(
                    f"the output {target} overlaps the input {source}", "Give an output path outside every input"
                )


def _beside(place: Path, ending: str) -> Path:
    """A hidden name for something of ours in the same folder, so on the same disk."""
    return place.with_name(f".{place.name}.{ending}")


@contextmanager
def _parents(parent: Path) -> Iterator[None]:
    """Make missing parents, and take away again those that are still empty where the block fails."""
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` inside the block. The kernel frees it when the process dies, however it dies.

    Raises:
        AdapterswapError: another process holds it; `what` says who does what.
        OSError: the file cannot be made.
    """
    from filelock import FileLock, Timeout  # here, because asking for help should not pay for it

    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        if not path.exists():  # where no file can be made, as in /proc, the lock takes that for a rival's doing
            path.touch()
            path.unlink(missing_ok=True)
        raise AdapterswapError(what, "Wait until it is done, or give another path") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: a rival that has opened it notices that it is gone
        lock.release()


def _recover(place: Path) -> None:
    """After a writer that was killed: put back the folder that it had set aside, and remove the rest."""
    ours = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{12}}(?P<old>\.old)?\.tmp")
    for left in sorted(place.parent.iterdir()):
        if match := ours.fullmatch(left.name):
            if match["old"] and not place.exists():
                left.rename(place)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _publish(building: Path, place: Path) -> None:
    """Put `building` in its place. A kill between the two renames of a replacement is what `_recover` mends."""
    retired = None
    if place.exists():
        retired = building.with_suffix(".old.tmp")  # by this name alone `_recover` knows the only copy
        place.rename(retired)
    try:
        building.rename(place)
    except OSError:
        if retired is not None:
            retired.rename(place)
        raise
    if retired is not None:
        shutil.rmtree(retired.rename(building), ignore_errors=True)


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Tell errors of the operating system as a user meets them."""
    if "\0" in str(target):
        raise AdapterswapError(f"{str(target)!r} holds a zero byte, which no path does", "Give another path")
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        name = str(error.filename or "")
        where = f" (at {name})" if name and not name.endswith((str(target), ".lock")) and ".tmp" not in name else ""
        raise AdapterswapError(f"{target} cannot be written: {reason}{where}", _mend(error.errno)) from error


def _mend(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, or give a path on another disk; nothing was left behind"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Give a path that you may write to"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return "Give a path whose parents are folders"
    if number == errno.ENAMETOOLONG:
        return "Give a shorter name"
    if number == errno.EBUSY:
        return "Give the path of a folder in it"
    return "Check the path and the disk; nothing was left behind"
