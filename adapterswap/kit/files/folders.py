"""Write outputs whole or not at all, and never replace a file that adapterswap did not write; temporary folders.

A folder is built next to its target under a temporary name and renamed into place at the end, so an error, a kill or a
full disk never leaves half of it. Files are synced to disk before the rename, so the same holds for a power loss. A
lock next to the target keeps a second writer out. The holder of the lock also cleans up after a killed writer, and
restores a folder that it had moved aside. An existing folder is replaced only if the same kind of command wrote all its
files, which its record lists, and if its weights are still those that were written.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from adapterswap.kit.errors import ExpertError, OutputError, and_more
from adapterswap.kit.files import locks
from adapterswap.kit.files.hashes import fingerprint
from adapterswap.kit.files.text import expand, read_small, write_json

_PREFIX = "adapterswap-"
_LOCK = "adapterswap.lock"
_WINDOWS = os.name == "nt"
_YOUNG_S = 60  # a younger folder may not have been locked yet


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder `adapterswap-PURPOSE-…` inside the block. First removes those that killed processes left.

    Raises:
        OutputError: the folder for temporary files is full, or cannot be written for another reason.
    """
    from filelock import FileLock, Timeout

    # Those of this user whose lock nobody holds
    user = getattr(os, "geteuid", lambda: 0)()
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError, Timeout):
            owner = lock.parent.lstat().st_uid  # of the link, if another user made one
            if owner == user and time.time() - lock.lstat().st_mtime > _YOUNG_S:
                with FileLock(lock, timeout=0):
                    shutil.rmtree(lock.parent)

    with ExitStack() as stack:
        try:
            # Windows keeps files that are still mapped.
            place = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(place))
            (folder / "files").mkdir()
            stack.enter_context(locks.locked(folder / _LOCK, locks.being_written(folder, "process")))
        except OSError as error:
            raise OutputError(
                f"No temporary folder can be made in {tempfile.gettempdir()}: {_reason(error)}",
                "Free some space there, or set the environment variable TMPDIR to another folder",
            ) from error
        yield folder / "files"


CARD = "README.md"
_MAX_RECORD = 2**30  # bytes
_HEAD = 2**16  # bytes in which a file's mark is looked for
_SAME_KIND = "`overwrite=True` only replaces earlier output of the same kind"
_SHOWN = 3  # foreign files that a message names


