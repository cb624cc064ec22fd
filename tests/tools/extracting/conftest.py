"""Fine-tunes of some parameters, and adapters read without the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pico_models as pico
import torch
from transformers import PreTrainedModel

Checkpoint = Callable[..., Path]


def changed(model: PreTrainedModel, seed: int, only: Callable[[str], bool] = lambda name: True) -> PreTrainedModel:
    """Add noise to the parameters whose names `only` accepts."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.02
        if only(name):
            parameter.data += noise
    return model


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """ΔW of every module of an adapter in float64."""
    return {name: torch.from_numpy(delta) for name, delta in pico.deltas(folder).items()}
