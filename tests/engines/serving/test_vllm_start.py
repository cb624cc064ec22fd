"""Bases that vLLM cannot serve: the server exits with the reason instead of answering 500. Needs `make vllm`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import make_expert
from .environment import needs_vllm
from .server import failed_start

pytestmark = [needs_vllm, pytest.mark.full, pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def test_heads_that_the_kernels_refuse(served_base: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM loads them, and fails at the first token; test_vllm_server serves heads of 32."""
    base = served_base("llama-16")
    make_expert(base, tmp_path / "experts" / "math", seed=0)
    status, log = failed_start(base, tmp_path / "experts", tmp_path)
    assert status == 3
    (error,) = [line for line in log.splitlines() if line.startswith("Error: ")]
    assert str(base) in error
    assert "head_dim=16" in error
    assert "adapterswap: ready" not in log
    assert "Application startup complete" not in log


def test_a_base_without_weights(served_base: Callable[[str], Path], tmp_path: Path) -> None:
    base = shutil.copytree(served_base("llama"), tmp_path / "base")
    make_expert(base, tmp_path / "experts" / "math", seed=0)
    (base / "model.safetensors").unlink()
    status, log = failed_start(base, tmp_path / "experts", tmp_path)
    assert status == 3
    (error,) = [line for line in log.splitlines() if line.startswith("Error: ")]
    assert "model weights" in error
    assert "adapterswap: ready" not in log


def test_an_argument_that_vllm_does_not_know(
    served_base: Callable[[str], Path], pristine: Callable[[str], Path], tmp_path: Path
) -> None:
    status, log = failed_start(served_base("llama"), pristine("llama"), tmp_path, "--no-such-option")
    assert status == 2
    assert "--no-such-option" in log
    assert not any(line.startswith("Error: ") for line in log.splitlines())  # vLLM's own message is enough
