"""What PEFT makes of one expert alone, and plans of two experts: for tests of embeddings, heads and their rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import adapterswap
from adapterswap.planning.composition import Composition
from adapterswap.planning.making import make_plan
from adapterswap.planning.plan import Plan

__all__ = [
    "LAYERS",
    "SIZE",
    "ends_in_peft",
    "in_peft",
    "loaded",
    "merged_by_peft",
    "pico_llama",
    "plan_of",
    "with_words",
]

LAYERS, SIZE = 4, 48


def pico_llama(folder: Path, *, tied: bool) -> Path:
    """A Llama of four layers and 48 tokens, in `folder`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "vocab_size": SIZE}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def with_words(folder: Path, *, tied: bool = False, rows: int = 96, layers: int = LAYERS) -> Path:
    """A pico Llama with a tokenizer of 96 words, w0 to w95, and a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "vocab_size": rows}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def in_peft(base: Path, adapter: Path, size: int | None = None) -> Any:
    """PEFT's running model. `size`: resize the vocabulary of the base first, unless it has that many rows."""
    model = loaded(base)
    if size not in (None, model.config.vocab_size):
        model.resize_token_embeddings(size, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, adapter).eval()


def merged_by_peft(base: Path, adapter: Path, size: int | None = None) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of ties that come apart
        model = in_peft(base, adapter, size).merge_and_unload()
    return {key: value.clone() for key, value in model.state_dict().items()}


def ends_in_peft(base: Path, adapter: Path, size: int) -> dict[str, torch.Tensor]:
    """The embedding and the head that PEFT's running model computes with; its merge gives tied ones both changes."""
    model = in_peft(base, adapter, size).base_model.model
    found = {}
    for key, module in (("model.embed_tokens.weight", model.model.embed_tokens), ("lm_head.weight", model.lm_head)):
        if hasattr(module, "get_delta_weight"):
            found[key] = module.get_base_layer().weight + module.get_delta_weight("default")
        else:
            found[key] = getattr(module, "modules_to_save", {"default": module})["default"].weight
    return {key: weight.detach().clone() for key, weight in found.items()}


def plan_of(task: Path, language: Path, base: Path | None, **options: Any) -> Plan:
    composition = Composition(task=("t",), language=("l",), bottom=1, top=1, base_model=base and str(base), **options)
    return make_plan(composition, {"t": adapterswap.open_adapter(task), "l": adapterswap.open_adapter(language)})
