"""Extracted adapters in PEFT: they restore the fine-tune on every architecture, and compose like other experts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from conftest import LAYERS, load_base, logits, merged_weights, random_model, weights
from peft import PeftModel
from refusals import refused
from safetensors.torch import save_file
from tolerances import close, near

import adapterswap
from adapterswap.kit.errors import UnsupportedError
from adapterswap.tools.extraction import extract

from .conftest import Checkpoint, changed, deltas

CUT = {"llama": 42, "qwen2": 42, "gpt2": 24, "neox": 24, "gemma": 42, "mixtral": 24}
LOST = {
    "llama": {"norms": 13, "embeddings and heads": 2},
    "qwen2": {"norms": 13, "embeddings and heads": 2, "biases": 18},
    "gpt2": {"norms": 13, "embeddings and heads": 2, "biases": 37},
    "neox": {"norms": 13, "embeddings and heads": 2, "biases": 37},
    "gemma": {"norms": 13, "embeddings and heads": 1},
    "mixtral": {"norms": 13, "embeddings and heads": 2, "experts and routers": 42},
}


@pytest.mark.parametrize("architecture", CUT)
def test_peft_restores_the_fine_tunes_weights(architecture: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """At full rank: extracted modules equal the fine-tune's, others the base's, and the difference is reported."""
    full, base = checkpoint(architecture, 1), checkpoint(architecture)
    result = extract(full, base, tmp_path / "out", rank=48)
    assert len(result.modules) == CUT[architecture]
    assert {reason: count for reason, (count, _) in result.lost_by_reason.items()} == LOST[architecture]
    merged = merged_weights(base, tmp_path / "out")
    ours, theirs = load_base(full).state_dict(), load_base(base).state_dict()
    cut = {f"{module.name}.weight" for module in result.modules}
    assert cut < merged.keys()
    for name, tensor in merged.items():
        if name in cut:
            close(tensor, ours[name], depth=2, name=name)
        else:
            assert torch.equal(tensor, theirs[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", CUT)
def test_omitted_modules_are_measured(architecture: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The shares add up to the change of all stored tensors."""
    full, base = checkpoint(architecture, 1), checkpoint(architecture)
    result = extract(full, base, tmp_path / "out", rank=1)
    ours, theirs = weights(full), weights(base)
    whole = sum(float((ours[key].double() - theirs[key].double()).square().sum()) for key in ours)
    assert result.norm**2 + sum(each.norm**2 for each in result.lost) == near(whole)
    assert result.lost_share**2 == near(1 - result.norm**2 / whole, scale=1)
    assert sum(share**2 for _, share in result.lost_by_reason.values()) == pytest.approx(result.lost_share**2)


