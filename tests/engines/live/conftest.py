"""Composers over pico models, and the state of a model as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_base

from adapterswap.engines.live import LiveComposer

# The experts differ in rank, alpha and formula of the scale, so that a scale taken from the wrong one shows.
EXPERTS: dict[str, dict[str, Any]] = {
    "math": {"seed": 1},
    "swahili": {"seed": 2, "r": 4, "lora_alpha": 8},
    "telugu": {"seed": 3, "r": 6, "lora_alpha": 9, "use_rslora": False},
}


@pytest.fixture
def folders(expert: Callable[..., Path]) -> Callable[..., dict[str, Path]]:
    """`folders("qwen2")` are the experts of that architecture; options are LoraConfig's and apply to all."""

    def make(architecture: str = "llama", **options: Any) -> dict[str, Path]:
        return {name: expert(architecture, **(own | options)) for name, own in EXPERTS.items()}

    return make


@pytest.fixture
def composer(base: Callable[[str], Path], folders: Callable[..., dict[str, Path]]) -> Callable[..., LiveComposer]:
    """`composer("qwen2")` is a composer over a fresh model with three experts."""

    def make(architecture: str = "llama", **options: Any) -> LiveComposer:
        return LiveComposer.from_experts(load_base(base(architecture)), folders(architecture, **options))

    return make


def state_of(model: Any) -> dict[str, Any]:
    """Everything that a composition could leave behind in a PeftModel."""
    found: dict[str, Any] = {"active": model.active_adapter, "methods": []}
    for owner in (model, model.base_model):
        found["methods"] += sorted(vars(owner).keys() & dir(type(owner)))
    for name, module in model.named_modules():
        if hasattr(module, "scaling") and hasattr(module, "lora_A"):
            found[name] = (list(module.active_adapters), dict(module.scaling), list(module.merged_adapters))
            found[name] += (len(module._forward_hooks), len(module._forward_pre_hooks))
        elif hasattr(module, "modules_to_save"):
            found[name] = list(module.active_adapters)
    found["trainable"] = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return found


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every tensor of the model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def written_files(folder: Path) -> dict[str, object]:
    """The bytes of a folder's files. The record is without the base, which is not looked up for a model in memory."""
    files: dict[str, object] = {path.name: path.read_bytes() for path in folder.iterdir()}
    record = json.loads((folder / "adapterswap.json").read_text())
    record.pop("base", None)
    return files | {"adapterswap.json": record}
