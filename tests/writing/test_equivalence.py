"""A composed adapter in PEFT gives the logits of the model whose full weights were swapped by a plain loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits, merged_weights
from peft import PeftModel
from tolerances import close

import adapterswap
from adapterswap.live import LiveComposer, load_experts

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal": ({}, {}),
    "ranks": ({"r": 4}, {"r": 8}),
    "alphas": ({"lora_alpha": 7}, {"lora_alpha": 32}),
    "plain": ({"use_rslora": False}, {"use_rslora": False, "r": 3}),
    "rslora and plain": ({"use_rslora": True, "r": 6}, {"use_rslora": False, "r": 5}),
}

ZONES = [
    {"bottom": 2, "top": 1},
    {"bottom": 1, "top": 1, "bottom_transition": 1, "top_transition": 2},
    {"bottom": 2, "top": 0, "bottom_transition": 1, "task_weight": 0.3, "language_weight": 1.7},
    {"bottom": 0, "top": 6},
]


def algorithm_1(
    task: dict[str, torch.Tensor],
    language: dict[str, torch.Tensor],
    *,
    bottom: int,
    top: int,
    bottom_transition: int = 0,
    top_transition: int = 0,
    task_weight: float = 1.0,
    language_weight: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The first paper's Algorithm 1 on full weights, line by line, with its line 5 read as "and"."""
    merged = {}
    for name in task:
        result = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        layer = int(result[1]) if result else None
        if layer is not None and (layer < bottom or layer > LAYERS - 1 - top):
            merged[name] = language[name]
        elif layer is not None and layer > bottom - 1 + bottom_transition and layer < LAYERS - top - top_transition:
            merged[name] = task[name]
        else:
            total = task_weight + language_weight
            merged[name] = (task_weight * task[name] + language_weight * language[name]) / total
    return merged


@pytest.mark.sampled(7)
@pytest.mark.parametrize("zones", ZONES, ids=lambda zones: "-".join(str(value) for value in zones.values()))
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "neox"])
def test_swap_equals_swapped_full_weights(
    architecture: str,
    pair: str,
    zones: dict[str, Any],
    base: Callable[[str], Path],
    expert: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folders = [expert(architecture, seed=seed, **PAIRS[pair][seed - 1]) for seed in (1, 2)]
    reference = load_base(base(architecture))
    reference.load_state_dict(algorithm_1(*(merged_weights(base(architecture), folder) for folder in folders), **zones))
    plan = adapterswap.layer_swap(*folders, **zones)
    composed = adapterswap.write_adapter(plan, tmp_path / "out")
    model = PeftModel.from_pretrained(load_base(base(architecture)), composed)
    close(logits(model), logits(reference), depth=LAYERS)
    live = load_experts(load_base(base(architecture)), plan)
    with LiveComposer(live).use(plan):
        close(logits(live), logits(reference), depth=LAYERS)


@pytest.mark.parametrize("scale", [0.4, 1.0, -0.5])
def test_task_arithmetic_is_the_scaled_sum(
    scale: float, base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [expert(seed=1, r=4), expert(seed=2, use_rslora=False)]
    original = load_base(base("llama")).state_dict()
    full = [merged_weights(base("llama"), folder) for folder in folders]
    reference = load_base(base("llama"))
    reference.load_state_dict({n: w + scale * ((full[0][n] - w) + (full[1][n] - w)) for n, w in original.items()})
    plan = adapterswap.task_arithmetic(*folders, scale=scale, allow_negative=scale < 0)
    model = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    close(logits(model), logits(reference), depth=LAYERS)
