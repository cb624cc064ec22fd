"""A random pico Llama with three random experts, so that the example runs offline in seconds.

Its words are noise, but they change with the composition. You do not need this file with a real base.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = (
    "habari nyumba maji mtoto shule kitabu moja mbili tatu nne sawa asante",
    "namaskaram illu neeru pillavadu badi pustakam okati rendu moodu nalugu sare dhanyavadalu",
    "hello house water child school book one two three four right thanks",
)
WORDS = [word for sentence in SENTENCES for word in sentence.split()]
SPECIAL = ["<pad>", "<end>", "<unknown>", "user:", "assistant:"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}assistant:"


def make_pico(folder: Path) -> dict[str, Path]:
    """Write `base` and the experts `math`, `swahili` and `telugu` into `folder`; return the experts' folders."""
    words = {word: at for at, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", chat_template=TEMPLATE
    ).save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    experts = {}
    for name in ("math", "swahili", "telugu"):
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        lora = LoraConfig(r=4, lora_alpha=4, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        experts[name] = folder / name
        model.save_pretrained(experts[name])
    return experts
