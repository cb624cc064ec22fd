"""Full fine-tunes and modules trained in full, converted to LoRA, in vLLM's engine against the original. Needs `make
vllm`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from adapterswap.tools.conversion import convert
from adapterswap.tools.extraction import extract

from .cases import LENGTH, PROMPTS
from .conftest import load, make_expert
from .environment import answers_in_process, needs_vllm

pytestmark = [needs_vllm, pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.full  # `make test` asks vLLM in test_vllm_server.py
def test_the_engine_answers_as_the_fine_tune_does(served_base: Callable[[str], Path], tmp_path: Path) -> None:
    """Ranks that are no squares and differ by module, so that alpha is no whole number and stands in patterns."""
    base = served_base("llama")
    options = {"r": 5, "rank_pattern": {"q_proj": 3, "down_proj": 7}}
    model = PeftModel.from_pretrained(load(base), make_expert(base, tmp_path / "lora", seed=4, **options))
    fine_tune = model.merge_and_unload()
    fine_tune.save_pretrained(tmp_path / "full")
    result = extract(tmp_path / "full", base, tmp_path / "experts" / "extracted", max_error=1e-3)
    assert {module.rank for module in result.modules} == {3, 5, 7}
    make_expert(base, tmp_path / "experts" / "math", seed=0)
    names, cache = ["extracted", "math+extracted"], tmp_path / "cache"
    outcome = answers_in_process(base, tmp_path / "experts", cache, names=names, prompts=PROMPTS[:3], length=LENGTH)
    answers = outcome["answers"]
    plain = load(base)
    for prompt, alone, mixed in zip(PROMPTS, answers["extracted"], answers["math+extracted"], strict=False):
        assert alone["tokens"] == greedy(fine_tune, prompt)
        assert alone["tokens"] != mixed["tokens"]
    assert [answer["tokens"] for answer in answers["extracted"]] != [greedy(plain, prompt) for prompt in PROMPTS[:3]]


@pytest.mark.full  # `make test` asks vLLM in test_vllm_server.py
def test_modules_trained_in_full_are_served_as_lora(served_base: Callable[[str], Path], tmp_path: Path) -> None:
    """`modules_to_save` with a change of rank 4: LoRA of that rank is the same model."""
    base = served_base("llama")
    generator = torch.Generator().manual_seed(5)
    settings = LoraConfig(r=8, target_modules=["q_proj", "up_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(load(base), settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        elif parameter.requires_grad:
            rows, columns = parameter.shape
            parameter.data += (
                torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator) * 0.3
            )
    model.save_pretrained(tmp_path / "trained")
    result = convert(tmp_path / "trained", tmp_path / "experts" / "lora", saved_rank=4)
    assert result.worst.error < 1e-5
    outcome = answers_in_process(
        base, tmp_path / "experts", tmp_path / "cache", names=["lora"], prompts=PROMPTS[:3], length=LENGTH
    )
    original = PeftModel.from_pretrained(load(base), tmp_path / "trained").eval()
    tokens = [answer["tokens"] for answer in outcome["answers"]["lora"]]
    assert tokens == [greedy(original, prompt) for prompt in PROMPTS[:3]]
    assert tokens != [greedy(load(base), prompt) for prompt in PROMPTS[:3]]
