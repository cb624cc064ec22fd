"""Models that do not belong together or cannot be extracted are refused by name, and nothing is written."""

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
from pico_models import edit_json
from refusals import refused
from safetensors.torch import load_file, save_file

from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    ExpertError,
    OutputError,
    UnsupportedError,
)
from adapterswap.tools.extraction import extract

from .conftest import Checkpoint, changed

Q = "model.layers.0.self_attn.q_proj.weight"


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", **changes)


def put(key: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({key: value(tensors[key]).contiguous()}))


def not_a_number(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = float("nan")
    return tensor


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    random_model("llama").save_pretrained(folder, max_shard_size="40KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()


def tied(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


# The damage to the fine-tune; the error's class and parameter, and a value that the message names.
MISFITS: dict[str, tuple[Callable[[Path], None], type[AdapterswapError], str | None, str]] = {
    "shape": (put(Q, lambda t: t[:16]), BaseModelError, "base_model", f"{Q} .*16×32.* 32×32"),
    "dtype": (put(Q, lambda t: t.to(torch.int8)), UnsupportedError, "full", f"{Q} .*I8"),
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop(Q)), BaseModelError, "base_model", Q),
    "more tensors": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2, 2)})),
        BaseModelError,
        "base_model",
        "model.layers.0.extra.weight",
    ),
    "other type": (lambda f: edit_config(f, model_type="qwen2"), BaseModelError, "base_model", "qwen2.* llama"),
    "quantized": (
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
        UnsupportedError,
        "full",
        "full",
    ),
    "tied": (tied, BaseModelError, "base_model", "full ties its head"),
    "unknown type": (lambda f: edit_config(f, model_type=7), BaseModelError, "base_model", "7"),
    "nan": (put(Q, not_a_number), ExpertError, None, Q),
    "infinity in a norm": (put("model.norm.weight", lambda t: t * torch.inf), ExpertError, None, "model.norm.weight"),
    "pickled": (pickled, UnsupportedError, None, "pickled"),
    "lost shard": (lost_shard, ExpertError, None, "model-00002-of-"),
    "truncated": (truncated, ExpertError, None, "model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), ExpertError, None, "config.json"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_fine_tune_of_another_base_or_damaged(misfit: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    damage, kind, parameter, named = MISFITS[misfit]
    shutil.copytree(checkpoint("llama", 1), tmp_path / "full")
    damage(tmp_path / "full")
    with refused(kind, parameter, match=named):
        extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("options", "parameter", "named"),
    [
        ({}, "rank", "max_error"),
        ({"rank": 0}, "rank", "0"),
        ({"max_error": 1.5}, "max_error", "1.5"),
        ({"max_error": float("nan")}, "max_error", "nan"),
        ({"rank": 2, "dtype": "int8"}, "dtype", "'int8'"),
        ({"rank": 2, "layers": "3-9"}, "layers", "6-9"),
        ({"rank": 2, "layers": "many"}, "layers", "'many'"),
        ({"rank": 2, "modules": ["q_porj", "mlp"]}, "modules", "'q_porj' .*attention, mlp, or down_proj"),
        ({"rank": 2, "layers": "none"}, "layers", "`layers`"),
        ({"rank": 2, "layers": "none", "modules": ["mlp"]}, "modules", "'mlp'"),
    ],
)
def test_wrong_options(
    options: dict[str, Any], parameter: str, named: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with refused(ArgumentError, parameter, match=named):
        extract(checkpoint("llama", 1), checkpoint("llama"), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_device(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with refused(ArgumentError, "device"):
        extract(checkpoint("llama", 1), checkpoint("llama"), tmp_path / "out", rank=2, device="abacus")
    assert list(tmp_path.iterdir()) == []


def test_a_base_path_that_no_adapter_config_can_hold(checkpoint: Checkpoint, tmp_path: Path) -> None:
    base, out, link = tmp_path / "base\udcff", tmp_path / "out", tmp_path / "link"
    shutil.copytree(checkpoint("llama"), base)
    with refused(BaseModelError, "base_model", match=r"adapter_config\.json"):
        extract(checkpoint("llama", 1), base, out, rank=2)
    assert list(tmp_path.iterdir()) == [base]
    link.symlink_to(base)
    extract(checkpoint("llama", 1), link, out, rank=2)
    assert json.loads((out / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"] == str(link)


def test_a_model_as_its_own_fine_tune(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with refused(ExpertError, "full"):
        extract(checkpoint("llama"), checkpoint("llama"), tmp_path / "out", rank=2)


def test_a_fine_tune_without_adaptable_changes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = changed(random_model("llama"), 1, only=lambda name: "norm" in name or "embed" in name)
    model.save_pretrained(tmp_path / "full")
    with refused(ExpertError, "full", match="embeddings and heads, norms"):
        extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_other_architectures_and_depths(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with refused(BaseModelError, "base_model", match="gpt2.* gpt_neox"):
        extract(checkpoint("gpt2", 1), checkpoint("neox"), tmp_path / "out", rank=2)
    with refused(BaseModelError, "base_model") as raised:
        extract(checkpoint("tiny", 1), checkpoint("llama"), tmp_path / "out", rank=2)
    assert raised.value.omitted > 0  # every layer that only one of them has


def test_every_mistake_is_reported_at_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama", 1), tmp_path / "full")
    put(Q, lambda t: t[:16])(tmp_path / "full")
    put("model.norm.weight", lambda t: t.to(torch.int8))(tmp_path / "full")
    with refused(AdapterswapError, "full") as raised:
        extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    assert {problem.kind for problem in raised.value.problems} == {BaseModelError, UnsupportedError}


def test_outputs_that_exist_or_are_inside_an_input(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama", 1), tmp_path / "full")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").touch()
    for out in ("there", "full/out"):
        with refused(OutputError, "out_path"):
            extract(tmp_path / "full", checkpoint("llama"), tmp_path / out, rank=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "there"]


def test_the_command_line_prints_errors_in_one_line(
    run: Callable[..., Result], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    same = run("extract", checkpoint("llama"), "--base-model", checkpoint("llama"), "-o", tmp_path / "out", "--rank", 2)
    assert (same.exit_code, same.stdout) == (3, "")
    assert len(same.stderr.splitlines()) == 1
    usage = run("extract", checkpoint("llama", 1), "--base-model", checkpoint("llama"), "-o", tmp_path / "out")
    assert (usage.exit_code, usage.stdout) == (2, "")
    assert "Pass --rank, --max-error, or both." in usage.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_transformers_rejects_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folders = [shutil.copytree(checkpoint("llama", seed), tmp_path / str(seed)) for seed in (1, 0)]
    for folder in folders:
        edit_config(folder, num_attention_heads=5)
    with refused(BaseModelError, "full"):
        extract(*folders, tmp_path / "out", rank=2)
    assert not (tmp_path / "out").exists()
