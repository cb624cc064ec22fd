"""Bases that store queries, keys and values as one tensor, which transformers splits when it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from pico_models import in_peft, trained
from refusals import refused
from safetensors import safe_open
from tolerances import close
from transformers import AutoModelForMaskedLM, PreTrainedModel

import adapterswap
from adapterswap.kit.errors import UnsupportedError

LAYERS = 2
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "one of them": {"target_modules": ["q_proj"]},
    "all of them": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "DoRA": {"target_modules": ["v_proj"], "use_dora": True},
    "in full": {"target_modules": ["o_proj"], "modules_to_save": ["k_proj"]},
}


def loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForMaskedLM.from_pretrained(folder).eval()
    return model


def answers(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(12)[None] * 7 % 96).logits
    return result


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("architecture", ["NomicBert", "JinaEmbeddingsV3"])
def test_refused_with_a_remedy_that_works(architecture: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, split = tmp_path / "base", tmp_path / "split"
    AutoModelForMaskedLM.from_config(getattr(transformers, f"{architecture}Config")(**SIZES)).save_pretrained(base)
    config = LoraConfig(r=3, lora_alpha=5, **OPTIONS[kind])
    adapter = trained(loaded(base), config, tmp_path / "adapter", scale=0.1, save_embedding_layers=False)
    with refused(UnsupportedError, "base_model") as refusal:
        adapterswap.merge(adapter, base, out_path=tmp_path / "merged")
    with safe_open(base / "model.safetensors", "pt") as stored:
        named = [key for key in stored.keys() if key in str(refusal.value)]  # noqa: SIM118
        assert named
        assert not any("q_proj" in key or "v_proj" in key for key in stored.keys())  # noqa: SIM118
    loaded(base).save_pretrained(split, save_original_format=False)
    expected = answers(in_peft(loaded(base), adapter))
    merged = adapterswap.merge(adapter, split, out_path=tmp_path / "merged")
    close(answers(loaded(merged)), expected, depth=2 * LAYERS, scale=max(1.0, float(expected.abs().max())))
    assert not torch.equal(expected, answers(loaded(base)))
