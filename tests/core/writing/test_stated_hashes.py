"""A file in the Hub's cache is named by its hash, so composing need not compute it; `verify` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from crafting import adapter, snapshot, tensors

from adapterswap.kit.files.tensorfile import TensorFile

WEIGHTS = "adapter_model.safetensors"


def downloaded(cache: Path, name: str, source: Path, blob: str) -> Path:
    """An adapter as the Hub's client keeps it: a snapshot with a link to a blob."""
    repository = cache / f"models--org--{name}"
    snapshot_folder = repository / "snapshots" / "main"
    snapshot_folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (source / WEIGHTS).rename(repository / "blobs" / blob)
    (snapshot_folder / WEIGHTS).symlink_to(f"../../blobs/{blob}")
    (source / "adapter_config.json").rename(snapshot_folder / "adapter_config.json")
    return snapshot_folder


@pytest.mark.parametrize("is_true", [True, False])
def test_the_name_of_a_blob_is_its_hash(is_true: bool, run: Callable[..., Result], tmp_path: Path) -> None:
    local = [adapter(tmp_path / name, tensors(seed=seed)) for seed, name in enumerate(("math", "swahili"))]
    options = ["--num-layers", "4", "--bottom", "1", "--top", "1"]
    assert run("compose", "-t", str(local[0]), "-l", str(local[1]), *options, "-o", str(tmp_path / "a")).exit_code == 0
    of_local = json.loads((tmp_path / "a" / "adapterswap.json").read_text())

    math_hash = hashlib.sha256((local[0] / WEIGHTS).read_bytes()).hexdigest()
    stated = math_hash if is_true else "0" * 64
    math = downloaded(tmp_path / "hub", "math", local[0], stated)
    sources = ["-t", str(math), "-l", str(local[1])]
    assert run("compose", *sources, *options, "-o", str(tmp_path / "b")).exit_code == 0
    record = json.loads((tmp_path / "b" / "adapterswap.json").read_text())

    hashes = [[expert["sha256"][WEIGHTS] for expert in content["experts"].values()] for content in (of_local, record)]
    assert hashes[1] == [stated, hashes[0][1]]
    assert snapshot(tmp_path / "a")[WEIGHTS] == snapshot(tmp_path / "b")[WEIGHTS]

    experts = [f"--expert={name}={path}" for name, path in zip(record["experts"], (math, local[1]), strict=True)]
    assert run("verify", str(tmp_path / "b"), *experts).exit_code == (0 if is_true else 1)


@pytest.mark.parametrize(
    "path",
    ["blobs/" + "0" * 64, "models--org--math/blobs/" + "0" * 40, "models--org--math/" + "0" * 64, WEIGHTS],
)
def test_other_names_state_nothing(path: str, tmp_path: Path) -> None:
    source = adapter(tmp_path / "math")
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    (source / WEIGHTS).rename(file)
    assert TensorFile.read(file).stated_hash is None
