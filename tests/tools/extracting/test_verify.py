"""Extracted adapters, checked against their records and sources."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import random_model
from core.experts.test_sources import files_of, repository
from huggingface_hub import constants
from refusals import refused
from safetensors.torch import load_file, save_file

from adapterswap.kit.errors import AdapterswapError, ArgumentError, BaseModelError, ExpertError
from adapterswap.tools.extraction import extract
from adapterswap.tools.verification import verify

from .conftest import Checkpoint, changed

WEIGHTS, CONFIG, RECORD = "adapter_model.safetensors", "adapter_config.json", "adapterswap.json"
Q0, UP3 = "model.layers.0.self_attn.q_proj", "model.layers.3.mlp.up_proj"


@pytest.fixture
def cut(checkpoint: Checkpoint, tmp_path: Path) -> tuple[Path, Path, Path]:
    """An adapter, with copies of the fine-tune and the base that it was extracted from."""
    folders = [shutil.copytree(checkpoint("llama", seed), tmp_path / name) for seed, name in ((1, "tuned"), (0, "own"))]
    extract(*folders, tmp_path / "out", rank=4)
    return tmp_path / "out", *folders  # type: ignore[return-value]


def edit(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"rank": 4}),
        ("llama", {"rank": 99}),
        ("llama", {"max_error": 0.4, "layers": "0-1,5", "modules": ["attention", "down_proj"]}),
        ("llama", {"rank": 3, "dtype": "bfloat16", "embeddings": True}),
        ("gpt2", {"rank": 2}),
        ("gemma", {"rank": 2, "embeddings": True}),
        ("mixtral", {"rank": 2}),
    ],
    ids=str,
)
def test_an_extracted_adapter_matches_its_record(
    architecture: str, options: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    full, base = checkpoint(architecture, 1), checkpoint(architecture)
    if architecture == "gemma":  # a tied head is stored as a second pair of factors
        full = tmp_path / "full"
        changed(random_model("gemma"), 1, only=lambda name: "norm" not in name).save_pretrained(full)
    extract(full, base, tmp_path / "out", **options)
    result = verify(tmp_path / "out", {"full": full}, base_model=str(base))
    assert result.equal
    assert (result.unchecked, result.differing, dict(result.changed_sources)) == ((), (), {})


def test_files_alone(cut: tuple[Path, Path, Path], run: Callable[..., Result]) -> None:
    """Without its sources, and with only the base; the report says what was not compared."""
    out, _, base = cut
    for options, missing, message in (
        ([], ["full", "base"], "Pass --expert full=PATH and --base-model."),
        (["--base-model", base], ["full"], "Pass --expert full=PATH."),
    ):
        result = run("verify", out, *options)
        assert (result.exit_code, result.stdout) == (0, "equal: the files match the record\n")
        assert message in result.stderr
        content = json.loads(run("verify", out, *options, "--json").stdout)
        assert content == {
            "equal": True, "changed_sources": {}, "differing": [], "config_differs": False,
                "record_differs": [], "unchecked": missing, "notes": [],
        }  # fmt: skip
    edit(base / "model.safetensors", lambda tensors: tensors["model.norm.weight"].add_(1))
    assert verify(out, base_model=str(base)).changed_sources == {"base": "model.safetensors"}


def test_verify_on_the_command_line(cut: tuple[Path, Path, Path], run: Callable[..., Result]) -> None:
    out, full, base = cut
    sources = ["--expert", f"full={full}", "--base-model", base]
    result = run("verify", out, *sources)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "equal: the files match the record, and every module has the recorded error of ΔW\n"
    edit(full / "model.safetensors", lambda tensors: tensors[f"{Q0}.weight"].mul_(1.01))
    result = run("verify", out, *sources, exit_code=1)
    assert result.stdout == (
        f"source changed: full's model.safetensors differs from what was cut (SHA-256)\ndiffers: {Q0}\n"
    )
    assert "does not match its sources" in result.stderr


def test_a_number_that_changed_is_named_with_its_module(cut: tuple[Path, Path, Path]) -> None:
    out, full, base = cut
    edit(out / WEIGHTS, lambda tensors: tensors[f"base_model.model.{UP3}.lora_B.weight"][0].add_(0.1))
    result = verify(out, {"full": full}, base_model=str(base))
    assert (result.differing, result.config_differs, dict(result.changed_sources)) == ((WEIGHTS, UP3), False, {})
    assert verify(out).differing == (WEIGHTS,)


def test_a_tied_heads_factors_are_the_embeddings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, out = tmp_path / "full", tmp_path / "out"
    changed(random_model("gemma"), 1, only=lambda name: "norm" not in name).save_pretrained(full)
    extract(full, checkpoint("gemma"), out, rank=2, embeddings=True)
    edit(out / WEIGHTS, lambda tensors: tensors["base_model.model.lm_head.lora_A.weight"].mul_(1.5))
    result = verify(out, {"full": full}, base_model=str(checkpoint("gemma")))
    assert result.differing == (WEIGHTS, "model.embed_tokens")


def test_sources_on_the_hub_are_resolved_from_the_record(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    snapshots = [repository(cache, f"org/{name}", files_of(checkpoint("llama", seed)))
                 for seed, name in enumerate(("base", "full"))]  # fmt: skip
    extract("org/full", "org/base", tmp_path / "out", rank=2)
    result = verify(tmp_path / "out")
    assert (result.equal, result.unchecked) == (True, ())
    edit((snapshots[1] / "model.safetensors").resolve(), lambda tensors: tensors[f"{Q0}.weight"].mul_(1.01))
    result = verify(tmp_path / "out")
    assert (dict(result.changed_sources), result.differing) == ({"full": "model.safetensors"}, (Q0,))


def test_a_config_that_changed(cut: tuple[Path, Path, Path]) -> None:
    out, full, base = cut
    config = json.loads((out / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    result = verify(out, {"full": full}, base_model=str(base))
    assert (result.config_differs, len(result.differing)) == (True, 42)  # each module is twice as large
    assert verify(out).config_differs


def test_other_sources(cut: tuple[Path, Path, Path], checkpoint: Checkpoint) -> None:
    out, full, base = cut
    result = verify(out, {"full": checkpoint("llama", 2)}, base_model=str(base))
    assert dict(result.changed_sources) == {"full": "model.safetensors"}
    assert len(result.differing) == 42
    edit(full / "model.safetensors", lambda tensors: tensors["model.norm.weight"].add_(1))
    result = verify(out, {"full": full}, base_model=str(base))
    assert (dict(result.changed_sources), result.differing) == ({"full": "model.safetensors"}, ())
    with refused(BaseModelError, "base_model", match="gpt2.* llama"):
        verify(out, {"full": checkpoint("gpt2", 1)}, base_model=str(base))
    wide = verify(out, {"full": checkpoint("tiny", 1)}, base_model=str(checkpoint("tiny")))
    assert len(wide.differing) == 42
    assert dict(wide.changed_sources) == {"full": "model.safetensors", "base": "model.safetensors"}


def test_modules_that_appear_or_disappear(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Omitted modules must still be unchanged; every other module is in the file and in the record."""
    tuned = changed(random_model("llama"), 1, only=lambda name: ".layers.2." in name)
    tuned.save_pretrained(tmp_path / "full")
    extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    sources = {"full": tmp_path / "full"}
    assert verify(tmp_path / "out", sources, base_model=str(checkpoint("llama"))).equal
    edit(tmp_path / "full" / "model.safetensors", lambda tensors: tensors[f"{Q0}.weight"].add_(1e-4))
    assert verify(tmp_path / "out", sources, base_model=str(checkpoint("llama"))).differing == (Q0,)


