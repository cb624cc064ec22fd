"""Local folders, and Hub ids in a handmade cache with snapshots, refs, blobs, and links that point out of it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from click.testing import Result
from crafting import BASE_CONFIG, CONFIG, WEIGHTS, adapter, config, tensors
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from refusals import refused
from safetensors.numpy import save

from adapterswap.core.experts.adapter import Adapter, open_adapter, open_expert
from adapterswap.core.model import sources
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.sources import Reference, Source, same_base
from adapterswap.core.planning.names import ExpertName
from adapterswap.kit.errors import BaseModelError, ExpertError, NotFoundError
from adapterswap.kit.hub import HubFailure

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, without network access."""
    folder = tmp_path / "home" / "hub"
    folder.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))  # the library read this from HF_HOME at import
    assert constants.HF_HUB_OFFLINE
    return folder


def repository(cache: Path, name: str, files: dict[str, bytes], commit: str = COMMIT, **refs: str) -> Path:
    """A repository in the cache, as the Hub's client leaves it: blobs, a snapshot of links to them, refs.

    `files` may lie in subfolders.
    """
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(Path(*[".."] * (2 + file.count("/")), "blobs", blob.name))
    for ref, target in {"main": commit, **refs}.items():
        (home / "refs" / ref).write_text(target)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def math(cache: Path, tmp_path: Path) -> Path:
    """The snapshot of org/math, with two commits."""
    repository(cache, "org/math", files_of(adapter(tmp_path / "older", tensors(seed=9))), commit=OLDER)
    return repository(cache, "org/math", files_of(adapter(tmp_path / "newer")), v1=OLDER)


def test_a_hub_id_at_each_revision(math: Path) -> None:
    for reference, commit in (
        ("org/math", COMMIT),
        ("org/math@main", COMMIT),
        ("org/math@v1", OLDER),
        (f"org/math@{OLDER}", OLDER),
    ):
        source = Source.find(reference, [WEIGHTS, CONFIG], what="adapter")
        assert (source.name, source.revision, source.folder.name) == ("org/math", commit, commit)
        assert str(source) == f"org/math@{commit}"