@pytest.mark.parametrize("architecture", ["llama", "neox"])
def test_embeddings_and_heads(architecture: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, base = checkpoint(architecture, 1), checkpoint(architecture)
    result = extract(full, base, tmp_path / "out", rank=48, embeddings=True)
    assert len(result.modules) == CUT[architecture] + 2
    assert "embeddings and heads" not in result.lost_by_reason
    merged, ours = merged_weights(base, tmp_path / "out"), load_base(full).state_dict()
    outside = [f"{module.name}.weight" for module in result.modules if module.layer is None]
    assert len(outside) == 2
    for name in outside:
        close(merged[name], ours[name], depth=2, name=name)


def test_tied_embeddings_change_on_both_sides(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = changed(random_model("gemma"), 1, only=lambda name: "norm" not in name)
    model.save_pretrained(tmp_path / "full")
    extract(tmp_path / "full", checkpoint("gemma"), tmp_path / "out", rank=48, embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PEFT 0.21 uses a name that transformers 5.23 has renamed, when it loads an embedding's LoRA.
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        adapted = PeftModel.from_pretrained(load_base(checkpoint("gemma")), tmp_path / "out")
    close(logits(adapted), logits(model.eval()), depth=LAYERS)
    assert set(deltas(tmp_path / "out")) > {"model.embed_tokens", "lm_head"}


def test_a_tied_embedding_that_peft_does_not_know_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with refused(UnsupportedError, "embeddings", match=r"lm_head .* transformer\.wte"):
        extract(checkpoint("gpt2", 1), checkpoint("gpt2"), tmp_path / "out", rank=4, embeddings=True)


def test_keys_without_the_models_prefix(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As the Hub's GPT-2 is stored: `h.0.attn.c_attn.weight`. The adapter has the names of the model in memory."""
    bare = tmp_path / "bare"
    bare.mkdir()
    stripped = {key.removeprefix("transformer."): value for key, value in weights(checkpoint("gpt2")).items()}
    save_file(stripped, bare / "model.safetensors", metadata={"format": "pt"})
    (bare / "config.json").write_text((checkpoint("gpt2") / "config.json").read_text())
    extract(checkpoint("gpt2", 1), bare, tmp_path / "out", rank=4)
    extract(checkpoint("gpt2", 1), checkpoint("gpt2"), tmp_path / "whole", rank=4)
    one, other = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("out", "whole"))
    assert one == other
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["fan_in_fan_out"] is True


def test_shards_change_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load_base(checkpoint("llama", 1)).save_pretrained(tmp_path / "full", max_shard_size="40KB")
    assert len(list((tmp_path / "full").glob("*.safetensors"))) > 3
    for name, full in (("one", checkpoint("llama", 1)), ("many", tmp_path / "full")):
        extract(full, checkpoint("llama"), tmp_path / name, rank=4)
    one, many = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "many"))
    assert one == many


def test_extracted_experts_compose(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The layer swap of two extracted experts is the layer swap of the full weights' matrices."""
    base = checkpoint("llama")
    for seed, name in ((1, "math"), (2, "swahili")):
        extract(checkpoint("llama", seed), base, tmp_path / name, rank=32)
    plan = adapterswap.layer_swap(task=tmp_path / "math", language=tmp_path / "swahili", bottom=2, top=1)
    merged = merged_weights(base, adapterswap.write_adapter(plan, tmp_path / "out"))
    experts = {name: load_base(checkpoint("llama", seed)).state_dict() for seed, name in ((1, "math"), (2, "swahili"))}
    for name, tensor in merged.items():
        if "_proj" in name:
            owner = "swahili" if int(name.split(".")[2]) in (0, 1, 5) else "math"
            close(tensor, experts[owner][name], depth=2, name=name)


def test_selected_layers_and_modules(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The rest is reported as not selected, and the adapter is a slice: composing needs only its layers."""
    full, base = checkpoint("llama", 1), checkpoint("llama")
    result = extract(full, base, tmp_path / "out", rank=2, layers="0-1,5", modules=["attention", "down_proj"])
    assert {module.layer for module in result.modules} == {0, 1, 5}
    assert {module.name.rpartition(".")[2] for module in result.modules} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "down_proj"
    }  # fmt: skip
    assert result.lost_by_reason["not selected"][0] == 42 - 15
    adapter = adapterswap.open_adapter(tmp_path / "out")
    assert adapter.kept_layers is not None
    assert adapter.kept_layers.by_stack == {None: {0, 1, 5}}
    extract(checkpoint("llama", 2), base, tmp_path / "other", rank=2)
    with pytest.raises(adapterswap.AdapterswapError, match="layer"):
        adapterswap.layer_swap(task=tmp_path / "out", language=tmp_path / "other", bottom=1, top=1)


def test_modules_that_did_not_change_are_left_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = changed(random_model("llama"), 1, only=lambda name: ".layers.2." in name)
    model.save_pretrained(tmp_path / "full")
    result = extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    assert {module.layer for module in result.modules} == {2}
    assert len(result.unchanged) == 35
    assert {each.name for each in result.lost} == {
        "model.layers.2.input_layernorm.weight", "model.layers.2.post_attention_layernorm.weight"
    }  # fmt: skip
    assert set(deltas(tmp_path / "out")) == {module.name for module in result.modules}


def test_a_larger_vocabulary_is_reported(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = changed(random_model("llama"), 1)
    model.resize_token_embeddings(100, mean_resizing=False)
    model.save_pretrained(tmp_path / "full")
    result = extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    assert result.lost_by_reason["vocabulary"][0] == 2
    ours, theirs = weights(tmp_path / "full"), weights(checkpoint("llama"))
    for each in result.lost:
        if each.reason == "vocabulary":
            grown = ours[each.name].double().clone()
            grown[:96] -= theirs[each.name]
            assert each.norm == near(float(grown.norm()))
    with refused(UnsupportedError, "embeddings", match=r"\[100, 32\] in full"):
        extract(tmp_path / "full", checkpoint("llama"), tmp_path / "two", rank=2, embeddings=True)
