"""Temporary folders: removed at the end, after SIGTERM, and at the next start if their process was killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from faults import failing

from adapterswap.kit.errors import OutputError
from adapterswap.kit.files.folders import scratch_folder

HOLD = """
import sys
from adapterswap.kit.files.folders import scratch_folder
with scratch_folder("test") as folder:
    (folder / "weights").write_text("x")
    print(folder.parent, flush=True)
    sys.stdin.read()
"""


def hold(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a scratch folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(place)},
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_only_the_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that a process still holds, nor a young one, nor one that is not ours, nor what a link names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (dead, killed), (young, recent), (alive, held) = (hold(tmp_path) for _ in range(3))
    for process in (dead, young):
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for folder in (killed, held):
        os.utime(folder / "adapterswap.lock", (0, 0))
    (tmp_path / "adapterswap-mine").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "adapterswap.lock").touch()
    os.utime(elsewhere / "adapterswap.lock", (0, 0))
    (tmp_path / "adapterswap-link").symlink_to(elsewhere)
    with scratch_folder("test") as folder:
        assert folder.parent.parent == tmp_path
        assert not list(folder.iterdir())
        assert not killed.exists()
        kept = {folder.parent, recent, held, elsewhere, tmp_path / "adapterswap-mine", tmp_path / "adapterswap-link"}
        assert {*tmp_path.iterdir()} == kept
    assert (held / "files" / "weights").exists()
    assert (elsewhere / "adapterswap.lock").exists()
    alive.communicate("")
    assert {*tmp_path.iterdir()} == kept - {folder.parent, held}


def test_a_full_disk_is_an_error_of_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for number in range(1, 100):
        outcome = failing(number, errno.ENOSPC, tmp_path, lambda: scratched(tmp_path))
        assert outcome.code == 0, outcome
        for leftover in tmp_path.iterdir():  # if the call that fails is to remove it
            shutil.rmtree(leftover)
        if not outcome.call:
            break
    assert 5 < number < 99


def scratched(place: Path) -> int:
    """0 if a folder can be made, or if the error names the place and how to use another."""
    try:
        with scratch_folder("test"):
            return 0
    except OutputError as error:
        text = str(error)
        return 0 if str(place) in text and "TMPDIR" in text and os.strerror(errno.ENOSPC).lower() in text else 1
