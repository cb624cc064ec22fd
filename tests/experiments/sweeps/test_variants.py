"""Sweeps of DoRA and of modules trained in full: each cell against the adapter written separately."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from refusals import refused
from transformers import AutoModelForCausalLM

from adapterswap import write_adapter
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.engines.live import find_adapter
from adapterswap.experiments.evaluation import evaluate_model
from adapterswap.experiments.evaluation.subjects import Subject
from adapterswap.experiments.sweeps import SweepRecipe, prepare, read_samples, sweep
from adapterswap.experiments.sweeps.judge import way_of
from adapterswap.kit.errors import UnsupportedError

from .conftest import PROJECTIONS

Recipe = Callable[..., SweepRecipe]


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`trained(7, use_dora=True)` is an expert with these options of LoraConfig, everything in it random."""

    def make(seed: int, **options: Any) -> str:
        model = AutoModelForCausalLM.from_pretrained(world / "base", dtype=torch.float32)
        lora = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(**{**lora, **options}))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.data *= 1 + torch.rand(parameter.shape, generator=generator)
            elif parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape, generator=generator) * 0.15
        folder = tmp_path_factory.mktemp(f"trained-{seed}")
        model.save_pretrained(folder, save_embedding_layers=False)
        return str(folder)

    return make


COMPOSITIONS: list[dict[str, Any]] = [
    {"bottom": 2, "top": 1},
    {"bottom": 1, "top": 1, "outside": "language"},
    {"partition": ["A"]},
    {"language": "base", "bottom": 1, "top": 1},
]


@pytest.mark.parametrize(
    ("options", "compositions"),
    [
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, COMPOSITIONS),
        ({"modules_to_save": ["lm_head"]}, [*COMPOSITIONS, {"name": "cut", "bottom": 2, "top": 1, "max_rank": 2}]),
    ],
    ids=["DoRA and a head", "a head"],
)
def test_cells_equal_written_adapters(
    options: dict[str, Any], compositions: list[dict[str, Any]], trained: Callable[..., str], recipe: Recipe,
    tmp_path: Path,
) -> None:  # fmt: skip
    both = {
        "task_experts": {"math1": trained(7, **options)},
        "language_experts": {"sw1": trained(8, **options)},
    }
    prepared = prepare(recipe(compositions=compositions, **both))
    run = sweep(prepared, tmp_path / "run", device="cpu")
    assert {r.cell.family for r in run.results if way_of(prepared, r.cell) != "switched"} <= {"cut"}
    outputs = set()
    for result in run.results:
        plan = prepared.plans[result.cell.cell]
        if plan is None:
            continue
        folder = write_adapter(plan, tmp_path / result.cell.cell, **result.cell.output)
        with Subject(prepared.base, adapter=find_adapter(str(folder))).loaded(device="cpu") as model:
            alone = evaluate_model(model, prepared.base.tokenizer, result.cell.tasks, prepared.settings)
        for name, value in result.results.items():
            assert value.value == alone.tasks[name].score("normalized").value
        found = [row["output"] for row in read_samples(run.folder, result.cell.cell)]
        assert found == [sample.as_json()["output"] for sample in alone.samples], result.cell.short
        outputs.add(str(found))
    assert len(outputs) >= len(compositions)  # the cells do differ


def test_dora_beside_plain_lora_equals_merged_weights(
    trained: Callable[..., str], recipe: Recipe, tmp_path: Path
) -> None:
    """No adapter could hold both kinds; the model can."""
    both = {"task_experts": {"math1": trained(7, use_dora=True)}, "language_experts": {"sw1": trained(8)}}
    prepared = prepare(recipe(compositions=[{"bottom": 2, "top": 1}], **both))
    run = sweep(prepared, tmp_path / "run", device="cpu")
    for result in run.results:
        plan = prepared.plans[result.cell.cell]
        if plan is None:
            continue
        base = OpenedBase.open(plan.merge(tmp_path / result.cell.cell, base_model=prepared.recipe.base_model))
        with Subject(base).loaded(device="cpu") as model:
            alone = evaluate_model(model, prepared.base.tokenizer, result.cell.tasks, prepared.settings)
        found = [row["output"] for row in read_samples(run.folder, result.cell.cell)]
        assert found == [sample.as_json()["output"] for sample in alone.samples], result.cell.short
    reduced = recipe(compositions=[{"bottom": 2, "top": 1, "max_rank": 2}], **both)
    with refused(UnsupportedError, "max_rank", match="math1 is DoRA and sw1 is LoRA"):
        prepare(reduced)


def test_what_peft_cannot_switch_is_refused_before_weights_are_loaded(
    trained: Callable[..., str], recipe: Recipe
) -> None:
    for options, message in (
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"], "bias": "all"}, "bias"),
    ):
        with refused(UnsupportedError, "task_experts", match=message):
            prepare(recipe(task_experts={"math1": trained(9, **options)}))
    clashing = {"math1": trained(7, modules_to_save=["lm_head"])}, {"sw1": trained(8, target_modules=["lm_head"])}
    with refused(UnsupportedError, "experts"):
        prepare(recipe(task_experts=clashing[0], language_experts=clashing[1]))
