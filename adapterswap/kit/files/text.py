"""Read small untrusted files: only regular files, only up to a size, only plain JSON.

There are limits because reading JSON takes many times the file's size in memory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

from adapterswap.kit.errors import AdapterswapError, ExpertError, reason_of, visible

_MAX_BYTES = 16 * 2**20  # a config that names every one of 100,000 modules fits
_MAX_CONTAINERS = 500_000  # lists and objects
_POINTER = b"version https://git-lfs.github.com/spec/"  # the start of the text that Git LFS keeps in place of a file
_POINTER_BYTES = 1024  # a pointer is always shorter
_MAX_DEPTH = 40  # the configs of real models nest about five deep

_T = TypeVar("_T")


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<a number of {x.bit_length()} bits>"


_short = _Short()
_short.maxlevel = 3
_short.maxstring = _short.maxother = 100


def shown(value: Any) -> str:
    """A value from a file, for use in a message: like `repr`, but short however large the value is."""
    return _short.repr(value)


_FORMULAS = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # the last four are the wide forms of the first


def csv_text(name: str) -> str:
    """A name as a cell of a CSV file: quoted if a spreadsheet would read it as a formula, also after spaces."""
    text = visible(name)
    if text.strip().startswith(_FORMULAS) or text[:1] in ("\t", "\n"):
        return f"'{text}"
    return text


def expand(path: str | Path) -> Path:
    """`path` with a leading `~` or `~user` replaced by that user's home folder, if the user exists."""
    return Path(os.path.expanduser(path))


def open_regular(path: Path, remedy: str, *, kind: type[AdapterswapError] = ExpertError) -> BufferedReader:
    """Open a regular file for reading. Anything else is refused: a pipe could wait for ever, a device never end.

    Args:
        path: the file.
        remedy: the remedy in the error message.
        kind: the class of the error; it depends on what the file belongs to.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe must not wait; no effect on regular files

    try:
        file = open(path, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise kind(f"{path} cannot be read: {reason}", remedy) from None

    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise kind(f"{path} is not a regular file", remedy)
    return file


def read_small(
    path: Path, remedy: str, *, limit: int = _MAX_BYTES, kind: type[AdapterswapError] = ExpertError
) -> bytes:
    """Read the bytes of a small file; `remedy` and `kind` as for `open_regular`."""
    with open_regular(path, remedy, kind=kind) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise kind(f"{path} cannot be read: {error.strerror}", remedy) from None

    check_pointer(content, path, kind=kind)
    if len(content) > limit:
        raise kind(f"{path} is larger than {limit:,} bytes, the most that is read from such a file", remedy)
    return content


def check_pointer(content: bytes, path: Path, *, kind: type[AdapterswapError] = ExpertError) -> None:
    """Raise an error of class `kind` if `content`, a file's first bytes, is from a Git LFS pointer."""
    if content.startswith(_POINTER):
        raise kind(
            f"{path} is a Git LFS pointer, not the file itself",
            "Run `git lfs pull` in its repository, or download the file",
        )


def check_pointers(folder: Path, *, kind: type[AdapterswapError] = ExpertError) -> None:
    """Do the same for all files in a folder, before a library fails on one with a less helpful message."""
    for path in sorted(folder.iterdir()):
        with suppress(OSError):
            if path.is_file() and path.stat().st_size < _POINTER_BYTES:
                check_pointer(path.read_bytes(), path, kind=kind)


def read_json(
    path: Path, remedy: str = "Write or download it again", *, kind: type[AdapterswapError] = ExpertError
) -> dict[str, Any]:
    """Read the JSON object in a small file; `remedy` and `kind` as for `open_regular`."""
    return parse_json(read_small(path, remedy, kind=kind), str(path), remedy, kind=kind)


