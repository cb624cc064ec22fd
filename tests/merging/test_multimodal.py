"""Full weights of multimodal models, whose files have other names than the model in memory."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from refusals import refused
from safetensors import safe_open
from safetensors.torch import save_file
from tolerances import close

import adapterswap
from adapterswap.errors import BaseModelError, ExpertError
from adapterswap.model.loading import quiet_peft

LAYERS = 3
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, **TOKENS,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
MODELS: dict[str, tuple[type, transformers.PretrainedConfig]] = {
    "gemma3": (
        transformers.Gemma3ForConditionalGeneration,
        transformers.Gemma3Config(
            text_config={**TEXT, "head_dim": 8}, vision_config=VISION, image_token_index=95, boi_token_index=94,
            eoi_token_index=93, mm_tokens_per_image=4,
        ),
    ),
    "llava": (
        transformers.LlavaForConditionalGeneration,
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT), vision_config=transformers.CLIPVisionConfig(**VISION),
            image_token_index=95,
        ),
    ),
}  # fmt: skip


def test_full_checkpoints_with_names_of_two_versions(tmp_path: Path) -> None:
    """They are refused, and the remedy works: transformers saves all of them under its own names."""
    model_class, config = MODELS["llava"]
    models = {}
    for seed, name in enumerate(("base", "one", "other")):
        torch.manual_seed(seed)
        models[name] = model_class(config)
        models[name].save_pretrained(tmp_path / name)
    weights = {key: tensor.clone() for key, tensor in models["one"].state_dict().items()}
    save_file(weights, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    experts = {"mm": tmp_path / "one", "sw": tmp_path / "other"}

    def merged(base: Path) -> Path:
        composition = adapterswap.Composition(
            task=("mm",), language=("sw",), bottom=1, top=0, norms="layer", base_model=str(base)
        )
        return adapterswap.merge(adapterswap.compose(composition, experts), base, out_path=tmp_path / "out")

    with refused(ExpertError, match="save_original_format=False"):
        merged(tmp_path / "base")
    with refused(BaseModelError, "base_model", match="save_original_format=False"):
        adapterswap.analyze(experts, base_model=tmp_path / "base")
    for name in models:
        model_class.from_pretrained(tmp_path / name).save_pretrained(
            tmp_path / f"{name}-again", save_original_format=False
        )
    experts = {"mm": tmp_path / "one-again", "sw": tmp_path / "other-again"}
    result = model_class.from_pretrained(merged(tmp_path / "base-again")).state_dict()
    for name, tensor in models["one"].state_dict().items():
        layer = re.search(r"language_model\.layers\.(\d)\.", name)
        other = models["other"].state_dict()[name]
        close(result[name], (tensor + other) / 2 if layer is None else other if layer[1] == "0" else tensor, name=name)
    assert len(adapterswap.analyze(experts, base_model=tmp_path / "base-again").changes) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_a_swap_of_multimodal_experts(kind: str, tmp_path: Path) -> None:
    """Layers of the language model are swapped; the vision tower and the embedding are averaged; the head stays."""
    model_class, config = MODELS[kind]
    torch.manual_seed(0)
    base = tmp_path / "base"
    model_class(config).save_pretrained(base)
    with safe_open(base / "model.safetensors", "pt") as file:
        assert any(key.startswith("language_model.model.layers.") for key in file.keys())  # noqa: SIM118

    def loaded(folder: Path) -> Any:
        return model_class.from_pretrained(folder, dtype=torch.float32).eval()

    deltas = []
    for seed, name in enumerate(("task", "language")):
        with quiet_peft(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            targets = ["q_proj", "down_proj", "embed_tokens"]
            adapted = get_peft_model(loaded(base), LoraConfig(r=3, lora_alpha=5, target_modules=targets))
            generator = torch.Generator().manual_seed(seed)
            for key, parameter in adapted.named_parameters():
                if "lora_" in key:
                    parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
            adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
            again = PeftModel.from_pretrained(loaded(base), tmp_path / name)
        deltas.append({
            f"{key.removeprefix('base_model.model.')}.weight": module.get_delta_weight("default").detach()
            for key, module in again.named_modules() if isinstance(module, LoraLayer)
        })  # fmt: skip
    plan = adapterswap.layer_swap(tmp_path / "task", tmp_path / "language", bottom=1, top=1)
    merged = loaded(adapterswap.merge(plan, base, out_path=tmp_path / "out")).state_dict()
    task, language = deltas
    changed = {*task, *language}
    assert any("vision" in name for name in changed)
    for name, tensor in loaded(base).state_dict().items():
        if name not in changed:
            assert torch.equal(merged[name], tensor), name
            continue
        layer = re.search(r"language_model\.layers\.(\d)\.", name)
        owner = None if layer is None else task if layer[1] == "1" else language
        wanted = (task[name] + language[name]) / 2 if owner is None else owner[name]
        close(merged[name], tensor + wanted, name=name)
