"""Adapters merged into full weights, against PEFT's merge and against the model that runs the adapters live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, logits, save_like, weights
from tolerances import close

import adapterswap
from adapterswap.engines.live import LiveComposer, load_experts
from core.merging.conftest import equal, loaded

Expert = Callable[..., Path]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "composition",
    [
        {"bottom": 2, "top": 1, "bottom_transition": 1},
        {"method": "soup", "task_weight": 0.3},
        {"method": "soup", "weights": "magnitude"},
        {"method": "slerp", "task_weight": 2},
        {"method": "task_arithmetic", "scale": 0.7},
        {"bottom": 2, "top": 1, "row_threshold": 0.012},
        {"partition": "A"},
    ],
    ids=str,
)
def test_merged_weights_equal_the_live_model(
    composition: dict[str, Any], architecture: str, model: Callable[..., Path], lora: Expert, tmp_path: Path
) -> None:
    experts = {"math": lora(architecture, seed=1), "swahili": lora(architecture, seed=2, r=3, use_rslora=False)}
    requested = adapterswap.Composition(task="math", language="swahili", **composition)
    plan = adapterswap.compose(requested, experts)
    merged = loaded(adapterswap.merge(plan, out_path=tmp_path / "out"))
    folder = adapterswap.write_adapter(plan, tmp_path / "adapter")
    through_adapter = loaded(adapterswap.merge(folder, model(architecture), out_path=tmp_path / "through"))
    close(logits(merged), logits(through_adapter), depth=LAYERS)
    if "row_threshold" not in composition and composition.get("weights") != "magnitude":
        live = load_experts(loaded(model(architecture)), plan)
        with LiveComposer(live).use(plan):
            close(logits(merged), logits(live), depth=LAYERS)


def test_names_as_stored_on_the_hub(model: Callable[..., Path], lora: Expert, tmp_path: Path) -> None:
    """GPT-2's own checkpoint stores `h.0.attn.c_attn.weight`, and adapters say `transformer.h.0.attn.c_attn`."""
    base = model("gpt2")
    short = {name.removeprefix("transformer."): tensor for name, tensor in weights(base).items()}
    stripped = save_like(tmp_path / "stripped", base, short)
    adapter = lora("gpt2")
    one = weights(adapterswap.merge(adapter, base, out_path=tmp_path / "one"))
    two = weights(adapterswap.merge(adapter, stripped, out_path=tmp_path / "two"))
    equal(two, {name.removeprefix("transformer."): tensor for name, tensor in one.items()})


def test_bf16_is_rounded_once(model: Callable[..., Path], lora: Expert, tmp_path: Path) -> None:
    """Each number is the float64 result rounded to bfloat16, except for ties that float32 rounds differently."""
    base = model(dtype=torch.bfloat16)
    plan = adapterswap.soup(lora(seed=1), lora(seed=2), base_model=str(base))
    merged = weights(adapterswap.merge(plan, str(base), out_path=tmp_path / "out"))
    original = weights(base)
    factors = [{k: t.double() for k, t in weights(tmp_path / f"expert-{seed}").items()} for seed in (1, 2)]
    wrong = total = 0
    for name, tensor in original.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in factors[0]:
            assert torch.equal(merged[name], tensor)
            continue
        deltas = [9 / 2 * f[f"{key}.lora_B.weight"] @ f[f"{key}.lora_A.weight"] for f in factors]
        truth = tensor.double() + (deltas[0] + deltas[1]) / 2
        wrong += int((merged[name] != truth.bfloat16()).sum())
        total += tensor.numel()
    assert wrong <= total // 1000
