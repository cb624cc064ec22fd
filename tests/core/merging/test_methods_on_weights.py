"""Every method of `dense_methods` through `merge`: each stored tensor against the method on full weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import weights
from pico_models import merged_by_peft
from safetensors.torch import save_file
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.core.methods.method import DENSITY
from adapterswap.core.methods.registry import find_method
from adapterswap.kit.errors import AdapterswapError, UnsupportedError
from core.methods import dense_methods
from core.methods.test_merge_methods import CASES, own_choice, seed_of

NAMES = ("task", "language")


def composition_of(case: str, **options: Any) -> Composition:
    method, values = CASES[case]
    return Composition(task="task", language="language", method=method, **seed_of(method), **values, **options)


def expected_of(case: str, base: dict[str, Any], experts: list[dict[str, Any]]) -> dict[str, Any]:
    method, values = CASES[case]
    result = {}
    for name, tensor in base.items():
        original = tensor.double().numpy()
        full = [expert[name].double().numpy() for expert in experts]
        if find_method(method).acts_on == "delta":  # as the library sees them: the difference of two float32 numbers
            full = [original + np.float32(expert[name].numpy() - tensor.numpy()) for expert in experts]
        module = name.removesuffix(".weight")
        result[name] = dense_methods.merged(method, original, full, [1.0, 1.0], own_choice(NAMES, module), **values)
    return result


@pytest.mark.sampled(3)  # what each method computes, tests/core/methods compares with the same dense ones
@pytest.mark.parametrize("case", CASES)
def test_two_full_checkpoints(case: str, model: Callable[..., Path], tmp_path: Path) -> None:
    base, experts = model(), {"task": model(seed=1), "language": model(seed=2)}
    plan = adapterswap.compose(composition_of(case, base_model=str(base)), experts)
    merged = weights(adapterswap.merge(plan, out_path=tmp_path / "out"))
    expected = expected_of(case, weights(base), [weights(folder) for folder in experts.values()])
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        close(tensor.numpy(), expected[name], depth=4, scale=2.0, name=f"{name} ")


@pytest.mark.parametrize("case", ["karcher", "arcee_fusion", "nearswap", "model_stock", "nuslerp", "sce"])
def test_an_adapter_counts_as_its_full_weights(
    case: str, model: Callable[..., Path], expert: Callable[..., Path], base: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a full checkpoint, and with another adapter: what neither changes equals the base, byte for byte."""
    task, language = expert(seed=1), expert(seed=2)
    for other, full in ((language, merged_by_peft(base("llama"), language)), (model(seed=2), weights(model(seed=2)))):
        composition = composition_of(case, base_model=str(base("llama")))
        plan = adapterswap.compose(composition, {"task": task, "language": other})
        merged = weights(adapterswap.merge(plan, out_path=tmp_path / "out", overwrite=True))
        original = weights(base("llama"))
        by_peft_task = merged_by_peft(base("llama"), task)
        first = {name: by_peft_task[name] for name in original}
        second = {name: full[name] for name in original}
        expected = expected_of(case, original, [first, second])
        for name, tensor in merged.items():
            if other is language and original[name].equal(first[name]) and original[name].equal(second[name]):
                assert tensor.equal(original[name]), name
            else:
                close(tensor.numpy(), expected[name], depth=8, scale=4.0, name=f"{name} ")