@pytest.mark.parametrize("reference", ["org/other", "org/math@v2", f"org/math@{'f' * 40}"])
def test_a_hub_id_that_is_not_in_the_cache(reference: str, math: Path) -> None:
    told = f"^The adapter {reference} is not a local folder and could not be downloaded from the Hub: "
    with refused(NotFoundError, match=told):
        Source.find(reference, [WEIGHTS], what="adapter")
    with refused(NotFoundError, "base_model", match="^The base model "):
        Source.find(reference, [WEIGHTS], what="base model")


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the Hub cannot be reached"),
        (TimeoutError("timed out"), "the Hub cannot be reached"),
        (ValueError("a checksum differs"), "a checksum differs"),
    ],
)
def test_a_network_that_fails_is_named_in_a_few_words(
    cause: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub raises errors of its own, with the client's as their cause, and a long explanation."""
    error = LocalEntryNotFoundError("Got: ConnectError: … An error happened while trying to locate the files")
    error.__cause__ = cause
    assert HubFailure(error).reason == "HF_HUB_OFFLINE is set"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert HubFailure(cause).reason == reason
    unreachable = reason == "the Hub cannot be reached"
    assert (HubFailure(error).reason == reason) == unreachable
    assert ("network" in HubFailure(error).remedy("Log in")) == unreachable


@pytest.mark.parametrize("reference", ["org/math@../refs/main", "org/math@/v1", "org/../math", "../math", "org/math@"])
def test_ids_that_leave_the_cache_are_refused(reference: str, math: Path) -> None:
    with refused(NotFoundError):
        Source.find(reference, [WEIGHTS], what="adapter")


def test_a_local_folder_wins(math: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    adapter(tmp_path / "org" / "math")
    source = Source.find("org/math", [WEIGHTS], what="adapter")
    assert (source.folder, str(source)) == (Path("org/math"), "math")


@pytest.fixture
def languages(cache: Path, tmp_path: Path) -> Path:
    """The snapshot of org/languages: an adapter in each of three folders, one of them deeper; none in the root."""
    files = {}
    for seed, folder in enumerate(("swahili", "bengali", "lora/telugu")):
        made = files_of(adapter(tmp_path / folder, tensors(seed=seed)))
        files |= {f"{folder}/{name}": content for name, content in made.items()}
    return repository(cache, "org/languages", files, v1=COMMIT)


@pytest.mark.parametrize("folder", ["swahili", "bengali", "lora/telugu"])
def test_one_repository_with_an_adapter_in_each_folder(folder: str, languages: Path, tmp_path: Path) -> None:
    for reference in (f"org/languages/{folder}", f"org/languages/{folder}@v1", f"org/languages/{folder}@{COMMIT}"):
        opened = open_expert(reference)
        assert str(opened.source) == f"org/languages/{folder}@{COMMIT}"
        assert opened.source.folder == languages / folder
        assert isinstance(opened, Adapter)
        assert opened.file.path.read_bytes() == (tmp_path / folder / WEIGHTS).read_bytes()
        assert ExpertName.of(reference) == ExpertName.of(opened) == folder.rpartition("/")[2]


def test_composing_and_verifying_experts_of_one_repository(
    languages: Path, cache: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    repository(cache, "org/base", {"config.json": json.dumps(BASE_CONFIG).encode()})
    experts = ("-t", "org/languages/bengali", "-l", "org/languages/swahili@v1")
    run("compose", *experts, "-o", tmp_path / "out", "--bottom", 1, "--top", 1, exit_code=0)
    run("compose", "-t", tmp_path / "bengali", "-l", tmp_path / "swahili", "-o", tmp_path / "again",
                "--bottom", 1, "--top", 1, exit_code=0)  # fmt: skip
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "again" / WEIGHTS).read_bytes()
    record = json.loads((tmp_path / "out" / "adapterswap.json").read_text())
    assert record["experts"]["bengali"]["source"] == "org/languages/bengali"
    assert record["experts"]["swahili"]["revision"] == COMMIT
    assert run("verify", tmp_path / "out").exit_code == 0  # verify resolves both sources from the record


def test_a_folder_of_adapters_is_not_an_adapter(languages: Path, tmp_path: Path) -> None:
    for reference in ("org/languages", tmp_path):
        with refused(NotFoundError, match=r"bengali.*swahili"):
            open_adapter(reference)
    with refused(NotFoundError, "reference", match="hindi"):
        open_adapter("org/languages/hindi")
    with refused(NotFoundError, "base_model"):
        Source.find("org/languages/swahili", ["config.json"], what="base model")


@pytest.mark.parametrize(
    "reference",
    ["./org/languages/swahili", "../org/math", "/org/math", "~/org/math", "local/math", "local/experts/math@v1"],
)
def test_paths_are_not_looked_up_on_the_hub(
    reference: str, languages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "local").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    with refused(NotFoundError, "reference"):
        open_adapter(reference)
    assert Reference(reference).hub_id is None


def test_a_link_out_of_the_cache_in_a_subfolder(languages: Path, tmp_path: Path) -> None:
    (languages / "swahili" / CONFIG).unlink()
    (languages / "swahili" / CONFIG).symlink_to(tmp_path / "swahili" / CONFIG)
    with refused(ExpertError, match="outside the Hub's cache"):
        open_adapter("org/languages/swahili")


def test_composing_from_the_cache(math: Path, cache: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    """The base's layers come from the cache too, and the output names Hub ids and commits, never a path."""
    repository(cache, "org/base", {"config.json": json.dumps(BASE_CONFIG).encode()})
    swahili = adapter(tmp_path / "swahili", tensors(seed=1))
    zones = ("--bottom", 1, "--top", 1)
    run("compose", "-t", "org/math@v1", "-l", swahili, "-o", tmp_path / "out", *zones, exit_code=0)
    record = json.loads((tmp_path / "out" / "adapterswap.json").read_text())
    assert record["experts"]["math"]["source"] == "org/math"
    assert record["experts"]["math"]["revision"] == OLDER
    assert record["experts"]["swahili"]["source"] == "swahili"
    assert record["num_layers"] == 4
    assert str(tmp_path) not in (tmp_path / "out" / "adapterswap.json").read_text()
    assert run("inspect", "org/math").exit_code == 0


@pytest.mark.parametrize("kind", ["adapter", "checkpoint"])
def test_an_expert_is_looked_up_once(kind: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter takes one request to the Hub; a checkpoint's weights take a second one, for the same commit."""
    if kind == "adapter":
        content = files_of(adapter(tmp_path / "expert"))
    else:
        names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)]
        weights = save({name: np.zeros((4, 4), np.float32) for name in names})
        content = {"config.json": json.dumps(BASE_CONFIG).encode(), "model.safetensors": weights}
    repository(cache, "org/expert", content)
    asked, look = [], sources.cached_snapshot

    def counting(repo: str, revision: str | None = None) -> Path | None:
        asked.append((repo, revision))
        return look(repo, revision)

    monkeypatch.setattr(sources, "cached_snapshot", counting)
    opened = open_expert("org/expert")
    assert type(opened) is {"adapter": Adapter, "checkpoint": Checkpoint}[kind]
    assert str(opened.source) == f"org/expert@{COMMIT}"
    assert [entry for entry in asked if entry[0] == "org/expert"] == [("org/expert", None), ("org/expert", COMMIT)][
        : 1 if kind == "adapter" else 2
    ]


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG])
def test_links_out_of_the_cache_are_not_followed(
    file: str, math: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    """A cache filled by others must not make us read and publish another local file."""
    secret = tmp_path / "newer" / file
    (math / file).unlink()
    (math / file).symlink_to(secret)
    result = run("inspect", "org/math", exit_code=3)
    assert (
        f"links to {secret}, outside the Hub's cache. Delete it from the cache and download it again." in result.stderr
    )
    assert result.stdout == ""


@pytest.mark.parametrize("revision", [None, "main", "v1", "unknown", COMMIT, OLDER])
def test_the_cache_is_read_as_the_hubs_client_reads_it(revision: str | None, cache: Path) -> None:
    repository(cache, "org/base", {"config.json": b"{}"}, OLDER, v1=OLDER)
    repository(cache, "org/base", {"config.json": b'{"a": 1}'})
    theirs = huggingface_hub.try_to_load_from_cache("org/base", "config.json", revision=revision)
    ours = sources.cached_snapshot("org/base", revision)
    assert (str(ours / "config.json") if ours else None) == theirs


def test_a_look_into_the_cache_does_not_import_the_hubs_client(cache: Path) -> None:
    repository(cache, "org/base", {"config.json": b"{}"})
    code = (
        "import sys; from adapterswap.core.model.sources import Reference; "
        "base = Reference('org/base'); assert base.cached_config == {} == base.config()[1]; "
        "assert 'huggingface_hub.hf_api' not in sys.modules and 'httpx' not in sys.modules"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_snapshot_that_is_a_link_out_of_the_cache(math: Path, tmp_path: Path) -> None:
    for path in math.iterdir():
        path.unlink()
    math.rmdir()
    math.symlink_to(tmp_path / "newer")
    with refused(ExpertError, match="outside the Hub's cache"):
        Source.find("org/math", [WEIGHTS], what="adapter")


def test_a_ref_that_points_out_of_the_cache(math: Path, tmp_path: Path) -> None:
    adapter(tmp_path / "elsewhere")
    (math.parents[1] / "refs" / "main").write_text("../../../../elsewhere")
    with refused(ExpertError):
        Source.find("org/math", [WEIGHTS], what="adapter")


def test_a_cache_behind_a_link(math: Path, cache: Path, tmp_path: Path) -> None:
    """Users move caches or single repositories to larger disks and leave a link."""
    home = math.parents[1]
    home.rename(tmp_path / "large-disk")
    home.symlink_to(tmp_path / "large-disk")
    assert Source.find("org/math", [WEIGHTS], what="adapter").revision == COMMIT
    cache.rename(tmp_path / "other-disk")
    cache.symlink_to(tmp_path / "other-disk")
    assert Source.find("org/math", [WEIGHTS], what="adapter").revision == COMMIT


def test_links_in_local_folders_are_followed(tmp_path: Path) -> None:
    """As in every program; a snapshot of the cache may also be passed as a path."""
    adapter(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    assert Source.find(tmp_path / "linked", [], what="adapter").name == "linked"


def test_names_are_made_printable(tmp_path: Path) -> None:
    """A folder's name may contain any bytes; outputs and messages contain valid text."""
    for name, message in (("plain", "plain"), ("two\nlines \x1b[31m", r"two\nlines \x1b[31m"), ("\udcff", r"\udcff")):
        (tmp_path / name).mkdir()
        assert str(Source.find(tmp_path / name, [], what="adapter")) == message
    assert Reference("org/base").public_name == "org/base"
    assert Reference(str(tmp_path / "plain")).public_name == "plain"
    assert Reference("/home/someone/models/base").public_name == "base"
    assert Reference("x" * 5000).public_name == "x" * 5000


def test_the_same_base_by_two_paths(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    assert same_base(str(tmp_path / "base"), str(tmp_path / "link"))
    assert same_base("org/base", "org/base")
    assert not same_base("org/base", "org/other")
    assert not same_base(None, "org/base")
    assert same_base(None, None)
    assert not same_base("x" * 5000, "y" * 5000)


def test_only_the_config_of_a_named_base_is_read(tmp_path: Path, run: Callable[..., Result]) -> None:
    """An untrusted adapter may name any path as its base: only its config.json is read, and not printed."""
    secret = tmp_path / "secrets"
    secret.mkdir()
    (secret / "config.json").write_text("password: hunter2")
    folder = adapter(tmp_path / "math", None, config(base_model_name_or_path=str(secret)))
    result = run("compose", "-t", folder, "-l", folder, "-o", tmp_path / "out", exit_code=3)
    assert f"{secret}/config.json is not JSON" in result.stderr
    assert "hunter2" not in result.stderr
    with refused(BaseModelError, match=r"config\.json cannot be read"):
        Reference(folder).config()
