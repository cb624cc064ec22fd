"""The environment of its own in which vLLM is installed: `make vllm` makes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["environment", "needs_vllm", "vllm_python"]

_FOLDER = Path(__file__).parents[2] / ".venv-vllm"

needs_vllm = pytest.mark.skipif(
    not (_FOLDER / ".installed").exists(), reason="needs vLLM in an environment of its own: `make vllm` makes it"
)


def vllm_python() -> str:
    return str(_FOLDER / "bin" / "python")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """What vLLM is started with: one thread, no network, no usage reports."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return {**os.environ, **quiet, **variables}
