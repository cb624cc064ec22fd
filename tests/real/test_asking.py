"""`ask` on the real model, beside the generation of transformers and PEFT: 20 prompts, four subjects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

import adapterswap as asw

from .conftest import EXAMPLE, EXPERTS

TOKENS = 6


@pytest.mark.full
@pytest.mark.slow
def test_twenty_prompts_are_answered_as_generate_does(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    """In one batch per prompt; the last four are conversations in the model's own template."""
    rows = [json.loads(line) for line in (EXAMPLE / "data" / "test_fr.jsonl").read_text("utf-8").splitlines()]
    problems = [f"Question: {row['question']}\nAnswer:" for row in rows[:: len(rows) // 16]][:16]
    chats = ["Combien font 7 et 5 ?", "Who are you?", "Habari gani?", "Write a haiku about adapters."]
    plan = asw.layer_swap(EXPERTS["math"], EXPERTS["french"], bottom=8, top=0, base_model=base)
    asked = asw.ask(plan, problems, plain=True, max_new_tokens=TOKENS)
    asked += asw.ask(plan, chats, max_new_tokens=TOKENS)

    folders = {**EXPERTS, "composition": plan.write(tmp_path / "composed")}
    differing = []
    for name in ("base", "math", "french", "composition"):
        model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
        if name != "base":
            model = PeftModel.from_pretrained(model, str(folders[name])).eval()
        for reply in asked:
            text = str(reply.prompt)
            if reply.prompt in chats:
                turns = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            inputs = tokenizer(text, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            if reply.answers[name].text != expected:
                differing.append((name, reply.prompt, reply.answers[name].text, expected))
    assert differing == []
