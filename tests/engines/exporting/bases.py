"""Pico bases of every architecture that is exported, as transformers saves them and as GGUF.

The GGUF writer is only for these tests: names from gguf's tables, and llama.cpp's requirements for each architecture
written out. `test_engine` checks the writer without an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

LAYERS, HIDDEN, HEADS, KEY_HEADS, VOCABULARY, CONTEXT = 6, 64, 4, 2, 192, 128
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = [*SEPARATE, "gate_proj", "up_proj", "down_proj"]
FUSED = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Pico:
    """A config of transformers, the modules that experts adapt, and llama.cpp's name of the architecture."""

    config: type
    options: dict[str, Any]
    targets: list[str]
    architecture: str


WINDOW = {"sliding_window": CONTEXT, "head_dim": 16, "query_pre_attn_scalar": 16}
PICOS = {
    "llama": Pico(transformers.LlamaConfig, COMMON, GATED, "LLAMA"),
    "mistral": Pico(transformers.MistralConfig, COMMON | {"head_dim": 32, "sliding_window": None}, GATED, "LLAMA"),
    "qwen2": Pico(transformers.Qwen2Config, COMMON, GATED, "QWEN2"),
    "qwen3": Pico(transformers.Qwen3Config, COMMON | {"head_dim": 32}, GATED, "QWEN3"),
    "gemma2": Pico(transformers.Gemma2Config, COMMON | WINDOW, GATED, "GEMMA2"),
    "gemma3": Pico(transformers.Gemma3TextConfig, COMMON | WINDOW, GATED, "GEMMA3"),
    "phi3": Pico(
        transformers.Phi3Config, COMMON | {"original_max_position_embeddings": CONTEXT},
        ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "PHI3",
    ),
    "falcon-7b": Pico(
        transformers.FalconConfig,
        {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
        | {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False},
        FUSED, "FALCON",
    ),
    "falcon-40b": Pico(
        transformers.FalconConfig,
        {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
        | {"num_kv_heads": KEY_HEADS, "new_decoder_architecture": True, "bias": False},
        FUSED, "FALCON",
    ),
    "gpt2": Pico(
        transformers.GPT2Config,
        {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT, "bos_token_id": 1,
         "eos_token_id": 2},
        ["c_attn", "c_proj", "c_fc"], "GPT2",
    ),
    "neox": Pico(
        transformers.GPTNeoXConfig,
        {k: v for k, v in COMMON.items() if k != "num_key_value_heads"} | {"rotary_pct": 0.5},
        FUSED, "GPTNEOX",
    ),
    "mixtral": Pico(
        transformers.MixtralConfig, COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        SEPARATE, "LLAMA",
    ),
    "qwen3_moe": Pico(
        transformers.Qwen3MoeConfig,
        COMMON | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "norm_topk_prob": True},
        SEPARATE, "QWEN3MOE",
    ),
}  # fmt: skip


def save_base(name: str, folder: Path, **options: Any) -> Path:
    """A random pico model whose numbers are large enough for each module to matter."""
    pico = PICOS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(pico.config(vocab_size=VOCABULARY, **(pico.options | options)))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.6 * parameter.shape[-1] ** -0.5
        else:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapted(base: Path, adapter: Path) -> torch.nn.Module:
    """The base with an adapter, as PEFT runs it."""
    model: torch.nn.Module = PeftModel.from_pretrained(load(base), adapter).eval()
    return model


def write_base(folder: Path, path: Path, name: str) -> Path:
    """The model in `folder` as GGUF, in float32."""
    pico, model = PICOS[name], load(folder)
    config, arch = model.config, gguf.MODEL_ARCH[pico.architecture]
    layers = config.num_hidden_layers
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _hyperparameters(writer, config, name)
    _tokenizer(writer)
    names = gguf.get_tensor_name_map(arch, layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if key.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # GPT-2's causal mask
        for stored, values in _reordered(key, tensor.float().numpy(), config, name):
            result = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert result is not None, stored
            writer.add_tensor(result, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _hyperparameters(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if name.startswith("falcon"):
        keys = config.num_kv_heads if config.new_decoder_architecture else 1
        writer.add_tensor_data_layout("jploski")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = getattr(config, "n_inner", None) or getattr(config, "ffn_hidden_size", None)
    writer.add_feed_forward_length(inner or getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if name in ("falcon-7b", "falcon-40b", "gpt2", "neox"):
        epsilon = getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if name == "neox":
        writer.add_rope_dimension_count(int(head * 0.5))
        writer.add_parallel_residual(config.use_parallel_residual)
    elif name != "gpt2":
        writer.add_rope_dimension_count(head)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_freq_base(1_000_000.0 if name in ("gemma3", "mixtral") else 10_000.0)
    if name in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if name == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "phi3":
        writer.add_rope_scaling_orig_ctx_len(CONTEXT)


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    """Three special tokens, 128 bytes, and words. Without a tokenizer, or with tokens that are half a character, the
    server returns no log-probabilities."""
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(128)]
    tokens += [(f"▁w{number}", kinds.NORMAL) for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _reordered(key: str, values: Array, config: Any, name: str) -> list[tuple[str, Array]]:
    """Convert a tensor of transformers: its llama.cpp names with their values."""
    heads = config.num_attention_heads
    if name in ("llama", "mistral", "mixtral") and key.endswith(("q_proj.weight", "k_proj.weight")):
        count = heads if "q_proj" in key else config.num_key_value_heads
        halves = values.reshape(count, 2, values.shape[0] // count // 2, -1)
        return [(key, halves.swapaxes(1, 2).reshape(values.shape))]
    if name.startswith("gemma") and key.endswith("norm.weight"):
        return [(key, values + 1)]
    if name == "gpt2" and values.ndim == 2 and ".h." in key:
        return [(key, values.T)]
    if "query_key_value" in key and name == "neox":
        parts = values.reshape(heads, 3, values.shape[0] // heads // 3, -1)
        return [(key, np.concatenate([parts[:, i].reshape(-1, *values.shape[1:]) for i in range(3)]))]
    if "query_key_value" in key:
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
        parts = values.reshape(groups, heads // groups + 2, HIDDEN // heads, HIDDEN)
        cut = (parts[:, :-2], parts[:, -2], parts[:, -1])
        return [(key, np.concatenate([part.reshape(-1, HIDDEN) for part in cut]))]
    if key.endswith("mlp.experts.gate_up_proj"):
        half, start = values.shape[1] // 2, key.removesuffix("gate_up_proj")
        return [(f"{start}gate_proj.weight", values[:, :half]), (f"{start}up_proj.weight", values[:, half:])]
    if key.endswith("mlp.experts.down_proj"):
        return [(f"{key}.weight", values)]
    return [(key, values)]
