"""Adapters of mlx-lm: read, written, and refused where they are more than LoRA on linear modules of the same names.

There is no MLX here. References follow mlx-lm's source: y = x·Wᵀ + scale·(x·lora_a)·lora_b, in numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from conftest import LAYERS, load_base, logits, merged_weights, weights
from peft import PeftModel
from refusals import refused
from safetensors.numpy import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import AdapterswapError, ArgumentError, ExpertError, UnsupportedError

KEYS = ["self_attn.q_proj", "mlp.down_proj"]
SCALE = 7.5
RANK = 3


@pytest.fixture
def trained(base: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """`trained(layers=[4, 5])` is a folder as mlx-lm saves it; options replace keys of its config."""

    def make(layers: list[int] | None = None, edit: Any = None, parameters: Any = None, **config: Any) -> Path:
        folder = tmp_path / "mlx"
        folder.mkdir()
        generator = np.random.default_rng(1)
        shapes = {name: tensor.shape for name, tensor in weights(base("llama")).items()}
        tensors = {}
        for layer in range(LAYERS) if layers is None else layers:
            for key in KEYS:
                module = f"model.layers.{layer}.{key}"
                out, into = shapes[f"{module}.weight"]
                tensors[f"{module}.lora_a"] = generator.normal(0, 0.1, (into, RANK)).astype(np.float32)
                tensors[f"{module}.lora_b"] = generator.normal(0, 0.1, (RANK, out)).astype(np.float32)
        if edit is not None:
            edit(tensors)
        save_file(tensors, folder / "adapters.safetensors")
        content = {
            "fine_tune_type": "lora",
            "model": str(base("llama")),
            "num_layers": -1,
            "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.1, "keys": KEYS} | (parameters or {}),
            "seed": 0,
        }
        (folder / "adapter_config.json").write_text(json.dumps(content | config))
        return folder

    return make


def as_mlx_computes(base_folder: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The base's weights with every factor of an mlx-lm folder fused into them."""
    state = {name: tensor.clone() for name, tensor in load_base(base_folder).state_dict().items()}
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapters.safetensors")
    for key, a in tensors.items():
        module, _, part = key.rpartition(".")
        if part == "lora_a":
            delta = config["lora_parameters"]["scale"] * (a.astype(np.float64) @ tensors[f"{module}.lora_b"])
            state[f"{module}.weight"] += torch.from_numpy(delta.T).float()
    return state


@pytest.mark.parametrize("layers", [None, [4, 5]])
@pytest.mark.parametrize("keys", [KEYS, None])
def test_an_adapter_of_mlx_becomes_one_of_peft(
    layers: list[int] | None, keys: list[str] | None, trained: Callable[..., Path], base: Any, tmp_path: Path
) -> None:
    folder = trained(layers, num_layers=len(layers) if layers else -1, parameters={"keys": keys})
    adapterswap.convert(folder, tmp_path / "out")
    reference = load_base(base("llama"))
    reference.load_state_dict(as_mlx_computes(base("llama"), folder))
    loaded = PeftModel.from_pretrained(load_base(base("llama")), tmp_path / "out")
    close(logits(loaded), logits(reference), depth=LAYERS)

    (name,) = json.loads((tmp_path / "out" / "adapterswap.json").read_text())["experts"]
    assert adapterswap.verify(tmp_path / "out", {name: folder}).equal
    (folder / "adapters.safetensors").write_bytes((folder / "adapters.safetensors").read_bytes() + b" ")
    assert not adapterswap.verify(tmp_path / "out", {name: folder}).equal