@pytest.mark.parametrize("case", ["magmax", "nuslerp", "tsv"])
def test_what_only_the_base_has_is_rounded(case: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """A tensor that no expert changes, such as those of layers that predict further tokens, in another dtype."""
    base, experts = tmp_path / "base", {"task": model(seed=1), "language": model(seed=2)}
    shutil.copytree(model(), base)
    further = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    save_file({**weights(base), "mtp.fc.weight": further}, base / "model.safetensors", {"format": "pt"})
    plan = adapterswap.compose(composition_of(case, base_model=str(base)), experts)
    merged = weights(adapterswap.merge(plan, out_path=tmp_path / "out", dtype="bfloat16"))
    assert merged["mtp.fc.weight"].equal(further.bfloat16())


def test_whole_weights_need_no_base_where_all_experts_are_full(model: Callable[..., Path], tmp_path: Path) -> None:
    experts = {"task": model(seed=1), "language": model(seed=2)}
    for case in ("karcher", "arcee_fusion"):
        with_base = adapterswap.compose(composition_of(case, base_model=str(model())), experts)
        without = adapterswap.compose(composition_of(case), experts)
        one, other = (weights(adapterswap.merge(plan, out_path=tmp_path / f"{case}-{plan.base.weights is None}"))
                      for plan in (with_base, without))  # fmt: skip
        assert all(tensor.equal(other[name]) for name, tensor in one.items())
    with pytest.raises(AdapterswapError) as caught:
        adapterswap.compose(composition_of("sce"), experts)
    assert "base_model" in str(caught.value)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox", "mixtral"])
@pytest.mark.parametrize("method", ["core_ties", "della", "ties", "dare_linear", "dare_ties", "magnitude_prune"])
def test_full_weights_equal_the_merged_adapter(
    method: str, architecture: str, model: Callable[..., Path], lora: Callable[..., Path], tmp_path: Path
) -> None:
    """The composition written as an adapter and merged by PEFT, and written as full weights at once."""
    values = {"density": 0.5} if find_method(method).has(DENSITY) else {}
    composition = Composition(task="task", language="language", method=method, **seed_of(method), **values)
    plan = adapterswap.compose(
        composition, {"task": lora(architecture, seed=1), "language": lora(architecture, seed=2)}
    )
    adapter = adapterswap.write_adapter(plan, tmp_path / "adapter", max_rank=None if method == "core_ties" else 128)
    merged = weights(adapterswap.merge(plan, str(model(architecture)), out_path=tmp_path / "out"))
    in_two_steps = weights(adapterswap.merge(adapter, str(model(architecture)), out_path=tmp_path / "two"))
    for name, tensor in merged.items():
        close(tensor, in_two_steps[name], depth=16, scale=4.0, name=f"{name} ")
    for name, tensor in merged_by_peft(model(architecture), adapter).items():
        if name in merged:  # some have other names in memory
            close(merged[name], tensor, depth=16, scale=4.0, name=f"{name} by PEFT ")


def test_core_space_refuses_full_checkpoints(model: Callable[..., Path], lora: Callable[..., Path]) -> None:
    composition = Composition(
        task="task", language="language", method="core_ties", density=0.5, base_model=str(model())
    )
    for task in (model(seed=1), lora(seed=1)):
        with pytest.raises(UnsupportedError) as caught:
            adapterswap.compose(composition, {"task": task, "language": model(seed=2)})
        assert caught.value.parameter == "method"


@pytest.mark.parametrize("case", ["karcher", "arcee_fusion", "sce", "tsv"])
def test_sides_are_averaged_first(case: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """An average of several experts counts as one; the base in it is an expert without changes. The record verifies."""
    method, values = CASES[case]
    folders = {"a": model(seed=1), "b": model(seed=2), "c": model(seed=3)}
    averages = {"pair": ["a", "b"], "half": ["c", "base"]}
    rule = {"blend": {"pair": 1, "half": 1}, "averages": averages, "method": method, **values}
    composition = Composition(allocation=[rule], base_model=str(model()))
    out = adapterswap.merge(adapterswap.compose(composition, folders), out_path=tmp_path / "out")
    base, (a, b, c) = weights(model()), (weights(folder) for folder in folders.values())
    sides = [{name: (a[name] + b[name]) / 2 for name in base}, {name: (c[name] + base[name]) / 2 for name in base}]
    expected = expected_of(case, base, sides)
    for name, tensor in weights(out).items():
        close(tensor.numpy(), expected[name], depth=8, scale=4.0, name=f"{name} ")
    places = {name: str(folder) for name, folder in folders.items()}
    assert adapterswap.verify(out, experts=places, base_model=str(model())).equal
