"""The cache: folders are complete, created once for any number of requests, and kept while a server uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import refused

from adapterswap.engines.serving import Cache
from adapterswap.engines.serving.cache import Memo
from adapterswap.kit.errors import ExpertError, OutputError

# A process that uses the cache; `make` takes a while and leaves a line in a log.
_PROCESS = """
import sys, time
from pathlib import Path
from adapterswap.engines.serving import Cache
root, log, halfway, hold = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "hold"
cache = Cache(root)
if hold: cache.hold()
def make(path):
    with log.open("a") as lines: lines.write("made\\n")
    path.mkdir()
    (path / "half").write_text("half")
    if halfway == "stop":
        print("half", flush=True)
        sys.stdin.readline()
    time.sleep(0.3)
    (path / "whole").write_text("whole")
print("ready", flush=True)
sys.stdin.readline()
print(cache.get("key", make), flush=True)
if hold: sys.stdin.readline()
"""


def process(root: Path, log: Path, halfway: str = "-", hold: str = "-") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROCESS, str(root), str(log), halfway, hold]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def go(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()


def test_concurrent_threads_create_a_folder_once(tmp_path: Path) -> None:
    for attempt in range(20):
        check_meeting(tmp_path / str(attempt))


def check_meeting(place: Path) -> None:
    cache, made, barrier = Cache(place / "cache"), [], threading.Barrier(8)

    def make(path: Path) -> None:
        made.append(path)
        path.mkdir()
        time.sleep(0.02)
        (path / "whole").write_text("whole")

    def ask(_: int) -> Path:
        barrier.wait()
        entry = cache.get("key", make)
        assert (entry / "whole").exists()
        return entry

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {place / "cache" / "compositions" / "key"}
    assert len(made) == 1


def test_concurrent_processes_create_a_folder_once(tmp_path: Path) -> None:
    running = [process(tmp_path / "cache", tmp_path / "log") for _ in range(3)]
    for one in running:
        go(one)
    found = {one.communicate()[0] for one in running}
    assert found == {f"{tmp_path / 'cache' / 'compositions' / 'key'}\n"}
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_killed_process_does_not_block_the_next(tmp_path: Path) -> None:
    running = process(tmp_path / "cache", tmp_path / "log", halfway="stop")
    go(running)
    assert running.stdout is not None
    assert running.stdout.readline() == "half\n"
    running.kill()
    running.communicate()
    building = tmp_path / "cache" / "building"
    assert list(building.rglob("half"))
    cache = Cache(tmp_path / "cache")
    entry = cache.get("key", lambda path: path.mkdir())
    assert list(entry.iterdir()) == []  # created afresh, not continued from the killed process
    assert len(list(building.iterdir())) == 1
    assert cache.collect(keep=5) == 0
    assert list(building.iterdir()) == []


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")

    def fail(path: Path) -> None:
        path.mkdir()
        raise ExpertError("no", "Try again")

    with refused(ExpertError):
        cache.get("key", fail)
    assert list((tmp_path / "cache" / "compositions").iterdir()) == []
    assert list((tmp_path / "cache" / "building").iterdir()) == []
    assert cache.get("key", lambda path: path.mkdir()).is_dir()


def test_nothing_is_collected_under_a_live_server(tmp_path: Path) -> None:
    running = process(tmp_path / "cache", tmp_path / "log", hold="hold")
    go(running)
    assert running.stdout is not None
    entry = Path(running.stdout.readline().strip())
    cache = Cache(tmp_path / "cache")
    assert cache.collect(keep=0) is None
    assert (entry / "whole").exists()
    running.kill()
    running.communicate()
    assert cache.collect(keep=0) == 1
    assert not entry.exists()


def test_the_last_used_folder_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for number, key in enumerate("abcd"):
        entry = cache.get(key, lambda path: path.mkdir())
        os.utime(entry, (number, number))
    cache.get("a", lambda path: pytest.fail("it is there"))  # now it is the youngest
    assert cache.collect(keep=2) == 2
    assert {entry.name for entry in (tmp_path / "cache" / "compositions").iterdir()} == {"a", "d"}


def write(path: Path) -> None:
    path.mkdir()
    (path / "weights").write_bytes(bytes(range(256)) * 64)
    (path / "config").write_text("{}")


def flip(entry: Path) -> None:
    content, stamp = bytearray((entry / "weights").read_bytes()), (entry / "weights").stat()
    content[5000] ^= 1
    (entry / "weights").write_bytes(content)
    os.utime(entry / "weights", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def replace_by_a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("a file")


HARMS: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "truncated": lambda entry: os.truncate(entry / "weights", 100),
    "empty": lambda entry: os.truncate(entry / "config", 0),
    "missing": lambda entry: (entry / "config").unlink(),
    "another file": lambda entry: (entry / "new_embeddings").write_text("?"),
    "another folder": lambda entry: (entry / "weights").rename(entry.with_name("kept")) and write(entry / "weights"),
    "no folder": shutil.rmtree,
    "a file": replace_by_a_file,
    "no hashes": lambda entry: (entry.parents[1] / "hashes" / entry.name).unlink(),
    "damaged hashes": lambda entry: (entry.parents[1] / "hashes" / entry.name).write_text("{"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_folder_is_made_again(harm: str, tmp_path: Path) -> None:
    write(tmp_path / "whole")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    running = Cache(tmp_path / "cache")
    entry = running.get("key", write)
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        write(path)

    for count, cache in enumerate((Cache(tmp_path / "cache"), running), start=1):  # at first use, and later
        HARMS[harm](entry)
        assert cache.get("key", make) == entry
        assert len(made) == count
        assert {file.name: file.read_bytes() for file in entry.iterdir()} == whole
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_an_intact_folder_is_not_made_again(tmp_path: Path) -> None:
    running = Cache(tmp_path / "cache")
    entry = running.get("key", write)
    for cache in (running, Cache(tmp_path / "cache")):
        for _ in range(2):
            assert cache.get("key", lambda path: pytest.fail("it is there")) == entry
        os.utime(entry / "weights")  # touched, with the same content
        (entry / ".nfs01").write_text("a file that another process has open")


def test_a_damaged_folder_that_cannot_be_made_again_is_not_served(tmp_path: Path) -> None:
    flip(Cache(tmp_path / "cache").get("key", write))

    def fail(path: Path) -> None:
        raise ExpertError("no", "Try again")

    cache = Cache(tmp_path / "cache")
    for _ in range(2):
        with refused(ExpertError):
            cache.get("key", fail)


def test_hashes_go_with_their_folder(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for key in "ab":
        os.utime(cache.get(key, write), (ord(key), ord(key)))
    assert cache.collect(keep=1) == 1
    assert [path.name for path in (tmp_path / "cache" / "hashes").iterdir()] == ["b"]
    assert cache.get("b", lambda path: pytest.fail("it is there")).is_dir()


def test_a_cache_is_private_and_created_when_needed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "cache")
    assert not cache.root.exists()
    cache.hold()
    assert cache.root.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused(OutputError, "cache"):
        Cache(tmp_path / "file" / "cache").hold()


def test_a_memo_outlives_its_process_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    Memo(path).put("key", {"a": "b"})
    assert Memo(path).get("key") == {"a": "b"}
    assert Memo(path).get("other") is None
    for damage in ("{", "{}", "[]", '{"known": ["key"]}', '{"known": {"key": "other"}}'):
        path.write_text(damage)
        damaged = Memo(path)
        assert damaged.get("key") is None
        damaged.put("key", 1)
        assert Memo(path).get("key") == 1


def test_a_memo_forgets_the_oldest(tmp_path: Path) -> None:
    memo = Memo(tmp_path / "nowhere" / "known.json")  # and a full disk is not an error
    for number in range(2010):
        memo.put(str(number), number)
    assert memo.get("9") is None
    assert memo.get("10") == 10


def test_a_folder_with_other_files_is_not_a_cache(tmp_path: Path) -> None:
    """`collect` would remove what is in folders of these names."""
    for name in ("compositions", "building"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "thesis.txt").write_text("years of work")
    cache = Cache(tmp_path / "project")
    for use in (lambda: cache.collect(keep=0), lambda: cache.get("key", lambda path: path.mkdir()), cache.hold):
        with refused(OutputError, "cache"):
            use()
    assert (tmp_path / "project" / "building" / "thesis.txt").exists()
    assert (tmp_path / "project" / "compositions" / "thesis.txt").exists()
