"""vLLM's own loader and engine, fed by the resolver, against full weights. Needs the environment of `make vllm`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tolerances import tolerance

from .cases import COMPOSITIONS, LENGTH, PROMPTS
from .conftest import LAYERS, Reference
from .environment import answers_in_process, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.xdist_group("vllm")]


@pytest.mark.full  # the server's tests ask the same engine
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_engine_answers_as_full_weights_do(
    architecture: str, served_base: Callable[[str], Path], pristine: Callable[[str], Path], tmp_path: Path
) -> None:
    base, experts = served_base(architecture), pristine(architecture)
    result = answers_in_process(
        base, experts, tmp_path / "cache", names=COMPOSITIONS, prompts=PROMPTS[:3], length=LENGTH
    )
    reference = Reference(base, experts)
    worst = 0.0
    for name, zones in COMPOSITIONS.items():
        if name in result["unloaded"]:
            continue
        for prompt, answer in zip(PROMPTS, result["answers"][name], strict=False):
            tokens, steps = reference.answer(zones, prompt, LENGTH)
            assert answer["tokens"] == tokens, name
            for told, expected in zip(answer["logprobs"], steps, strict=True):
                apart = max(abs(value - expected[int(token)]) for token, value in told.items())
                worst = max(worst, apart / tolerance(expected, depth=LAYERS))
    assert worst < 1
    # vLLM's Qwen2 takes no LoRA on embeddings and head, and says so when it loads one.
    with_embeddings = {name for name in COMPOSITIONS if "code" in name}
    assert result["unloaded"].keys() == (with_embeddings if architecture == "qwen2" else set())
    assert all("received ['lm_head', " in reason for reason in result["unloaded"].values())
    different = {json.dumps(answer) for answer in result["answers"].values()}
    assert len(different) == len(COMPOSITIONS) - len(result["unloaded"])
    kinds = {name: kind for name, (kind, _) in result["refused"].items()}
    assert kinds == {
        "nosuch": "VLLMNotFoundError",
        "math+nosuch": "VLLMNotFoundError",
        "math+swahili@": "VLLMValidationError",
        "math+swahili@bottom=99": "VLLMValidationError",
        "code+math@method=soup": "VLLMValidationError",
    }
    assert "rank 24, and this server takes up to 16" in result["refused"]["code+math@method=soup"][1]
