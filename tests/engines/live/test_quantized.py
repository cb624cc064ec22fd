"""Compositions over a base that bitsandbytes has quantized, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, logits
from peft import LoraConfig, get_peft_model
from tolerances import close
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from adapterswap.engines.live import LiveComposer
from engines.live.conftest import EXPERTS, state_of

pytest.importorskip("bitsandbytes")

NAMES = ["math+swahili@bottom=2,top=1,bottom_transition=1", "base", "math+telugu"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base as wide as 4-bit blocks require, and experts."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("base", *EXPERTS)}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(found["base"])
    for name, options in EXPERTS.items():
        own = {"r": 8, "lora_alpha": 16, "use_rslora": True, **options}
        base = LlamaForCausalLM.from_pretrained(found["base"])
        lora = LoraConfig(**{key: value for key, value in own.items() if key != "seed"}, target_modules="all-linear")
        model = get_peft_model(base, lora)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(found[name])
    return found


@pytest.mark.parametrize("bits", [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}])
def test_quantized_bases(bits: dict[str, Any], folders: dict[str, Path]) -> None:
    """The layers add the experts to the quantized base: together, alone, and restored."""
    quantized = BitsAndBytesConfig(**bits)
    model = AutoModelForCausalLM.from_pretrained(folders["base"], quantization_config=quantized).eval()
    composing = LiveComposer.from_experts(model, {name: folders[name] for name in EXPERTS})
    with composing.model.disable_adapter():
        original = logits(composing.model)
    before = state_of(composing.model)
    tokens = torch.arange(15).reshape(3, 5)
    with composing.use_rows(NAMES), torch.no_grad():
        together = composing.model(tokens).logits
    for row, name in enumerate(NAMES):
        with composing.use(name), torch.no_grad():
            alone = composing.model(tokens).logits[row]
        # More than float32 rounding: in 8 bits an activation may move by one of its 127 steps.
        torch.testing.assert_close(together[row], alone, rtol=0, atol=2e-3)  # noqa: TID251
    with composing.use("base"):
        close(logits(composing.model), original, depth=LAYERS)
    with composing.use("math"):
        assert not torch.allclose(logits(composing.model), original, atol=1e-3)
    assert state_of(composing.model) == before
