"""Text rows on multimodal bases: the language model's layers are trained, and the tower stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refusals import refused
from safetensors.torch import load_file
from tolerances import near
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2AudioConfig, Qwen2Config

from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.kit.errors import FieldError

from .conftest import echo_rows, recipe_maker, word_tokenizer

LAYERS = 3
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
CONFIGS = {
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**SIZES),
        vision_config=CLIPVisionConfig(**VISION, image_size=28, patch_size=14),
        image_token_index=95,
    ),
    "qwen2_audio": lambda: Qwen2AudioConfig(text_config=Qwen2Config(**SIZES), audio_config=AUDIO, audio_token_index=95),
}


@pytest.fixture(scope="module", params=CONFIGS)
def multimodal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multimodal") / request.param
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(CONFIGS[request.param]())
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def by_hand(base: Path, rows: list[dict[str, str]]) -> float:
    """The mean loss of the completions' tokens, one row after the other."""
    model = transformers.AutoModelForMultimodalLM.from_pretrained(base).eval()
    tokenizer = word_tokenizer()
    total, count = 0.0, 0
    for row in rows:
        prompt, answer = (tokenizer(row[key], add_special_tokens=False)["input_ids"] for key in ("question", "answer"))
        labels = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + labels])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum").item()
        count += len(labels)
    return total / count


def test_the_language_model_is_trained_and_the_tower_is_not(multimodal: Path, tmp_path: Path) -> None:
    rows = echo_rows(8)
    recipe = recipe_maker(multimodal, tmp_path)(rows=rows)
    report = train(recipe, out_path=tmp_path / "expert")
    assert report.train_losses[0][1] == near(by_hand(multimodal, rows))

    written = load_file(report.path / "adapter_model.safetensors")
    modules = {name.rpartition(".lora_")[0] for name in written}
    assert len(modules) == LAYERS * 7
    assert all(".language_model.layers." in name for name in modules)
    assert report.trainable_parameters == sum(tensor.numel() for tensor in written.values())


def test_all_weights_are_those_of_the_language_model(multimodal: Path, tmp_path: Path) -> None:
    recipe = recipe_maker(multimodal, tmp_path)(adapter={"method": "none"})
    report = train(recipe, out_path=tmp_path / "model")
    before, after = (load_file(folder / "model.safetensors") for folder in (multimodal, report.path))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("language_model" in name or "lm_head" in name for name in changed)
    assert report.trainable_parameters == sum(
        tensor.numel() for name, tensor in before.items() if "language_model" in name or "lm_head" in name
    )


def test_a_module_of_the_tower_is_not_meant_by_its_end(multimodal: Path, tmp_path: Path) -> None:
    make: Callable[..., TrainRecipe] = recipe_maker(multimodal, tmp_path)
    assert estimate(make(adapter={"target_modules": ["q_proj"]})).trained_modules == LAYERS
    tower_only = "fc1"  # of the vision and of the audio tower
    with refused(FieldError, "adapter.target_modules"):
        estimate(make(adapter={"target_modules": [tower_only]}))


def test_the_config_says_what_peft_adapts(multimodal: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    report = train(recipe_maker(multimodal, tmp_path)(), out_path=tmp_path / "expert")
    config: dict[str, Any] = json.loads((report.path / "adapter_config.json").read_text(encoding="utf-8"))
    model = PeftModel.from_pretrained(
        transformers.AutoModelForMultimodalLM.from_pretrained(multimodal), report.path, is_trainable=False
    )
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert len(adapted) == LAYERS * 7
    assert config["layers_to_transform"] is None
