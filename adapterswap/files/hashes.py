"""Hashes of files.

SHA-256 covers a whole file. A fingerprint covers a small file as a whole; for a large one it covers the size and blocks
spread evenly over the file, including its header and end. That is enough, because the weights of another model or of
another training step differ everywhere. Time stamps do not count, since copying changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_SMALL = 64 * 2**20  # bytes; smaller files are hashed as a whole
_BLOCK = 2**20
_BLOCKS = 64


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path) -> str:
    """A hash of a file's content, equal for equal files wherever they are."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _SMALL:
            while block := file.read(_BLOCK):
                digest.update(block)
        else:
            for place in range(_BLOCKS):
                file.seek(place * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def fingerprints(folder: Path, patterns: Iterable[str] = ("*",)) -> dict[str, str]:
    """The fingerprints of the files in a folder that match one of the patterns, by name."""
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.name: fingerprint(path) for path in sorted(files)}
