"""LoRA on fused experts as PEFT 0.18.1 saved it, compared with the weights that PEFT 0.18.1 merged.

`peft018` holds two pico mixtures with random adapters. PEFT 0.18 mistook outputs for inputs in Qwen3-MoE, but not in
GPT-OSS.
`merged_experts.safetensors` is the result of `merge_and_unload` on transformers 5.23.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pico_models import copied, edit_json, merged_by_peft
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import Rule
from adapterswap.kit.errors import BaseModelError, UnsupportedError

FIXTURES = Path(__file__).parent / "peft018"
WEIGHTS = "adapter_model.safetensors"


def loaded(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-OSS's rotary embeddings
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_converted_adapter_equals_what_peft_merged(name: str, tmp_path: Path) -> None:
    folder, base = FIXTURES / name, str(FIXTURES / name / "base")
    expected = load_file(folder / "merged_experts.safetensors")
    with refused(UnsupportedError, match="adapterswap convert"):
        adapterswap.open_adapter(folder)
    conversion = adapterswap.convert(folder, tmp_path / "out", base_model=base)
    assert conversion.relative_error == 0
    merged = merged_by_peft(loaded(folder / "base"), tmp_path / "out")
    close({key: value for key, value in merged.items() if key in expected}, expected)
    expert = adapterswap.open_adapter(tmp_path / "out")
    plan = make_plan(Composition(allocation=(Rule(expert="a"),), base_model=base), {"a": expert})
    merged = plan.merge(tmp_path / "merged")
    close({key: value for key, value in loaded(merged).state_dict().items() if key in expected}, expected)
    assert adapterswap.verify(tmp_path / "out", {name: folder}).equal
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert sorted(v.numel() for v in before.values()) == sorted(v.numel() for v in after.values())


def test_diff_measures_fused_experts(tmp_path: Path) -> None:
    folder = FIXTURES / "qwen3_moe"
    adapterswap.convert(folder, tmp_path / "out", base_model=str(folder / "base"))
    own, merged = loaded(folder / "base").state_dict(), load_file(folder / "merged_experts.safetensors")
    rows = {row.name: row for row in adapterswap.diff(tmp_path / "out", tmp_path / "out").modules}
    for key, weight in merged.items():
        norm = torch.linalg.norm(weight.double() - own[key].double()).item()
        assert rows[key].norms == pytest.approx((norm, norm), rel=1e-6)  # of differences of rounded weights
        assert (rows[key].apart, rows[key].cosine) == (0, pytest.approx(1))


def edited(name: str, folder: Path, only: str, **config: Any) -> Path:
    """The fixture with LoRA on one of the two parameters."""
    out = folder / "edited"
    copied(FIXTURES / name, out, target_parameters=[f"mlp.experts.{only}"], **config)
    inner = ".base_layer.lora_"
    tensors = load_file(out / WEIGHTS)
    kept = {
        key: value for key, value in tensors.items() if ".experts." not in key or (inner in key) == (only[0] == "g")
    }
    save_file({key.replace(inner, ".lora_"): value for key, value in kept.items()}, out / WEIGHTS)
    return out


@pytest.mark.parametrize("only", ["gate_up_proj", "down_proj"])
def test_one_parameter(only: str, tmp_path: Path) -> None:
    folder = edited("qwen3_moe", tmp_path, only)
    base = folder / "base"
    adapterswap.convert(folder, tmp_path / "out", base_model=str(base))
    own = loaded(base).state_dict()
    model = merged_by_peft(loaded(base), tmp_path / "out")
    for key, expected in load_file(folder / "merged_experts.safetensors").items():
        close(model[key], expected if only in key else own[key])


def test_without_a_version_the_shapes_decide(tmp_path: Path) -> None:
    folder = edited("qwen3_moe", tmp_path, "gate_up_proj", peft_version=None)
    adapterswap.convert(folder, tmp_path / "out", base_model=str(folder / "base"))
    key = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    assert load_file(tmp_path / "out" / WEIGHTS)[key].shape == (4, 8)


def test_square_matrices_are_refused(tmp_path: Path) -> None:
    folder = edited("qwen3_moe", tmp_path, "down_proj")
    edit_json(folder / "base" / "config.json", moe_intermediate_size=8)
    square = {"gate_proj": (8, 8), "up_proj": (8, 8), "down_proj": (8, 8)}
    stored = load_file(folder / "base" / "model.safetensors")
    stored = {
        key: torch.zeros(square[key.split(".")[-2]]) if ".experts." in key else value for key, value in stored.items()
    }
    save_file(stored, folder / "base" / "model.safetensors")
    tensors = load_file(folder / WEIGHTS)
    for key in tensors:
        if ".experts." in key:
            tensors[key] = torch.ones(4, 8) if "lora_A" in key else torch.ones(8, 4)
    save_file(tensors, folder / WEIGHTS)
    with refused(UnsupportedError, "adapter"):
        adapterswap.convert(folder, tmp_path / "out", base_model=str(folder / "base"))


def test_another_base_is_refused(tmp_path: Path) -> None:
    with refused(BaseModelError, "base_model"):
        adapterswap.convert(FIXTURES / "qwen3_moe", tmp_path / "out", base_model=str(FIXTURES / "gpt_oss" / "base"))
