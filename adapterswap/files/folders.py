"""Outputs that are whole or absent, and never at the cost of a file that adapterswap did not write.

A folder is built beside its target under a temporary name and renamed into place at the end, so an error, a kill or a
full disk never leaves half of one. Files are forced to the disk before the rename, so this holds for a power loss too.
A lock beside the target keeps a second writer out; the holder of the lock also removes what a killed writer left, and
puts back a folder that it had set aside. An existing folder is replaced only if all its files were written by the same
kind of command: its record lists them. Knows nothing of what the folders hold.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from adapterswap.errors import ExpertError, OutputError
from adapterswap.files.smallfiles import exists, expand, read_small, write_json

__all__ = [
    "OutputKind",
    "atomic_file",
    "atomic_folder",
    "check_file",
    "check_inputs",
    "check_place",
    "check_target",
    "locked",
    "refuse_strangers",
    "replacing",
    "strangers",
    "sync_folder",
    "sync_one",
]

_LIST = "files"  # the key of a record that lists what was written
_MAX_RECORD = 2**30  # bytes
_SHOWN = 3  # strangers that a message names


@dataclass(frozen=True)
class OutputKind:
    """What a kind of command writes into its folder, so that `overwrite` removes nothing else.

    Attributes:
        record: the JSON file in the folder whose key `files` lists everything that was written; `atomic_folder` adds
            the list. None if the command writes no such file.
        names: what to expect in a folder without that list, as the first edition wrote it: from the record's content
            (empty without a record) to relative paths, in which `*` stands for a part of one name and `**` at the end
            for everything below. Nothing, if the record is not one of this kind.
    """

    record: str | None
    names: Callable[[Mapping[str, Any]], Sequence[str]]


@contextmanager
def atomic_folder(
    target: str | Path,
    *,
    kind: OutputKind | None = None,
    overwrite: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `target` when the block ends without an exception.

    Args:
        target: the folder to make. Its parents are made too. If it is a symlink, the folder that it points to is meant.
            An empty folder counts as absent.
        kind: what the block writes; its record gets the list of files.
        overwrite: replace `target` if it is of this kind (it stays as it was until the new one is complete).
        inputs: everything that is read, see `check_inputs`.

    Raises:
        OutputError: see `check_target`; the target is being written by another process, or cannot be written
            (permissions, a full disk).
    """
    target, inputs = expand(target), tuple(inputs)
    check_target(target, kind=kind, overwrite=overwrite, inputs=inputs)
    place = Path(os.path.realpath(target))
    with (
        _os_errors(target),
        _parents(place.parent),
        locked(_beside(place, "lock"), f"{target} is being written by another process"),
    ):
        _recover(place)
        check_target(target, kind=kind, overwrite=overwrite, inputs=inputs)  # again: something may have been put back
        building = _beside(place, f"{uuid.uuid4().hex[:12]}.tmp")
        try:
            building.mkdir()
            yield building
            if kind is not None and kind.record is not None:
                _add_list(building, kind.record)
            sync_folder(building)
            if overwrite:
                check_target(target, kind=kind, overwrite=True, inputs=inputs)  # again: this may have taken hours
            _publish(building, place, target, overwrite=overwrite)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def check_target(
    target: str | Path,
    *,
    kind: OutputKind | None = None,
    overwrite: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Check whether `atomic_folder` may write `target`. A dry run calls this too, and so does a command before hours of
    work.

    Raises:
        OutputError: the target exists, is not an empty folder, and `overwrite` is false; it holds something that
            no command of this kind wrote; it is a file, or holds the current folder or the home folder; it is, holds or
            lies inside an input.
    """
    target = expand(target)
    with _os_errors(target):
        place = Path(os.path.realpath(target))
        if os.path.lexists(target) and not place.is_dir() and not overwrite:
            raise _exists(target)
        check_place(target, inputs)
        if not place.is_dir() or _is_empty(place):
            return
        if not overwrite:
            raise _exists(target)
        refuse_strangers(target, strangers(place, kind))


def check_place(target: Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Check whether a folder may be at `target`, whatever is there now.

    Raises:
        OutputError: it is a file; see `check_inputs`.
    """
    with _os_errors(target):
        if target.exists() and not target.is_dir():
            raise OutputError(
                f"{target} is a file, but the output is a folder", "Choose another path", parameter="out_path"
            )
        check_inputs(target, inputs)


def refuse_strangers(target: Path, found: Sequence[str]) -> None:
    """Raise an `OutputError` that names what `strangers` found in `target`, if it found anything."""
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise OutputError(
            f"{target} holds files that this command did not write: {', '.join(found[:_SHOWN])}{more}",
            "Move them away, or choose another path: `overwrite=True` only replaces earlier output of this command",
            parameter="out_path",
        )


def check_inputs(target: Path, inputs: Iterable[str | Path | None]) -> None:
    """Check that an output does not touch what is read.

    Args:
        target: the output, a folder or a file.
        inputs: files and folders that are read. Folders count with what the symlinks in them point to. None, Hub ids
            and whatever else does not exist locally is passed over.

    Raises:
        OutputError: the target is an input, holds one or lies inside one; or it holds the current folder or the
            home folder.
    """
    place = Path(os.path.realpath(target))
    if any(_holds(place, Path(os.path.realpath(lived_in))) for lived_in in (os.curdir, os.path.expanduser("~"))):
        raise OutputError(
            f"{target} holds your home folder or the folder that you are in",
            "Choose the path of a folder in it",
            parameter="out_path",
        )
    for read in inputs:
        source = None if read is None else expand(read)
        if source is None or not exists(source):
            continue
        for one in _lives_at(source):
            if _holds(place, one) or _holds(one, place):
                raise OutputError(
                    f"the output {target} overlaps the input {read}",
                    "Choose an output path outside every input",
                    parameter="out_path",
                )


def _lives_at(source: Path) -> Iterator[Path]:
    """Every place that a reader of `source` reaches: where it is, and where it and the links in it point to."""
    yield Path(os.path.realpath(source.parent)) / source.name
    real = Path(os.path.realpath(source))
    yield real
    if real.is_dir():
        with suppress(OSError):  # a folder that cannot be listed cannot be read either
            yield from (Path(os.path.realpath(entry)) for entry in real.iterdir() if entry.is_symlink())


def _holds(folder: Path, path: Path) -> bool:
    """Whether `path` is `folder` or lies in it, under whatever name a case-blind or bound file system has it."""
    if path.is_relative_to(folder):
        return True
    try:
        wanted = folder.stat()
    except OSError:
        return False
    for parent in (path, *path.parents):
        with suppress(OSError):
            if os.path.samestat(parent.stat(), wanted):
                return True
    return False


def strangers(folder: Path, kind: OutputKind | None, *, names: Iterable[str] = ()) -> list[str]:
    """What `folder` holds that no command of this kind wrote: relative paths, those of folders with a slash at the end.

    `names` are further paths that the command writes, as in `OutputKind.names`.
    """
    known = [tuple(name.rstrip("/").split("/")) for name in (*_known_names(folder, kind), *names)]
    found: list[str] = []

    def look(place: Path, within: tuple[str, ...], matching: list[tuple[str, ...]]) -> None:
        with os.scandir(place) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            path = (*within, entry.name)
            fitting = [name for name in matching if fnmatchcase(entry.name, name[len(within)])]
            is_folder = entry.is_dir(follow_symlinks=False)
            deeper = [name for name in fitting if len(name) > len(path)]
            if is_folder and any(name[len(path)] == "**" for name in deeper):
                continue
            if is_folder and deeper:
                look(Path(entry.path), path, deeper)
            elif is_folder and fitting and not os.listdir(entry.path):
                continue  # an empty folder that the command made
            elif is_folder or len(deeper) == len(fitting):
                found.append("/".join(path) + "/" * is_folder)

    look(folder, (), known)
    return found


def _known_names(folder: Path, kind: OutputKind | None) -> Sequence[str]:
    """The paths that a command of this kind wrote into `folder`, by its record; literal ones, or patterns."""
    if kind is None:
        return ()
    if kind.record is None:
        return kind.names({})
    try:
        record = json.loads(read_small(folder / kind.record, "", limit=_MAX_RECORD))
    except (ExpertError, ValueError, RecursionError):
        return ()
    if not isinstance(record, dict):
        return ()
    names = kind.names(record)
    listed = record.get(_LIST)
    if names and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        return [glob.escape(name) for name in listed]
    return names


def _add_list(folder: Path, record: str) -> None:
    """Add what `folder` holds to its record."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )
    content = json.loads((folder / record).read_bytes())
    write_json(folder / record, {**content, _LIST: names}, allow_nan=True)


def sync_folder(folder: Path) -> None:
    """Force `folder` and all that it holds to the disk: after a power loss a renamed file could be empty otherwise."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not os.path.islink(path := os.path.join(place, name)):
                sync_one(path)
        sync_one(place)


def sync_one(path: str | Path) -> None:
    """Force a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, building: Path | None = None) -> Iterator[Path]:
    """Yield the path of a temporary file that takes the place of `path` when the block ends without an exception.

    For files inside a folder that is ours: nothing is checked. Both the file and its new name are forced to the disk.

    Args:
        path: the file to write; what is there is replaced.
        building: the temporary file, on the same disk, if its name must be known for cleaning up; by default a
            hidden one beside `path`.

    Raises:
        OSError: it cannot be written.
    """
    building = building or _beside(path, f"{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield building
        sync_one(building)
        building.replace(path)
        sync_one(path.parent)
    finally:
        building.unlink(missing_ok=True)


@contextmanager
def atomic_file(
    target: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()
) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes `target` when the block ends without an exception.

    Raises:
        OutputError: see `check_file`; the file cannot be written.
    """
    target, inputs = expand(target), tuple(inputs)
    check_file(target, overwrite=overwrite, inputs=inputs)
    place = Path(os.path.realpath(target))
    with _os_errors(target), replacing(place) as building:
        yield building
        check_file(target, overwrite=overwrite, inputs=inputs)  # again: something may have been put there


def check_file(target: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
    """Check whether `atomic_file` may write `target`: a file that exists is replaced where `overwrite` says so.

    Raises:
        OutputError: the target exists and `overwrite` is false; it is a folder, or not a regular file; its folder
            does not exist; it is an input, or lies inside one.
    """
    target = expand(target)
    with _os_errors(target):
        if target.is_dir():
            raise OutputError(
                f"{target} is a folder, but the output is a file", "Choose the path of a file", parameter="out_path"
            )
        if os.path.lexists(target) and not overwrite:
            raise _exists(target)
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise OutputError(
                f"{target} is a device or a pipe, not a file", "Choose another path", parameter="out_path"
            )
        check_inputs(target, inputs)
        if not target.parent.is_dir():
            raise OutputError(
                f"{target} cannot be written: the folder {target.parent} does not exist",
                "Make the folder, or choose another path",
                parameter="out_path",
            )


def _exists(target: Path) -> OutputError:
    return OutputError(f"{target} already exists", "Choose another path or pass `overwrite=True`", parameter="out_path")


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not os.listdir(place)


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
        for folder in made:
            sync_one(folder.parent)
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` inside the block. The kernel frees it when the process dies, however it dies.

    Raises:
        OutputError: another process holds it; `what` says who does what.
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
        raise OutputError(what, "Wait until it is done, or choose another path", parameter="out_path") from None
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
            if match["old"] and (not place.exists() or _is_empty(place)):
                left.rename(place)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _publish(building: Path, place: Path, target: Path, *, overwrite: bool) -> None:
    """Put `building` in its place. A kill between the two renames of a replacement is what `_recover` repairs."""
    retired = None
    if place.exists() and _is_empty(place):
        shutil.copymode(place, building)
    elif place.exists() and overwrite:
        retired = building.with_suffix(".old.tmp")  # by this name alone `_recover` knows the only copy
        place.rename(retired)
    try:
        building.rename(place)  # over an empty folder; the system refuses any other
    except OSError as error:
        if retired is not None:
            retired.rename(place)
        elif error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(
                f"{target} appeared while it was being written", "Choose another path", parameter="out_path"
            ) from None
        raise
    sync_one(place.parent)
    if retired is not None:
        shutil.rmtree(retired.rename(building), ignore_errors=True)


@contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    """Report errors of the operating system in the user's terms."""
    if "\0" in str(target):
        raise OutputError(f"{str(target)!r} contains a null byte", "Choose another path", parameter="out_path")
    try:
        os.fsencode(target)
    except UnicodeEncodeError as error:
        raise OutputError(
            f"{str(target)!r} cannot be the name of a file: {error.reason}", "Choose another path", parameter="out_path"
        ) from None
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        name = str(error.filename or "")
        where = f" (at {name})" if name and not name.endswith((str(target), ".lock")) and ".tmp" not in name else ""
        raise OutputError(
            f"{target} cannot be written: {reason}{where}", _remedy(error.errno), parameter="out_path"
        ) from error


def _remedy(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, or choose a path on another disk; nothing was left behind"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Choose a path that you may write to"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return "Choose a path whose parents are folders"
    if number == errno.ENAMETOOLONG:
        return "Choose a shorter name"
    if number == errno.EBUSY:
        return "Choose the path of a folder in it"
    return "Check the path and the disk; nothing was left behind"
