"""A base for the example: a BPE tokenizer and a small Llama, built from the example's own training text.

With a real base this file is not needed. The Llama starts from random weights and reads both texts a few times, so that
"before" in the example's table is a model that has seen words and sentences, not noise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BLOCK = 128  # tokens to a sequence


def read_texts(data: Path) -> list[str]:
    """Every training row as one text; the held-out files are not opened."""
    files = {name: (data / f"{name}_train.jsonl").read_text(encoding="utf-8") for name in ("math", "swahili")}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}
    texts = [f"Question: {row['question']}\nStep-by-Step Answer: {row['answer']}" for row in rows["math"]]
    texts += [f"{row['prompt']}\nJibu: {row['completion']}" for row in rows["swahili"]]
    return texts


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=1024, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def make_base(data: Path, out_path: Path, *, steps: int, batch_size: int = 4, learning_rate: float = 3e-3) -> None:
    """Write config.json, model.safetensors and the tokenizer's files to `out_path`."""
    texts = read_texts(data)
    tokenizer = make_tokenizer(texts)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=160,
            intermediate_size=432,
            num_hidden_layers=8,
            num_attention_heads=5,
            max_position_embeddings=2048,
            initializer_range=0.055,  # 0.7/√hidden: small models learn faster from larger weights
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    random.Random(0).shuffle(texts)
    tokens = torch.tensor(
        [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - BLOCK, (batch_size,))
        batch = torch.stack([tokens[start : start + BLOCK] for start in starts])
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(out_path)
    tokenizer.save_pretrained(out_path)
