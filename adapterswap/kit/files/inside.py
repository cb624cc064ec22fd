"""Read and copy files of a folder that somebody else made: only regular files that stand inside that folder.

A link in a downloaded folder may lead to a private file, which a copy of the folder would publish. So a link counts
only if it leads to a file of the same folder or, in the Hub's cache, to a blob of the same repository. A pipe could
wait for ever and a device never end, so both are refused, and no file of code is copied.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

from adapterswap.kit.errors import AdapterswapError, ExpertError
from adapterswap.kit.files.text import check_pointer

_MOST = 2**28  # bytes to read; the largest tokenizers have some 40 MB
_MOST_COPIED = 2**32  # bytes
_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib")
_REPOSITORIES = ("models--", "datasets--")  # what the names of folders in the Hub's cache begin with
_COPY = "Replace it with a copy of the file, or remove it"


def files_inside(folder: Path, patterns: Iterable[str], *, kind: type[AdapterswapError] = ExpertError) -> list[Path]:
    """The files in a folder that match one of the patterns, sorted; without files of code.

    Raises:
        AdapterswapError: one is a pipe, a device, or a link that leads to a folder or out of this one.
    """
    matching: set[Path] = set()
    for pattern in patterns:
        matching.update(folder.glob(pattern))

    files = []
    for path in sorted(matching):
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and path.suffix not in _CODE:
            files.append(path)

    for path in files:
        file = open_inside(folder, path.relative_to(folder).as_posix(), kind=kind)
        if file is not None:
            file.close()
    return files


def open_inside(folder: Path, name: str, *, kind: type[AdapterswapError] = ExpertError) -> BufferedReader | None:
    """Open the file `name` of a folder for reading; None if the folder has nothing of this name.

    Args:
        folder: the folder.
        name: the file's name, or its path relative to the folder.
        kind: the class of the error.

    Raises:
        AdapterswapError: it is not a regular file, leads out of the folder, or cannot be read.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    target = os.path.realpath(path)
    if not _is_inside(Path(target), folder):
        raise kind(f"{path} links to {target}, outside its folder", _COPY)
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}", _COPY) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise kind(f"{path} is not a regular file", _COPY)
    return os.fdopen(descriptor, "rb")


def read_inside(
    folder: Path, name: str, *, limit: int = _MOST, kind: type[AdapterswapError] = ExpertError
) -> bytes | None:
    """The bytes of the file `name` of a folder, at most `limit` of them; None if there is none.

    Raises:
        AdapterswapError: as `open_inside`; or the file is larger, or is a Git LFS pointer.
    """
    file = open_inside(folder, name, kind=kind)
    if file is None:
        return None
    with file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise kind(f"{folder / name} cannot be read: {error.strerror}", _COPY) from None
    check_pointer(content, folder / name, kind=kind)
    if len(content) > limit:
        raise kind(f"{folder / name} is larger than {limit:,} bytes, the most that is read from such a file", _COPY)
    return content


def copy_inside(folder: Path, name: str, target: Path, *, kind: type[AdapterswapError] = ExpertError) -> bool:
    """Copy the file `name` of a folder to the path `target`; False if there is none. Raises as `read_inside`.

    A file of code is refused: code of strangers is never copied into a result.
    """
    if name.endswith(_CODE):
        raise kind(f"{folder / name} is code, which is never copied", "Remove it from the list of files")
    file = open_inside(folder, name, kind=kind)
    if file is None:
        return False
    with file:
        if os.fstat(file.fileno()).st_size > _MOST_COPIED:
            raise kind(f"{folder / name} is larger than {_MOST_COPIED:,} bytes, the most that is copied", _COPY)
        check_pointer(file.peek(1024)[:1024], folder / name, kind=kind)
        with target.open("wb") as output:
            shutil.copyfileobj(file, output)
    return True


def _is_inside(target: Path, folder: Path) -> bool:
    """Whether a path without links is inside a folder, or is a blob of the repository of which it is a snapshot."""
    real = Path(os.path.realpath(folder))
    if target.is_relative_to(real):
        return True
    for place in (real, *real.parents):  # the snapshot, or a folder in it
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith(_REPOSITORIES):
            return target.is_relative_to(repository / "blobs")
    return False
