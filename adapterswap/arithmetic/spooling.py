"""Keep computed tensors until they are written: up to a limit in memory, the rest in an unnamed temporary file.

Knows bytes and shapes, but not their meaning.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from adapterswap.errors import OutputError
from adapterswap.files.numbers import Bytes, write_at

__all__ = ["Spool", "Stored"]

_IN_MEMORY = 64 * 2**20  # bytes


@dataclass(frozen=True)
class Stored:
    """The bytes of a tensor with two axes, in memory or in a spool's file.

    Attributes:
        shape: the tensor's shape.
    """

    shape: tuple[int, int]
    size: int
    _data: Bytes | None
    _file: _Unnamed | None
    _offset: int

    def read(self, shape: tuple[int, ...]) -> Bytes:
        """The bytes, padded with zeros to `shape`, which must be at least as large on each axis."""
        data = self._data
        if data is None:
            assert self._file is not None
            data = np.frombuffer(_read(self._file.number, self.size, self._offset), np.uint8)
        if shape == self.shape:
            return data
        grown = np.zeros((*shape, self.size // math.prod(self.shape)), np.uint8)
        grown[: self.shape[0], : self.shape[1]] = data.reshape(*self.shape, -1)
        return grown.reshape(-1)


class _Unnamed:
    """An unnamed file, closed when nothing refers to it."""

    def __init__(self, folder: Path | None) -> None:
        with tempfile.TemporaryFile(prefix="adapterswap-", dir=folder) as file:
            self.number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.number)


class Spool:
    """Keeps tensors, from any thread. Its file is deleted with it.

    Args:
        folder: the folder of the file; by default the one for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = Lock()
        self._file: _Unnamed | None = None
        self._bytes_in_memory = self._bytes_in_file = 0

    def add(self, data: Bytes, shape: tuple[int, int]) -> Stored:
        """Keep the bytes of a tensor.

        Raises:
            OutputError: they cannot be written.
        """
        with self._lock:
            if self._bytes_in_memory + data.size <= _IN_MEMORY:
                self._bytes_in_memory += data.size
                return Stored(shape, data.size, data, None, 0)
            offset = self._bytes_in_file
            self._bytes_in_file += data.size
            try:
                if self._file is None:
                    self._file = _Unnamed(self._folder)
                write_at(self._file.number, data, offset)
            except OSError as error:
                place, remedy = self._folder or tempfile.gettempdir(), "Set TMPDIR to a folder with free space"
                raise OutputError(
                    f"Cannot write temporary files to {place}: {error.strerror}",
                    "Free some space there" if self._folder else remedy,
                ) from None
        return Stored(shape, data.size, None, self._file, offset)


def _read(file: int, size: int, offset: int) -> bytearray:
    raw = bytearray(size)
    bytes_read = 0
    while bytes_read < size:
        count = os.preadv(file, [memoryview(raw)[bytes_read:]], offset + bytes_read)
        if count == 0:
            raise OutputError("A temporary file was truncated", "Run the command again")
        bytes_read += count
    return raw
