"""The error of an extracted adapter, against numpy's SVD: zero at sufficient rank, else the smallest possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load_base, merged_weights, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import close, near, tolerance

from adapterswap.core.writing.reduction import approximate
from adapterswap.tools.extraction import extract

from .conftest import Checkpoint, deltas

MODULE = "model.layers.3.mlp.gate_proj"  # 48×32


def tails(matrix: np.ndarray) -> np.ndarray:
    """The smallest relative error of every rank from 0 on (Eckart & Young): √(Σ_{i>k} σ_i²) / √(Σ σ_i²)."""
    sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return np.sqrt(np.append(np.cumsum(np.square(sigma[::-1]))[::-1], 0) / np.sum(np.square(sigma)))


def change(full: Path, base: Path, module: str) -> np.ndarray:
    key = f"{module}.weight"
    return (weights(full)[key].double() - weights(base)[key].double()).numpy()


def test_a_change_of_low_rank_comes_back(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """base + s·B·A, saved as a full model: the extracted adapter has the same ΔW and rank."""
    adapter = expert("llama", seed=3, r=5, lora_alpha=7)
    model = load_base(base("llama"))
    model.load_state_dict(merged_weights(base("llama"), adapter))
    model.save_pretrained(tmp_path / "full")
    by_rank = extract(tmp_path / "full", base("llama"), tmp_path / "rank", rank=5)
    by_error = extract(tmp_path / "full", base("llama"), tmp_path / "error", max_error=1e-4)
    assert {module.rank for module in (*by_rank.modules, *by_error.modules)} == {5}
    assert by_rank.lost == by_rank.unchanged == ()
    expected = deltas(adapter)
    full = weights(tmp_path / "full")
    for folder in ("rank", "error"):
        result = deltas(tmp_path / folder)
        assert result.keys() == expected.keys()
        for name, delta in expected.items():
            # Adding ΔW to W in float32 rounds away what is small compared with W.
            close(result[name], delta, scale=float(full[f"{name}.weight"].abs().max()), name=name)
    assert max(module.error for module in by_rank.modules) < 1e-5


@pytest.mark.parametrize("rank", [1, 5, 17, 31, 32, 99])
def test_the_error_is_the_smallest_possible(rank: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, base = checkpoint("llama", 1), checkpoint("llama")
    result = extract(full, base, tmp_path / "out", rank=rank)
    written = deltas(tmp_path / "out")
    assert len(result.modules) == 42
    for module in result.modules:
        delta = change(full, base, module.name)
        assert module.rank == min(rank, *delta.shape)
        assert module.norm == near(np.linalg.norm(delta))
        apart = np.linalg.norm(delta - written[module.name].numpy()) / np.linalg.norm(delta)
        assert module.error == near(apart, scale=1)
        assert module.error == near(tails(delta)[module.rank], scale=1)
    total = sum((m.norm * m.error) ** 2 for m in result.modules) / sum(m.norm**2 for m in result.modules)
    assert result.error == pytest.approx(total**0.5)


@pytest.mark.parametrize("error", [0.9, 0.5, 0.1])
def test_an_error_gives_each_module_the_smallest_rank(error: float, checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, base = checkpoint("llama", 1), checkpoint("llama")
    result = extract(full, base, tmp_path / "out", max_error=error)
    for module in result.modules:
        assert module.rank == np.argmax(tails(change(full, base, module.name)) <= error)
        assert module.error <= error
    capped = extract(full, base, tmp_path / "capped", max_error=error, rank=6)
    assert [module.rank for module in capped.modules] == [min(6, module.rank) for module in result.modules]


def test_large_matrices_are_sampled_and_nearly_as_good(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Matrices of 288×288 and 400×288 at rank 9: randomized SVD. Noise has a flat spectrum, the worst case."""
    full, base = checkpoint("wide", 1), checkpoint("wide")
    result = extract(full, base, tmp_path / "out", rank=9)
    large = [module for module in result.modules if min(module.out_features, module.in_features) > 256]
    assert len(large) >= 5
    for module in large:
        best = tails(change(full, base, module.name))[9]
        assert best <= module.error <= 1.005 * best


def test_the_error_includes_rounding_to_half_precision(checkpoint: Checkpoint, tmp_path: Path) -> None:
    full, base = checkpoint("llama", 1), checkpoint("llama")
    exact = extract(full, base, tmp_path / "float32", rank=32)
    rounded = extract(full, base, tmp_path / "bfloat16", rank=32, dtype="bfloat16")
    written = deltas(tmp_path / "bfloat16")
    for module in rounded.modules:
        delta = change(full, base, module.name)
        apart = np.linalg.norm(delta - written[module.name].numpy()) / np.linalg.norm(delta)
        assert module.error == near(apart, scale=1)
    assert max(module.error for module in exact.modules) < 1e-5 < 1e-3 < min(module.error for module in rounded.modules)
    assert {module.dtype for module in rounded.modules} == {"BF16"}


def test_factors_have_the_fine_tunes_dtype(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = load_base(checkpoint("llama", 1)).to(torch.float16)
    model.save_pretrained(tmp_path / "full")
    result = extract(tmp_path / "full", checkpoint("llama"), tmp_path / "out", rank=2)
    assert {module.dtype for module in result.modules} == {"F16"}


shapes = st.sampled_from([(12, 40), (40, 12), (300, 280)])  # the last is sampled, the others decomposed
decays = st.floats(0.0, 2.0)


def matrix(shape: tuple[int, int], decay: float, seed: int) -> np.ndarray:
    """Singular values that fall as k^-decay."""
    random = np.random.default_rng(seed)
    small = min(shape)
    u, v = (np.linalg.qr(random.standard_normal((size, small)))[0] for size in shape)
    return (u * np.arange(1, small + 1.0) ** -decay @ v.T).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(shapes, decays, st.integers(0, 99), st.integers(1, 60), st.integers(1, 60))
def test_a_higher_rank_is_never_worse(shape: tuple[int, int], decay: float, seed: int, one: int, other: int) -> None:
    dense = matrix(shape, decay, seed)
    low, high = (approximate(dense, rank=rank, error=None) for rank in sorted((one, other)))
    assert high.error <= low.error * (1 + 1e-4) + tolerance(1.0)
    for result in (low, high):
        best = tails(dense)[len(result.singular_values)]
        assert best - tolerance(1.0) <= result.error <= 1.01 * best + tolerance(1.0)


@settings(max_examples=25, deadline=None)
@given(shapes, decays, st.integers(0, 99), st.floats(0.05, 0.95))
def test_a_looser_error_never_needs_a_higher_rank(
    shape: tuple[int, int], decay: float, seed: int, error: float
) -> None:
    dense = matrix(shape, decay, seed)
    tight, loose = (approximate(dense, rank=None, error=bound) for bound in (error / 2, error))
    assert len(loose.singular_values) <= len(tight.singular_values)
    smallest = int(np.argmax(tails(dense) <= error))
    assert smallest <= len(loose.singular_values) <= max(1, smallest) * 1.02 + 1
    assert loose.error <= error