def test_an_adapter_of_peft_becomes_one_of_mlx(
    trained: Callable[..., Path], expert: Callable[..., Path], base: Any, tmp_path: Path, run: Callable[..., Result]
) -> None:
    """Ranks and scales that differ between modules become one rank and one scale."""
    adapter = expert(seed=4, rank_pattern={"q_proj": 5}, alpha_pattern={"v_proj": 40}, layers_to_transform=[1, 3])
    run("convert", adapter, "--format", "mlx", "-o", tmp_path / "out", exit_code=0)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "out" / "adapters.safetensors")
    parameters = config["lora_parameters"]
    assert (config["fine_tune_type"], config["num_layers"]) == ("lora", -1)
    for key, tensor in tensors.items():
        assert tensor.shape[1 if key.endswith("lora_a") else 0] == parameters["rank"]
        assert any(key.rpartition(".")[0].endswith(f".{name}") for name in parameters["keys"])
    fused = as_mlx_computes(base("llama"), tmp_path / "out")
    close(fused, merged_weights(base("llama"), adapter))

    # The same folder is read again, and replaced only on request.
    adapterswap.convert(tmp_path / "out", tmp_path / "back")
    close(merged_weights(base("llama"), tmp_path / "back"), fused)
    assert run("convert", adapter, "--format", "mlx", "-o", tmp_path / "out").exit_code != 0
    run("convert", adapter, "--format", "mlx", "-o", tmp_path / "out", "--overwrite", exit_code=0)


def test_it_is_named_where_an_expert_is_opened(
    trained: Callable[..., Path], math: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    folder = trained()
    with refused(UnsupportedError, match="adapterswap convert"):
        adapterswap.open_expert(folder)
    for command in (
        ["inspect", folder],
        ["compose", "-t", folder, "-l", math, "-o", tmp_path / "o"],
        ["diff", folder, math],
    ):
        shown = run(*command)
        assert shown.exit_code != 0
        assert "mlx-lm" in shown.stderr
        assert "adapterswap convert" in shown.stderr


def _with_magnitude(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.m"] = np.ones(32, np.float32)


def _of_a_mixture(tensors: dict[str, Any]) -> None:
    for part in ("lora_a", "lora_b"):
        tensors[f"model.layers.0.mlp.switch_mlp.up_proj.{part}"] = np.ones((4, 3, 32), np.float32)


def _on_the_embedding(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.lora_a"] = np.ones((64, RANK), np.float32)
    tensors["model.embed_tokens.lora_b"] = np.ones((RANK, 32), np.float32)


def _half(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.0.self_attn.q_proj.lora_b"]


def _whole_weights(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.ones((32, 32), np.float32)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"edit": _with_magnitude}, UnsupportedError),
        ({"edit": _of_a_mixture}, UnsupportedError),
        ({"edit": _on_the_embedding}, UnsupportedError),
        ({"edit": _half}, UnsupportedError),
        ({"edit": _whole_weights}, UnsupportedError),
        ({"fine_tune_type": "dora"}, UnsupportedError),
        ({"fine_tune_type": "full"}, UnsupportedError),
        ({"parameters": {"keys": ["self_attn.q_proj"]}}, ExpertError),
        ({"parameters": {"scale": None}}, ExpertError),
        ({"num_layers": 2}, ExpertError),
        ({"num_layers": "2"}, ExpertError),
    ],
)
def test_what_is_more_than_lora_is_refused(
    options: dict[str, Any], kind: type[AdapterswapError], trained: Callable[..., Path], tmp_path: Path
) -> None:
    with refused(kind):
        adapterswap.convert(trained(**options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_that_mlx_would_not_load_are_refused(trained: Callable[..., Path], tmp_path: Path) -> None:
    """It adapts the last two of the base's six layers, and the file has the first two."""
    with refused(ExpertError, "adapter"):
        adapterswap.convert(trained([0, 1], num_layers=2), tmp_path / "out")


def test_what_mlx_cannot_hold_is_refused(expert: Callable[..., Path], tmp_path: Path) -> None:
    embedding = expert(seed=1, target_modules=["embed_tokens", "q_proj"])
    whole = expert(seed=1, modules_to_save=["lm_head"])
    other_names = expert("gpt2", seed=1)
    for adapter in (embedding, whole, other_names):
        with refused(UnsupportedError, "format"):
            adapterswap.convert(adapter, tmp_path / "out", format="mlx", dry_run=True)
    with refused(ArgumentError, "format"):
        adapterswap.convert(embedding, tmp_path / "out", format="gguf")  # type: ignore[arg-type]
