"""Methods on ΔW against independent references: plain torch on full weights, dense SVDs, formulas written out."""

from __future__ import annotations

import json
import math as mathematics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crafting
import numpy as np
import pytest
import torch
from click.testing import Result
from conftest import LAYERS, load_base, logits, merged_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close, near, tolerance

import adapterswap
from adapterswap import Composition
from adapterswap.core.changes.factors import FactorReader, Factors
from adapterswap.core.changes.joint import Joint
from adapterswap.core.methods.dense import drop_mask, keep_largest
from adapterswap.core.planning.rules import Rule
from adapterswap.core.writing.adapter import prepare
from adapterswap.core.writing.outputs import Form
from adapterswap.core.writing.reduction import approximate, dense_delta
from adapterswap.core.writing.resolution import Resolved
from adapterswap.kit.errors import BaseModelError, UnsupportedError
from core.planning.test_sides import combined
from core.writing.test_blends import deltas, handmade

FULL = 12  # the largest rank that a 12×8 or 8×12 module can have, and more


def composed(folders: list[Path], out: Path, *, max_rank: int | None = None, **options: Any) -> dict[str, np.ndarray]:
    """ΔW of a composition of two hand-made experts named math and swahili, from the files that were written."""
    composition = Composition(task="math", language="swahili", num_layers=3, **options)
    plan = adapterswap.compose(composition, dict(zip(("math", "swahili"), folders, strict=True)))
    return deltas(adapterswap.write_adapter(plan, out, max_rank=max_rank, overwrite=True))


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [
        handmade(tmp_path / "math", layers=3, rank=3, alpha=8, rslora=True, seed=1),
        handmade(tmp_path / "swahili", layers=3, rank=2, alpha=5, rslora=False, seed=2),
    ]


def test_dares_masks_are_seeded_and_of_the_right_density() -> None:
    mask = drop_mask((400, 500), 0.3, seed=1, expert="math", module="m")
    assert mask.mean() == pytest.approx(0.3, abs=4 * mathematics.sqrt(0.3 * 0.7 / 200_000))
    assert np.array_equal(mask, drop_mask((400, 500), 0.3, seed=1, expert="math", module="m"))
    for other in ({"seed": 2}, {"expert": "swahili"}, {"module": "n"}):
        assert not np.array_equal(
            mask, drop_mask((400, 500), 0.3, **({"seed": 1, "expert": "math", "module": "m"} | other))
        )


def test_nonlinear_methods_need_a_rank(pair: list[Path], tmp_path: Path) -> None:
    with refused(UnsupportedError, "max_rank"):
        composed(pair, tmp_path / "out", method="ties", density=0.5)
    assert not (tmp_path / "out").exists()


def test_slerp_of_parallel_deltas_is_the_line_between_them(tmp_path: Path) -> None:
    folders = [
        handmade(tmp_path / name, layers=3, rank=2, alpha=alpha, rslora=True, seed=1)
        for name, alpha in (("math", 4), ("swahili", 12))
    ]
    written = composed(folders, tmp_path / "out", method="slerp")
    for name, delta in written.items():
        close(delta, 2 * deltas(folders[0])[name])


def test_magnitude_weights_are_the_inverse_mean_of_all_rows(pair: list[Path], tmp_path: Path) -> None:
    written = composed(pair, tmp_path / "out", weights="magnitude", bottom=1, top=0, bottom_transition=1)
    task, language = deltas(pair[0]), deltas(pair[1])
    means = [
        np.mean(np.concatenate([np.abs(delta).mean(axis=1) for delta in each.values()])) for each in (task, language)
    ]
    shares = (1 / np.array(means)) / (1 / np.array(means)).sum()
    for name, delta in written.items():
        layer = int(name.split(".")[2])
        blend = shares[0] * task[name] + shares[1] * language[name]
        expected = (language[name], blend, task[name])[layer]
        close(delta, expected)
    recorded = json.loads((tmp_path / "out" / "adapterswap.json").read_text())["magnitudes"]
    assert [recorded["math"], recorded["swahili"]] == near(means)


