"""Pico checkpoints of six architectures, full fine-tunes of them, and the weights of a folder as torch tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import CONFIGS, LAYERS, LLAMA_PROJECTIONS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapterswap.model.loading import quiet_peft

ARCHITECTURES = ["llama", "qwen2", "gpt2", "neox", "gemma", "mixtral"]

_MORE: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma": (transformers.GemmaConfig, {"head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 2}),
}
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

TARGETS = {name: targets for name, (_, _, targets) in CONFIGS.items()}
TARGETS |= {"gemma": LLAMA_PROJECTIONS, "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"]}

State = dict[str, torch.Tensor]


def weights(folder: Path) -> State:
    """Every stored tensor of a checkpoint, in the order of its shards."""
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def save_like(folder: Path, like: Path, state: Mapping[str, torch.Tensor], *, shards: int = 1) -> Path:
    """A checkpoint with other weights: `like`'s small files, and `state` in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in like.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", {"format": "pt"})
        return folder
    names = list(state)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: state[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model("gemma")` is a pico base with a tokenizer file; `model("gemma", seed=1)` a full fine-tune of it."""
    made: dict[str, Path] = {}

    def make(
        architecture: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1
    ) -> Path:
        key = repr((architecture, seed, dtype, shards))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            if not seed and shards == 1 and dtype == torch.float32:
                _save_base(architecture, made[key])
            else:
                generator = torch.Generator().manual_seed(seed)
                base = make(architecture)
                tuned = {
                    name: (tensor + 0.03 * torch.randn(tensor.shape, generator=generator) * bool(seed)).to(dtype)
                    for name, tensor in weights(base).items()
                }
                save_like(made[key], base, tuned, shards=shards)
        return made[key]

    return make


def _save_base(architecture: str, folder: Path) -> None:
    if architecture in CONFIGS:
        config_class, options, _ = CONFIGS[architecture]
    else:
        config_class, more = _MORE[architecture]
        options = _SMALL | more
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_class(vocab_size=96, **options))
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def loaded(folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers loads it, in float32; missing weights are an error."""
    result, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return result.eval()


def equal(one: State, other: State) -> None:
    """The same tensors, bit for bit."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.fixture
def lora(model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`lora("gpt2", seed=1, …)` is a random adapter of the pico base; options are LoraConfig's."""

    def make(architecture: str = "llama", *, seed: int = 1, name: str = "", **options: Any) -> Path:
        settings = {"r": 4, "lora_alpha": 9, "use_rslora": True, "target_modules": TARGETS[architecture]}
        settings |= {"fan_in_fan_out": architecture == "gpt2", "task_type": "CAUSAL_LM"}
        folder = tmp_path / (name or f"expert-{seed}")
        with quiet_peft():
            adapted = get_peft_model(loaded(model(architecture)), LoraConfig(**(settings | options)))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in adapted.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        adapted.save_pretrained(folder, save_embedding_layers=False)
        return folder

    return make


def by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The state dict of base + adapter, merged by PEFT."""
    with quiet_peft():
        merged = PeftModel.from_pretrained(loaded(base), adapter).merge_and_unload()
    return {name: tensor.clone() for name, tensor in merged.state_dict().items()}
