"""How models read rows of different lengths, beside their own greedy answers to each row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from refusals import refused
from transformers import AutoModelForCausalLM

from adapterswap.engines.live import LiveComposer
from adapterswap.engines.live.reading import Reading
from adapterswap.kit.errors import BaseModelError, UnsupportedError

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MIXTURE = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4}

# Each with: is a row continued as alone when it is padded on the left, and how many positions has the model learned?
MODELS: dict[str, tuple[Any, bool, int | None]] = {
    "Llama": (transformers.LlamaConfig(**SIZES), True, None),
    "Mamba": (transformers.MambaConfig(**SIZES, state_size=4), True, None),
    "GPT-2": (
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None),
        True,
        64,
    ),
    "OPT": (transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32), True, 64),
    "RoBERTa": (transformers.RobertaConfig(**SIZES | {"pad_token_id": 1}, is_decoder=True), True, 62),
    "BART": (transformers.BartConfig(**SIZES, **BART), False, 64),
    "RWKV": (transformers.RwkvConfig(**SIZES, attention_hidden_size=32), False, None),
    "MiniMax": (
        transformers.MiniMaxConfig(**SIZES, **MIXTURE, layer_types=["linear_attention", "full_attention"]),
        False,
        None,
    ),
}


def model_of(config: Any) -> Any:
    """Random weights, large enough that tokens depend on those before them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.3)
    return model


def rows_of(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[torch.Tensor], filler: int = 0) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.full((width - len(row),), filler), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_whether_batches_change_its_answers(name: str) -> None:
    config, expected, positions = MODELS[name]
    model = model_of(config)
    rows = rows_of([3, 9, 14, 20, 25, 5, 31, 12])

    together = model.generate(**padded(rows), max_new_tokens=8, do_sample=False, pad_token_id=0)[:, -8:]
    alone = [model.generate(**padded([row]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, -8:] for row in rows]
    equal = all(torch.equal(row, answer) for row, answer in zip(together, alone, strict=True))

    reading = Reading.of(model)
    assert (equal, reading.left, reading.right, reading.causal) == (expected, expected, True, True)
    assert reading.even == (name != "RWKV")
    assert reading.positions == positions
    assert Reading.of(model) is reading


@pytest.mark.parametrize("name", [name for name, (*_, positions) in MODELS.items() if positions])
def test_a_model_reads_as_many_tokens_as_it_has_positions(name: str) -> None:
    config, _, positions = MODELS[name]
    model = model_of(config)
    assert positions is not None
    model(torch.full((1, positions), 5))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.full((1, positions + 1), 5))


def test_an_encoder_is_not_causal() -> None:
    model = model_of(transformers.BertConfig(**SIZES))
    reading = Reading.of(model)
    assert (reading.causal, reading.right) == (False, False)


def test_a_model_that_needs_more_than_text_says_so() -> None:
    model = model_of(transformers.LlamaConfig(**SIZES))
    model.forward = lambda pixel_values: None
    with refused(BaseModelError, "base_model"):
        _ = Reading.of(model).right


@pytest.fixture(scope="module")
def composer() -> Callable[[str], LiveComposer]:
    """A model with two experts."""

    def make(name: str) -> LiveComposer:
        config, *_ = MODELS[name]
        targets = ["key", "value"] if name == "RWKV" else ["q_proj", "v_proj"]
        options = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(1)
        model = get_peft_model(model_of(config), options, "math")
        model.add_adapter("swahili", options)
        return LiveComposer(model.eval())

    return make


@pytest.mark.parametrize("name", ["RWKV", "BART"])
def test_rows_that_would_be_answered_otherwise_are_refused(name: str, composer: Callable[[str], LiveComposer]) -> None:
    composing = composer(name)
    batch, names = padded(rows_of([3, 9])), ["math", "swahili"]
    for compositions in (names, "math", None):
        with refused(UnsupportedError):
            composing.generate(**batch, compositions=compositions, max_new_tokens=2)
    with composing.use_rows(names), refused(UnsupportedError):
        composing.model(**batch)


def test_rows_of_one_length_are_answered_unless_a_model_mixes_them(composer: Callable[[str], LiveComposer]) -> None:
    rows, names = rows_of([9, 9, 9]), ["math", "base", "swahili"]
    options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0}
    composing = composer("BART")
    together = composing.generate(**padded(rows), compositions=names, **options)
    for row, name, answer in zip(rows, names, together, strict=True):
        assert torch.equal(answer, composing.generate(**padded([row]), compositions=name, **options)[0])
    with refused(UnsupportedError):
        composer("RWKV").generate(**padded(rows), compositions=names, **options)
