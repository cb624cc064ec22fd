"""Random adapters and models of real shapes, for timing: their numbers mean nothing, their sizes do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def llama_projections(hidden: int, intermediate: int, kv: int) -> dict[str, tuple[int, int]]:
    """out and in features of the projections of a Llama layer."""
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def random_adapter(
    folder: Path,
    *,
    seed: int,
    rank: int,
    layers: int = 32,
    shapes: dict[str, tuple[int, int]] | None = None,
    base_model: str = "meta-llama/Llama-3.1-8B",
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """An rsLoRA on all projections, by default of Llama-3.1-8B's shape (336 MB at rank 64)."""
    shapes = shapes or llama_projections(4096, 14336, 1024)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (out, into) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, into, generator=generator) / into**0.5).to(dtype)
            tensors[f"{key}.lora_B.weight"] = (torch.randn(out, rank, generator=generator) * 0.02).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def random_llama(folder: Path, *, hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> Path:
    """A random bf16 Llama with a tokenizer of single characters."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
    )
    torch.manual_seed(0)
    with torch.device("cpu"):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {chr(code): code for code in range(128)} | {"<unk>": 128}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    random_adapter(Path(sys.argv[1]), seed=int(sys.argv[2]), rank=64)
