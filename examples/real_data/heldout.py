"""The loss of a base, with or without an adapter, on the completions of held-out rows: nats per token.

Plain PyTorch and PEFT, so that adapterswap's output is measured independently.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_pairs(data: Path) -> dict[str, list[tuple[str, str]]]:
    """Prompts and completions of the held-out rows, in the format of the recipes."""
    files = {name: (data / f"{name}_heldout.jsonl").read_text(encoding="utf-8") for name in ("math", "swahili")}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}
    return {
        "math": [(f"Question: {r['question']}\nStep-by-Step Answer:", f" {r['answer']}") for r in rows["math"]],
        "swahili": [(f"{r['prompt']}\nJibu:", f" {r['completion']}") for r in rows["swahili"]],
    }


def heldout_losses(base: Path, adapter: Path | None, data: Path) -> dict[str, float]:
    """Mean loss over all tokens of all completions, including the end of sequence."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    losses = {}
    for name, pairs in read_pairs(data).items():
        total, count = 0.0, 0
        for prompt, completion in pairs:
            asked = tokenizer(prompt)["input_ids"]
            told = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([asked + told])
            with torch.no_grad():
                logits = model(ids).logits[0, len(asked) - 1 : -1]
            total += torch.nn.functional.cross_entropy(logits, ids[0, len(asked) :], reduction="sum").item()
            count += len(told)
        losses[name] = total / count
    return losses
