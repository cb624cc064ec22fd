"""Adapters cut out of fine-tunes of vision-language models, and of text-only ones of the same language models.

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
from core.matrix.architectures import ARCHITECTURES
from pico_models import edit_json, in_peft, merged_by_peft
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close, near, tolerance

from adapterswap.kit.errors import BaseModelError
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
    "gemma3": ARCHITECTURES["gemma3"].config,
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
    "llama4", "qwen3_5", "gemma3",
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
        model_class = transformers.AutoModelForCausalLM if role.endswith("-text") else self.model_class
        return model_class.from_pretrained(self.folder / role, dtype=torch.float32).eval()


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
    adapted = in_peft(world.load("base-new"), out)
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
    merged = merged_by_peft(world.load("base"), tmp_path / "out")
    for key, tensor in merged.items():
        wanted = world.full if key.removesuffix(".weight") in names else world.base
        close(tensor, wanted[key], depth=4, name=key)


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize(("full", "base"), [("full-text", "base"), ("full-text", "base-new"), ("full", "base-text")])
def test_peft_restores_the_language_models_weights(
    full: str, base: str, embeddings: bool, worlds: Callable[[str], World], tmp_path: Path
) -> None:
    """At full rank: equals the base with the fine-tune's matrices, in all weights and in the logits of a text."""
    world = worlds("gemma3")
    result = extract(world.folder / full, world.folder / base, tmp_path / "out", rank=48, embeddings=embeddings)
    names = {module.name for module in result.modules}
    assert len({name.rpartition(".")[2] for name in names}) == 7 + embeddings
    reference, tuned = world.load(base), world.load("full-text").state_dict()
    own = {name if base == "base-text" else world.inside(name): tensor for name, tensor in tuned.items()}
    untouched = answers(reference)
    for name in names:
        reference.get_submodule(name).weight.data.copy_(own[f"{name}.weight"])
    adapted = in_peft(world.load(base), tmp_path / "out")
    close(answers(adapted), answers(reference), depth=10 * LAYERS)
    assert float((answers(reference) - untouched).abs().max()) > 0.01
    if not embeddings:  # PEFT merges a tied embedding's LoRA twice
        close(adapted.merge_and_unload().state_dict(), reference.state_dict(), depth=2)
    assert verify(tmp_path / "out", {"full": world.folder / full}, base_model=str(world.folder / base)).equal


def test_a_mixtures_experts_are_matched_one_by_one(tmp_path: Path) -> None:
    """Files hold each expert, memory holds all in one parameter; the base's text class is the text-only one."""
    text = {
        **TEXT, "head_dim": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    torch.manual_seed(0)
    base = transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(text_config=text, vision_config={**vision, "out_hidden_size": 32})
    )
    base.save_pretrained(tmp_path / "seeing")
    language = transformers.Qwen3_5MoeForCausalLM(base.config.text_config)
    own = base.state_dict()

    def inside(name: str) -> str:
        return name if name.startswith("lm_head") else f"model.language_model.{name.removeprefix('model.')}"

    language.load_state_dict({name: own[inside(name)] for name in language.state_dict()})
    language.save_pretrained(tmp_path / "reading")
    changed(language, 1).save_pretrained(tmp_path / "full")
    assert any(".experts.3." in name for name in load_file(tmp_path / "full" / "model.safetensors"))
    found = [
        extract(tmp_path / "full", tmp_path / name, tmp_path / f"{name}-out", rank=4) for name in ("seeing", "reading")
    ]
    changes = [deltas(tmp_path / f"{name}-out") for name in ("seeing", "reading")]
    assert changes[0].keys() == {inside(name) for name in changes[1]}
    assert all(torch.equal(changes[0][inside(name)], delta) for name, delta in changes[1].items())
    assert [result.lost_by_reason["experts and routers"][0] for result in found] == [26, 26]
    classes = {
        "seeing": transformers.Qwen3_5MoeForConditionalGeneration, "reading": transformers.Qwen3_5MoeForCausalLM
    }  # fmt: skip
    one, other = (
        answers(in_peft(model_class.from_pretrained(tmp_path / name), tmp_path / f"{name}-out"))
        for name, model_class in classes.items()
    )
    assert torch.equal(one, other)


