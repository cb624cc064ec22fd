"""Systems without positioned reads and writes, or that cannot sync folders, as Windows."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from adapterswap.kit.files import folders
from adapterswap.kit.files.folders import OutputKind, sync
from adapterswap.kit.files.numbers import read_at, write_at


def test_reads_and_writes_at_places_without_the_systems_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads share a file, whose position moves under them."""
    for name in ("preadv", "pwrite"):
        monkeypatch.delattr(os, name)
    blocks = np.arange(64 * 100, dtype=np.uint8).reshape(64, 100)
    with (tmp_path / "file").open("w+b") as file, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda place: write_at(file.fileno(), blocks[place], 100 * place), range(64)))

        def read(place: int) -> bytes:
            into = bytearray(100)
            assert read_at(file.fileno(), memoryview(into), 100 * place) == 100
            return bytes(into)

        assert list(pool.map(read, range(64))) == [block.tobytes() for block in blocks]
        assert read_at(file.fileno(), memoryview(bytearray(8)), 6400) == 0


@pytest.mark.parametrize("exists", [False, True])
def test_folders_are_written_as_windows_needs_it(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is opened, and an empty folder is removed before another one takes its place."""
    monkeypatch.setattr(folders, "_WINDOWS", True)
    opened, really = list[str](), os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(str(path)) or really(path, *rest, **more))
    if exists:
        (tmp_path / "out").mkdir()
    with OutputKind(None).folder(tmp_path / "out") as place:
        (place / "file").write_text("content")
        sync(place, whole=True)
    assert (tmp_path / "out" / "file").read_text() == "content"
    assert not [path for path in opened if Path(path).is_dir()]
