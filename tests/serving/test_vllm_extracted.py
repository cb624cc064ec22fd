"""An adapter cut out of a full fine-tune in vLLM's engine, against the fine-tune itself. Needs `make vllm`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from adapterswap.extracting import extract

from .cases import LENGTH, PROMPTS
from .conftest import load, make_expert
from .environment import environment, needs_vllm, vllm_python

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_the_engine_answers_as_the_fine_tune_does(served_base: Callable[[str], Path], tmp_path: Path) -> None:
    """Ranks that are no squares and differ by module, so that alpha is no whole number and stands in patterns."""
    base = served_base("llama")
    options = {"r": 5, "rank_pattern": {"q_proj": 3, "down_proj": 7}}
    model = PeftModel.from_pretrained(load(base), make_expert(base, tmp_path / "lora", seed=4, **options))
    fine_tune = model.merge_and_unload()
    fine_tune.save_pretrained(tmp_path / "full")
    found = extract(tmp_path / "full", base, tmp_path / "experts" / "extracted", max_error=1e-3)
    assert {module.rank for module in found.modules} == {3, 5, 7}
    make_expert(base, tmp_path / "experts" / "math", seed=0)
    asked = {"base": str(base), "names": ["extracted", "math+extracted"], "prompts": PROMPTS[:3], "length": LENGTH}
    variables = {
        "ADAPTERSWAP_EXPERTS": str(tmp_path / "experts"), "ADAPTERSWAP_CACHE": str(tmp_path / "cache"),
        "ADAPTERSWAP_MAX_LORA_RANK": "16", "VLLM_PLUGINS": "adapterswap",
    }  # fmt: skip
    done = subprocess.run(
        [vllm_python(), Path(__file__).with_name("in_process.py"), json.dumps(asked)],
        env=environment(variables), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.partition("ANSWERS")[2])["answers"]
    plain = load(base)
    for prompt, alone, mixed in zip(PROMPTS, answers["extracted"], answers["math+extracted"], strict=False):
        assert alone["tokens"] == greedy(fine_tune, prompt)
        assert alone["tokens"] != mixed["tokens"]
    assert [answer["tokens"] for answer in answers["extracted"]] != [greedy(plain, prompt) for prompt in PROMPTS[:3]]
