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


def test_patterns_and_partial_experts(base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path) -> None:
    """Ranks and alphas that differ by module; an attention-only task expert; an expert on some layers only."""
    task = expert(seed=3, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 5}, alpha_pattern={"v_proj": 3})
    language = expert(
        seed=4, use_rslora=False, layers_to_transform=[0, 1, 5], rank_pattern={r"layers\.1\.mlp\..*": 2}, lora_alpha=11
    )
    full = [merged_weights(base("llama"), folder) for folder in (task, language)]
    reference = load_base(base("llama"))
    zones = {"bottom": 2, "top": 1, "bottom_transition": 1}
    reference.load_state_dict(algorithm_1(*full, **zones))
    plan = adapterswap.layer_swap(task, language, **zones)
    model = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    close(logits(model), logits(reference), depth=LAYERS)


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


def test_reset_gives_layers_back_to_the_base(base: Callable[[str], Path], math: Path, tmp_path: Path) -> None:
    original, full = load_base(base("llama")).state_dict(), merged_weights(base("llama"), math)
    outer = re.compile(r"\.layers\.[015]\.")
    reference = load_base(base("llama"))
    reference.load_state_dict({name: original[name] if outer.search(name) else full[name] for name in full})
    plan = adapterswap.layer_swap(math, "base", bottom=2, top=1)
    model = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    close(logits(model), logits(reference), depth=LAYERS)


@pytest.mark.parametrize("partition", ["A", "B", "C", "Z"])
def test_partitions_of_the_second_paper(
    partition: str, base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    """Counts of 28 layers in proportion for 6: 6 and 2 become 1 and 0, 8 and 4 become 2 and 1."""
    outer = {"A": {0}, "B": {0, 1, 5}, "C": {0}, "Z": {0, 1, 5}}[partition]
    task, language = (merged_weights(base("llama"), folder) for folder in (math, swahili))
    reference = load_base(base("llama"))

    def from_language(name: str) -> bool:
        layer = int(name.split(".")[2])
        if partition == "A" and "self_attn" in name:
            return True
        return (layer in outer) != (partition == "Z")

    reference.load_state_dict(
        {
            name: weight if ".layers." not in name else (language[name] if from_language(name) else weight)
            for name, weight in task.items()
        }
    )
    composition = adapterswap.Composition(task="math", language="swahili", partition=partition)
    plan = adapterswap.compose(composition, {"math": math, "swahili": swahili})
    model = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    close(logits(model), logits(reference), depth=LAYERS)


def test_embedding_and_head_are_averaged(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    modules = ["embed_tokens", "lm_head", "q_proj"]
    folders = [expert(seed=seed, target_modules=modules, r=rank) for seed, rank in ((5, 8), (6, 4))]
    reference = load_base(base("llama"))
    full = [merged_weights(base("llama"), folder) for folder in folders]
    reference.load_state_dict(algorithm_1(*full, bottom=2, top=1))
    plan = adapterswap.layer_swap(*folders, bottom=2, top=1)
    model = PeftModel.from_pretrained(load_base(base("llama")), adapterswap.write_adapter(plan, tmp_path / "out"))
    close(logits(model), logits(reference), depth=LAYERS)