def change(record: dict[str, Any], *keys: str, to: Any) -> dict[str, Any]:
    """The record with one value changed; None removes it."""
    copy = json.loads(json.dumps(record))
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    if to is None:
        del inner[keys[-1]]
    return copy


@pytest.mark.parametrize(
    ("keys", "to"),
    [
        (("extracted", UP3), None),
        (("extracted", "model.layers.9.mlp.up_proj"), {"rank": 4, "relative_error": 0.5, "norm": 1.0}),
        (("extracted", UP3, "norm"), 2.0),
        (("extracted", UP3, "relative_error"), 0.25),
    ],
    ids=str,
)
def test_a_record_of_something_else(keys: tuple[str, ...], to: Any, cut: tuple[Path, Path, Path]) -> None:
    out, full, base = cut
    record = json.loads((out / RECORD).read_text())
    (out / RECORD).write_text(json.dumps(change(record, *keys, to=to)))
    assert verify(out, {"full": full}, base_model=str(base)).differing == (keys[1],)


@pytest.mark.parametrize(
    ("keys", "to"),
    [
        (("format",), 2),
        (("sha256",), None),
        (("extraction",), "whole"),
        (("extraction", "full"), "tuned"),
        (("extraction", "base", "revision"), 7),
        (("extraction", "layers"), 3),
        (("extracted", UP3, "norm"), "large"),
        (("extracted", UP3, "norm"), float("nan")),
        (("extracted",), None),
    ],
    ids=str,
)
def test_records_that_are_not_understood(
    keys: tuple[str, ...], to: Any, cut: tuple[Path, Path, Path], run: Callable[..., Result]
) -> None:
    out = cut[0]
    (out / RECORD).write_text(json.dumps(change(json.loads((out / RECORD).read_text()), *keys, to=to)))
    result = run("verify", out)
    assert (result.exit_code, result.stdout) == (3, "")
    with refused(ExpertError, "path", match="adapterswap.json"):
        verify(out)