def test_rows_under_a_threshold_go_back_to_zero(pair: list[Path], tmp_path: Path) -> None:
    task, language = deltas(pair[0]), deltas(pair[1])
    threshold = float(np.median(np.concatenate([np.abs(delta).mean(axis=1) for delta in task.values()])))
    written = composed(pair, tmp_path / "out", bottom=1, top=0, row_threshold=threshold)
    kept, rows = 0, 0
    for name, delta in written.items():
        expected = (language if int(name.split(".")[2]) == 0 else task)[name]
        stays = np.abs(expected).mean(axis=1) >= threshold
        close(delta, expected * stays[:, None])
        if int(name.split(".")[2]) > 0:
            kept, rows = kept + stays.sum(), rows + stays.size
    output = json.loads((tmp_path / "out" / "adapterswap.json").read_text())["kept_rows"]
    assert output["math"] == pytest.approx(kept / rows)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), out=st.integers(1, 12), width=st.integers(1, 12), rank=st.integers(1, 8))
def test_truncation_is_the_svd_of_delta_w(data: st.DataObject, out: int, width: int, rank: int) -> None:
    numbers = st.floats(-2, 2, width=32)
    b = data.draw(hnp.arrays(np.float64, (out, rank), elements=numbers))
    a = data.draw(hnp.arrays(np.float64, (rank, width), elements=numbers))
    dense = b @ a
    wanted = data.draw(st.integers(1, rank))
    joint = Joint([Factors(a, b)])
    spectrum, keep, error = joint.cut([1.0], rank=wanted, error=None)
    left, right = joint.mixture([1.0], spectrum, keep)
    sigma = np.linalg.svd(dense, compute_uv=False)
    count = min(keep, len(sigma))
    # The size of the terms, which may exceed that of their sum: terms cancel.
    size = np.linalg.norm(b) * np.linalg.norm(a)
    close(spectrum.sigma[:count], sigma[:count], dtype=torch.float64, scale=size)
    lost = np.linalg.norm(dense - b @ left @ right @ a)
    assert lost == near(np.linalg.norm(sigma[wanted:]), dtype=torch.float64, scale=size)
    # The error is the root of a difference of squares, so it contains the root of their rounding.
    norm = np.linalg.norm(dense) or 1
    allowed = mathematics.sqrt(tolerance(1.0, dtype=torch.float64)) * max(1, size / norm)
    assert error == pytest.approx(lost / norm, abs=allowed)


@pytest.mark.parametrize("error", [0.5, 0.1, 0.01])
def test_max_error_takes_the_smallest_rank_that_reaches_it(error: float, tmp_path: Path) -> None:
    folders = [
        handmade(tmp_path / name, layers=3, rank=4, alpha=4, rslora=True, seed=seed)
        for name, seed in (("math", 1), ("swahili", 2))
    ]
    plan = adapterswap.soup(*folders, num_layers=3)
    out = adapterswap.write_adapter(plan, tmp_path / "out", max_error=error)
    record = json.loads((out / "adapterswap.json").read_text())["reduced"]
    task, language = deltas(folders[0]), deltas(folders[1])
    for name, delta in deltas(out).items():
        exact = (task[name] + language[name]) / 2
        sigma = np.linalg.svd(exact, compute_uv=False)
        errors = [np.linalg.norm(sigma[k:]) / np.linalg.norm(sigma) for k in range(len(sigma) + 1)]
        smallest = next(k for k in range(1, len(errors)) if errors[k] <= error)
        assert record[name]["rank"] == smallest
        assert record[name]["relative_error"] == near(errors[smallest], scale=1)
        lost = np.linalg.norm(delta - exact) / np.linalg.norm(exact)
        assert lost == near(errors[smallest], scale=1)


