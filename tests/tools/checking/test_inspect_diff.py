"""`inspect` and `diff` cover everything in an adapter or in full weights, and text and JSON agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from conftest import LAYERS, LLAMA_PROJECTIONS
from safetensors.torch import load_file, save_file
from tolerances import near, tolerance

import adapterswap
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.planning.composition import Composition

Run = Callable[..., Result]
Experts = Callable[..., Path]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def heads(expert: Experts, tmp_path: Path) -> tuple[Path, Path]:
    """Two adapters with equal LoRA factors and norms, whose heads differ by 1 in every number."""
    with quiet_peft():
        one = expert(seed=1, modules_to_save=["lm_head", "input_layernorm"])
    other = tmp_path / "other"
    shutil.copytree(one, other)
    tensors = load_file(other / WEIGHTS)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, other / WEIGHTS, {"format": "pt"})
    return one, other


def parsed(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_diff_sees_a_head_trained_in_full(heads: tuple[Path, Path], run: Run) -> None:
    one, other = (load_file(path / WEIGHTS)["base_model.model.lm_head.weight"].double() for path in heads)
    output = parsed(run("diff", *heads, "--json"))
    # The root of a difference of squares in float64, which leaves the root of their rounding.
    assert output["total"]["distance"] == pytest.approx(0, abs=tolerance(1.0, dtype=torch.float64) ** 0.5)
    head = output["saved"]["lm_head"]
    assert head["norms"] == near([float(one.norm()), float(other.norm())])
    assert head["apart"] == near(one.numel() ** 0.5)
    assert head["distance"] == near(one.numel() ** 0.5 / float(one.norm()))
    norms = [row for name, row in output["saved"].items() if name.endswith("input_layernorm")]
    assert [row["distance"] for row in norms] == [0.0] * LAYERS
    shown = run("diff", *heads).stdout
    assert f"{head['distance']:.4f}" in shown
    assert f"{head['apart']:.4g}" in shown
    assert shown.count("input_layernorm") == LAYERS


@pytest.mark.parametrize("swapped", [False, True])
def test_modules_in_full_in_one_adapter_have_no_distance(
    swapped: bool, heads: tuple[Path, Path], expert: Experts, run: Run
) -> None:
    pair = [heads[0], expert(seed=2, target_modules=["q_proj", "lm_head"])]
    output = parsed(run("diff", *(pair[::-1] if swapped else pair), "--json"))
    head, norm = output["saved"]["lm_head"], output["saved"]["model.layers.0.input_layernorm"]
    for row in (head, norm):
        assert (row["distance"], row["apart"]) == (None, None)
        assert row["norms"][1 - swapped] is None
        assert row["norms"][swapped] > 0
        assert row["remark"].startswith(f"trained in full in the {'second' if swapped else 'first'} only")
    assert "has LoRA on it" in head["remark"]
    assert "has LoRA on it" not in norm["remark"]
    shown = run("diff", *(pair[::-1] if swapped else pair)).stdout
    for name in ("lm_head", "model.layers.0.input_layernorm"):
        assert f"{name}: {output['saved'][name]['remark']}" in shown.splitlines()


def test_diff_reads_large_weights_in_blocks(
    heads: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = parsed(run("diff", *heads, "--json"))["saved"]["lm_head"]
    monkeypatch.setattr("adapterswap.tools.comparison._BLOCK", 100)
    blocks = parsed(run("diff", *heads, "--json"))["saved"]["lm_head"]
    for key in ("norms", "apart", "distance"):
        assert blocks[key] == near(whole[key], dtype=torch.float64)


def test_diff_refuses_other_shapes_and_nan(heads: tuple[Path, Path], run: Run) -> None:
    tensors = load_file(heads[1] / WEIGHTS)
    key = "base_model.model.lm_head.weight"
    whole = tensors[key]
    save_file(tensors | {key: whole[:-1].clone()}, heads[1] / WEIGHTS, {"format": "pt"})
    refused = run("diff", *heads)
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert all(part in refused.stderr for part in ("lm_head", "95")), refused.stderr
    save_file(tensors | {key: whole * np.nan}, heads[1] / WEIGHTS, {"format": "pt"})
    refused = run("diff", *heads)
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "holds NaN" in refused.stderr


def test_diff_sees_embeddings(expert: Experts, run: Run) -> None:
    pair = [expert(seed=seed, target_modules=["embed_tokens", "q_proj"]) for seed in (1, 2)]
    output = parsed(run("diff", *pair, "--json"))["modules"]["model.embed_tokens"]
    deltas = []
    for path in pair:
        tensors = load_file(path / WEIGHTS)
        name = "base_model.model.model.embed_tokens.lora_embedding_"
        deltas.append(16 / 8**0.5 * tensors[f"{name}B"].double() @ tensors[f"{name}A"].double())
    assert output["distance"] == near(float((deltas[0] - deltas[1]).norm() / deltas[0].norm()), depth=2)


def test_diff_says_that_layers_which_a_slice_lacks_count_as_unchanged(math: Path, run: Run, tmp_path: Path) -> None:
    cut = tmp_path / "shell"
    assert run("slice", math, "--layers", "0", "-o", cut, "--num-layers", str(LAYERS)).exit_code == 0
    for pair, place in (((cut, math), "first"), ((math, cut), "second")):
        output = parsed(run("diff", *pair, "--json"))
        (remark,) = output["remarks"]
        assert remark == f"the {place} adapter, shell, is a slice with the layers 0; others count as ΔW = 0"
        assert remark in run("diff", *pair).stderr
        assert output["layers"]["0"]["distance"] == 0
    for pair in ((cut, cut), (math, math)):
        assert parsed(run("diff", *pair, "--json"))["remarks"] == []


def test_diff_refuses_full_weights(base: Callable[[str], Path], math: Path, run: Run) -> None:
    for pair in ((base("llama"), math), (math, base("llama"))):
        refused = run("diff", *pair)
        assert (refused.exit_code, refused.stdout) == (3, "")
        assert "is a full checkpoint" in refused.stderr
        assert "adapterswap extract" in refused.stderr


def test_inspect_shows_modules_trained_in_full(heads: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    tensors = load_file(heads[0] / WEIGHTS)
    output = parsed(run("inspect", heads[0], "--json"))
    saved = {entry["name"]: entry for entry in output["saved"]}
    assert len(saved) == LAYERS + 1
    head = saved["lm_head"]
    assert head["tensors"]["weight"]["shape"] == [96, 32]
    start, stop = head["tensors"]["weight"]["bytes"]
    raw = (heads[0] / WEIGHTS).read_bytes()[start:stop]
    assert np.array_equal(np.frombuffer(raw, np.float32), tensors["base_model.model.lm_head.weight"].numpy().ravel())
    assert output["saved_parameters"] == 96 * 32 + LAYERS * 32
    assert saved["model.layers.3.input_layernorm"]["layer"] == 3
    shown = run("inspect", heads[0]).stdout.splitlines()
    assert any(line.split()[:5] == ["lm_head.weight", "other", "none", "96", "×"] for line in shown)
    assert any(line.split()[:4] == ["input_layernorm.weight", "other", "0-5", "32"] for line in shown)
    assert f"{LAYERS + 1} trained in full with {output['saved_parameters']:,} parameters" in shown[1]

    out = tmp_path / "out"
    assert run("compose", "-t", heads[0], "-l", heads[1], "-o", out, "--bottom", 1, "--top", 1).exit_code == 0
    owners = {entry["name"]: entry["owner"] for entry in parsed(run("inspect", out, "--json"))["saved"]}
    assert owners["lm_head"] == {heads[0].name: 0.5, heads[1].name: 0.5}
    assert owners["model.layers.0.input_layernorm"] == heads[1].name


@pytest.mark.parametrize("options", [["--bottom", 1, "--top-transition", 2, "--top", 1], ["--method", "soup"]], ids=str)
def test_json_contains_what_the_text_shows(
    options: list[Any], math: Path, swahili: Path, run: Run, tmp_path: Path
) -> None:
    assert run("compose", "-t", math, "-l", swahili, "-o", tmp_path / "out", *options).exit_code == 0
    found, shown = parsed(run("inspect", tmp_path / "out", "--json")), run("inspect", tmp_path / "out").stdout
    origin = found["composed_of"]
    assert origin["num_layers"] == LAYERS
    assert origin["experts"] == {path.name: path.name for path in (math, swahili)}
    assert shown.splitlines()[-len(origin["strip"]) :] == origin["strip"]
    assert f"{found['parameters']:,} parameters" in shown
    for module in found["modules"]:
        row = [module["name"].partition(f".{module['layer']}.")[2], module["kind"]]
        assert any(line.split()[:2] == row and str(module["rank"]) in line.split() for line in shown.splitlines())


@pytest.mark.parametrize("kind", ["adapters", "mixed", "base"])
def test_inspect_full_weights(
    kind: str, base: Callable[[str], Path], math: Path, swahili: Path, run: Run, tmp_path: Path
) -> None:
    folder, strip = base("llama"), None
    if kind != "base":
        language = swahili
        if kind == "mixed":
            language = adapterswap.merge(swahili, out_path=tmp_path / "swahili")
        zones = Composition(task="math", language="swahili", bottom=1, top=2)
        plan = adapterswap.compose(zones, {"math": math, "swahili": language})
        folder = adapterswap.merge(plan, folder, out_path=tmp_path / "merged", max_shard_size="60KB")
        strip = "layers  smmmss" if kind == "adapters" else None
    tensors = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    found, text = parsed(run("inspect", folder, "--json")), run("inspect", folder)
    assert text.exit_code == 0, text.stderr
    shown = text.stdout.splitlines()
    assert (found["kind"], found["model_type"], found["num_layers"]) == ("model", "llama", LAYERS)
    assert {entry["name"]: entry["shape"] for entry in found["tensors"]} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert found["parameters"] == sum(prod(tensor.shape) for tensor in tensors.values())
    assert found["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert shown[0].endswith(f"full weights of llama, {LAYERS} layers")
    assert f"{len(tensors)} tensors, {found['parameters']:,} parameters" in shown[1]
    for end in LLAMA_PROJECTIONS:
        assert any(f"{end}.weight" in line and "0-5" in line for line in shown)
    if kind == "base":
        assert "composed_of" not in found
        return
    record = json.loads((folder / "adapterswap.json").read_text())["tensors"]
    assert {entry["name"]: entry["owner"] for entry in found["tensors"]} == record
    assert found["composed_of"]["experts"].keys() == {"math", "swahili"}
    assert shown[-len(found["composed_of"]["strip"]) :] == found["composed_of"]["strip"]
    assert found["composed_of"]["strip"][0].split() == ["012345"]
    if strip:
        rows = [line for line in shown if line.startswith(("attention", "mlp", "layers"))]
        assert all(row.split()[-1] == "smmmss" for row in rows)


@pytest.mark.parametrize(("part", "exit_code"), [(1.001, 0), (0.999, 1)])
def test_max_distance_applies_to_all_modules_together(part: float, exit_code: int, expert: Experts, run: Run) -> None:
    pair = expert(seed=1), expert(seed=2)
    distance = parsed(run("diff", *pair, "--json"))["total"]["distance"]
    result = run("diff", *pair, "--max-distance", part * distance)
    assert result.exit_code == exit_code
    assert result.stdout == run("diff", *pair).stdout
    assert bool(result.stderr) == bool(exit_code)


def test_max_distance_of_modules_trained_in_full(heads: tuple[Path, Path], expert: Experts, run: Run) -> None:
    head = parsed(run("diff", *heads, "--json"))["saved"]["lm_head"]["distance"]
    assert run("diff", *heads, "--max-distance", head).exit_code == 0
    assert run("diff", *heads, "--max-distance", head * 0.999, "--json").exit_code == 1
    assert run("diff", heads[0], heads[0], "--max-distance", 0).exit_code == 0  # rounding is not distance
    only_one = run("diff", heads[0], expert(seed=1), "--max-distance", 1e9, exit_code=1)
    assert "lm_head" in only_one.stderr


@pytest.mark.parametrize("limit", ["nan", "-1", "near"])
def test_max_distance_is_a_number_of_0_or_more(limit: str, math: Path, run: Run) -> None:
    assert run("diff", math, math, "--max-distance", limit).exit_code == 2
