"""A random pico Llama that reads bytes, and two experts for it, created once per session. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

os.environ["HF_DATASETS_OFFLINE"] = "1"

LAYERS = 6
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that every script can be written and nothing is unknown."""
    special = ["<pad>", "<s>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<eos>", chat_template=CHAT
    )


def pico_model(*, layers: int = LAYERS, context: int = 16384, spread: float = 0.3) -> LlamaForCausalLM:
    """Random weights, spread widely enough that outputs differ from prompt to prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=spread,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def byte_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-base")
    pico_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_expert(byte_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`byte_expert("math")` is the folder of a random rsLoRA for that base, another for each name."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            base = AutoModelForCausalLM.from_pretrained(byte_base, dtype=torch.float32)
            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            options = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": targets, "task_type": "CAUSAL_LM"}
            model = get_peft_model(base, LoraConfig(**options))
            generator = torch.Generator().manual_seed(sum(name.encode()))
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
            made[name] = tmp_path_factory.mktemp("experts") / name
            model.save_pretrained(made[name], save_embedding_layers=False)
        return made[name]

    return make


@pytest.fixture
def byte_model(byte_base: Path) -> tuple[Any, Any]:
    """The base and its tokenizer, loaded."""
    model = AutoModelForCausalLM.from_pretrained(byte_base, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(byte_base)
