"""The output as data: its form, its tensors, the pieces of each; and computed tensors kept until they are written.

`layout` decides on the pieces, and the executors compute and write them, in threads: numpy and torch would each start
one thread per core, and threads that wait for a core spin, so both are limited here.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from numbers import Integral, Real
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from adapterswap.core.changes.kinds import Storage
from adapterswap.core.planning.slots import Slot
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, OutputError, Problems, check_type
from adapterswap.kit.files.numbers import Bytes, Dtype, read_at, write_at
from adapterswap.kit.files.tensorfile import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

_THREADS = 4  # each keeps a few copies of the largest weight's factors in memory

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def cores() -> int:
    """The number of processor cores."""
    return os.cpu_count() or 1


@contextmanager
def torch_threads(count: int | None = None) -> Iterator[None]:
    """In the block, and in threads started there, torch uses `count` threads, or fewer if it was limited before.

    By default it leaves one core to other threads.
    """
    require("models")
    import torch

    count = cores() - 1 if count is None else count
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, count)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """In the block numpy's matrix products use one thread, so that their last digits do not vary with the cores."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


def map_in_threads(compute: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`compute` of every item, in order, on one thread per core, up to four. Matrix products use one thread each.

    At most two items per thread are in progress or waiting, so memory does not grow with the number of items.
    """
    threads = min(_THREADS, cores())
    waiting: deque[Future[_Result]] = deque()
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(compute, item))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


_IN_MEMORY = 64 * 2**20  # bytes


class Stored(NamedTuple):
    """The bytes of a tensor, in memory or in a spool's file.

    Attributes:
        shape: the tensor's shape.
    """

    shape: tuple[int, ...]
    size: int
    data: Bytes | None
    file: _Unnamed | None
    offset: int

    def read(self, shape: tuple[int, ...]) -> Bytes:
        """The bytes; those of a matrix padded with zeros to `shape`, which must be at least as large on each axis."""
        data = self.data
        if data is None:
            assert self.file is not None
            data = np.frombuffer(_read(self.file.number, self.size, self.offset), np.uint8)
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
        self._kept: list[OutputTensor] = []

    def add(self, data: Bytes, shape: tuple[int, ...]) -> Stored:
        """Keep the bytes of a tensor."""
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
                place, remedy = tempfile.gettempdir(), "Set TMPDIR to a folder with free space"
                if self._folder is not None:
                    place, remedy = str(self._folder), "Free some space there"
                raise OutputError(f"Cannot write temporary files to {place}: {error.strerror}", remedy) from None
        return Stored(shape, data.size, None, self._file, offset)

    def keep(self, key: str, dtype: str, values: npt.NDArray[np.float32]) -> None:
        """Keep a matrix for the file that `write` writes."""
        data = self.add(Dtype(dtype).pack(values), values.shape)
        self._kept.append(OutputTensor(key, dtype, values.shape, None, data=data))

    def keep_copy(self, key: str, tensor: Tensor, file: int) -> None:
        """Keep a copy of a stored tensor for the file that `write` writes."""
        nbytes = math.prod(tensor.shape) * Dtype.BYTES[tensor.dtype]
        data = self.add(tensor.read_bytes(file, 0, nbytes), tensor.shape)
        self._kept.append(OutputTensor(key, tensor.dtype, tensor.shape, None, data=data))

    def write(self, path: Path) -> None:
        """Write a file of the tensors that were kept, at `path`, which must not exist."""
        header, places = header_bytes((tensor.key, tensor.dtype, tensor.shape) for tensor in self._kept)
        with path.open("xb", buffering=0) as output:
            output.write(header)
            for tensor in self._kept:
                write_at(output.fileno(), tensor.assemble({}), places[tensor.key].start)


def _read(file: int, size: int, offset: int) -> bytearray:
    raw = bytearray(size)
    if read_at(file, memoryview(raw), offset) < size:
        raise OutputError("A temporary file was truncated", "Run the command again")
    return raw


Names = Literal["task", "language", "transformers4", "transformers5"]
"""The naming of an adapter's modules; see `writing.loadable.with_written_names`."""

NAMES: tuple[Names, ...] = get_args(Names)


@dataclass(frozen=True)
class Form:
    """How an adapter is written.

    Attributes:
        layout: `exact` or `portable`, see `layout`.
        max_rank: modules with a higher rank are truncated to this one.
        max_error: blends are truncated to the smallest rank with at most this relative error of ΔW.
        names: the naming of the modules; by default the first expert's.
        dtype: the dtype of every tensor, as files name it; by default the experts'.
    """

    layout: Literal["exact", "portable"] = "exact"
    max_rank: int | None = None
    max_error: float | None = None
    names: Names | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_type(self.max_rank, (Integral, type(None)), "max_rank", "Pass a whole number such as 64")
        check_type(self.max_error, (Real, type(None)), "max_error", "Pass a number such as 0.1")
        problems = Problems(ArgumentError)
        if self.layout not in ("exact", "portable"):
            problems.add(f"`layout` is {self.layout!r}", "Choose exact or portable", parameter="layout")
        if self.names not in (None, *NAMES):
            problems.add(f"`names` is {self.names!r}", f"Choose {', '.join(NAMES)}", parameter="names")
        if self.dtype not in (None, *Dtype.FLOATS):
            problems.add(f"`dtype` is {self.dtype!r}", f"Choose from {', '.join(Dtype.FLOATS)}", parameter="dtype")
        if self.max_rank is not None and self.max_rank < 1:
            problems.add(f"`max_rank` is {self.max_rank}, but must be 1 or more", "", parameter="max_rank")
        if self.max_error is not None and not 0 < self.max_error < 1:
            problems.add(
                f"`max_error` is {self.max_error:g}, but must be between 0 and 1",
                "Pass a number such as 0.1",
                parameter="max_error",
            )
        problems.raise_if_any()

    def reduces(self, module: Slot) -> bool:
        """Whether a module must be reduced: it is nonlinear, its rank is too high, or the form allows an error."""
        if not module.terms:
            return False
        if not module.is_linear or (self.max_error is not None and not module.owner):
            return True
        if self.max_rank is None or module.storage is Storage.OTHER:  # those have no rank, and are copied
            return False
        return module.total_rank > self.max_rank


class Piece(NamedTuple):
    """A source tensor, multiplied by `factor`, at `offset` along the output's rank axis.

    `rows` marks the rows of B (and so of ΔW) to keep; the others become zero. `cut` is the range of source rows to use,
    if not all; pieces with the same offset are then added up.
    """

    expert: str
    path: Path
    tensor: Tensor
    factor: float = 1.0
    offset: int = 0
    rows: npt.NDArray[np.bool_] | None = None
    cut: tuple[int, int] | None = None

    @property
    def source(self) -> Tensor:
        """The tensor, or only its rows in `cut`."""
        if self.cut is None:
            return self.tensor
        first, last = self.cut
        count, *rest = self.tensor.shape
        row = self.tensor.nbytes // count
        start = self.tensor.start + first * row
        return replace(self.tensor, shape=(last - first, *rest), start=start, stop=start + (last - first) * row)


def common_dtype(pieces: Iterable[Piece]) -> str:
    """The dtype of all pieces, or float32 if they differ."""
    dtypes = {piece.tensor.dtype for piece in pieces}
    if len(dtypes) != 1:
        return "F32"
    return dtypes.pop()


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write.

    Attributes:
        key, dtype, shape: as in the safetensors file.
        axis: the axis along which pieces are concatenated: 0 for A (rank×in), 1 for B (out×rank); None adds them up.
        pieces: its sources; elements that they do not fill are zero.
        data: its bytes, if already computed (a truncated module); they may have a lower rank than `shape`.
        view: the shape in which pieces are concatenated along `axis`, if it differs from the stored one.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    pieces: tuple[Piece, ...] = ()
    data: Stored | None = None
    view: tuple[int, ...] | None = None

    @cached_property
    def is_copied(self) -> bool:
        """Whether the bytes of all pieces can be copied unchanged."""
        if self.data is not None:
            return False
        is_alone = len(self.pieces) == 1 and self.pieces[0].tensor.shape == (self.view or self.shape)
        if not is_alone and self.axis != 0:
            return False
        for piece in self.pieces:
            is_whole = piece.rows is None and piece.cut is None
            if piece.factor != 1 or not is_whole or piece.tensor.dtype != self.dtype:
                return False
        return True

    @property
    def alone(self) -> Piece | None:
        """The piece whose numbers it has, in its own dtype; None if they are computed."""
        if self.data is not None or len(self.pieces) != 1:
            return None
        piece = self.pieces[0]
        if piece.tensor.shape != self.shape or piece.factor != 1 or piece.rows is not None:
            return None
        return piece

    def assemble(self, files: Mapping[Path, int]) -> Bytes:
        """Its bytes, computed from the pieces, which are in these open files."""
        if self.data is not None:
            return self.data.read(self.shape)
        values = np.zeros(self.view or self.shape, np.float32)
        offsets: set[int] = set()
        with np.errstate(all="ignore"):  # as in `Dtype.pack`
            for piece in self.pieces:
                numbers = piece.source.read_numbers(piece.expert, files[piece.path]) * np.float32(piece.factor)
                if piece.rows is not None:
                    numbers *= piece.rows[:, None]
                if self.axis is None:
                    values += numbers
                    continue

                # Along the axis; rows that are cut out of several tensors for one place are added up.
                width = piece.source.shape[self.axis]
                all_before = (slice(None),) * self.axis
                place = (*all_before, slice(piece.offset, piece.offset + width))
                if piece.cut is not None and piece.offset in offsets:
                    values[place] += numbers
                else:
                    values[place] = numbers
                offsets.add(piece.offset)
        return Dtype(self.dtype).finite_bytes(values, self.key)


class Reduced(NamedTuple):
    """A module that was truncated.

    Attributes:
        rank: the rank of its factors.
        tensors: its factors, with data.
        error: ‖ΔW - ΔW'‖ / ‖ΔW‖ (Frobenius norm), before the factors are rounded to their dtype.
        written_error: the same error after rounding.
    """

    rank: int
    tensors: tuple[OutputTensor, ...]
    error: float
    written_error: float


class Layout(NamedTuple):
    """The content of an adapter folder: adapter_config.json as a mapping, and the tensors."""

    config: dict[str, Any]
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensors' data."""
        return sum(Dtype.BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in self.tensors)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Tensor]]:
    """The header for tensors, each a (name, dtype, shape), and each tensor's place in the file.

    Tensors with larger elements come first, then they are sorted by name: so every tensor is aligned, and the same
    tensors give the same bytes. The header is padded with spaces to a multiple of 8 bytes.
    """

    def place_in_order(tensor: tuple[str, str, tuple[int, ...]]) -> tuple[int, str]:
        name, dtype, _ = tensor
        return -Dtype.BYTES[dtype], name

    # Offsets in the header count from its end.
    placed: dict[str, Tensor] = {}
    offset = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape in sorted(tensors, key=place_in_order):
        stop = offset + Dtype.BYTES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        placed[name] = Tensor(name, dtype, shape, offset, stop)
        offset = stop

    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)

    # In the file, eight bytes with the header's length come first.
    end = 8 + len(raw)
    moved = {}
    for name, tensor in placed.items():
        moved[name] = Tensor(name, tensor.dtype, tensor.shape, end + tensor.start, end + tensor.stop)
    return len(raw).to_bytes(8, "little") + raw, moved
