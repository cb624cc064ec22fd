"""What PEFT makes of one expert alone, and plans of two experts: for tests of embeddings, heads and their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pico_models as pico
import torch
from conftest import load_base
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

import adapterswap
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan

__all__ = [
    "LAYERS",
    "SIZE",
    "ends_in_peft",
    "in_peft",
    "merged_by_peft",
    "pico_llama",
    "plan_of",
    "resized",
    "row_by_row",
    "save_with_tokens",
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


def save_with_tokens(
    base: Path, folder: Path, tokens: Sequence[str], options: dict[str, Any] | None, *, seed: int,
    size: int | None = None, copies: bool | str = "auto",
) -> Path:  # fmt: skip
    """An expert with added tokens and its tokenizer: LoRA with PEFT's options, or a full fine-tune if None.

    `size`: the number of rows, unless it is the number of tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(tokens))
    torch.manual_seed(seed)
    model = resized(base, size or len(tokenizer))
    if options is None:
        pico.noisy(model, seed).save_pretrained(folder)
    else:
        config = LoraConfig(**{"r": 4, "use_rslora": True, "task_type": "CAUSAL_LM", **options})
        pico.trained(model, config, folder, seed=1 + seed, save_embedding_layers=copies)
    tokenizer.save_pretrained(folder)
    return folder


def row_by_row(
    experts: Mapping[str, torch.Tensor], new: Mapping[str, set[int]], shares: Mapping[str, float], base: torch.Tensor
) -> torch.Tensor:
    """An embedding or head as the documentation says it: one row after the other."""
    ruling = [name for name in experts if shares[name]]
    covered = {i for name in ruling for i in new[name]}
    entering = {*ruling, *(name for name in experts if not new[name] <= covered)}
    rows = []
    for row in range(max(len(experts[name]) for name in entering)):
        owners = [name for name in experts if row in new[name]]
        having = [name for name in (owners or ruling) if shares[name] and row < len(experts[name])]
        having = having or owners or [name for name in entering if row < len(experts[name])]
        if not owners and len(having) == len(ruling) and row < len(base):
            rows.append(base[row] + sum(shares[name] * (experts[name][row] - base[row]) for name in ruling))
            continue
        total = sum(shares[name] for name in having)
        parts = [experts[name][row] * (shares[name] / total if total else 1 / len(having)) for name in having]
        rows.append(sum(parts[1:], parts[0]))
    return torch.stack(rows)


def resized(base: Path, size: int | None) -> PreTrainedModel:
    """The base, with another number of rows in its vocabulary unless it has that many."""
    model = load_base(base)
    if size not in (None, model.config.vocab_size):
        model.resize_token_embeddings(size, mean_resizing=False)
    return model


def in_peft(base: Path, adapter: Path, size: int | None = None) -> Any:
    """PEFT's running model on a base with `size` rows."""
    return pico.in_peft(resized(base, size), adapter)


def merged_by_peft(base: Path, adapter: Path, size: int | None = None) -> dict[str, torch.Tensor]:
    return pico.merged_by_peft(resized(base, size), adapter)


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
