"""The lengths that configs state, beside those that models are published with and what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tolerances import close, tolerance
from transformers import AutoModelForCausalLM

from adapterswap.core.model.layers import ModelConfig
from adapterswap.core.model.lengths import Lengths

YARN = {"rope_type": "yarn", "rope_theta": 1e6}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.3}  # fmt: skip

PUBLISHED: dict[str, tuple[Any, int | None, int | None]] = {
    "Qwen 2.5, YaRN": (
        transformers.Qwen2Config(
            max_position_embeddings=32768,
            rope_parameters={**YARN, "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        131072,
        None,
    ),
    "DeepSeek V3, YaRN": (
        transformers.DeepseekV3Config(
            max_position_embeddings=163840,
            rope_parameters={**YARN, "factor": 40.0, "original_max_position_embeddings": 4096},
        ),
        163840,
        None,
    ),
    "Phi 3 mini 128k, LongRoPE": (
        transformers.Phi3Config(
            **SMALL,
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
        ),
        131072,
        4096,
    ),
    "Llama 3.1": (
        transformers.LlamaConfig(
            max_position_embeddings=131072,
            rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ),
        131072,
        None,
    ),
    "Vicuna 16k, linear": (
        transformers.LlamaConfig(
            max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
        ),
        16384,
        None,
    ),
    "dynamic": (
        transformers.LlamaConfig(
            max_position_embeddings=2048, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        4096,
        2048,
    ),
    "Gemma 3 4B, linear in full attention": (
        transformers.Gemma3TextConfig(
            max_position_embeddings=131072,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        131072,
        None,
    ),
    "a multimodal base": (transformers.Gemma3Config(text_config={"max_position_embeddings": 512}), 512, None),
    "GPT-2": (transformers.GPT2Config(), 1024, None),
    "MPT": (transformers.MptConfig(), 2048, None),
    "BLOOM": (transformers.BloomConfig(), None, None),
    "BLOOM on the Hub": (transformers.BloomConfig(seq_length=2048), 2048, None),
    "Mamba": (transformers.MambaConfig(), None, None),
    "RWKV": (transformers.RwkvConfig(), None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_length_is_that_of_the_published_model(name: str) -> None:
    config, longest, alike = PUBLISHED[name]
    assert ModelConfig(config.to_dict()).lengths == Lengths(longest, alike)


CHANGING = {
    "longrope": transformers.Phi3Config(
        **SMALL,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
    ),
    "dynamic": transformers.LlamaConfig(
        **SMALL,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_frequencies_change_only_above_the_length_that_is_called_alike(kind: str) -> None:
    """A text's first logits beside those of the same text with more text behind it."""
    config = CHANGING[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 40, (1, 24))

    with torch.no_grad():
        first = [model(ids[:, :length]).logits[0, :8] for length in (8, 16, 17)]

    assert ModelConfig(config.to_dict()).lengths == Lengths(64, alike=16)
    close(first[1], first[0], depth=2)
    assert (first[2] - first[0]).abs().max() > 100 * tolerance(first[0], depth=2)
