"""The written folder: its files, the same bytes every time, and complete or absent even if the writer is killed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from crafting import snapshot
from killing import forked, result

import adapterswap
from adapterswap.cli import main
from adapterswap.core.model import opened_base as bases
from adapterswap.core.writing.peft_config import Shape
from adapterswap.core.writing.records import read_record
from adapterswap.tools.extraction import extract

from .conftest import Checkpoint


def test_mps_falls_back_to_the_cpu(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS has no float64. Without MPS, torch refuses to place tensors there, so the test fails if any is."""
    full, base = checkpoint("wide", 1), checkpoint("wide")
    monkeypatch.setattr(bases, "choose_device", torch.device)  # which does not check whether the device exists
    for device in ("cpu", "mps"):
        extract(full, base, tmp_path / device, rank=4, device=device)
    assert snapshot(tmp_path / "mps") == snapshot(tmp_path / "cpu")


def test_the_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, base = checkpoint("llama", 1), checkpoint("llama")
    extraction = extract(full, base, tmp_path / "out", max_error=0.5)
    beside = ("chat_template.jinja", "generation_config.json", "tokenizer.json")  # the fine-tune's
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "adapterswap.json", *beside
    ]  # fmt: skip
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["use_rslora"] is True
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == sorted(module.name for module in extraction.modules)
    assert len({module.rank for module in extraction.modules}) > 1
    assert config["rank_pattern"]
    adapter = adapterswap.open_adapter(tmp_path / "out")
    for module in extraction.modules:
        opened = adapter.modules[module.name]
        assert (opened.rank, opened.scale, opened.layer, opened.kind) == (module.rank, 1.0, module.layer, module.kind)
        assert (opened.out_features, opened.in_features) == (module.out_features, module.in_features)
    text = (tmp_path / "out" / "adapterswap.json").read_text()
    record = json.loads(text)
    assert str(tmp_path.parent) not in text
    for name, folder in (("full", full), ("base", base)):
        raw = (folder / "model.safetensors").read_bytes()
        known = {"fingerprints": {"model.safetensors": hashlib.sha256(str(len(raw)).encode() + raw).hexdigest()}}
        assert record["extraction"][name] == {
            "source": folder.name, "revision": None,
            "sha256": {"model.safetensors": hashlib.sha256(raw).hexdigest()}, **(known if name == "base" else {}),
        }  # fmt: skip
    assert record["sha256"] == {
        name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        for name in ("adapter_model.safetensors", "adapter_config.json", *beside)
    }
    assert record["extraction"]["max_error"] == 0.5
    errors = {name: entry["relative_error"] for name, entry in record["extracted"].items()}
    assert errors == {module.name: module.error for module in extraction.modules}
    assert {entry["reason"] for entry in record["left_out"].values()} == {"norms", "embeddings and heads"}
    assert read_record(tmp_path / "out" / "adapterswap.json") is None  # not a composition
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"relative error is {extraction.error:.4f}" in card
    assert "13 norms" in card


def test_every_rank_has_scale_one() -> None:
    """α = √r is no whole number, and √r/√r is 1 in floating point too."""
    for rank in range(1, 2**16 + 1):
        shape = Shape.of_scale(rank, True, 1.0)
        alpha, scale = shape.alpha, shape.scale
        assert scale == 1.0
        assert json.loads(json.dumps(alpha)) / math.sqrt(rank) == 1.0


@pytest.mark.parametrize("architecture", ["llama", "wide"])
def test_the_same_bytes_every_time(architecture: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("one", "two"):
        extract(checkpoint(architecture, 1), checkpoint(architecture), tmp_path / name, rank=4, embeddings=True)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_the_command_line(run: Callable[..., Result], checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, out = checkpoint("llama", 1), tmp_path / "out"
    options = ["extract", full, "--base-model", checkpoint("llama"), "-o", out, "--rank", 4]
    dry = run(*options, "--dry-run", "--json", exit_code=0)
    assert list(tmp_path.iterdir()) == []
    told = json.loads(dry.stdout)
    assert told["written"] is False
    written = run(*options, "--json")
    assert json.loads(written.stdout) == told | {"written": True}
    assert {module["rank"] for module in told["modules"]} == {4}
    assert told["lost_share"] > 0
    again = run(*options)
    assert (again.exit_code, again.stdout) == (3, "")
    shown = run(*options, "--overwrite", exit_code=0)
    assert shown.stdout.splitlines()[1].split()[:3] == ["mlp.down_proj", "0-5", "4"]
    assert "not in the adapter: 13 norms" in shown.stderr
    assert "Raise --rank" in shown.stderr
    bounded = run(*options, "--max-error", 0.3, "--overwrite")
    assert "because of --rank" in bounded.stderr


@pytest.mark.full  # `test_every_command_that_writes_survives_its_kills` kills it three times
@pytest.mark.slow
def test_killed_at_every_step(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    command = ["extract", str(checkpoint("tiny", 1)), "--base-model", str(checkpoint("tiny"))]
    command += ["-o", str(tmp_path / "outputs" / "out"), "--layers", "0", "--modules", "q_proj"]
    settings = {
        "folder": str(tmp_path / "outputs"), "overwrite": False,
        "first": [*command, "--rank", "1"], "arguments": [*command, "--rank", "2"],
    }  # fmt: skip
    program = [sys.executable, str(Path(__file__).parents[2] / "crashing.py"), "every", json.dumps(settings)]
    process = subprocess.run(program, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    output = json.loads(process.stdout.splitlines()[-1])
    assert output["kills"] >= 8
    assert set(output["states"]) == {"absent", "new"}
    assert set(output["recovered"]) == {"new"}
    assert output["left"] == []


@pytest.mark.slow
def test_a_full_disk(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stops a write in its middle, as a full disk does: in the waiting factors, and in the record."""
    command = ["extract", str(checkpoint("tiny", 1)), "--base-model", str(checkpoint("tiny"))]
    command += ["--rank", "1", "-o", str(tmp_path / "new" / "out")]
    for limit in (100, 3000):
        code, stdout, stderr = with_a_limit(limit, command)
        assert (code, stdout) == (3, "")
        assert "cannot be written: file too large. Free some space" in stderr
        assert list(tmp_path.iterdir()) == []


def with_a_limit(size: int, command: list[str]) -> tuple[int, str, str]:
    """The exit code and the outputs of a command in a child that may write no larger files."""
    heard, told = os.pipe()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        ended = CliRunner().invoke(main, command)
        os.write(told, json.dumps([ended.exit_code, ended.stdout, ended.stderr]).encode())

    child = forked(limited)
    os.close(told)
    with os.fdopen(heard, "rb") as stream:
        code, stdout, stderr = json.loads(stream.read())
    assert result(child) == 0
    return code, stdout, stderr
