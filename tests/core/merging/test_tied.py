"""An embedding tied to the head, under any names: PEFT changes one of the two, and so does the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from pico_models import in_peft, trained
from tolerances import close
from transformers import AutoModelForCausalLM

import adapterswap
from core.merging.conftest import loaded

LAYERS = 2
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OLD = {"vocab_size": 96, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
NEW = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": LAYERS, **TOKENS}

# The config, a module in the layers, the embedding, the head.
MODELS: dict[str, tuple[transformers.PretrainedConfig, str, str, str]] = {
    "openai-gpt": (transformers.OpenAIGPTConfig(**OLD), "c_attn", "tokens_embed", "lm_head"),
    "ctrl": (transformers.CTRLConfig(**OLD, dff=48), "Wq", "w", "lm_head"),
    "mamba": (transformers.MambaConfig(**NEW, state_size=8), "in_proj", "embeddings", "lm_head"),
    "biogpt": (
        transformers.BioGptConfig(**NEW, intermediate_size=48, num_attention_heads=4, max_position_embeddings=64),
        "q_proj", "embed_tokens", "output_projection",
    ),
    "opt": (
        transformers.OPTConfig(
            **NEW, ffn_dim=48, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32
        ),
        "q_proj", "embed_tokens", "lm_head",
    ),
}  # fmt: skip


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24).reshape(2, 12) * 7 % 96, use_cache=False).logits


def lora(base: Path, folder: Path, targets: list[str], saved: list[str]) -> Path:
    config = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=targets, modules_to_save=saved)
    return trained(base, config, folder, scale=0.1, save_embedding_layers=False)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str, str]:
    config, inner, embedding, head = MODELS[request.param]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base", inner, embedding, head


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["embedding", "head", "both", "saved embedding", "saved head"])
def test_the_merged_model_answers_as_peft(kind: str, model: tuple[Path, str, str, str], tmp_path: Path) -> None:
    base, inner, embedding, head = model
    ends = {"embedding": [embedding], "head": [head], "both": [embedding, head]}.get(kind, [])
    saved = {"saved embedding": [embedding], "saved head": [head]}.get(kind, [])
    adapter = lora(base, tmp_path / "adapter", [inner, *ends], saved)
    expected = answers(in_peft(base, adapter))
    merged = loaded(adapterswap.merge(adapter, base, out_path=tmp_path / "out"))
    assert float((expected - answers(loaded(base))).abs().max()) > 0.01
    close(answers(merged), expected, depth=2 * LAYERS, scale=max(1.0, float(expected.abs().max())))


def test_other_adapters_leave_the_head_tied(model: tuple[Path, str, str, str], tmp_path: Path) -> None:
    base, inner, _, head = model
    adapter = lora(base, tmp_path / "adapter", [inner], [])
    out = adapterswap.merge(adapter, base, out_path=tmp_path / "out")
    close(answers(loaded(out)), answers(in_peft(base, adapter)), depth=2 * LAYERS, scale=1.0)
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert not any(f"{head}.weight" in path.read_bytes().decode("latin-1") for path in out.glob("*.safetensors"))
