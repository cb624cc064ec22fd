"""Quantized bases: merged into their dequantized weights on request, else refused."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits, merged_weights
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap.kit.errors import ArgumentError, UnsupportedError

Base = Callable[[str], Path]


@pytest.fixture
def quantized(base: Base, tmp_path: Path) -> Path:
    """A base in 8-bit floating point, as DeepSeek stores it: transformers can dequantize it on any machine."""
    folder = Path(shutil.copytree(base("llama"), tmp_path / "fp8"))
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale_inv")] = scale.reshape(1, 1)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write(folder, {**settings, "modules_to_not_convert": ["lm_head"]})
    return folder


def write(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def by_hand(folder: Path, base: Path, target: Path) -> Path:
    """The same base in float32, dequantized by a formula."""
    shutil.copytree(base, target)
    stored = load_file(folder / "model.safetensors")
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale_inv")}
    plain = {
        name: weight.float() * scales[found] if (found := f"{name}_scale_inv") in scales else weight
        for name, weight in stored.items()
    }
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    return target


def test_merging_into_dequantized_weights(
    quantized: Path, base: Base, math: Path, swahili: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    own = by_hand(quantized, base("llama"), tmp_path / "by-hand")
    out = adapterswap.merge(math, quantized, out_path=tmp_path / "out", dequantize=True)
    expected = load_base(own)
    expected.load_state_dict(merged_weights(own, math))
    close(logits(load_base(out)), logits(expected), depth=LAYERS)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert adapterswap.verify(out, {math.name: math}, base_model=quantized).equal
    gc.collect()
    assert not list(scratch.iterdir())  # the dequantized weights are gone
    plan = adapterswap.layer_swap(math, swahili, bottom=1, top=1)
    swapped = plan.merge(tmp_path / "swapped", base_model=quantized, dequantize=True)
    likewise = plan.merge(tmp_path / "likewise", base_model=own)
    close(logits(load_base(swapped)), logits(load_base(likewise)), depth=LAYERS)


def test_without_it_a_quantized_base_is_refused(
    quantized: Path, math: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    result = run("merge", math, "--base-model", quantized, "-o", tmp_path / "out", exit_code=3)
    assert "--dequantize" in result.stderr
    assert not (tmp_path / "out").exists()
    result = run("merge", math, "--base-model", quantized, "-o", tmp_path / "out", "--dequantize", exit_code=0)
    assert "is quantized" in result.stderr


def test_a_base_in_floating_point_numbers_is_not_dequantized(base: Base, math: Path, tmp_path: Path) -> None:
    with refused(ArgumentError, parameter="dequantize"):
        adapterswap.merge(math, base("llama"), out_path=tmp_path / "out", dequantize=True)


def test_what_transformers_cannot_dequantize_is_refused(base: Base, math: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base("llama"), tmp_path / "unknown"))
    write(folder, {"quant_method": "nobody-knows"})
    with refused(UnsupportedError, parameter="base_model"):
        adapterswap.merge(math, folder, out_path=tmp_path / "out", dequantize=True)


def test_four_bits_by_bitsandbytes(base: Base, math: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options: dict[str, Any] = {"quantization_config": bits, "device_map": "cpu"}
    AutoModelForCausalLM.from_pretrained(base("llama"), **options).save_pretrained(tmp_path / "nf4")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", device_map="cpu").dequantize()
    plain = load_base(base("llama"))
    plain.load_state_dict(own.state_dict())
    plain.save_pretrained(tmp_path / "own")
    out = adapterswap.merge(math, tmp_path / "nf4", out_path=tmp_path / "out", dequantize=True)
    expected = load_base(tmp_path / "own")
    expected.load_state_dict(merged_weights(tmp_path / "own", math))
    close(logits(load_base(out)), logits(expected), depth=LAYERS)
