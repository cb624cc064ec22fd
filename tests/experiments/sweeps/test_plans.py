"""Cells that differ only in their zones: a few of them check all, and plans are made when they are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterswap import compose, make_plan, open_adapter
from adapterswap.core.planning.plan import Plan
from adapterswap.engines.live import why_not_live
from adapterswap.experiments.sweeps import SweepRecipe, plans
from adapterswap.experiments.sweeps.judge import way_of
from adapterswap.experiments.sweeps.prepared import prepare

ZONES = {"bottom": [0, 1, 2], "top": [0, 1], "bottom_transition": [0, 1], "top_transition": [0, 1]}


def terms(plan: Plan) -> list[Any]:
    return [(slot.name, slot.method, [(term.expert, term.coefficient) for term in slot.terms]) for slot in plan]


@pytest.mark.parametrize("family", [ZONES, {**ZONES, "max_rank": 2}])
def test_plans_and_ways_are_those_of_each_cell_alone(
    recipe: Callable[..., SweepRecipe], world: Path, family: dict[str, Any]
) -> None:
    prepared = prepare(recipe(baselines=[], compositions=[family]))
    experts = {name: open_adapter(world / name) for name in ("math1", "sw1")}
    cells = prepared.grid.cells
    assert len(prepared.plans.checked) < len(cells) / 2
    for cell in reversed(cells):
        composition, plan = cell.parsed, prepared.plans[cell.cell]
        assert composition is not None
        assert plan is not None
        alone = compose(composition.model_copy(update={"num_layers": prepared.num_layers}), experts)
        assert terms(plan) == terms(alone), cell.short
        expected = "switched" if not cell.output and why_not_live(alone) is None else "reduced"
        assert way_of(prepared, cell) == expected


def test_an_expert_without_some_layers_has_every_cell_checked(
    recipe: Callable[..., SweepRecipe], world: Path, tmp_path: Path
) -> None:
    """There a layer's rule in one cell does not say what it does in another layer of the zone."""
    shutil.copytree(world / "sw1", tmp_path / "sw1")
    config = json.loads((tmp_path / "sw1" / "adapter_config.json").read_text())
    layers = {"layers_to_transform": [0], "layers_pattern": "layers"}
    (tmp_path / "sw1" / "adapter_config.json").write_text(json.dumps({**config, **layers}))
    language = {"sw1": str(tmp_path / "sw1")}
    prepared = prepare(recipe(baselines=[], language_experts=language, compositions=[ZONES]))
    assert len(prepared.plans.checked) == len(prepared.grid.cells)


def test_a_cell_is_planned_once(
    recipe: Callable[..., SweepRecipe], world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []

    def counting(composition: Any, *arguments: Any, **options: Any) -> Plan:
        planned.append(composition)
        return make_plan(composition, *arguments, **options)

    monkeypatch.setattr(plans, "make_plan", counting)
    weights = [number / 100 for number in range(1, 151)]
    families = [{"method": ["soup", "layer_swap"]}, {"method": "soup", "language_weight": weights}]
    prepared = prepare(recipe(baselines=[], compositions=families))
    for cell in (*prepared.grid.cells, *prepared.grid.cells):
        way_of(prepared, cell)
        assert prepared.plans[cell.cell] is not None
    assert len(planned) == len(prepared.grid.cells) > 150


def test_few_plans_are_kept_of_a_large_base(
    recipe: Callable[..., SweepRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [number / 10 for number in range(1, 9)]
    prepared = prepare(recipe(compositions=[{"method": "soup", "language_weight": weights}]))
    first = {cell: plan and terms(plan) for cell, plan in prepared.plans.items()}
    size = max(len(plan.slots) for plan in prepared.plans.values() if plan is not None)
    monkeypatch.setattr(plans, "_MOST_KEPT", 2 * size)
    again = prepare(prepared.recipe)
    assert {cell: plan and terms(plan) for cell, plan in again.plans.items()} == first
    assert sum(len(plan.slots) for plan in again.plans._kept.values() if plan is not None) <= 3 * size
