"""Adapters and full checkpoints in one plan, shards and dtypes that differ, and methods on dense ΔW."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import save_like, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pico_models import merged_by_peft
from tolerances import close, near

import adapterswap
from adapterswap.core.writing.stream import ModelForm
from adapterswap.core.writing.weights import prepare_model
from core.merging.conftest import equal, loaded
from core.merging.test_full_experts import algorithm_1, is_transformer, layer_of, same_weights


@pytest.mark.parametrize("zones", [{"bottom": 2, "top": 1}, {"bottom": 1, "top": 1, "top_transition": 2}], ids=str)
def test_an_adapter_and_a_full_checkpoint(
    zones: dict[str, int], model: Callable[..., Path], expert: Callable[..., Path], base: Callable[[str], Path]
) -> None:
    """A LoRA math expert and a full Swahili checkpoint; the base is the one that the adapter names."""
    math = expert(seed=1)
    swahili = model(seed=2)
    plan = adapterswap.layer_swap(math, swahili, **zones)
    assert plan.is_model
    assert plan.base.weights is not None
    out = math.parent / f"mixed-{len(zones)}"
    merged = weights(adapterswap.merge(plan, out_path=out, overwrite=True))
    full = merged_by_peft(base("llama"), math)
    wanted = algorithm_1(full, weights(swahili), **zones)
    close({name: merged[name] for name in wanted}, wanted)
    for name in (name for name in wanted if is_transformer(name) and layer_of(name) in {0, 5}):
        assert torch.equal(merged[name], weights(swahili)[name])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_magnitudes_of_an_adapter_and_of_its_full_weights(
    architecture: str, model: Callable[..., Path], lora: Callable[..., Path], tmp_path: Path
) -> None:
    """The full expert has rows that the adapter does not change, so its mean is smaller; both are recorded."""
    math, language = lora(architecture, seed=1), model(architecture, seed=2)
    base, full = weights(model(architecture)), adapterswap.merge(math, out_path=tmp_path / "full")
    composition = adapterswap.Composition(
        task="math", language="swahili", base_model=str(model(architecture)), method="soup", weights="magnitude"
    )
    mixed, whole = (
        prepare_model(adapterswap.compose(composition, {"math": expert, "swahili": language}), ModelForm())
        for expert in (math, full)
    )
    deltas = [weights(full)[name] - tensor for name, tensor in base.items() if tensor.ndim > 1]
    rows = [(delta.T if architecture == "gpt2" else delta).abs().mean(1) for delta in deltas if delta.any()]
    largest = max(float(tensor.abs().max()) for tensor in base.values() if tensor.ndim > 1)
    assert mixed.magnitudes["math"] == near(float(torch.cat(rows).mean()), scale=2 * largest)
    assert whole.magnitudes["math"] < mixed.magnitudes["math"]


def test_shards_that_differ(model: Callable[..., Path], tmp_path: Path) -> None:
    """The first full expert's shards are kept; the numbers do not depend on the shards."""
    one, two = model(seed=1), model(seed=2)
    three = save_like(tmp_path / "sharded", one, weights(one), shards=3)
    whole = adapterswap.merge(adapterswap.layer_swap(one, two, bottom=2, top=1), out_path=tmp_path / "whole")
    sharded = adapterswap.merge(adapterswap.layer_swap(three, two, bottom=2, top=1), out_path=tmp_path / "many")
    equal(weights(whole), weights(sharded))
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights(three).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(three).values())
    loaded(sharded)


def test_max_shard_size(model: Callable[..., Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(model(seed=1), model(seed=2), bottom=2, top=1)
    whole = adapterswap.merge(plan, out_path=tmp_path / "whole")
    split = adapterswap.merge(plan, out_path=tmp_path / "split", max_shard_size="40KB")
    equal(weights(whole), weights(split))
    sizes = [sum(t.nbytes for t in weights_of(path).values()) for path in sorted(split.glob("*.safetensors"))]
    assert len(sizes) > 2
    assert max(sizes) <= 40_000
    loaded(split)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)], ids=str)
def test_dtypes_that_differ(
    dtypes: tuple[torch.dtype, torch.dtype], model: Callable[..., Path], tmp_path: Path
) -> None:
    """Everything is written in the skeleton's dtype, rounded once."""
    one, two = model(seed=1, dtype=dtypes[0]), model(seed=2, dtype=dtypes[1])
    merged = weights(adapterswap.merge(adapterswap.layer_swap(one, two, bottom=2, top=1), out_path=tmp_path / "out"))
    wanted = algorithm_1(weights(one), {n: t.double() for n, t in weights(two).items()}, bottom=2, top=1)
    for name, tensor in wanted.items():
        assert merged[name].dtype == dtypes[0]
        assert torch.equal(merged[name], tensor.to(dtypes[0])), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_of_the_result(dtype: str, model: Callable[..., Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(model(seed=1), model(seed=2), bottom=2, top=1)
    plain = weights(adapterswap.merge(plan, out_path=tmp_path / "plain"))
    out = adapterswap.merge(plan, out_path=tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
    for name, tensor in weights(out).items():
        assert torch.equal(tensor, plain[name].to(getattr(torch, dtype))), name
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_allocation(
    data: st.DataObject, model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An allocation drawn at random: each tensor is what its layer's owner, or the blend, says."""
    owners = data.draw(st.lists(st.sampled_from(["math", "swahili", "base", "blend"]), min_size=6, max_size=6))
    weight = data.draw(st.floats(0.1, 0.9))
    blend = {"math": weight, "swahili": 1 - weight}
    rules = [
        adapterswap.Rule(layers=i, blend=blend) if owner == "blend" else adapterswap.Rule(layers=i, expert=owner)
        for i, owner in enumerate(owners)
    ]
    rules += [adapterswap.Rule(expert="math"), adapterswap.Rule(expert="swahili", optional=True)]
    if "swahili" not in owners and "blend" not in owners:
        rules[-2] = adapterswap.Rule(blend=blend)
    composition = adapterswap.Composition(allocation=tuple(rules), base_model=str(model()))
    plan = adapterswap.compose(composition, {"math": model(seed=1), "swahili": model(seed=2)})
    merged = weights(adapterswap.merge(plan, out_path=tmp_path_factory.mktemp("any") / "out"))
    states = {"math": weights(model(seed=1)), "swahili": weights(model(seed=2)), "base": weights(model())}
    mixed = {
        name: (weight * states["math"][name].double() + (1 - weight) * states["swahili"][name].double()).float()
        for name in merged
    }
    for name, tensor in merged.items():
        layer = layer_of(name)
        owner = owners[layer] if layer is not None else ("math" if rules[-2].expert else "blend")
        if owner == "blend":
            close(tensor, mixed[name], name=name)
        else:
            assert torch.equal(tensor, states[owner][name])


def test_tied_checkpoints_stay_tied(model: Callable[..., Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(model("gemma", seed=1), model("gemma", seed=2), bottom=2, top=1)
    merged = adapterswap.merge(plan, out_path=tmp_path / "out")
    assert "lm_head.weight" not in weights(merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True
    ours, theirs = (weights(model("gemma", seed=seed)) for seed in (1, 2))
    same_weights(weights(merged), algorithm_1(ours, theirs, bottom=2, top=1), ours, theirs)