def test_max_rank_bounds_copies_too(pair: list[Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(*pair, num_layers=3, bottom=1, top=0)
    out = adapterswap.write_adapter(plan, tmp_path / "out", max_rank=2)
    for key, tensor in load_file(out / "adapter_model.safetensors").items():
        assert tensor.shape[0 if "lora_A" in key else 1] == 2
    whole = deltas(pair[0])
    for name, delta in deltas(out).items():
        if int(name.split(".")[2]) > 0:
            sigma = np.linalg.svd(whole[name], compute_uv=False)
            assert np.linalg.norm(delta - whole[name]) == near(sigma[2], scale=sigma[0])


def test_the_card_states_the_error_of_a_bound_on_the_rank(pair: list[Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(*pair, num_layers=3, bottom=1, top=0)
    whole, sides = [deltas(folder) for folder in pair], {"0": 1}
    lost = []
    for name in whole[0]:
        sigma = np.linalg.svd(whole[sides.get(name.split(".")[2], 0)][name], compute_uv=False)
        lost.append(np.linalg.norm(sigma[2:]) / np.linalg.norm(sigma))
    card = (adapterswap.write_adapter(plan, tmp_path / "cut", max_rank=2) / "README.md").read_text(encoding="utf-8")
    (message,) = (line for line in card.splitlines() if "reduced to rank 2" in line)
    assert float(message.rsplit(" ", 1)[1]) == pytest.approx(max(lost), abs=6e-4)
    assert message.startswith(f"- {sum(error > 1e-6 for error in lost)} modules")
    exact = adapterswap.write_adapter(plan, tmp_path / "exact")
    assert "reduced to" not in (exact / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("rank", "error"), [(5, None), (None, 0.2), (4, 0.05)])
def test_randomized_svd_is_as_good_as_the_dense_one(rank: int | None, error: float | None) -> None:
    dense = np.random.default_rng(0).standard_normal((60, 40)).astype(np.float32)
    sigma = np.linalg.svd(dense, compute_uv=False)
    errors = np.array([np.linalg.norm(sigma[k:]) / np.linalg.norm(sigma) for k in range(len(sigma) + 1)])
    result = approximate(dense, rank=rank, error=error)
    keep = len(result.singular_values)
    lost = np.linalg.norm(dense - result.factors.b @ result.factors.a) / np.linalg.norm(dense)
    assert lost == pytest.approx(result.error, abs=1e-3)
    assert lost <= errors[keep] * 1.02
    if error is None or rank == 4:
        assert keep == rank
    else:
        assert errors[keep] <= error
        assert keep <= int(np.argmax(errors <= error)) + 1


def test_a_matrix_of_zeros_has_no_error() -> None:
    assert approximate(np.zeros((6, 5), np.float32), rank=2, error=None).error == 0
    assert Joint([Factors(np.zeros((2, 5)), np.ones((6, 2)))]).cut([1.0], rank=1, error=None)[2] == 0


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 300))
def test_low_rank_arithmetic_equals_dense(seed: int, rank: int, out: int) -> None:
    random = np.random.default_rng(seed)
    one, other = (Factors(random.standard_normal((rank, 7)), random.standard_normal((out, rank))) for _ in range(2))
    expected = np.sum((one.b @ one.a) * (other.b @ other.a))
    size = mathematics.prod(float(np.linalg.norm(part)) for part in (one.a, one.b, other.a, other.b))
    assert Joint([one, other]).inner(0, 1) == near(expected, dtype=torch.float64, scale=size)
    close(one.row_magnitudes("one"), np.abs(one.b @ one.a).mean(axis=1), dtype=torch.float64)


def test_keep_largest_keeps_at_least_one() -> None:
    delta = np.array([[1.0, -3.0], [2.0, 0.5]], np.float32)
    assert np.array_equal(keep_largest(delta, 0.01), [[0, -3], [0, 0]])
    assert np.array_equal(keep_largest(delta, 0.5), [[0, -3], [2, 0]])
    assert keep_largest(delta, 1.0) is delta


def test_weights_that_cancel_do_not_divide_by_zero() -> None:
    rule = Rule.model_validate({"blend": {"a": 1, "b": 1}, "method": "ties", "density": 1})
    ones = np.ones((2, 2), np.float32)
    merged = rule.combine({"a": ones, "b": ones}, {"a": 1.0, "b": -1.0}, seed=0, module="m")
    assert np.isfinite(merged).all()


def test_methods_may_differ_by_rule(pair: list[Path], tmp_path: Path) -> None:
    """A general allocation: TIES in the middle, SLERP at the top, the language below."""
    rules = [
        {"layers": 0, "expert": "swahili"},
        {"layers": 1, "blend": {"math": 1, "swahili": 1}, "method": "ties", "density": 0.5, "lambda": 2},
        {"layers": 2, "blend": {"math": 1, "swahili": 1}, "method": "slerp"},
    ]
    composition = Composition.model_validate({"allocation": rules, "num_layers": 3})
    plan = adapterswap.compose(composition, dict(zip(("math", "swahili"), pair, strict=True)))
    written = deltas(adapterswap.write_adapter(plan, tmp_path / "out", max_rank=FULL))
    task, language = deltas(pair[0]), deltas(pair[1])
    name = "model.layers.1.mlp.down_proj"
    sides = {"math": (1.0, task[name]), "swahili": (1.0, language[name])}
    expected = combined({"method": "ties", "density": 0.5, "scale": 2.0}, sides, name, [])
    close(written[name], expected, depth=2)
    name = "model.layers.0.mlp.down_proj"
    np.testing.assert_array_equal(written[name], language[name])


@pytest.mark.parametrize("method", ["swap", "blend", "truncated"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_portable_gives_the_same_logits(
    method: str, architecture: str, base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [expert(architecture, seed=1, r=4), expert(architecture, seed=2, r=6, lora_alpha=5, use_rslora=False)]
    zones = {"bottom": 2, "top": 1, "bottom_transition": 0 if method == "swap" else 2}
    plan = adapterswap.layer_swap(*folders, **zones)
    rank = 5 if method == "truncated" else None
    exact = adapterswap.write_adapter(plan, tmp_path / "exact", max_rank=rank)
    portable = adapterswap.write_adapter(plan, tmp_path / "portable", layout="portable", max_rank=rank)
    config = json.loads((portable / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"], config["use_rslora"]) == ({}, {}, False)
    assert config["lora_alpha"] == config["r"] == {"swap": 6, "blend": 10, "truncated": 5}[method]
    found = [logits(PeftModel.from_pretrained(load_base(base(architecture)), folder)) for folder in (exact, portable)]
    close(found[0], found[1], depth=LAYERS)


@pytest.mark.parametrize("alpha", [1e-4, 0.01, 3, 4, 1e6])
@pytest.mark.parametrize("other", [1, 1e-4])
@pytest.mark.parametrize("layout", ["exact", "portable"])
def test_small_and_large_scales_keep_their_digits_in_float16(
    layout: str, alpha: float, other: float, tmp_path: Path
) -> None:
    """Folded into B, a small scale would make its numbers subnormal, and a large one infinite."""
    folders = [
        handmade(tmp_path / name, layers=4, rank=4, alpha=scaled, rslora=False, seed=seed, dtype=torch.float16)
        for seed, (name, scaled) in enumerate({"math": alpha, "swahili": alpha * other}.items())
    ]
    plan = adapterswap.layer_swap(*folders, num_layers=4, bottom=1, top=1, bottom_transition=1)
    written = deltas(adapterswap.write_adapter(plan, tmp_path / "out", layout=layout))
    task, language = map(deltas, folders)
    for name, delta in written.items():
        layer = int(name.split(".")[2])
        expected = (language[name], (task[name] + language[name]) / 2, task[name], language[name])[layer]
        assert np.linalg.norm(delta - expected) < 2**-10 * np.linalg.norm(expected), name
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    if layout == "portable":
        assert (config["rank_pattern"], config["alpha_pattern"], config["use_rslora"]) == ({}, {}, False)


def test_modules_trained_in_full(base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path) -> None:
    """`modules_to_save`: averaged if both experts have a copy; averaged with the base's weight if only one has."""
    both = [expert(seed=seed, modules_to_save=["lm_head"]) for seed in (1, 2)]
    for seed, folder in enumerate(both):
        tensors = load_file(folder / "adapter_model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        tensors["base_model.model.lm_head.weight"] += 0.05 * torch.randn(96, 32, generator=generator)
        save_file(tensors, tmp_path / "changed.safetensors", metadata={"format": "pt"})
        (tmp_path / "changed.safetensors").rename(folder / "adapter_model.safetensors")
    plain = expert(seed=2)
    for language, remedy in ((both[1], None), (plain, "--base-model")):
        if remedy:
            with refused(
                BaseModelError, "base_model", match=r"Averaging lm_head with .* Pass the base's folder as `base"
            ):
                adapterswap.layer_swap(both[0], language, bottom=2, top=1)
        plan = adapterswap.layer_swap(both[0], language, bottom=2, top=1, base_model=str(base("llama")))
        out = adapterswap.write_adapter(plan, tmp_path / "out", overwrite=True)
        full = [merged_weights(base("llama"), folder) for folder in (both[0], language, out)]
        close(full[2]["lm_head.weight"], (full[0]["lm_head.weight"] + full[1]["lm_head.weight"]) / 2)
        name = "model.layers.0.mlp.up_proj.weight"
        close(full[2][name], full[1][name])


def test_resolving_a_resolved_plan_changes_nothing(pair: list[Path]) -> None:
    """`resolve` returns a fully resolved plan unchanged."""
    plan = adapterswap.layer_swap(*pair, num_layers=3, bottom=1)
    assert Resolved.of(plan).plan is plan
    with FactorReader.open(plan.adapters) as read:
        module = next(iter(plan.experts[pair[0].name].modules.values()))
        factors = read(pair[0].name, module)
        close(factors.b @ factors.a, deltas(pair[0])[module.name])


@pytest.mark.parametrize("method", ["soup", "ties"])
@pytest.mark.parametrize(("dtype", "bound"), [("BF16", 0.0001), ("BF16", 0.3), ("F32", 0.3)])
def test_the_recorded_error_includes_rounding(tmp_path: Path, method: str, dtype: str, bound: float) -> None:
    settings = crafting.config(r=3)
    folders = [
        crafting.adapter(tmp_path / name, crafting.tensors(seed=seed, dtype=dtype, rank=3, width=16), settings)
        for seed, name in enumerate(("math", "swahili"))
    ]
    options: dict[str, Any] = {"density": 0.5} if method == "ties" else {}
    composition = Composition(task="math", language="swahili", num_layers=4, method=method, **options)
    plan = adapterswap.compose(composition, dict(zip(("math", "swahili"), folders, strict=True)))
    prepared = prepare(plan, Form(max_error=bound))
    out = prepared.write(tmp_path / "out")
    written, sources = deltas(out), [deltas(folder) for folder in folders]
    assert prepared.reduced.keys() == written.keys()
    with FactorReader.open(plan.adapters) as read:
        for module in plan:
            exact = np.mean([source[module.name] for source in sources], axis=0)
            if method == "ties":
                exact = dense_delta(module, prepared.resolved, read).astype(np.float64)
            lost = np.linalg.norm(written[module.name] - exact) / np.linalg.norm(exact)
            found = prepared.reduced[module.name]
            assert found.written_error == pytest.approx(lost, rel=1e-2, abs=1e-6)
            assert found.error <= bound
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "is up to 0.000" not in card
    worst = max(found.written_error for found in prepared.reduced.values())
    assert f"is up to {worst:.3f}" in card


def test_a_rounding_beyond_the_wanted_error_is_reported(run: Callable[..., Result], tmp_path: Path) -> None:
    for name, dtype in (("whole", "F32"), ("half", "BF16")):
        for seed, side in enumerate("ml"):
            place = tmp_path / f"{name}-{side}"
            crafting.adapter(place, crafting.tensors(seed=seed, dtype=dtype, rank=3), crafting.config(r=3))
        options = ("--method", "soup", "--max-error", 0.0001, "--num-layers", 4, "--dry-run", "-o", tmp_path / "out")
        result = run("compose", "-t", tmp_path / f"{name}-m", "-l", tmp_path / f"{name}-l", *options, exit_code=0)
        assert ("above --max-error 0.0001" in result.stderr) == (name == "half")
        assert ("< 0.001 on average" in result.stderr) == (name == "whole")