@dataclass(frozen=True)
class FileKind:
    """How to recognise a file that a command wrote, so that `overwrite` replaces no other.

    Attributes:
        start: its first bytes.
        mark: bytes that stand near its start.
    """

    start: bytes
    mark: bytes = b""

    def wrote(self, path: str | Path) -> bool:
        """Whether the file at `path` is of this kind."""
        with open(path, "rb") as file:
            head = file.read(_HEAD)
        return head.startswith(self.start) and self.mark in head

    @contextmanager
    def file(
        self, target: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()
    ) -> Iterator[Path]:
        """Yield the path of a temporary file that becomes `target` when the block ends without an exception.

        Args:
            target: the file to write. A symlink stands for the file that it points to.
            overwrite: replace `target` if it is of this kind.
            inputs: files and folders that are read, which the output may not overlap.
        """
        target, inputs = expand(target), tuple(inputs)
        self.check(target, overwrite=overwrite, inputs=inputs)

        place = Path(os.path.realpath(target))
        with _os_errors(target), _alone(place, target), replacing(place, _temporary(place)) as building:
            yield building
            self.check(target, overwrite=overwrite, inputs=inputs)  # again: it may have appeared meanwhile

    def check(self, target: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
        """Check whether `file` may write `target`. An existing file is replaced only with `overwrite`."""
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

            _check_inputs(target, inputs)
            if target.exists() and not self.wrote(target):
                raise OutputError(
                    f"This command did not write {target}",
                    f"Move it away or choose another path: {_SAME_KIND}",
                    parameter="out_path",
                )

            if not target.parent.is_dir():
                raise OutputError(
                    f"{target} cannot be written: the folder {target.parent} does not exist",
                    "Create the folder or choose another path",
                    parameter="out_path",
                )


@dataclass(frozen=True)
class OutputKind:
    """The files that a kind of command writes into its folder, so that `overwrite` removes nothing else.

    Attributes:
        record: the JSON file in the folder whose key `files` lists everything that was written; `folder` adds the
            list. None if the command writes no such file.
        is_ours: whether the record's content is of this kind.
        names: what to expect in a folder without that list: relative paths, in which `*` matches part of a name and a
            final `**` everything below.
        files: how to recognise each file, if there is no record.
        LIST: the key of a record that lists what was written.
        PRINTS: the key of a record with the fingerprints of what users may change: weights, model card.
    """

    LIST: ClassVar = "files"
    PRINTS: ClassVar = "fingerprints"

    record: str | None
    is_ours: Callable[[Mapping[str, Any]], bool] = bool
    names: Callable[[], Sequence[str]] = tuple
    files: FileKind | None = None

    @contextmanager
    def folder(
        self,
        target: str | Path,
        *,
        overwrite: bool = False,
        inputs: Iterable[str | Path | None] = (),
    ) -> Iterator[Path]:
        """Yield an empty temporary folder that becomes `target` when the block ends without an exception.

        Args:
            target: the folder to create, with its parents. A symlink stands for the folder that it points to. An empty
                folder counts as absent.
            overwrite: replace `target` if it is of this kind. It stays unchanged until the new folder is complete.
            inputs: files and folders that are read, which the output may not overlap.
        """
        target, inputs = expand(target), tuple(inputs)
        self.check(target, overwrite=overwrite, inputs=inputs)

        place = Path(os.path.realpath(target))
        with _os_errors(target), _parents(place.parent), _alone(place, target):
            self.check(target, overwrite=overwrite, inputs=inputs)  # again: a folder may have been restored
            building = _temporary(place)
            try:
                building.mkdir()
                yield building

                if self.record is not None:
                    _add_list(building, self.record)
                sync(building, whole=True)
                if overwrite:
                    self.check(target, overwrite=True, inputs=inputs)  # again: this may have taken hours
                _publish(building, place, target, overwrite=overwrite)
            finally:
                locks.remove(building)

    def check(
        self,
        target: str | Path,
        *,
        overwrite: bool = False,
        inputs: Iterable[str | Path | None] = (),
    ) -> None:
        """Check whether `folder` may write `target`. Dry runs and long commands call this before they start."""
        target = expand(target)
        with _os_errors(target):
            place = Path(os.path.realpath(target))
            if os.path.lexists(target) and not place.is_dir() and not overwrite:
                raise _exists(target)
            self.check_place(target, inputs)
            if not place.is_dir() or _is_empty(place):
                return
            if not overwrite:
                raise _exists(target)
            self.refuse_strangers(target)

    @staticmethod
    def check_place(target: Path, inputs: Iterable[str | Path | None] = ()) -> None:
        """Check whether a folder may be written at `target`, regardless of what is in it now."""
        with _os_errors(target):
            if target.exists() and not target.is_dir():
                raise OutputError(
                    f"{target} is a file, but the output is a folder", "Choose another path", parameter="out_path"
                )
            _check_inputs(target, inputs)

    def refuse_strangers(self, target: Path) -> None:
        """Raise an `OutputError` that names the files in the folder `target` that no command of this kind wrote."""
        foreign_paths = self.strangers(target)
        if foreign_paths:
            raise OutputError(
                f"{target} contains files that this command did not write: {and_more(foreign_paths, _SHOWN)}",
                f"Move them away or choose another path: {_SAME_KIND}",
                parameter="out_path",
            )

    def strangers(self, folder: Path) -> list[str]:
        """The paths in `folder` that no command of this kind wrote, relative to it; a folder's path ends with a slash,
        and weights and a model card that were changed since say so.
        """
        known_names, prints = self._known_files(folder)
        expected = [tuple(name.rstrip("/").split("/")) for name in known_names]
        foreign_paths: list[str] = []
        printed: list[str] = []

        def wrote(entry: os.DirEntry[str]) -> bool:
            return self.files is None or (entry.is_file(follow_symlinks=False) and self.files.wrote(entry.path))

        def look(place: Path, within: tuple[str, ...], matching: list[tuple[str, ...]]) -> None:
            with os.scandir(place) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)

            for entry in entries:
                path = (*within, entry.name)
                is_folder = entry.is_dir(follow_symlinks=False)
                fitting = [name for name in matching if fnmatchcase(entry.name, name[len(within)])]
                deeper = [name for name in fitting if len(name) > len(path)]

                if is_folder and any(name[len(path)] == "**" for name in deeper):
                    continue
                if is_folder and deeper:
                    look(Path(entry.path), path, deeper)
                elif is_folder and fitting and not os.listdir(entry.path):
                    continue  # an empty folder that the command made
                elif is_folder or len(deeper) == len(fitting) or not wrote(entry):
                    foreign_paths.append("/".join(path) + ("/" if is_folder else ""))
                elif "/".join(path) in prints:
                    printed.append("/".join(path))

        look(folder, (), expected)
        for name, now in self.prints_of(folder, printed).items():
            if prints[name] != now:
                foreign_paths.append(f"{name} (changed since)")
        return foreign_paths

    def _known_files(self, folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """The paths, or patterns of paths, that a command of this kind wrote into `folder`, and the fingerprints
        according to its record."""
        if self.record is None:
            return self.names(), {}

        try:
            record = json.loads(read_small(folder / self.record, "", limit=_MAX_RECORD))
        except (ExpertError, ValueError, RecursionError):
            return (), {}
        if not isinstance(record, dict) or not self.is_ours(record):
            return (), {}

        listed = record.get(self.LIST)
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            return self.names(), {}

        prints = record.get(self.PRINTS)
        if not isinstance(prints, dict):
            prints = {}
        return [glob.escape(name) for name in listed], prints

    @staticmethod
    def prints_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
        """The fingerprints of the weights and the card among these files of a folder; quick for any size."""
        prints = {}
        for name in names:
            is_printed = name.endswith(".safetensors") or name == CARD

            # `is_file` would take a file that the disk fails to show for one that is not there.
            if is_printed and stat.S_ISREG((folder / name).stat().st_mode):
                prints[name] = fingerprint(folder / name, most=2**23, block=2**12)
        return prints


def _check_inputs(target: Path, inputs: Iterable[str | Path | None]) -> None:
    """Check that an output does not overlap any input.

    Args:
        target: the output, a folder or a file.
        inputs: files and folders that are read, with everything that symlinks in a folder point to. None, Hub ids and
            other names that do not exist locally are skipped.
    """
    place = Path(os.path.realpath(target))
    for folder in (os.curdir, os.path.expanduser("~")):
        if _contains(place, Path(os.path.realpath(folder))):
            raise OutputError(
                f"{target} contains your home folder or the current folder",
                "Choose a folder inside it",
                parameter="out_path",
            )

    for given_input in inputs:
        if given_input is None:
            continue
        source = expand(given_input)
        if not os.path.exists(source):
            continue

        for location in _locations(source):
            if _contains(place, location) or _contains(location, place):
                raise OutputError(
                    f"The output {target} overlaps the input {given_input}",
                    "Choose an output path outside every input",
                    parameter="out_path",
                )


def _locations(source: Path) -> Iterator[Path]:
    """Every place that is read with `source`: its own path, and the targets of its links and of those in it."""
    yield Path(os.path.realpath(source.parent)) / source.name

    real = Path(os.path.realpath(source))
    yield real

    if real.is_dir():
        with suppress(OSError):  # a folder that cannot be listed cannot be read either
            for entry in real.iterdir():
                if entry.is_symlink():
                    yield Path(os.path.realpath(entry))


def _contains(folder: Path, path: Path) -> bool:
    """Whether `path` is `folder` or inside it, also in other case on a disk that ignores case."""
    if path.is_relative_to(folder):
        return True
    try:
        folder_stat = folder.stat()
    except OSError:
        return False
    for parent in (path, *path.parents):
        with suppress(OSError):
            if os.path.samestat(parent.stat(), folder_stat):
                return True
    return False


def _add_list(folder: Path, record: str) -> None:
    """Add the list of files in `folder`, and the fingerprints of its weights and card, to its record."""

    def fail(error: OSError) -> NoReturn:
        raise error

    names = []
    for place, folders, files in os.walk(folder, onerror=fail):
        inside = Path(place).relative_to(folder)
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        names += [(inside / name).as_posix() for name in (*files, *links)]

        is_empty = not files and not folders
        if is_empty and inside != Path():
            names.append(inside.as_posix())

    names.sort()
    content = json.loads((folder / record).read_bytes())
    content[OutputKind.LIST] = names
    prints = OutputKind.prints_of(folder, names)
    if prints:
        content[OutputKind.PRINTS] = prints
    write_json(folder / record, content, allow_nan=True)


def sync(path: str | Path, *, whole: bool = False) -> None:
    """Sync a file, or a folder's list of names, to disk: otherwise a renamed file could be empty after a power loss.

    `whole` syncs everything in a folder first. Windows syncs only what is open for writing, and no folders.
    """
    if whole:
        for place, folders, files in os.walk(path, topdown=False):
            for name in (*files, *folders):
                inner = os.path.join(place, name)
                if not os.path.islink(inner):
                    sync(inner)

    if _WINDOWS and os.path.isdir(path):
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


class _AfterwardsError(OSError):
    """An output stands complete under its name, and something after that failed.

    Attributes:
        what: what failed, as the end of "OUTPUT is complete, but …".
        remedy: what to do about it.
    """

    def __init__(self, error: OSError, what: str, remedy: str) -> None:
        super().__init__(error.errno, error.strerror, error.filename)
        self.what, self.remedy = what, remedy


def _sync_name(path: Path) -> None:
    """Sync the name of `path`, which has just got its final content, to disk."""
    try:
        sync(path.parent)
    except OSError as error:
        raise _AfterwardsError(
            error,
            "the disk did not confirm that its name is stored",
            "Check the disk: until then, the output may vanish if the machine fails",
        ) from error


@contextmanager
def replacing(path: Path, building: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that takes the place of `path` when the block ends without an exception.

    For files in a folder of our own: nothing is checked. Both the file and its new name are synced to disk. A killed
    process leaves the temporary file, so give it a name that the next one finds.

    Args:
        path: the file to write, or to replace.
        building: the temporary file, on the same disk.
    """
    try:
        yield building
        sync(building)
        building.replace(path)
        _sync_name(path)
    finally:
        locks.remove(building)


def _exists(target: Path) -> OutputError:
    return OutputError(f"{target} already exists", "Choose another path or pass `overwrite=True`", parameter="out_path")


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not os.listdir(place)


def _sibling(place: Path, ending: str) -> Path:
    """A hidden path in the same folder, and so on the same disk."""
    return place.with_name(f".{place.name}.{ending}")


@contextmanager
def _parents(parent: Path) -> Iterator[None]:
    """Create missing parents; if the block fails, remove those that are still empty."""
    new_folders = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        yield
        for folder in new_folders:
            _sync_name(folder)
    except BaseException:
        for folder in new_folders:
            with suppress(OSError):
                folder.rmdir()
        raise


def _temporary(place: Path) -> Path:
    """A new path for what is being written, or removed; `_recover` finds it."""
    return _sibling(place, f"{uuid.uuid4().hex[:12]}.tmp")


@contextmanager
def _alone(place: Path, target: Path) -> Iterator[None]:
    """Keep other writers of `place` out, after cleaning up after killed ones."""
    with locks.locked(_sibling(place, "lock"), locks.being_written(target, "process")):
        _recover(place)
        yield


def _recover(place: Path) -> None:
    """Clean up after a killed writer: restore the folder that it had moved aside, and remove the rest."""
    temporary_name = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{12}}(?P<old>\.old)?\.tmp")
    for leftover in sorted(place.parent.iterdir()):
        match = temporary_name.fullmatch(leftover.name)
        if match is None:
            continue

        if match["old"]:
            if not place.exists() or _is_empty(place):
                leftover.rename(place)
                continue
            # A folder that is half removed must not look like one that was moved aside.
            leftover = leftover.rename(_temporary(place))

        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _publish(building: Path, place: Path, target: Path, *, overwrite: bool) -> None:
    """Move `building` into place. `_recover` repairs the result of a kill between the two renames."""
    retired = None
    if place.exists() and _is_empty(place):
        shutil.copymode(place, building)
        if _WINDOWS:  # where a rename replaces no folder, not even an empty one
            place.rmdir()
    elif place.exists() and overwrite:
        retired = building.with_suffix(".old.tmp")  # `_recover` recognises the only copy by this name
        place.rename(retired)
    try:
        building.rename(place)  # this may replace an empty folder; the system refuses any other
    except OSError as error:
        if retired is not None:
            retired.rename(place)
        elif error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(
                f"Another process created {target} in the meantime", "Choose another path", parameter="out_path"
            ) from None
        raise
    _sync_name(place)

    if retired is not None:
        try:
            # A folder that is half removed must not look like one that was moved aside.
            locks.remove(retired.rename(building))
        except OSError as error:
            raise _AfterwardsError(
                error,
                f"the folder that it replaced could not be removed from {retired}",
                "Remove it; the next command that writes there does so, too",
            ) from error


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
    except _AfterwardsError as error:
        raise OutputError(
            f"{target} is complete, but {error.what}: {_reason(error)}", error.remedy, parameter="out_path"
        ) from error
    except OSError as error:
        # Users know the output's own name, and no temporary one.
        reason, name = _reason(error), str(error.filename or "")
        if name and not name.endswith((str(target), ".lock")) and ".tmp" not in name:
            reason = f"{reason} (at {name})"
        raise OutputError(
            f"{target} cannot be written: {reason}", _remedy(error.errno, target), parameter="out_path"
        ) from error


def _reason(error: OSError) -> str:
    if error.errno:
        return os.strerror(error.errno).lower()
    return str(error)


def _remedy(number: int | None, target: Path) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, or choose a path on another disk; no partial output remains"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Choose a path where you have permission to write"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return "Choose a path whose parents are folders"
    if number == errno.ENAMETOOLONG:
        return "Choose a shorter name"
    if number == errno.EBUSY and os.path.ismount(target):
        return "Choose a folder inside it"
    return "Check the path and the disk; no partial output remains"
