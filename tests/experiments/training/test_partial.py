"""Adapters on some modules: a side of a partition, or some layers; and the effect of reverting afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import merged_weights
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from adapterswap.core.experts.adapter import open_adapter
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.functions import slice_layers
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.writing.adapter import write_adapter
from adapterswap.experiments.training import TrainRecipe, estimate, train
from adapterswap.experiments.training.base import with_padding
from adapterswap.experiments.training.targets import find_targets
from adapterswap.kit.errors import FieldError

MakeRecipe = Callable[..., TrainRecipe]

ATTENTION = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]


def named(layers: Any, ends: list[str]) -> set[str]:
    return {f"model.layers.{layer}.{end}" for layer in layers for end in ends}


# Written out for six layers: 6, 2, 8 and 4 of 28, rounded half up, are 1, 0, 2 and 1.
LANGUAGE = {
    "A": named(range(6), ATTENTION) | named([0], MLP),
    "B": named([0, 1, 5], ATTENTION + MLP),
    "C": named([0], ATTENTION + MLP),
    "Z": named([2, 3, 4], ATTENTION + MLP),
}
ALL = named(range(6), ATTENTION + MLP)


@pytest.mark.parametrize("partition", LANGUAGE)
def test_each_side_has_its_modules(make_recipe: MakeRecipe, partition: str) -> None:
    for side, wanted in (("language", LANGUAGE[partition]), ("task", ALL - LANGUAGE[partition])):
        recipe = make_recipe(adapter={"partition": partition, "side": side})
        base = with_padding(OpenedBase.open(recipe.base_model))
        targets = find_targets(base.empty_model(), recipe, base.config)
        assert targets.modules == wanted
        # By layers if these are enough, and by whole names if the modules differ between layers.
        whole = partition == "A" and side == "language"
        assert set(targets.names) == (wanted if whole else set(targets.ends))
        assert targets.layers == (None if whole else sorted({int(name.split(".")[2]) for name in wanted}))


def test_only_the_sides_modules_get_an_adapter(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """Partition A, whose language side PEFT gets by whole names."""
    experts = {}
    for side, wanted in (("language", LANGUAGE["A"]), ("task", ALL - LANGUAGE["A"])):
        recipe = make_recipe(adapter={"partition": "A", "side": side}, training={"max_steps": 2})
        expected, report = estimate(recipe), train(recipe, out_path=tmp_path / side)
        experts[side] = open_adapter(report.path)
        assert set(experts[side].modules) == wanted
        assert {module.scale for module in experts[side].modules.values()} == {8 / 4**0.5}
        assert expected.trained_modules == len(wanted)
        saved = load_file(report.path / "adapter_model.safetensors")
        assert expected.trainable_parameters == report.trainable_parameters == sum(t.numel() for t in saved.values())
        # PEFT puts an adapter where the file says one is, and nowhere else.
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(recipe.base_model), report.path)
        adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name}
        assert {name.removeprefix("base_model.model.") for name in adapted} == wanted
        output = json.loads((report.path / "training.json").read_text())
        assert output["recipe"]["adapter"]["partition"] == "A"

    # A layer swap with partial experts finds every module where it looks for it.
    composition = Composition(partition="A", task=("task",), language=("language",))
    plan = make_plan(composition, experts, num_layers=6)
    assert {name: module.owner for name, module in plan.modules.items()} == {
        name: "language" if name in LANGUAGE["A"] else "task" for name in ALL
    }


def test_slicing_afterwards_is_reverting(tmp_path: Path, make_recipe: MakeRecipe, pico: Any) -> None:
    """Train-then-revert: all modules are trained, and some put back; freeze-then-train never trains them."""
    trained = train(make_recipe(training={"max_steps": 4}), out_path=tmp_path / "trained").path
    write_adapter(slice_layers(open_adapter(trained), "0-1,5", num_layers=6), tmp_path / "reverted")
    frozen = train(
        make_recipe(training={"max_steps": 4}, adapter={"layers": "0-1,5"}), out_path=tmp_path / "frozen"
    ).path
    weights = {
        folder.name: load_file(folder / "adapter_model.safetensors")
        for folder in (trained, tmp_path / "reverted", frozen)
    }
    assert weights["reverted"].keys() == weights["frozen"].keys() < weights["trained"].keys()
    for name, tensor in weights["reverted"].items():
        assert torch.equal(tensor, weights["trained"][name])
    assert any(not torch.equal(tensor, weights["frozen"][name]) for name, tensor in weights["reverted"].items())

    base = pico("llama")
    unchanged = AutoModelForCausalLM.from_pretrained(base).state_dict()
    whole, reverted = (merged_weights(base, tmp_path / name) for name in ("trained", "reverted"))
    for name, tensor in reverted.items():
        kept = any(f"layers.{layer}." in name for layer in (0, 1, 5))
        assert torch.equal(tensor, whole[name] if kept else unchanged[name]), name


@pytest.mark.parametrize(
    ("adapter", "parameter"),
    [
        ({"partition": "A"}, "adapter"),
        ({"side": "task"}, "adapter"),
        ({"partition": "A", "side": "task", "layers": "0"}, "adapter"),
        ({"partition": "A", "side": "both"}, "adapter.side"),
        ({"r": 0}, "adapter.r"),
        ({"method": "none", "r": 8}, "adapter"),
    ],
)
def test_invalid_selections_are_refused(make_recipe: MakeRecipe, adapter: dict[str, Any], parameter: str) -> None:
    with refused(FieldError, parameter):
        make_recipe(adapter=adapter)


def test_a_side_without_a_module_is_refused(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(adapter={"partition": "A", "side": "task", "target_modules": ["q_proj"]})
    with refused(FieldError, "adapter.partition"):
        estimate(recipe)
