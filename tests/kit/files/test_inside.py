"""Only regular files that stand inside a folder are read and copied."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

from adapterswap.kit.errors import ExpertError, OutputError
from adapterswap.kit.files.inside import copy_inside, files_inside, open_inside, read_inside

Make = Callable[[Path, Path], object]


def a_link(path: Path, private: Path) -> None:
    path.symlink_to(private)


def a_link_upwards(path: Path, private: Path) -> None:
    path.symlink_to(Path("..") / private.name)


def a_chain_of_links(path: Path, private: Path) -> None:
    (path.parent / "hop").symlink_to(private)
    path.symlink_to("hop")


def a_broken_link(path: Path, private: Path) -> None:
    path.symlink_to("nothing")


ATTACKS: dict[str, Make] = {
    "link": a_link,
    "link upwards": a_link_upwards,
    "chain of links": a_chain_of_links,
    "broken link": a_broken_link,
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "pipe": lambda path, _: os.mkfifo(path),
    "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "link to a process": lambda path, _: path.symlink_to("/proc/self/environ"),
    "folder": lambda path, _: path.mkdir(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "expert"
    place.mkdir()
    (tmp_path / "private.key").write_text("secret")
    return place


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_a_file_of_the_folder_is_refused(folder: Path, tmp_path: Path, attack: str) -> None:
    name = "tokenizer.json"
    ATTACKS[attack](folder / name, tmp_path / "private.key")
    for call in (
        lambda: open_inside(folder, name),
        lambda: read_inside(folder, name),
        lambda: copy_inside(folder, name, tmp_path / "copy"),
    ):
        with refused(ExpertError, None):
            call()
    assert not (tmp_path / "copy").exists()


def test_a_path_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("../private.key", str(tmp_path / "private.key")):
        with refused(ExpertError, None):
            read_inside(folder, name)
    (folder / "inner").symlink_to(tmp_path)
    with refused(ExpertError, None):
        read_inside(folder, "inner/private.key")


def test_files_and_links_within_the_folder_are_read(folder: Path, tmp_path: Path) -> None:
    (folder / "templates").mkdir()
    (folder / "templates/tool.jinja").write_text("çé", encoding="utf-8")
    (folder / "chat_template.jinja").symlink_to("templates/tool.jinja")
    assert read_inside(folder, "templates/tool.jinja") == read_inside(folder, "chat_template.jinja") == "çé".encode()
    linked = tmp_path / "link"
    linked.symlink_to(folder)  # you may name the folder by a link
    assert read_inside(linked, "chat_template.jinja") == "çé".encode()
    assert copy_inside(linked, "chat_template.jinja", tmp_path / "copy")
    assert (tmp_path / "copy").read_text(encoding="utf-8") == "çé"
    assert not (tmp_path / "copy").is_symlink()
    assert read_inside(folder, "absent.json") is None
    assert not copy_inside(folder, "absent.json", tmp_path / "absent")


def test_a_snapshot_may_link_to_blobs_of_its_own_repository(tmp_path: Path) -> None:
    repository, other = tmp_path / "models--org--name", tmp_path / "models--org--other"
    snapshot = repository / "snapshots/0123"
    for place in (snapshot / "math", repository / "blobs", other / "blobs"):
        place.mkdir(parents=True)
    (repository / "blobs/aa").write_text("{}")
    (other / "blobs/bb").write_text("{}")
    (snapshot / "math/tokenizer.json").symlink_to("../../../blobs/aa")
    assert read_inside(snapshot / "math", "tokenizer.json") == b"{}"
    (snapshot / "other.json").symlink_to(other / "blobs/bb")
    with refused(ExpertError, None):
        read_inside(snapshot, "other.json")
    (tmp_path / "linked").symlink_to(snapshot)
    assert read_inside(tmp_path / "linked" / "math", "tokenizer.json") == b"{}"


def test_a_folder_that_looks_like_the_cache_lends_nothing(tmp_path: Path) -> None:
    repository, private = tmp_path / "models--org--name", tmp_path / "private"
    (repository / "snapshots/0123").mkdir(parents=True)
    private.mkdir()
    (private / "key").write_text("secret")
    (repository / "blobs").symlink_to(private)
    (repository / "snapshots/0123/tokenizer.json").symlink_to("../../blobs/key")
    with refused(ExpertError, None):
        read_inside(repository / "snapshots/0123", "tokenizer.json")


def test_limits_and_pointers(folder: Path, tmp_path: Path) -> None:
    (folder / "large.json").write_bytes(b"0" * 11)
    with refused(ExpertError, None):
        read_inside(folder, "large.json", limit=10)
    with (folder / "huge.json").open("wb") as file:
        file.truncate(2**40)  # takes no space on disk
    for call in (lambda: read_inside(folder, "huge.json"), lambda: copy_inside(folder, "huge.json", tmp_path / "c")):
        with refused(ExpertError, None):
            call()
    with refused(OutputError, None):
        read_inside(folder, "large.json", limit=10, kind=OutputError)
    (folder / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for call in (
        lambda: read_inside(folder, "pointer.json"),
        lambda: copy_inside(folder, "pointer.json", folder / "c"),
    ):
        with refused(ExpertError, None):
            call()


def test_files_are_listed_without_code(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenization_own.py", "tokenizer.so", "notes.txt"):
        (folder / name).write_text("")
    (folder / "tokenizer_files").mkdir()
    (folder / "tokenizer_files/one.json").write_text("")
    listed = [folder / "tokenizer.json", folder / "tokenizer_files/one.json"]
    assert files_inside(folder, ["tokeniz*", "tokenizer_files/*"]) == listed
    with refused(ExpertError, None):
        copy_inside(folder, "tokenization_own.py", tmp_path / "copy")
    (folder / "tokenizer_private.key").symlink_to(tmp_path / "private.key")
    with refused(ExpertError, None):
        files_inside(folder, ["tokeniz*"])
