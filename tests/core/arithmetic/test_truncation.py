"""A bound on the rank, from files to files: the written adapter, its recorded error, and its verification."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crafting
import numpy as np
import pytest
import torch
from tolerances import near, tolerance

import adapterswap
from adapterswap import AdapterswapError
from adapterswap.core.writing import outputs as spooling
from adapterswap.kit.errors import OutputError
from adapterswap.tools.verification import verify
from core.writing.test_blends import deltas

WEIGHTS, RECORD = "adapter_model.safetensors", "adapterswap.json"
WIDTH, RANK = 24, 8
EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def expert(folder: Path, seed: int, dtype: str = "F32", change: Callable[[str, np.ndarray], Any] | None = None) -> Path:
    content = crafting.tensors(layers=1, rank=RANK, seed=seed, width=WIDTH, dtype=dtype)
    for key, (_, shape, raw) in content.items():
        values = np.frombuffer(raw, crafting.NUMPY[dtype]).reshape(shape).astype(np.float32)
        if change is not None:
            values = change(key, values)
        content[key] = dtype, shape, values.astype(crafting.NUMPY[dtype]).tobytes()
    return crafting.adapter(folder, content, crafting.config(r=RANK))


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Path]:
    return {name: expert(tmp_path / name, seed) for seed, name in enumerate(("math", "swahili"))}


def soup(pair: dict[str, Path]) -> adapterswap.Plan:
    return adapterswap.soup(pair["math"], pair["swahili"], num_layers=1)


@pytest.mark.parametrize("layout", ["exact", "portable"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_recorded_error_matches_the_written_adapter(dtype: str, layout: Any, tmp_path: Path) -> None:
    """Also at full rank, where nothing is cut off and only rounding remains."""
    pair = {name: expert(tmp_path / name, seed, dtype) for seed, name in enumerate(("math", "swahili"))}
    exact = [deltas(folder) for folder in pair.values()]
    for rank in (1, 3, 2 * RANK - 1):
        out = adapterswap.write_adapter(
            soup(pair), tmp_path / "out", max_rank=rank, layout=layout, max_error=1e-7, overwrite=True
        )
        record = json.loads((out / RECORD).read_text())
        assert record["output"] == {"layout": layout, "max_rank": rank, "max_error": 1e-7}
        for name, delta in deltas(out).items():
            average = (exact[0][name] + exact[1][name]) / 2
            lost = float(np.linalg.norm(delta - average) / np.linalg.norm(average))
            sigma = np.linalg.svd(average, compute_uv=False)
            found = record["reduced"][name]
            assert found["rank"] == rank
            # Products of two roundings are left out of the recorded error.
            assert found["relative_error"] == pytest.approx(lost, rel=1e-2 if dtype == "BF16" else 1e-4, abs=1e-8)
            assert lost >= np.linalg.norm(sigma[rank:]) / np.linalg.norm(sigma) * (1 - 1e-6)
            rounding = tolerance(1.0, dtype=EXACT[dtype])
            assert lost <= np.linalg.norm(sigma[rank:]) / np.linalg.norm(sigma) + rounding
        assert verify(out, pair).equal


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_sizes_at_the_ends_of_float32(size: float, tmp_path: Path) -> None:
    def scaled(key: str, values: np.ndarray) -> np.ndarray:
        return values * np.float32(size if "lora_A" in key else 1 / size)

    pair = {"math": expert(tmp_path / "math", 0, change=scaled), "swahili": expert(tmp_path / "swahili", 1)}
    out = adapterswap.write_adapter(soup(pair), tmp_path / "out", max_rank=5)
    exact = [deltas(folder) for folder in pair.values()]
    for name, delta in deltas(out).items():
        average = (exact[0][name] + exact[1][name]) / 2
        sigma = np.linalg.svd(average, compute_uv=False)
        assert np.linalg.norm(delta - average) == near(float(np.linalg.norm(sigma[5:])), scale=float(sigma[0]))


def test_an_untrained_expert_and_one_twice(tmp_path: Path) -> None:
    def untrained(key: str, values: np.ndarray) -> np.ndarray:
        return values * 0 if "lora_B" in key else values

    math, zero = expert(tmp_path / "math", 0), expert(tmp_path / "zero", 1, change=untrained)
    again = shutil.copytree(math, tmp_path / "again")
    exact = deltas(math)
    for pair, share in (([math, zero], 0.5), ([math, again], 1.0), ([zero, zero], 0.0)):
        out = adapterswap.write_adapter(
            adapterswap.soup(*pair, num_layers=1), tmp_path / "out", max_rank=RANK, overwrite=True
        )
        for name, delta in deltas(out).items():
            assert np.abs(delta - share * exact[name]).max() <= tolerance(exact[name])
            error = json.loads((out / RECORD).read_text())["reduced"][name]["relative_error"]
            assert error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["soup", "ties"])
@pytest.mark.parametrize("layout", ["exact", "portable"])
def test_factors_spooled_to_disk_give_the_same_bytes(
    method: str, layout: Any, pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"density": 0.5} if method == "ties" else {}
    composition = adapterswap.Composition(task="math", language="swahili", num_layers=1, method=method, **options)
    plan = adapterswap.compose(composition, pair)
    held = adapterswap.write_adapter(plan, tmp_path / "held", max_error=0.3, layout=layout)
    monkeypatch.setattr(spooling, "_IN_MEMORY", 0)
    spooled = adapterswap.write_adapter(plan, tmp_path / "spooled", max_error=0.3, layout=layout)
    assert (held / WEIGHTS).read_bytes() == (spooled / WEIGHTS).read_bytes()


def test_a_full_disk_is_an_error(pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spooling, "_IN_MEMORY", 0)
    monkeypatch.setattr(spooling.tempfile, "TemporaryFile", full)
    with pytest.raises(OutputError):
        adapterswap.write_adapter(soup(pair), tmp_path / "out", max_rank=5)
    assert not (tmp_path / "out").exists()


def test_numbers_that_fit_no_dtype_are_refused_by_name(tmp_path: Path) -> None:
    def huge(key: str, values: np.ndarray) -> np.ndarray:
        return np.full_like(values, 6e4)

    pair = [expert(tmp_path / name, seed, "F16", huge) for seed, name in enumerate(("math", "swahili"))]
    with pytest.raises(AdapterswapError, match=r"layers\.0\..*overflows F16"):
        adapterswap.write_adapter(adapterswap.soup(*pair, num_layers=1), tmp_path / "out", max_rank=5)