def test_a_tower_that_the_base_lacks_is_reported(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """Each of its tensors counts in full; a tower that only the base has counts as unchanged."""
    world = worlds("gemma3")
    result = extract(world.folder / "full", world.folder / "base-text", tmp_path / "out", rank=4)
    tower = {each.name: each.norm for each in result.lost if each.reason == "not in the base"}
    assert tower.keys() == {name for name in world.full if "vision" in name or "multi_modal" in name}
    for name, norm in tower.items():
        assert norm == near(float(world.full[name].double().norm()))
    sources = {"full": world.folder / "full"}
    assert verify(tmp_path / "out", sources, base_model=str(world.folder / "base-text")).equal
    other = extract(world.folder / "full-text", world.folder / "base", tmp_path / "other", rank=4)
    assert not [each for each in other.lost if "language_model" not in each.name]


def without(name: str, tensor: torch.Tensor | None = None) -> Callable[[Path], None]:
    """Remove a tensor of the fine-tune, or put another in its place."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name, None)
        tensors |= {} if tensor is None else {name: tensor}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def saved_anew(model_class: Any, config: Any) -> Callable[[Path], None]:
    return lambda folder: model_class(config).save_pretrained(folder)


INSIDE, Q = "model.language_model.", "self_attn.q_proj.weight"
DEEPER = {**TEXT, "vocab_size": 64, "num_hidden_layers": 6, "head_dim": 8}
# The fine-tune and its base, what happens to the fine-tune, and what the refusal names.
MISFITS: dict[str, tuple[str, str, Callable[[Path], None], list[str]]] = {
    "missing": (
        "full-text", "base", without(f"model.layers.0.{Q}"), [f"{INSIDE}layers.0.{Q}", f"model.layers.0.{Q}"]
    ),
    "another shape": (
        "full-text", "base", without(f"model.layers.0.{Q}", torch.ones(16, 32)),
        [f"model.layers.0.{Q}", f"{INSIDE}layers.0.{Q}"],
    ),
    "unknown": (
        "full-text", "base", without("model.layers.1.extra.weight", torch.ones(2, 2)),
        ["model.layers.1.extra.weight", f"{INSIDE}layers.1.extra.weight"],
    ),
    "a missing norm": (
        "full-text", "base", without("model.norm.weight"), [f"{INSIDE}norm.weight", "model.norm.weight"]
    ),
    "a multimodal one without a layer's weight": (
        "full", "base-text", without(f"language_model.model.layers.1.{Q}"),
        [f"model.layers.1.{Q}", f"{INSIDE}layers.1.{Q}"],
    ),
    "deeper": (
        "full-text", "base", saved_anew(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**DEEPER)),
        ["model.layers.5.", f"{INSIDE}layers.5."],
    ),
    "another language model": (  # with the same names and shapes
        "full-text", "base", saved_anew(transformers.LlamaForCausalLM, LLAMA(**TEXT)), ["llama", "gemma3"]
    ),
    "another multimodal model with this language model": (
        "full", "base", lambda folder: edit_json(folder / "config.json", model_type="gemma3n"), ["gemma3n", "gemma3 "]
    ),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_fine_tune_without_a_certain_counterpart_is_refused(
    misfit: str, worlds: Callable[[str], World], tmp_path: Path
) -> None:
    role, base, damage, named = MISFITS[misfit]
    folder = worlds("gemma3").folder
    full = shutil.copytree(folder / role, tmp_path / "full")
    damage(full)
    with refused(BaseModelError, "base_model") as raised:
        extract(full, folder / base, tmp_path / "out", rank=2)
    assert all(name in str(raised.value) for name in named)
    assert not (tmp_path / "out").exists()


def test_the_card_names_the_class_that_loads_the_base(
    worlds: Callable[[str], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds("llava")
    monkeypatch.setattr("adapterswap.core.model.sources.Reference.public_name", "org/llava")
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
