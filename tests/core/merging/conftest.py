"""Pico checkpoints of six architectures, full fine-tunes of them, and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import CONFIGS
from peft import LoraConfig
from pico_models import trained
from transformers import AutoModelForCausalLM

ARCHITECTURES = ["llama", "qwen2", "gpt2", "neox", "gemma", "mixtral"]

State = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """`model("gemma")` is a pico base, `model("gemma", seed=1)` a full fine-tune of it."""
    return checkpoint


def loaded(folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers loads it, in float32; missing weights are an error."""
    result, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return result.eval()


def equal(one: State, other: State) -> None:
    """The same tensors, bit for bit."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.fixture
def lora(model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`lora("gpt2", seed=1, …)` is a random adapter of the pico base; options are LoraConfig's."""

    def make(architecture: str = "llama", *, seed: int = 1, name: str = "", **options: Any) -> Path:
        settings = {"r": 4, "lora_alpha": 9, "use_rslora": True, "target_modules": CONFIGS[architecture][2]}
        settings |= {"fan_in_fan_out": architecture == "gpt2", "task_type": "CAUSAL_LM"}
        folder = tmp_path / (name or f"expert-{seed}")
        config = LoraConfig(**(settings | options))
        return trained(model(architecture), config, folder, seed=seed, save_embedding_layers=False)

    return make
