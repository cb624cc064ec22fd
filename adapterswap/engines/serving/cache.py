"""The folders from which a server loads compositions, named by a hash of their sources; and a memo file.

A folder appears whole, by a rename, and stays as long as any server runs that may load it again: vLLM reads an evicted
adapter a second time, and crashes if its folder is gone. Simultaneous requests, also of several processes, make a
folder once. The SHA-256 hashes of its files are stored separately. Every process compares them when it first uses the
folder, and again when a file's stamp changes, so a damaged folder is made again.

Several processes may use one memo file. Each replaces it whole, and the last one wins. Lost answers are computed again,
and so are all answers if the file was altered.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from adapterswap.core.experts.adapter import Adapter
from adapterswap.kit.errors import AdapterswapError, OutputError, RunError, UnsupportedError
from adapterswap.kit.files import locks
from adapterswap.kit.files.folders import replacing, sync
from adapterswap.kit.files.hashes import Stamps, sha256_of
from adapterswap.kit.files.text import expand, read_json

if sys.platform != "win32":
    import fcntl

_MOST = 2000  # answers; the oldest go first


class Memo:
    """A mapping of text to JSON values in the file `path`, with a hash against damage. Several threads may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        with suppress(AdapterswapError):  # missing or damaged: everything can be computed again
            content = read_json(path)
            known = content.get("known")
            if isinstance(known, dict) and content.get("sha256") == _digest(known):
                self._known = known

    def get(self, key: str) -> Any:
        """The value stored for `key`, or None."""
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store `value`. A disk that cannot be written to is not an error."""
        with self._lock:
            self._known[key] = value
            for oldest in list(self._known)[:-_MOST]:
                del self._known[oldest]
            with suppress(OSError), replacing(self._path, self._path.with_name(f"{self._path.name}.tmp")) as building:
                content = {"known": self._known, "sha256": _digest(self._known)}
                building.write_text(json.dumps(content), encoding="utf-8")


def _digest(known: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


_MEMO = "known.json"
_WAIT_S = 600  # for another process that makes the same folder; it may have to read from a slow disk


class Cache:
    """A folder of folders, created when it is first needed and readable by its owner only.

    Several threads and processes may use one cache at once.

    Attributes:
        root: the folder.
        memo: remembered facts about experts and bases; see `Memo`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.abspath(expand(root)))
        self.memo = Memo(self.root / _MEMO)
        self._entries = self.root / "compositions"
        self._building = self.root / "building"
        self._locks = self.root / "locks"
        self._hashes = self.root / "hashes"
        self._sound: dict[str, dict[str, Stamps]] = {}  # the stamps of files whose hashes were compared
        self._in_use: int | None = None
        self._opening = threading.Lock()

    def open(self) -> int:
        """Create the folders, and return the descriptor of the file whose lock marks them as in use."""
        if sys.platform == "win32":
            raise UnsupportedError(
                "The cache of a server needs locks that several processes share, which Windows lacks",
                "Serve from Linux, for instance in WSL 2, or from macOS",
                parameter="cache",
            )
        with self._opening:
            if self._in_use is None:
                self._in_use = self._open()
            return self._in_use

    def _open(self) -> int:
        """Create the cache's folders, and return the descriptor of the file that marks it as a cache."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            in_use = self.root / "in-use"  # created first and never removed: it marks a folder as a cache
            foreign = [name for name in os.listdir(self.root) if name != _MEMO and not name.endswith(".tmp")]
            if foreign and not in_use.exists():
                raise OutputError(
                    f"{self.root} is not a cache of adapterswap: it holds {sorted(foreign)[0]}",
                    "Choose an empty or new folder for `cache`",
                    parameter="cache",
                )
            descriptor = os.open(in_use, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for folder in (self._entries, self._building, self._locks, self._hashes):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None
        return descriptor

    def hash_of(self, adapter: Adapter) -> str:
        """SHA-256 of an adapter's safetensors file, in hexadecimal. The file is read again only if its stamp is new."""
        file = adapter.file
        key = f"sha256 {os.path.realpath(file.path)} {file.stamp}"
        weights = self.memo.get(key)
        if not isinstance(weights, str):
            with file.open() as opened:
                weights = hashlib.file_digest(opened, "sha256").hexdigest()
            self.memo.put(key, weights)
        return weights

    def hold(self) -> None:
        """Keep entries from being collected while this process runs; the kernel releases the lock at its end.

        On a file system without locks nobody can tell whether a server runs, and `collect` removes nothing.
        """
        try:
            fcntl.flock(self.open(), fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in locks.HAS_NO_LOCKS:
                raise self._unwritable(error) from None

    def get(self, key: str, make: Callable[[Path], object]) -> Path:
        """The folder named `key`. If it is missing or damaged, `make(path)` writes it first."""
        self.open()
        entry = self._entries / key
        if self._touch(entry) and stamps_in(entry) == self._sound.get(key):
            return entry

        busy = RunError(
            f"Another process has been composing this for {_WAIT_S} seconds",
            "Check whether it hangs, and request it again",
        )
        try:
            with locks.locked(self._locks / f"{key}.lock", busy, wait_s=_WAIT_S):
                if not (self._touch(entry) and self._is_sound(key)):
                    self._make(key, make)
        except OSError as error:
            raise self._unwritable(error) from None
        return entry

    def entry(self, key: str) -> Path:
        """Where the folder named `key` is, or would be."""
        return self._entries / key

    @property
    def entries(self) -> Path:
        """The folder of all entries."""
        return self._entries

    def collect(self, keep: int) -> int | None:
        """Remove all but the `keep` entries used last, and leftovers of killed processes, unless a server is running.

        Returns:
            The number of entries removed; None if a server uses the cache, which is then not changed.
        """
        in_use = self.open()
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in locks.HAS_NO_LOCKS:
                return None
            raise self._unwritable(error) from None
        try:
            for folder in (self._building, self._locks):
                for leftover in folder.iterdir():
                    if leftover.is_dir():
                        shutil.rmtree(leftover)
                    else:
                        leftover.unlink()

            entries = sorted(self._entries.iterdir(), key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
            for entry in entries[keep:]:
                # Rename it first, so that nobody sees a half-removed entry.
                shutil.rmtree(entry.rename(self._building / entry.name))
                (self._hashes / entry.name).unlink(missing_ok=True)
            return len(entries[keep:])
        finally:
            fcntl.flock(in_use, fcntl.LOCK_UN)

    def _unwritable(self, error: OSError) -> OutputError:
        """The error for a cache that cannot be written."""
        return OutputError(
            f"The cache {self.root} cannot be written: {error.strerror}",
            "Check its disk, or choose another folder for `cache`",
            parameter="cache",
        )

    def _make(self, key: str, make: Callable[[Path], object]) -> None:
        """Write the folder named `key`, and replace what is there."""
        building = self._building / uuid.uuid4().hex
        try:
            make(building)
            sync(building, whole=True)
            content = json.dumps({name: sha256_of(building / name) for name in stamps_in(building)})
            with replacing(self._hashes / key, building.with_suffix(".json")) as hashes:
                hashes.write_text(content, encoding="utf-8")
            _put(building, self._entries / key)
            sync(self._entries)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        self._sound[key] = stamps_in(self._entries / key)

    def _is_sound(self, key: str) -> bool:
        """Whether the files of the folder named `key` are those that were written."""
        entry = self._entries / key
        with suppress(OSError, AdapterswapError):  # what cannot be read is damaged
            stamps = stamps_in(entry)
            if read_json(self._hashes / key) == {name: sha256_of(entry / name) for name in stamps}:
                self._sound[key] = stamps
                return True
        return False

    def _touch(self, entry: Path) -> bool:
        """Mark a folder as used now. False if it does not exist."""
        with suppress(OSError):
            os.utime(entry)
            return True
        return False

    @staticmethod
    def default() -> Path:
        """The cache folder by default: `adapterswap/serving` in the user's cache folder."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adapterswap" / "serving"


def stamps_in(folder: Path) -> dict[str, Stamps]:
    """The stamps of a folder's files by name, without hidden files; empty if it cannot be read."""
    with suppress(OSError):  # NFS keeps replaced files that are still open under hidden names
        return {name: Stamps.of([folder / name]) for name in os.listdir(folder) if not name.startswith(".")}
    return {}


def _put(building: Path, entry: Path) -> None:
    """Move a new folder into place. A damaged one is repaired file by file, because a server may be reading it."""
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
    if not entry.exists():
        building.rename(entry)
        return
    for old in entry.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif not (building / old.name).exists():
            old.unlink()
    for new in building.iterdir():
        new.replace(entry / new.name)
    sync(entry)
