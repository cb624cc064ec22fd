"""Adapters merged into full weights, against PEFT's merge and against the model that runs the adapters live."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, logits
from peft import PeftModel
from tolerances import close

import adapterswap
from adapterswap.live import LiveComposer, load_experts
from adapterswap.model.loading import quiet_peft
from merging.conftest import ARCHITECTURES, by_peft, equal, loaded, weights

Expert = Callable[..., Path]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_adapter_as_peft_merges_it(
    architecture: str, model: Callable[..., Path], lora: Expert, tmp_path: Path
) -> None:
    adapter, base = lora(architecture), model(architecture)
    merged = adapterswap.merge(adapter, out_path=tmp_path / "out")
    found, wanted = loaded(merged).state_dict(), by_peft(base, adapter)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        close(found[name], tensor, name=name)
    original, result = weights(base), weights(merged)
    untouched = {name for name in original if torch.equal(original[name], result[name])}
    assert len(original) - len(untouched) == len(adapterswap.open_adapter(adapter).modules)


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


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties", "magnitude_prune"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_nonlinear_methods_are_exact_in_full_weights(
    architecture: str, method: str, model: Callable[..., Path], lora: Expert, tmp_path: Path
) -> None:
    """The same plan as a full-rank adapter, made by a full-rank SVD, is equal up to the SVD's rounding."""
    experts = {"math": lora(architecture, seed=1), "swahili": lora(architecture, seed=2)}
    requested = adapterswap.Composition(task="math", language="swahili", method=method, density=0.4)
    plan = adapterswap.compose(requested, experts)
    merged = loaded(adapterswap.merge(plan, out_path=tmp_path / "out"))
    adapter = adapterswap.write_adapter(plan, tmp_path / "adapter", max_rank=64)
    reference = by_peft(model(architecture), adapter)
    for name, tensor in reference.items():
        close(merged.state_dict()[name], tensor, depth=2, name=name)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("architecture", ["gemma", "llama"])
def test_embedding_and_head(
    architecture: str, kind: str, target: str, model: Callable[..., Path], lora: Expert, tmp_path: Path
) -> None:
    """On a tied base PEFT changes only one of the two, so they become separate weights."""
    options = {kind: [target, "q_proj"] if kind == "target_modules" else [target]}
    message = ".*tie_word_embeddings=True.*" if architecture == "gemma" else "nothing is to be ignored"
    adapter = _ignoring(message, lambda: lora(architecture, **options))
    merged = adapterswap.merge(adapter, out_path=tmp_path / "out")
    live = _ignoring(message, lambda: PeftModel.from_pretrained(loaded(model(architecture)), adapter))
    close(logits(loaded(merged)), logits(live), depth=LAYERS)
    held = weights(merged)
    assert "lm_head.weight" in held
    changed = "lm_head.weight" if target == "lm_head" else "model.embed_tokens.weight"
    original = weights(model(architecture))
    assert not torch.equal(held[changed], original.get(changed, original["model.embed_tokens.weight"]))


def _ignoring(message: str, make: Callable[[], Any]) -> Any:
    """PEFT warns of a tied layer in an adapter, which is what these tests are about."""
    with warnings.catch_warnings(), quiet_peft():
        warnings.filterwarnings("ignore", message)
        return make()


def test_gpt2_embedding_and_projections(model: Callable[..., Path], lora: Expert, tmp_path: Path) -> None:
    """An embedding, tied to the head, and Conv1D: both are stored transposed compared with ΔW."""
    message = ".*tie_word_embeddings=True.*"
    adapter = _ignoring(message, lambda: lora("gpt2", target_modules=["wte", "c_attn", "c_proj"]))
    live = _ignoring(message, lambda: PeftModel.from_pretrained(loaded(model("gpt2")), adapter))
    merged = adapterswap.merge(adapter, out_path=tmp_path / "out")
    close(logits(loaded(merged)), logits(live), depth=LAYERS)
    assert torch.equal(weights(merged)["lm_head.weight"], weights(model("gpt2"))["transformer.wte.weight"])


def test_ensured_tying_stays_tied(model: Callable[..., Path], lora: Expert, tmp_path: Path) -> None:
    adapter = lora("gemma", target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    with quiet_peft():
        live = PeftModel.from_pretrained(loaded(model("gemma")), adapter)
    merged = adapterswap.merge(adapter, out_path=tmp_path / "out")
    close(logits(loaded(merged)), logits(live), depth=LAYERS)


def test_names_as_stored_on_the_hub(model: Callable[..., Path], lora: Expert, tmp_path: Path) -> None:
    """GPT-2's own checkpoint stores `h.0.attn.c_attn.weight`, and adapters say `transformer.h.0.attn.c_attn`."""
    from merging.conftest import save_like

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
