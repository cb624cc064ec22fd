"""Adapters cut out of fine-tunes of vision-language models, whose classes AutoModelForCausalLM does not know.

Both checkpoints may have the names of the Hub's files (transformers 4) or of the model in memory (transformers 5). The
reference is plain torch: the base, with W_full in place of W_base wherever the adapter says that it has ΔW.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matrix.architectures import ARCHITECTURES
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close, tolerance

from adapterswap.errors import BaseModelError
from adapterswap.model.loading import quiet_peft
from adapterswap.tools.extraction import extract
from adapterswap.tools.verification import verify

from .conftest import changed, deltas

LAYERS = 2
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
BLOCKS = {
    "depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "spatial_merge_size": 2,
}  # fmt: skip
LISTENING = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8,
    "max_source_positions": 20,
}  # fmt: skip


def _llava(kind: str, text: Any, vision: Any, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        towers = {"text_config": text(**TEXT), "vision_config": vision(**VISION)}
        return getattr(transformers, f"{kind}Config")(**towers, image_token_index=95, **options)

    return make


CLIP, SIGLIP = transformers.CLIPVisionConfig, transformers.SiglipVisionConfig
LLAMA, MISTRAL, QWEN2 = transformers.LlamaConfig, transformers.MistralConfig, transformers.Qwen2Config
GRID = {"image_grid_pinpoints": [[8, 16]]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llava": _llava("Llava", LLAMA, CLIP),
    "llava_tied": _llava(
        "Llava", lambda **text: QWEN2(**text, tie_word_embeddings=True), CLIP, tie_word_embeddings=True
    ),
    "llava_next": _llava("LlavaNext", MISTRAL, CLIP, **GRID),
    "llava_onevision": _llava("LlavaOnevision", QWEN2, SIGLIP, video_token_index=94, **GRID),
    "paligemma": _llava("PaliGemma", lambda **text: transformers.GemmaConfig(**text, head_dim=8), SIGLIP,
                        projection_dim=32),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=MISTRAL(**TEXT, head_dim=8), image_token_index=95, tie_word_embeddings=False,
        vision_config=transformers.PixtralVisionConfig(**VISION, head_dim=8)),
    "internvl": lambda: transformers.InternVLConfig(
        text_config=QWEN2(**TEXT), vision_config={**VISION, "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=95, tie_word_embeddings=False),
    "qwen2_vl": ARCHITECTURES["qwen2_vl"].config,
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={**BLOCKS, "window_size": 16, "fullatt_block_indexes": [0]},
        image_token_id=95, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92),
    "idefics3": lambda: transformers.Idefics3Config(
        text_config=LLAMA(**TEXT), vision_config=VISION, scale_factor=2, image_token_id=95, pad_token_id=0),
    "smolvlm": lambda: transformers.SmolVLMConfig(
        text_config=LLAMA(**TEXT), vision_config=VISION, scale_factor=2, image_token_id=95, pad_token_id=0),
    "mllama": ARCHITECTURES["mllama"].config,
    "llama4": lambda: transformers.Llama4Config(
        text_config={**TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1],
                     "num_experts_per_tok": 1},
        vision_config={**VISION, "intermediate_size": 64, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 16,
                       "projector_input_dim": 16, "projector_output_dim": 16},
        image_token_index=95, boi_token_index=94, eoi_token_index=93),
    "omni": lambda: transformers.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={**BLOCKS, "window_size": 16, "fullatt_block_indexes": [0]},
        audio_config={**LISTENING, "output_dim": 32, "n_window": 5},
        audio_token_index=91, image_token_index=95, video_token_index=94),
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config={**TEXT, "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                     "layer_types": ["linear_attention", "full_attention"]},
        vision_config=BLOCKS),
}  # fmt: skip
# These have a text-only class with the type of the multimodal config's language model.
WITH_TEXT_CLASS = (
    "llava", "llava_tied", "llava_next", "llava_onevision", "paligemma", "mistral3", "internvl", "idefics3", "smolvlm",
    "llama4", "qwen3_5",
)  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForMultimodalLM.from_config(CONFIGS[name]())


def language_prefix(model: Any) -> str:
    """The prefix of the language model's parameters; that of the text-only class is `model.`."""
    names = [name for name in model.state_dict() if ".layers.0." in name or ".layers.1." in name]
    return next(name.partition("layers.")[0] for name in names if "language_model" in name or "text_model" in name)


class World:
    """A base and a fine-tune of everything in it, each under the Hub's names and (`-new`) those in memory."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        base, full = build(name), changed(build(name), 1)
        self.model_class = type(base)
        for role, model in (("base", base), ("full", full)):
            model.save_pretrained(folder / role)
            shutil.copytree(folder / role, folder / f"{role}-new")
            own = dict(model.named_parameters())  # of tied parameters only the first
            weights = {key: tensor.detach().clone() for key, tensor in own.items()}
            save_file(weights, folder / f"{role}-new" / "model.safetensors", metadata={"format": "pt"})
        self.base, self.full = base.state_dict(), full.state_dict()
        self.prefix = language_prefix(base)
        if name in WITH_TEXT_CLASS:
            for role, weights in (("base-text", self.base), ("full-text", self.full)):
                text = transformers.AutoModelForCausalLM.from_config(base.config.get_text_config())
                text.load_state_dict({key: weights[self.inside(key)] for key in text.state_dict()})
                text.save_pretrained(folder / role)

    def inside(self, name: str) -> str:
        """The multimodal name of a text-only model's parameter or module."""
        if name.startswith("lm_head"):
            return name if name in self.base or f"{name}.weight" in self.base else f"language_model.{name}"
        return self.prefix + name.removeprefix("model.")

    def load(self, role: str) -> Any:
        return self.model_class.from_pretrained(self.folder / role, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    return cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 27).reshape(2, 12) * 7 % 60, use_cache=False).logits
    return logits


