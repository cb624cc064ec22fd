"""Averages with the base of modules that one expert trained in full, where the base stores them under other names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from pico_models import merged_by_peft, trained
from safetensors import safe_open
from tolerances import close

import adapterswap
from adapterswap import Composition
from core.matrix.architectures import ARCHITECTURES, build


def whisper() -> Any:
    """Its head is `proj_out`, tied to the decoder's embedding."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 96}
    heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8}
    positions = {"max_source_positions": 16, "max_target_positions": 32}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, **tokens, **heads, **positions)
    )


# The model, the modules that one expert trains in full, and names that the base does not store.
CASES: dict[str, tuple[Callable[[], Any], Any, list[str]]] = {
    "a tied head": (whisper, {"modules_to_save": ["proj_out"]}, ["proj_out.weight"]),
    "a head under another name": (
        lambda: build(ARCHITECTURES["gpt_neox"]), {"modules_to_save": ["lm_head"]}, ["lm_head.weight"],
    ),
    "a multimodal model": (
        lambda: build(ARCHITECTURES["gemma3"]),
        {"modules_to_save": ["q_norm", "embed_tokens"], "bias": "lora_only"},
        ["model.language_model.embed_tokens.weight"],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Input and output embeddings are no longer")
@pytest.mark.parametrize("case", CASES)
def test_names_that_the_base_does_not_store(case: str, tmp_path: Path) -> None:
    make, options, unknown = CASES[case]
    make().save_pretrained(tmp_path / "base")
    with safe_open(tmp_path / "base" / "model.safetensors", "pt") as stored:
        assert not {*unknown} & {*stored.keys()}
    kind = type(make())

    def base() -> Any:
        return kind.from_pretrained(tmp_path / "base")

    experts: dict[str, Path] = {"math": tmp_path / "math", "swahili": tmp_path / "swahili"}
    for seed, (name, folder) in enumerate(experts.items()):
        own = options if name == "math" else {}
        config = LoraConfig(r=2 + seed, target_modules=["q_proj", "query_key_value"], **own)
        trained(base(), config, folder, seed=seed)
    composition = Composition(
        method="soup", task="math", language="swahili", task_weight=1, language_weight=3,
        base_model=str(tmp_path / "base"),
    )  # fmt: skip
    out = adapterswap.compose(composition, experts).write(tmp_path / "out")
    math, swahili, result = (merged_by_peft(base(), folder) for folder in (experts["math"], experts["swahili"], out))
    for key, tensor in base().state_dict().items():
        expected = 0.25 * math[key].double() + 0.75 * swahili[key].double()
        close(result[key].double(), expected, scale=float(tensor.abs().max()), name=key)
    assert adapterswap.verify(out, experts=experts, base_model=tmp_path / "base").equal
