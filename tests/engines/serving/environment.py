"""The separate environment in which vLLM is installed by `make vllm`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["answers_in_process", "environment", "needs_vllm", "vllm_python"]

_FOLDER = Path(__file__).parents[3] / ".venv-vllm"

needs_vllm = pytest.mark.skipif(
    not (_FOLDER / ".installed").exists(), reason="needs vLLM in an environment of its own: `make vllm` makes it"
)


def vllm_python() -> str:
    return str(_FOLDER / "bin" / "python")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The variables that vLLM is started with: one thread, no network, no usage reports."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, **variables}


def answers_in_process(
    base: Path, experts: Path, cache: Path, *, names: Iterable[str], prompts: list[list[int]], length: int
) -> Any:
    """The output of `in_process.py`: vLLM's answers to each prompt by name, and what was not loaded or refused."""
    request = {"base": str(base), "names": list(names), "prompts": prompts, "length": length}
    variables = {
        "ADAPTERSWAP_EXPERTS": str(experts),
        "ADAPTERSWAP_CACHE": str(cache),
        "ADAPTERSWAP_MAX_LORA_RANK": "16",
        "VLLM_PLUGINS": "adapterswap",
    }
    process = subprocess.run(
        [vllm_python(), Path(__file__).with_name("in_process.py"), json.dumps(request)],
        env=environment(variables), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.partition("ANSWERS")[2])