def check_deltas(folder: Path, base: dict[str, torch.Tensor], full: dict[str, torch.Tensor]) -> set[str]:
    """Compare every ΔW in an adapter with W_full - W_base; returns the modules' names."""
    found = deltas(folder)
    keys = load_file(folder / "adapter_model.safetensors").keys()
    for name, delta in found.items():
        expected = full[f"{name}.weight"].double() - base[f"{name}.weight"].double()
        if f"base_model.model.{name}.lora_embedding_A" in keys:
            expected = expected.T
        close(delta, expected, scale=2 * float(expected.abs().max()), depth=4, name=name)
    return set(found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_multimodal_fine_tune(name: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    """Names of either version on either side give the same adapter; PEFT loads it and computes with W_full."""
    world = worlds(name)
    written = set()
    for full, base in (("full", "base"), ("full", "base-new"), ("full-new", "base")):
        out = tmp_path / f"{full}-{base}"
        result = extract(world.folder / full, world.folder / base, out, rank=64)
        written.add((out / "adapter_model.safetensors").read_bytes())
        assert {lost.reason for lost in result.lost} >= {"norms", "towers", "embeddings and heads"}
    assert len(written) == 1
    names = check_deltas(out, world.base, world.full)
    assert all(module.startswith(world.prefix) for module in names)
    assert {module.rpartition(".")[2] for module in names} >= {"q_proj", "o_proj"}
    reference = world.load("base")
    untouched = answers(reference)
    for module in names:
        reference.get_submodule(module).weight.data.copy_(world.full[f"{module}.weight"])
    with quiet_peft():
        adapted = PeftModel.from_pretrained(world.load("base-new"), out).eval()
    close(answers(adapted), answers(reference), depth=4 * LAYERS)
    change = float((answers(reference) - untouched).abs().max())
    assert change > 100 * tolerance(untouched, depth=4 * LAYERS)
    assert verify(out, {"full": world.folder / "full-new"}, base_model=str(world.folder / "base")).equal


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WITH_TEXT_CLASS)
def test_a_text_only_fine_tune(name: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    """In both directions the change of the language model is the same; names are the base's."""
    world = worlds(name)
    for role, full, base in (
        ("both", "full", "base"), ("text", "full-text", "base"), ("text-new", "full-text", "base-new"),
        ("seeing", "full", "base-text"), ("seeing-new", "full-new", "base-text"),
    ):  # fmt: skip
        extract(world.folder / full, world.folder / base, tmp_path / role, rank=64)
    expected = deltas(tmp_path / "both")
    for role in ("text", "text-new", "seeing", "seeing-new"):
        found = {
            world.inside(module) if "seeing" in role else module: d for module, d in deltas(tmp_path / role).items()
        }
        assert found.keys() == expected.keys(), role
        assert all(torch.equal(found[module], delta) for module, delta in expected.items()), role


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "omni"])
def test_towers_with_embeddings(name: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    """`embeddings` selects every matrix outside the layers, and PEFT merges all of them."""
    world = worlds(name)
    result = extract(world.folder / "full", world.folder / "base", tmp_path / "out", rank=100, embeddings=True)
    assert "towers" not in result.lost_by_reason
    names = check_deltas(tmp_path / "out", world.base, world.full)
    assert any("vis" in module for module in names)
    with quiet_peft():
        merged = PeftModel.from_pretrained(world.load("base"), tmp_path / "out").merge_and_unload().state_dict()
    for key, tensor in merged.items():
        wanted = world.full if key.removesuffix(".weight") in names else world.base
        close(tensor, wanted[key], depth=4, name=key)


def test_the_card_names_the_class_that_loads_the_base(
    worlds: Callable[[str], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds("llava")
    monkeypatch.setattr("adapterswap.tools.extraction.public_name", lambda name: "org/llava")
    extract(world.folder / "full", world.folder / "base", tmp_path / "out", rank=1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'LlavaForConditionalGeneration.from_pretrained("org/llava")' in card
    assert "AutoModelForCausalLM" not in card


def test_a_config_that_leaves_out_what_is_the_default(tmp_path: Path) -> None:
    """llava-1.5's `text_config` has no number of layers: transformers takes Llama's default."""
    text = {**TEXT, "num_hidden_layers": 32, "hidden_size": 8, "intermediate_size": 8}
    config = transformers.LlavaConfig(text_config=LLAMA(**text), vision_config=CLIP(**VISION), image_token_index=95)
    model = transformers.LlavaForConditionalGeneration(config)
    for role in ("base", "full"):
        (changed(model, 1) if role == "full" else model).save_pretrained(tmp_path / role)
        path = tmp_path / role / "config.json"
        content = json.loads(path.read_text())
        del content["text_config"]["num_hidden_layers"]
        path.write_text(json.dumps(content))
    result = extract(tmp_path / "full", tmp_path / "base", tmp_path / "out", rank=1, layers="31")
    assert {module.layer for module in result.modules} == {31}
    assert json.loads((tmp_path / "out" / "adapterswap.json").read_text())["num_layers"] == 32


def test_a_fine_tune_of_an_unknown_class_is_named(worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds("llava")
    shutil.copytree(world.folder / "full", tmp_path / "full")
    path = tmp_path / "full" / "config.json"
    path.write_text(path.read_text().replace("LlavaForConditionalGeneration", "LlavaLlamaForCausalLM"))
    with refused(BaseModelError, "full", match="LlavaLlamaForCausalLM"):
        extract(tmp_path / "full", world.folder / "base", tmp_path / "out", rank=1)
