"""Create random full checkpoints of real shapes and read their tensors one at a time, for the benchmarks of full
weights.

    python benchmarks/checkpoints.py FOLDER --size 1.1b [--seed 0] [--shards 5]
    python benchmarks/checkpoints.py FOLDER --size 1.1b --base BASE --seed 1

The second form is a fine-tune of BASE: its numbers mean nothing, but the spectrum of its change is like a real one's, a
few strong directions over noise. The same seed gives the same checkpoint. This is a separate program, since the peak
memory of the process that creates a checkpoint would count for the processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shapes import llama_projections

SIZES = {
    "pico": {"hidden": 64, "intermediate": 128, "layers": 4, "heads": 4, "kv_heads": 2, "vocab": 256},
    "0.1b": {"hidden": 768, "intermediate": 2048, "layers": 12, "heads": 12, "kv_heads": 12, "vocab": 8192},
    "0.4b": {"hidden": 1024, "intermediate": 2816, "layers": 32, "heads": 16, "kv_heads": 16, "vocab": 8192},
    "1.1b": {"hidden": 2048, "intermediate": 5632, "layers": 22, "heads": 32, "kv_heads": 4, "vocab": 32000},
}
STRONG = 16  # directions of a fine-tune's change that stand out


def kv_width(size: str) -> int:
    shape = SIZES[size]
    return shape["hidden"] // shape["heads"] * shape["kv_heads"]


def parameters(size: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint in the order of the model, with its shape."""
    shape = SIZES[size]
    hidden, vocab = shape["hidden"], shape["vocab"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(shape["layers"]):
        for name, dims in llama_projections(hidden, shape["intermediate"], kv_width(size)).items():
            found[f"model.layers.{layer}.{name}.weight"] = dims
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def make(folder: Path, size: str, *, seed: int, shards: int, base: Path | None = None) -> Path:
    """Write a bf16 checkpoint in shards of about the same size; a fine-tune of `base` where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": shape["hidden"], "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "vocab_size": shape["vocab"], "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    dims = parameters(size)
    total = sum(torch.Size(shape).numel() for shape in dims.values())
    generator = torch.Generator().manual_seed(seed)
    groups: list[dict[str, torch.Tensor]] = [{}]
    where, written, held = {}, 0, 0
    for name, each in dims.items():
        if held * shards >= total * (written + 1) and written + 1 < shards:
            written += 1
            _save(folder, groups[-1], written, shards)
            groups[-1].clear()
        groups[-1][name] = _tensor(name, each, generator, base)
        where[name] = _shard(written + 1, shards)
        held += groups[-1][name].numel()
    _save(folder, groups[-1], written + 1, shards)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if base is None:
        _save_tokenizer(folder)
    else:
        for path in base.glob("*token*"):
            shutil.copy(path, folder)
    return folder


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator, base: Path | None) -> torch.Tensor:
    if base is None:
        center = 1.0 if len(shape) == 1 else 0.0
        return (center + 0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    change = 4e-4 * torch.randn(shape, generator=generator)
    if len(shape) == 2:
        left = torch.randn(shape[0], STRONG, generator=generator) * torch.arange(1, STRONG + 1.0).rsqrt()
        change += 5e-4 * left @ torch.randn(STRONG, shape[1], generator=generator)
    return (tensor(base, name).float() + change).to(torch.bfloat16)


def _shard(number: int, shards: int) -> str:
    return f"model-{number:05}-of-{shards:05}.safetensors"


def _save(folder: Path, tensors: dict[str, torch.Tensor], number: int, shards: int) -> None:
    save_file(tensors, folder / _shard(number, shards), metadata={"format": "pt"})


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {chr(code): code for code in range(128)} | {"<unk>": 128}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def tensor(folder: Path, name: str) -> torch.Tensor:
    """A tensor of a checkpoint, sharded or not."""
    index = folder / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"][name] if index.exists() else "model.safetensors"
    with safe_open(folder / file, "pt") as opened:
        return opened.get_tensor(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--base", type=Path)
    options = parser.parse_args()
    make(options.folder, options.size, seed=options.seed, shards=options.shards, base=options.base)


if __name__ == "__main__":
    main()
