"""Full fine-tunes of pico models, and their checkpoints read without the library."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import CONFIGS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}

# In addition to those of all tests: tied embeddings with norms around 1, and a mixture of experts.
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    **{name: (kind, options) for name, (kind, options, _) in CONFIGS.items()},
    "gemma": (transformers.GemmaConfig, {**SMALL, "num_hidden_layers": 6, "head_dim": 8}),
    "mixtral": (transformers.MixtralConfig, {**SMALL, "num_hidden_layers": 2, "num_local_experts": 3}),
    "wide": (transformers.LlamaConfig, {**SMALL, "num_hidden_layers": 1, "hidden_size": 288, "intermediate_size": 400}),
    "tiny": (transformers.LlamaConfig, {**SMALL, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}),
}

Checkpoint = Callable[..., Path]


def random_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    kind, options = MODELS[architecture]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(kind(vocab_size=96, **options))


def changed(model: PreTrainedModel, seed: int, only: Callable[[str], bool] = lambda name: True) -> PreTrainedModel:
    """Add noise to the parameters whose names `only` accepts."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.02
        if only(name):
            parameter.data += noise
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("llama")` is a random base, `checkpoint("llama", seed=1)` a full fine-tune of it."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str, seed: int = 0) -> Path:
        if (architecture, seed) not in made:
            model = random_model(architecture)
            made[architecture, seed] = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            (changed(model, seed) if seed else model).save_pretrained(made[architecture, seed])
        return made[architecture, seed]

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by their keys in the files."""
    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """s·B·A of every module of an adapter in float64, with PEFT's rule for s; an embedding's is width×vocabulary."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    result = {}
    for key, a in tensors.items():
        for first, second, end in (("lora_A", "lora_B", ".weight"), ("lora_embedding_A", "lora_embedding_B", "")):
            if key.endswith(f".{first}{end}"):
                name = key.removeprefix("base_model.model.").removesuffix(f".{first}{end}")
                rank = config["rank_pattern"].get(name, config["r"])
                alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
                assert a.shape[0] == rank
                b = tensors[key.replace(first, second)]
                result[name] = alpha / math.sqrt(rank) * (b.double() @ a.double())
    return result