def write_json(path: Path, content: Mapping[str, Any], *, sort_keys: bool = False, allow_nan: bool = False) -> None:
    """Write a JSON object for people to read: one key per line, non-ASCII letters unescaped, a final newline.

    Control characters, and halves of surrogate pairs, which UTF-8 cannot encode, are written as JSON escapes
    (`\\u202e`).

    Args:
        path: the file to write, or to replace.
        content: the object.
        sort_keys: sort the keys by name instead of keeping their order.
        allow_nan: write NaN and Infinity, which are not valid JSON but which Python reads back.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=sort_keys, allow_nan=allow_nan)
    path.write_text(visible(text) + "\n", encoding="utf-8", errors="backslashreplace")


def parse_json(raw: bytes, where: str, remedy: str, *, kind: type[AdapterswapError] = ExpertError) -> dict[str, Any]:
    """Parse the JSON object in `raw`. It may contain Infinity, as the configs of Mamba models do.

    `where` names the source in messages; `remedy` and `kind` as for `open_regular`.
    """
    if raw.count(b"[") + raw.count(b"{") > _MAX_CONTAINERS:  # counted before they take up memory
        raise kind(f"{where} contains more than {_MAX_CONTAINERS:,} lists and objects", remedy)

    try:
        content = loads(raw.decode("utf-8"))
    except ValueError as error:
        raise kind(f"{where} is not JSON in UTF-8: {str(error)[:200]}", remedy) from None
    if not isinstance(content, dict):
        raise kind(f"{where} is not a JSON object", remedy)

    # Level by level, since a recursive function could exhaust the stack
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        children: list[Any] = []
        for value in level:
            children += value.values() if isinstance(value, dict) else value
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise kind(f"{where} is nested more than {_MAX_DEPTH} levels deep", remedy)
    return content


def loads(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Like `json.loads`, but a key that an object has twice is an error too; `json` would keep its last value.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the same key twice: {shown(max(keys, key=keys.count))}")
    return mapping


def csv_rows(lines: Iterable[str], separator: str = ",") -> Iterator[dict[str, str]]:
    """The rows of a table with a header; every cell is text as it stands there. Empty lines are left out.

    Args:
        lines: those of a file that was opened with `newline=""`, since a cell may hold several.
        separator: what stands between cells.

    Raises:
        ValueError: the header has a column twice, a line has another number of fields, or quotes do not match.
    """
    import csv

    csv.field_size_limit(2**31 - 1)  # by default long texts are refused
    reader = csv.reader(lines, delimiter=separator, strict=True)
    try:
        header = next(reader, [])
        for place, name in enumerate(header):
            if name in header[:place]:
                raise ValueError(f"the header has the column {name!r} twice")

        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise ValueError(f"line {reader.line_num} has {len(cells)} fields, and the header {len(header)}")
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None


def json_lines(
    lines: Iterable[str | bytes],
    make: Callable[[Any], _T],
    *,
    any_value: bool = False,
    parse_constant: Callable[[str], Any] | None = None,
) -> Iterator[_T]:
    """What `make` returns for the object in each line of JSON Lines, such as `dict`; empty lines are skipped.

    Args:
        lines: the lines.
        make: is called with a line's value.
        any_value: accept values that are not objects too.
        parse_constant: as in `json.loads`.

    Raises:
        ValueError: a line cannot be read, or `make` refuses its value; says which line.
        AdapterswapError: the error that `make` raised, with the line.
    """
    for number, line in enumerate(lines, 1):
        try:
            if isinstance(line, bytes):
                line = line.decode()
            text = line.strip()
            if not text:
                continue

            value = loads(text, parse_constant)
            if not (any_value or isinstance(value, dict)):
                raise ValueError(f"{shown(value)} is not an object with keys and values")
            made = make(value)

        except AdapterswapError as error:
            raise error.within(f"line {number}") from None
        except json.JSONDecodeError as error:
            place = f"{error.msg} at column {error.colno} of {shown(error.doc)}"
            raise ValueError(f"line {number} is not JSON: {place}") from None
        except (ValueError, TypeError, LookupError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else reason_of(error)
            raise ValueError(f"line {number} cannot be read: {reason}") from None
        yield made
