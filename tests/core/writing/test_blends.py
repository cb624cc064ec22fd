"""ΔW of written adapters, against numpy in float64: sums, one rounding, identity, copied bytes, determinism."""

from __future__ import annotations

import json
import math as mathematics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import LAYERS, load_base, logits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from pico_models import deltas
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import UnsupportedError

PREFIX = "base_model.model."


def handmade(
    folder: Path, *, layers: int, rank: int, alpha: float, rslora: bool, seed: int, dtype: torch.dtype = torch.float32
) -> Path:
    """A small adapter without a model: two modules per layer, 12×8 and 8×12."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, out, into in (("self_attn.q_proj", 12, 8), ("mlp.down_proj", 8, 12)):
            key = f"{PREFIX}model.layers.{layer}.{name}."
            tensors[f"{key}lora_A.weight"] = torch.randn(rank, into, generator=generator).to(dtype)
            tensors[f"{key}lora_B.weight"] = torch.randn(out, rank, generator=generator).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "rank_pattern": {}}
    config |= {"alpha_pattern": {}, "base_model_name_or_path": "org/base", "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_module_follows_the_zones(data: st.DataObject, tmp_path: Path) -> None:
    layers = data.draw(st.integers(1, 9), "layers")
    zones = data.draw(
        st.lists(st.integers(0, layers), min_size=4, max_size=4).filter(lambda z: sum(z) <= layers), "zones"
    )
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=2, max_size=2), "weights")
    folders = [
        handmade(
            tmp_path / name,
            layers=layers,
            rank=data.draw(st.integers(1, 5), "rank"),
            alpha=data.draw(st.one_of(st.integers(1, 64), st.floats(0.1, 50)), "alpha"),
            rslora=data.draw(st.booleans(), "rslora"),
            seed=seed,
        )
        for seed, name in enumerate(("math", "swahili"))
    ]
    bottom, top, bottom_transition, top_transition = zones
    plan = adapterswap.layer_swap(
        *folders, num_layers=layers, bottom=bottom, top=top, bottom_transition=bottom_transition,
        top_transition=top_transition, task_weight=weights[0], language_weight=weights[1],
    )  # fmt: skip
    adapterswap.write_adapter(plan, tmp_path / "out", overwrite=True)
    task, language, composed = deltas(folders[0]), deltas(folders[1]), deltas(tmp_path / "out")
    assert composed.keys() == task.keys()
    for name, delta in composed.items():
        layer = int(name.split(".")[2])
        if layer < bottom or layer >= layers - top:
            expected = language[name]
        elif layer >= bottom + bottom_transition and layer < layers - top - top_transition:
            expected = task[name]
        else:
            expected = (weights[0] * task[name] + weights[1] * language[name]) / sum(weights)
        close(delta, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rule=st.sampled_from(["swap", "soup", "transition"]), weight=st.floats(0.05, 0.95), rslora=st.booleans())
def test_an_expert_composed_with_itself_is_itself(rule: str, weight: float, rslora: bool, tmp_path: Path) -> None:
    one = handmade(tmp_path / "one", layers=4, rank=3, alpha=5, rslora=rslora, seed=7)
    twin = handmade(tmp_path / "twin", layers=4, rank=3, alpha=5, rslora=rslora, seed=7)
    if rule == "soup":
        plan = adapterswap.soup(one, twin, num_layers=4, task_weight=weight, language_weight=1 - weight)
    else:
        zones = {"bottom": 1, "top": 1, "bottom_transition": 1 if rule == "transition" else 0}
        plan = adapterswap.layer_swap(one, twin, num_layers=4, task_weight=weight, **zones)
    adapterswap.write_adapter(plan, tmp_path / "out", overwrite=True)
    for name, delta in deltas(tmp_path / "out").items():
        expected = deltas(one)[name]
        close(delta, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_blend_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """B' is the float64 product c·s/s'·B, rounded once to the dtype: no second rounding on the way."""
    folders = [
        handmade(tmp_path / name, layers=3, rank=3, alpha=alpha, rslora=True, seed=seed, dtype=dtype)
        for name, alpha, seed in (("math", 8, 1), ("swahili", 11, 2))
    ]
    plan = adapterswap.soup(*folders, num_layers=3, task_weight=0.3, language_weight=0.7)
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / mathematics.sqrt(config["r"])
    written = load_file(out / "adapter_model.safetensors")
    parts = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    factors = [0.3 * 8 / mathematics.sqrt(3) / scale, 0.7 * 11 / mathematics.sqrt(3) / scale]
    for key, tensor in written.items():
        assert tensor.dtype == dtype
        if "lora_A" in key:
            assert torch.equal(tensor, torch.cat([part[key] for part in parts], dim=0))
        else:
            exact = torch.cat([part[key].double() * factor for part, factor in zip(parts, factors, strict=True)], dim=1)
            half_ulp = torch.finfo(dtype).eps / 2 * 2 ** torch.floor(torch.log2(exact.abs()))
            assert ((tensor.double() - exact).abs() <= half_ulp * (1 + 1e-4)).all()


def test_copied_tensors_keep_their_bytes(math: Path, swahili: Path, tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(math, swahili, bottom=2, top=1)
    out = load_file(adapterswap.write_adapter(plan, tmp_path / "out") / "adapter_model.safetensors")
    task, language = (load_file(folder / "adapter_model.safetensors") for folder in (math, swahili))
    assert out.keys() == task.keys()
    for key, tensor in out.items():
        layer = int(key.split(".layers.")[1].split(".")[0])
        assert torch.equal(tensor, (language if layer in (0, 1, 5) else task)[key])


def test_weight_one_gives_that_experts_tensors(math: Path, swahili: Path, tmp_path: Path) -> None:
    plan = adapterswap.soup(math, swahili, task_weight=1, language_weight=0, num_layers=6)
    out = load_file(adapterswap.write_adapter(plan, tmp_path / "out") / "adapter_model.safetensors")
    source = load_file(math / "adapter_model.safetensors")
    assert out.keys() == source.keys()
    assert all(torch.equal(out[key], source[key]) for key in source)


@pytest.mark.parametrize("method", ["swap", "soup"])
def test_the_same_inputs_give_the_same_bytes(method: str, math: Path, swahili: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        plan = adapterswap.soup(math, swahili) if method == "soup" else adapterswap.layer_swap(math, swahili, bottom=1)
        adapterswap.write_adapter(plan, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors", "adapterswap.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_mixed_dtypes_widen_only_in_blends(tmp_path: Path) -> None:
    one = handmade(tmp_path / "one", layers=4, rank=2, alpha=4, rslora=True, seed=1, dtype=torch.bfloat16)
    two = handmade(tmp_path / "two", layers=4, rank=2, alpha=4, rslora=True, seed=2, dtype=torch.float16)
    plan = adapterswap.layer_swap(one, two, num_layers=4, bottom=1, top=0, bottom_transition=1)
    out = load_file(adapterswap.write_adapter(plan, tmp_path / "out") / "adapter_model.safetensors")
    dtypes = {int(key.split(".layers.")[1].split(".")[0]): tensor.dtype for key, tensor in out.items()}
    assert dtypes == {0: torch.float16, 1: torch.float32, 2: torch.bfloat16, 3: torch.bfloat16}


def test_a_reader_that_ignores_patterns_is_right_where_scales_agree(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """Both experts have s = 4; the blend has rank 12, and with the global alpha and rank its s is still 4."""
    folders = [expert(seed=1, r=4, lora_alpha=8), expert(seed=2, r=16, lora_alpha=16)]
    plan = adapterswap.layer_swap(*folders, bottom=2, top=1, bottom_transition=1)
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    model = PeftModel.from_pretrained(load_base(base("llama")), out)
    expected = logits(model)
    config = json.loads((out / "adapter_config.json").read_text())
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] = config["lora_alpha"] / mathematics.sqrt(config["r"])
    close(logits(model), expected, depth=LAYERS)


@pytest.mark.parametrize("alpha", [1e-9, -1e-9])
def test_a_copy_whose_alpha_would_be_too_small_is_refused(alpha: float, tmp_path: Path) -> None:
    """The plain expert's scale α/r takes a smaller α in the rank-stabilized form, α'/√r."""
    tiny = handmade(tmp_path / "tiny", layers=2, rank=16, alpha=alpha, rslora=False, seed=1)
    other = handmade(tmp_path / "other", layers=2, rank=16, alpha=16, rslora=True, seed=2)
    plan = adapterswap.layer_swap(tiny, other, num_layers=2, bottom=1, top=0)
    with refused(UnsupportedError, "layout"):
        adapterswap.write_adapter(plan, tmp_path / "exact")
    assert not (tmp_path / "exact").exists()
    adapterswap.open_adapter(adapterswap.write_adapter(plan, tmp_path / "portable", layout="portable"))
    name = "model.layers.1.self_attn.q_proj"
    close(deltas(tmp_path / "portable")[name], deltas(tiny)[name])


def test_a_blend_whose_alpha_would_be_too_large_is_refused(tmp_path: Path) -> None:
    experts = [handmade(tmp_path / name, layers=2, rank=4, alpha=8e8, rslora=False, seed=len(name)) for name in "ab"]
    plan = adapterswap.soup(*experts, num_layers=2)
    with refused(UnsupportedError, "layout", match="lora_alpha"):
        adapterswap.write_adapter(plan, tmp_path / "exact")
    portable = adapterswap.write_adapter(plan, tmp_path / "portable", layout="portable")
    assert adapterswap.open_adapter(portable).config.rank == 8


def test_an_overflow_in_float32_does_not_advise_float32(tmp_path: Path) -> None:
    experts = [handmade(tmp_path / name, layers=1, rank=2, alpha=1e9, rslora=False, seed=1) for name in ("a", "b")]
    for folder in experts:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({key: tensor * 1e30 for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    with refused(UnsupportedError, match="overflows F32") as caught:
        adapterswap.write_adapter(adapterswap.soup(*experts, num_layers=1), tmp_path / "out", layout="portable")
    assert "float32" not in str(caught.value)
