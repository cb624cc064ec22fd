"""Adapters with random numbers, as PEFT saves them, and what PEFT makes of an adapter."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from conftest import load_base
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

__all__ = ["copied", "deltas", "edit_json", "in_peft", "merged_by_peft", "noisy", "trained"]

Model = TypeVar("Model", bound=torch.nn.Module)
State = dict[str, torch.Tensor]


def deltas(adapter: Path) -> dict[str, np.ndarray]:
    """s·B·A of every module in float64, from the files alone and by PEFT's published rule.

    An embedding's is width×vocabulary.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    stored = load_file(adapter / "adapter_model.safetensors")
    result = {}
    for key, a in stored.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?A(\.weight)?", key)
        if match is None:
            continue
        rank = config["rank_pattern"].get(match[1], config["r"])
        alpha = config["alpha_pattern"].get(match[1], config["lora_alpha"])
        assert a.shape[0] == rank
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        result[match[1]] = scale * (stored[re.sub(r"A(\.weight)?$", r"B\1", key)].double() @ a.double()).numpy()
    return result


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `...` removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def copied(adapter: Path, out: Path, **changes: Any) -> Path:
    """A copy of an adapter with other values in its config; `...` removes a key."""
    shutil.copytree(adapter, out)
    edit_json(out / "adapter_config.json", **changes)
    return out


def noisy(model: Model, seed: int, *, scale: float = 0.05) -> Model:
    """The model with noise on every parameter that is trained."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            # In place, because tied modules share it.
            parameter.data.add_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype))
    return model


def trained(
    base: Path | PreTrainedModel, config: PeftConfig, folder: Path, *, seed: int = 1, scale: float = 0.05, **saving: Any
) -> Path:
    """An adapter with random numbers wherever PEFT would train some, saved by PEFT into `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT explains its defaults
        torch.manual_seed(seed)
        model = get_peft_model(load_base(base) if isinstance(base, Path) else base, config)
        noisy(model, seed, scale=scale).save_pretrained(folder, **saving)
    return folder


def in_peft(base: Path | PreTrainedModel, adapter: Path) -> PeftModel:
    """The running model with the adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load_base(base) if isinstance(base, Path) else base, adapter).eval()


def merged_by_peft(base: Path | PreTrainedModel, adapter: Path) -> State:
    """The state of base + adapter, merged by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of ties that come apart, and of biases that it merges
        model = in_peft(base, adapter).merge_and_unload()
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}