def test_sources_that_are_named_wrongly_or_are_not_there(cut: tuple[Path, Path, Path], tmp_path: Path) -> None:
    out = cut[0]
    with pytest.raises(AdapterswapError) as caught:
        verify(out, {"math": cut[1], "full": tmp_path / "nowhere"}, base_model=str(tmp_path / "no-base"))
    unknown, *missing = caught.value.problems
    assert (unknown.kind, unknown.parameter) == (ArgumentError, "experts")
    assert [name in problem.message for name, problem in zip(("nowhere", "no-base"), missing, strict=True)] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("key", "lie"),
    [
        ("slice", lambda record: record.update(slice={"layers": "0-99999999999"})),
        ("extracted", lambda record: record["extracted"][Q0].update(rank=1)),
        ("unchanged", lambda record: record["unchanged"].append(Q0)),
        ("unchanged", lambda record: record.pop("unchanged")),
        ("base_model", lambda record: record.update(base_model="org/other")),
        ("num_layers", lambda record: record.update(num_layers=2)),
        ("award", lambda record: record.update(award="best paper")),
    ],
)
def test_contradictions_between_record_and_adapter_are_named(
    key: str, lie: Callable[[dict[str, Any]], object], cut: tuple[Path, Path, Path]
) -> None:
    out, full, base = cut
    record = json.loads((out / RECORD).read_text())
    lie(record)
    (out / RECORD).write_text(json.dumps(record))
    result = verify(out, {"full": full}, base_model=str(base))
    assert (result.equal, result.record_differs) == (False, (key,))


def test_the_origin_of_the_fine_tune_is_compared(cut: tuple[Path, Path, Path], tmp_path: Path) -> None:
    out, full, base = cut
    record = json.loads((out / RECORD).read_text())
    record["extraction"]["full"]["origin"] = {"experts": {}}
    (out / RECORD).write_text(json.dumps(record))
    result = verify(out, {"full": full}, base_model=str(base))
    assert (result.equal, result.record_differs) == (False, ("extraction",))
