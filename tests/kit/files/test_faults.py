"""One call to the operating system fails during a write: the exit code and the message agree with what is there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from crafting import adapter, snapshot, tensors
from refusals import refused
from tiers import ALL

from adapterswap.kit.errors import OutputError
from adapterswap.kit.files import locks
from adapterswap.kit.files.folders import FileKind, OutputKind

from .writers import commands, make_inputs

CRASHING = Path(__file__).parents[2] / "crashing.py"
ERRORS = [errno.EIO, errno.ENOSPC, errno.ENOLCK, errno.EOPNOTSUPP, errno.ESTALE, errno.EBUSY, errno.EROFS]
KIND = OutputKind(None, names=lambda: ["file"])


def agrees(outcome: dict[str, Any]) -> bool:
    """Whether the exit code and the message of a run say what is there, and nothing else is left."""
    complete = "is complete, but" in outcome["message"]
    said_left = all(name in outcome["message"] for name in outcome["left"])
    if "Traceback" in outcome["message"] or not said_left:
        return False
    if outcome["code"] == 0:
        return bool(outcome["state"] == "new") and not outcome["left"]
    return bool(outcome["code"] == 3) and outcome["state"] in (("new",) if complete else ("old", "absent"))


def outcomes(folder: Path, first: list[str], arguments: list[str], stride: int) -> list[dict[str, Any]]:
    """What failing calls lead to; see `crashing.faults`."""
    settings = {"folder": str(folder), "first": first, "arguments": arguments, "errors": ERRORS}
    settings["stride"] = 0 if ALL else stride
    command = [sys.executable, str(CRASHING), "faults", json.dumps(settings)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    found: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_each_call_of_a_compose_fails_once(tmp_path: Path) -> None:
    experts = [str(adapter(tmp_path / name, tensors(seed=seed))) for seed, name in enumerate(("math", "swahili"))]
    folder = tmp_path / "outputs"
    folder.mkdir()
    command = ["compose", "-t", experts[0], "-l", experts[1], "--num-layers", "4", "--bottom", "1", "--top", "1"]
    command += ["-o", str(folder / "out")]

    results = outcomes(folder, command, [*command, "--bottom-transition", "1"], stride=5)
    assert [result for result in results if not agrees(result)] == []
    assert len(results) > 50
    assert {result["state"] for result in results} == {"old", "absent", "new"}
    assert not ALL or any("is complete, but" in result["message"] for result in results)


def test_each_call_of_a_merge_fails_once(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    experts = [expert(seed=seed, r=2, target_modules=["q_proj"]) for seed in (1, 2)]
    folder = tmp_path / "outputs"
    folder.mkdir()
    command = [
        "merge",
        "-t",
        str(experts[0]),
        "-l",
        str(experts[1]),
        "--base-model",
        str(base("llama")),
        "--bottom",
        "1",
    ]
    command += ["-o", str(folder / "out"), "--top"]

    results = outcomes(folder, [*command, "0"], [*command, "1"], stride=97)
    assert [result for result in results if not agrees(result)] == []


# Some calls of the quick commands. `make test-all` has every call fail, also of the slow ones.
STRIDES = {"slice": 17, "convert": 17, "export": 17, "pieces": 29, "suggest": 5, "recipes": 197}
SLOW = ("extract", "analyze", "report")


def test_each_call_of_other_commands_fails_once(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    make_inputs(tmp_path, base, expert)
    folder = tmp_path / "outputs"
    folder.mkdir()
    strides = dict.fromkeys((*STRIDES, *SLOW), 1) if ALL else STRIDES
    settings = {"folder": str(folder), "commands": commands(*strides), "errors": ERRORS, "strides": strides}
    command = [sys.executable, str(CRASHING), "each faults", json.dumps(settings)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    by_command = json.loads(process.stdout.splitlines()[-1])

    everything = []
    for name, results in by_command.items():
        assert [result for result in results if not agrees(result)] == [], name
        assert len(results) > 4, name
        everything += results
    assert {result["state"] for result in everything} == {"old", "absent", "new"}
    assert {result["call"].split()[0] for result in everything if result["call"]} >= {"io.open", "rename"}


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that answers `flock` as Lustre without its option does."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_a_file_system_without_locks(tmp_path: Path, run: Callable[..., Result]) -> None:
    experts = [str(adapter(tmp_path / "in" / name, tensors(seed=i))) for i, name in enumerate(("math", "swahili"))]
    command = ["compose", "-t", experts[0], "-l", experts[1], "--num-layers", "4", "-o", str(tmp_path / "out" / "a")]
    assert run(*command).exit_code == 0
    first = snapshot(tmp_path / "out" / "a")
    assert run(*command, "--overwrite").exit_code == 0
    assert snapshot(tmp_path / "out" / "a") == first
    assert os.listdir(tmp_path / "out") == ["a"]


@pytest.mark.usefixtures("without_locks")
def test_a_second_writer_is_kept_out_without_locks(tmp_path: Path) -> None:
    with KIND.folder(tmp_path / "out") as building:
        (building / "file").write_text("new")
        with refused(OutputError, "out_path") as refusal, KIND.folder(tmp_path / "out"):
            pass
        marker = tmp_path / ".out.soft.lock"
        assert str(marker) in str(refusal.value)
        assert marker.exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("without_locks")
def test_the_marker_of_a_dead_process_does_not_count(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with KIND.folder(tmp_path / "out"):
            os._exit(0)
    os.waitpid(child, 0)
    assert ".out.soft.lock" in os.listdir(tmp_path)
    with KIND.folder(tmp_path / "out") as building:
        (building / "file").write_text("new")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOLCK])
def test_a_lock_that_cannot_be_released_is_no_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def failing(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(number, os.strerror(number))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", failing)
    with KIND.folder(tmp_path / "out") as building:
        (building / "file").write_text("new")
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_that_stands_is_not_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    target = tmp_path / "table.csv"
    with refused(OutputError, "out_path", match="is complete, but"), FileKind(b"a").file(target) as building:
        building.write_bytes(b"a,b\n")
    assert target.read_bytes() == b"a,b\n"
    assert os.listdir(tmp_path) == ["table.csv"]


def test_a_lock_file_that_vanishes_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / ".out.lock"
    with locks.locked(path, locks.being_written(tmp_path / "out", "process")):
        path.unlink()
    assert os.listdir(tmp_path) == []


def test_the_old_output_is_put_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with KIND.folder(out) as building:
        (building / "file").write_text("old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self == building and target == out:
            raise OSError(errno.EIO, "the disk fails")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with refused(OutputError, "out_path"), KIND.folder(out, overwrite=True) as building:
        (building / "file").write_text("new")
    assert (out / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
