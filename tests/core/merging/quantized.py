"""Quantized bases at sizes that real ones have, and the dense models that transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from pico_models import merged_by_peft, noisy, trained
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

SIDE = 256  # two blocks of 128
SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

State = dict[str, torch.Tensor]
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def sizes(**options: Any) -> dict[str, Any]:
    """The sizes of a small model, all multiples of 128."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": SIDE // 4}
    return {"vocab_size": 96, "hidden_size": SIDE, "intermediate_size": SIDE, "num_hidden_layers": 2} | heads | options


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**sizes(num_hidden_layers=3)),
    "tied": lambda: transformers.LlamaConfig(**sizes(), tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **sizes(), moe_intermediate_size=SIDE, num_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **sizes(), num_local_experts=4, num_experts_per_tok=2, sliding_window=16, max_position_embeddings=64
    ),
}


def saved(kind: str, folder: Path) -> Path:
    """A random model in bfloat16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(torch.bfloat16)
    noisy(model, 0).save_pretrained(folder)
    return folder


def with_settings(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    return folder


def rewritten(folder: Path, change: Callable[[str, torch.Tensor], State], *, shards: int = 1) -> Path:
    """The folder with each tensor replaced by those that `change` makes of it."""
    stored = load_file(folder / "model.safetensors")
    tensors = {key: part for name, tensor in stored.items() for key, part in change(name, tensor).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    places = {key: files[i % shards] for i, key in enumerate(sorted(tensors))}  # scales apart from their weights
    for file in files:
        save_file({key: tensors[key] for key in tensors if places[key] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def in_fp8(folder: Path, *, excluded: tuple[str, ...] = ("lm_head",), shards: int = 1, **settings: Any) -> Path:
    """A base in 8-bit floats, with a scale for each block of 128×128, as DeepSeek and Qwen publish them."""

    def quantize(name: str, weight: torch.Tensor) -> State:
        if not name.endswith("_proj.weight") or any(part in name for part in excluded):
            return {name: weight}
        blocks = weight.float().reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        small = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        return {name: small, f"{name}_scale_inv": scales}

    rewritten(folder, quantize, shards=shards)
    return with_settings(folder, SETTINGS | settings)


def in_mxfp4(folder: Path) -> Path:
    """A gpt-oss whose experts are in 4 bits, with a scale for 32 numbers each, as OpenAI publishes them."""
    generator = torch.Generator().manual_seed(0)

    def quantize(name: str, weight: torch.Tensor) -> State:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: weight}
        experts, into, out = weight.shape
        codes = torch.randint(0, 16, (experts, out, into // 32, 32), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 123, (experts, out, into // 32), generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4), f"{name}_scales": scales}

    rewritten(folder, quantize)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return with_settings(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def dense(folder: Path, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The base as transformers dequantizes it, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            part.quantization_config = dict(part.quantization_config) | {"dequantize": True}
    model: PreTrainedModel = kind.from_pretrained(folder, config=config, dtype="auto")
    return model.float().eval()


def adapter(base: Path, folder: Path, *, seed: int = 1, **options: Any) -> Path:
    """A random adapter of a quantized base, trained by PEFT on its dense form."""
    config = LoraConfig(**({"r": 4, "lora_alpha": 9, "use_rslora": True, "task_type": "CAUSAL_LM"} | options))
    model = dense(base)
    model.config.tie_word_embeddings = False  # of which PEFT warns
    path = trained(model, config, folder, seed=seed, save_embedding_layers=False)
    config_path = path / "adapter_config.json"
    content = json.loads(config_path.read_text()) | {"base_model_name_or_path": str(base)}
    config_path.write_text(json.dumps(content))
    return path


def merged(base: Path, expert: Path) -> State:
    """The dense base + the adapter, merged by PEFT in float32; a tied head gets a weight of its own first."""
    model = dense(base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return merged_by_peft(model, expert)
