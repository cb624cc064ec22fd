"""Open GGUF files of others: every count in the header is compared with the size of the file first.

The `gguf` package believes the counts. A file of a few hundred bytes that announces 2⁴⁰ values would keep it busy for
days.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGUFReader

_MAGIC = b"GGUF"
_MOST_DIMENSIONS = 4  # of a tensor in ggml
_DEEPEST = 4  # arrays within arrays; llama.cpp writes none

# The number of a type of value → its size in bytes.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9


def read_gguf(path: Path) -> GGUFReader:
    """Read a GGUF file.

    Raises:
        ValueError: its header announces more than the file holds, or has an unknown type.
        OSError: it cannot be read.
    """
    from adapterswap.engines.gguf.architectures import load_gguf

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _Header(content).check()
    return load_gguf().GGUFReader(path)


class _Header:
    """The header of a GGUF file, read from its start. Nothing is kept."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = 0
        self._order = "<"

    def check(self) -> None:
        """Raise a ValueError if a count or a type is wrong."""
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._place = 4

        # The version is a small number, so its bytes show their order.
        if self._number("I") & 0xFFFF == 0:
            self._order = ">"

        tensors, fields = self._number("Q"), self._number("Q")
        for _ in range(self._count(fields, 1)):
            self._text()
            self._value(self._number("I"), 0)

        for _ in range(self._count(tensors, 1)):
            self._tensor()

    def _tensor(self) -> None:
        """Skip a tensor's name, sizes, type and place."""
        self._text()
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")

        sizes = [self._number("Q") for _ in range(dimensions)]
        self._number("I")
        place = self._number("Q")

        # The smallest types of llama.cpp store five values in a byte.
        most = 8 * len(self._content)
        if math.prod(sizes) > most or place > len(self._content):
            raise ValueError(f"a tensor of {' × '.join(map(str, sizes))} values at {place} is not in the file")

    def _value(self, kind: int, depth: int) -> None:
        """Skip a value."""
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _TEXT:
            self._text()
        elif kind == _ARRAY and depth < _DEEPEST:
            self._array(depth + 1)
        else:
            raise ValueError(f"a value has the unknown type {kind}")

    def _array(self, depth: int) -> None:
        """Skip an array, whose values may be arrays."""
        kind, count = self._number("I"), self._number("Q")
        if kind in _SIZES:
            self._skip(self._count(count, _SIZES[kind]) * _SIZES[kind])
            return
        for _ in range(self._count(count, 8)):  # texts and arrays begin with a count of eight bytes
            self._value(kind, depth)

    def _text(self) -> None:
        self._skip(self._number("Q"))

    def _count(self, count: int, size: int) -> int:
        """`count`, if that many things of at least `size` bytes fit into the rest of the file."""
        left = len(self._content) - self._place
        if count * size > left:
            raise ValueError(f"its header announces {count} values, but {left} bytes follow")
        return count

    def _number(self, form: str) -> int:
        """Read a number in the format `form` of `struct`."""
        start = self._place
        self._skip(struct.calcsize(self._order + form))
        number: int = struct.unpack_from(self._order + form, self._content, start)[0]
        return number

    def _skip(self, size: int) -> None:
        self._place += self._count(size, 1)
