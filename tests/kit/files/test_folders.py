"""Output folders are complete or absent: where they may be, full and read-only disks, two writers at once."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from crafting import adapter, snapshot, tensors
from refusals import refused

from adapterswap.kit.errors import OutputError
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.locks import being_written, locked

FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "adapterswap.json"}
KIND = OutputKind(None, names=lambda: ["file", "more"])


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, Path]:
    return adapter(tmp_path / "in" / "math"), adapter(tmp_path / "in" / "swahili", tensors(seed=1))


def arguments(experts: tuple[Path, Path], out: Path | str, *options: str) -> list[str]:
    zones = ["--num-layers", "4", "--bottom", "1", "--top", "1", "--bottom-transition", "1"]
    return ["compose", "-t", str(experts[0]), "-l", str(experts[1]), "-o", str(out), *zones, *options]


def fill(folder: Path, text: str = "new") -> None:
    (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with OutputKind(None).folder(target) as folder:
        fill(folder)
        assert folder.parent == target.parent
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert names(target.parent) == ["out"]
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(target.parent.stat().st_mode)


def write(target: Path, meanwhile: Callable[[], object] = lambda: None, **options: bool) -> None:
    with KIND.folder(target, **options) as folder:
        fill(folder)
        meanwhile()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_error_leaves_nothing_behind(error: type[BaseException], tmp_path: Path) -> None:
    """Parents that were created are removed too, unless they hold other files."""
    raised = OutputError if error is OSError else error

    def fail() -> None:
        raise error

    def fail_later() -> None:
        (tmp_path / "a" / "other").mkdir()
        raise error

    with pytest.raises(raised):
        write(tmp_path / "a" / "b" / "out", fail)
    assert names(tmp_path) == []
    with pytest.raises(raised):
        write(tmp_path / "a" / "b" / "out", fail_later)
    assert names(tmp_path / "a") == ["other"]


def test_overwriting_keeps_the_old_until_the_new_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    fill(target, "old")
    (target / "more").touch()

    def fail() -> None:
        assert (target / "file").read_text() == "old"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write(target, fail, overwrite=True)
    assert names(target) == ["file", "more"]
    write(target, overwrite=True)
    assert names(target) == ["file"]
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_a_symlink_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    fill(tmp_path / "disk", "old")
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with refused(OutputError, "out_path"), OutputKind(None).folder(tmp_path / "out"):
        pass
    with KIND.folder(tmp_path / "out", overwrite=True) as folder:
        fill(folder)
    assert (tmp_path / "out").readlink() == tmp_path / "disk"
    assert (tmp_path / "disk" / "file").read_text() == "new"
    assert names(tmp_path) == ["disk", "out"]


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def appear() -> None:
        (tmp_path / "out").mkdir()
        fill(tmp_path / "out", "another's")

    with refused(OutputError, "out_path", match="Another process created"):
        write(tmp_path / "out", appear)
    assert (tmp_path / "out" / "file").read_text() == "another's"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_writer_is_kept_out(overwrite: bool, tmp_path: Path) -> None:
    def second() -> None:
        with refused(OutputError, "out_path", match="is being written by another process"):
            write(tmp_path / "out", overwrite=overwrite)
        write(tmp_path / "other")  # another target next to it does not matter

    write(tmp_path / "out", second)
    assert names(tmp_path) == ["other", "out"]


def test_who_is_kept_out_leaves_a_rivals_new_lock_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock may be free when it is looked for, and another's a moment later."""
    lock, exists = tmp_path / ".out.lock", Path.exists
    with locked(lock, being_written(tmp_path / "out", "process")):
        monkeypatch.setattr(Path, "exists", lambda path: path != lock and exists(path))
        with refused(OutputError, "out_path", match="is being written by another process"):
            write(tmp_path / "out")
        assert names(tmp_path) == [".out.lock"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_where_no_file_can_be_made_is_not_busy() -> None:
    with refused(OutputError, "out_path", match=r"/proc/out cannot be written: (no such file|permission)"):
        write(Path("/proc/out"))


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    """Names of targets are not patterns, and the remains of `out.b` are not those of `out`."""
    mine = [".o[u]t.0123456789ab.tmp", ".o[u]t.0123456789ab.old.tmp"]
    others = [".out.0123456789ab.tmp", ".o[u]t.b.0123456789ab.tmp", ".o[u]t.tmp", ".o[u]t.0123456789ab.tmp.txt"]
    for name in mine + others:
        (tmp_path / name).mkdir()
        fill(tmp_path / name, name)
    with refused(OutputError, "out_path"), OutputKind(None).folder(tmp_path / "o[u]t"):
        pass
    assert (tmp_path / "o[u]t" / "file").read_text() == mine[1]  # the only copy of the old output
    with KIND.folder(tmp_path / "o[u]t", overwrite=True) as folder:
        fill(folder)
    assert names(tmp_path) == sorted(["o[u]t", *others])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (".", "the current folder"),
        ("..", "the current folder"),
        ("/", "the current folder"),
        ("~", "the current folder"),
        ("in/math", "overlaps the input"),
        ("in/math/deeper/out", "overlaps the input"),
        ("in", "overlaps the input"),
        ("link/out", "overlaps the input"),
        ("in/math/../math/out", "overlaps the input"),
        ("file", "is a file, but the output is a folder"),
        ("file/out", "Choose a path whose parents are folders"),
        ("loop/out", "Choose a path whose parents are folders"),
        ("x" * 250, "file name too long. Choose a shorter name"),
        ("a\0b", "a null byte"),
        ("a\ud800", "cannot be the name of a file"),
        ("/sys/out", "Choose a path where you have permission to write"),
        ("/dev/null", "is a file"),
    ],
)
def test_invalid_output_paths_are_refused(
    target: str, message: str, experts: tuple[Path, Path], run: Callable[..., Result], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link").symlink_to(experts[1])
    (tmp_path / "loop").symlink_to("loop")
    fill(tmp_path)
    before = snapshot(tmp_path)
    out = target.replace("~", str(home))
    for options in (["--overwrite"], ["--overwrite", "--dry-run"]):
        result = run(*arguments(experts, out, *options))
        if "--dry-run" in options and result.exit_code == 0:
            continue  # what only writing can show
        assert result.exit_code == 3
        assert message in result.stderr
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert snapshot(tmp_path) == before


def test_an_output_that_exists(experts: tuple[Path, Path], run: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    fill(folder)
    for make in (lambda path: folder.rename(path), lambda path: path.touch(), lambda path: path.symlink_to("nowhere")):
        make(tmp_path / "out")
        before = snapshot(tmp_path)
        for options in ([], ["--dry-run"]):
            result = run(*arguments(experts, tmp_path / "out", *options))
            assert result.exit_code == 3
            message = f"Error: {tmp_path / 'out'} already exists. Choose another path or pass --overwrite."
            assert result.stderr == f"{message}\n"
            assert snapshot(tmp_path) == before
        (tmp_path / "out").rename(tmp_path / uuid.uuid4().hex)


@pytest.fixture
def another_user(experts: tuple[Path, Path], run: Callable[..., Result], tmp_path: Path) -> Iterator[Path]:
    """A folder that everyone may read but only its owner may write to; the test continues as another user."""
    assert run(*arguments(experts, tmp_path / "out")).exit_code == 0  # imports what that other user may not even read
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    try:
        if user == 0:
            folder.chmod(0o755)
            adapter(folder / "math")
            adapter(folder / "swahili", tensors(seed=1))
            os.seteuid(65534)
        else:
            adapter(folder / "math")
            adapter(folder / "swahili", tensors(seed=1))
            folder.chmod(0o555)
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_without_permission(another_user: Path, run: Callable[..., Result]) -> None:
    before = names(another_user)
    pair = another_user / "math", another_user / "swahili"
    for out in ("out", "a/b/out"):
        result = run(*arguments(pair, another_user / out))
        assert result.exit_code == 3
        assert "cannot be written: permission denied" in result.stderr
        assert "Choose a path where you have permission to write." in result.stderr
    assert names(another_user) == before


def test_a_source_without_permission(another_user: Path, run: Callable[..., Result]) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    (another_user / "math" / "adapter_config.json").chmod(0)
    (another_user / "swahili").chmod(0)
    os.seteuid(user)
    stderr = run(*arguments((another_user / "math", another_user / "swahili"), another_user / "out")).stderr
    assert "math/adapter_config.json cannot be read: Permission denied" in stderr
    assert "swahili has no adapter_model.safetensors" in stderr
    os.seteuid(os.getuid())
    (another_user / "swahili").chmod(0o755)


def test_files_larger_than_allowed(experts: tuple[Path, Path], tmp_path: Path) -> None:
    """RLIMIT_FSIZE stops a write in its middle, as a full disk does: in the weights, the configs, or the card."""
    process = subprocess.run(
        [sys.executable, "-m", "adapterswap", *arguments(experts, tmp_path / "whole")], check=True, capture_output=True
    )
    assert process.returncode == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").iterdir()}
    before = snapshot(tmp_path)
    for limit in sorted({100, *(size - 1 for size in sizes.values())})[:-1]:
        process = subprocess.run(
            [sys.executable, "-m", "adapterswap", *arguments(experts, tmp_path / "new" / "out")],
            capture_output=True, text=True,
            preexec_fn=lambda size=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )  # fmt: skip
        assert process.returncode == 3
        assert process.stdout == ""
        assert "cannot be written: file too large. Free some space" in process.stderr
        assert len(process.stderr.splitlines()) == 1
        assert snapshot(tmp_path) == before


MOUNTED = """
set -e
mount -t tmpfs -o "$1" tmpfs "$2"
shift
out="$1"; shift
set +e
"$@" >"$out.stdout" 2>"$out.stderr"
echo $? >"$out.code"
ls -A "$out" >"$out.left"
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Callable[..., tuple[int, str, str, list[str]]]:
    """Run the command line with a tmpfs of the given kind at tmp_path/disk: its exit code, stdout, stderr, and what is
    left on the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def call(options: str, *command: str) -> tuple[int, str, str, list[str]]:
        base = ["unshare", "-rm", "sh", "-c", MOUNTED, "sh", options, str(disk)]
        if shutil.which("unshare") is None or subprocess.run([*base, "true"], capture_output=True).returncode:
            pytest.skip("no right to mount a small disk here")
        subprocess.run([*base, sys.executable, "-m", "adapterswap", *command], check=True)
        code, out, err, left = (Path(f"{disk}.{end}").read_text() for end in ("code", "stdout", "stderr", "left"))
        return int(code), out, err, left.split()

    return call


@pytest.mark.parametrize("options", ["size=4k", "size=8k", "size=12k", "size=1m,nr_inodes=3"])
def test_a_full_disk(
    options: str, experts: tuple[Path, Path], mounted: Callable[..., tuple[int, str, str, list[str]]], tmp_path: Path
) -> None:
    code, out, err, left = mounted(options, *arguments(experts, tmp_path / "disk" / "out"))
    assert (code, out, left) == (3, "", [])
    assert "cannot be written: no space left on device. Free some space, or choose a path on another disk" in err
    assert len(err.splitlines()) == 1


def test_a_disk_that_is_just_large_enough(
    experts: tuple[Path, Path], mounted: Callable[..., tuple[int, str, str, list[str]]], tmp_path: Path
) -> None:
    code, _, _, left = mounted("size=1m", *arguments(experts, tmp_path / "disk" / "out"))
    assert (code, left) == (0, ["out"])


def test_a_disk_that_is_read_only(
    experts: tuple[Path, Path], mounted: Callable[..., tuple[int, str, str, list[str]]], tmp_path: Path
) -> None:
    code, out, err, left = mounted("size=1m,ro", *arguments(experts, tmp_path / "disk" / "out"))
    assert (code, out, left) == (3, "", [])
    assert "cannot be written: read-only file system. Choose a path where you have permission to write." in err


def test_a_mount_point_is_not_replaced(
    experts: tuple[Path, Path], mounted: Callable[..., tuple[int, str, str, list[str]]], tmp_path: Path
) -> None:
    code, _, err, left = mounted("size=1m", *arguments(experts, tmp_path / "disk", "--overwrite"))
    assert (code, left) == (3, [])
    assert "cannot be written: device or resource busy. Choose a folder inside it." in err


def test_a_dry_run_refuses_what_writing_refuses(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    OutputKind(None).check(tmp_path / "out")
    fill(tmp_path / "out")
    with refused(OutputError, "out_path", match="already exists"):
        KIND.check(tmp_path / "out")
    KIND.check(tmp_path / "out", overwrite=True)
    with refused(OutputError, "out_path", match="did not write: file"):
        OutputKind(None).check(tmp_path / "out", overwrite=True)
    assert names(tmp_path) == ["out"]
