"""The lab's own bases in vLLM on the CPU, with compositions by name. Needs the environment of `make vllm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapterswap.experiments.lab.bases import BOS, ids_of, write_base
from adapterswap.experiments.lab.scenes import SCENES, draw_problems

from .conftest import Reference, make_expert
from .environment import answers_in_process, needs_vllm

pytestmark = [needs_vllm, pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("vllm")]

COMPOSITIONS = {
    "math": ("math", "math", 0, 0),
    "math+xx": ("math", "xx", 1, 0),
    "math+xx@bottom=2,top=1,bottom_transition=1": ("math", "xx", 2, 1, 1, 0),
}
LENGTH = 6


@pytest.mark.full  # `make test` asks vLLM in test_vllm_server.py
def test_a_shipped_base_answers_in_vllm_as_full_weights_do(tmp_path: Path) -> None:
    base, experts = tmp_path / "base", tmp_path / "experts"
    base.mkdir()
    write_base(SCENES["gap"], 0, base)
    for seed, name in enumerate(("math", "xx")):
        make_expert(base, experts / name, seed=seed)
    prompts = [[BOS, *ids_of(problem.prompt("xx"))] for problem in draw_problems(SCENES["gap"], "development", 3)]
    results = answers_in_process(base, experts, tmp_path / "cache", names=COMPOSITIONS, prompts=prompts, length=LENGTH)
    assert results["unloaded"] == {}
    reference = Reference(base, experts)
    for name, zones in COMPOSITIONS.items():
        for prompt, answer in zip(prompts, results["answers"][name], strict=True):
            assert answer["tokens"] == reference.answer(zones, prompt, LENGTH)[0], name
    assert len({json.dumps(answer) for answer in results["answers"].values()}) == len(COMPOSITIONS)
