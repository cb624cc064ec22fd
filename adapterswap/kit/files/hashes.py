"""Hashes of files.

SHA-256 covers a whole file. A fingerprint covers a small file as a whole; for a large one it covers the size and blocks
spread evenly over the file, including its header and end. That is enough, because the weights of another model or of
another training step differ everywhere. Time stamps do not count, since copying changes them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_MOST, _BLOCK = 64 * 2**20, 2**20  # bytes


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path, *, most: int = _MOST, block: int = _BLOCK) -> str:
    """A hash of a file's content, equal for equal files wherever they are.

    It covers at most `most` bytes, in blocks of `block` bytes.
    """
    size, blocks = path.stat().st_size, most // block
    digest = hashlib.sha256(str(size).encode())

    with path.open("rb") as file:
        if size <= most:
            digest.update(file.read())
        else:
            for place in range(blocks):
                file.seek(place * (size - block) // (blocks - 1))
                digest.update(file.read(block))
    return digest.hexdigest()


def stamp(file_stat: os.stat_result) -> tuple[int, ...]:
    """Size, times and inode, which change when a file is replaced or written to."""
    # Size and modification time are not enough: images, archives and `cp -p` set the latter. No program sets ctime.
    return file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_ino


class Stamps(tuple[tuple[Path, tuple[int, ...]], ...]):
    """Files, each with its `stamp`: equal as long as no file changes."""

    __slots__ = ()

    @staticmethod
    def of(paths: Iterable[Path]) -> Stamps:
        """The stamps of these files now."""
        return Stamps((path, stamp(path.stat())) for path in paths)
