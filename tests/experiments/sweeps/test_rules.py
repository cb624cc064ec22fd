"""Compositions by rules in sweeps, and experts of more roles than two."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from refusals import refused

import adapterswap
from adapterswap.core.planning.composition import Composition
from adapterswap.experiments.reporting.choices import is_single
from adapterswap.experiments.reporting.report import compose_command
from adapterswap.experiments.sweeps import Cell, Run, SweepRecipe, prepare, sweep
from adapterswap.kit.errors import FieldError
from experiments.sweeps.test_grid import grid_of, recipe_of

ROLES = {"culture": {"c1": "x", "c2": "y"}, "safety": {"guard": "z"}}


def texts(cell: Cell) -> list[str]:
    composition = cell.parsed
    assert composition is not None
    return [rule.text for rule in composition.allocation or ()]


def test_rules_over_named_experts_are_one_composition() -> None:
    grid = grid_of(compositions={"my swap": {"rules": ["s1: 0-4", "m1*0.5 + s2*0.5: 5", "mlp of m2: 6-9", "m1"]}})
    (cell,) = grid.cells
    assert (cell.family, cell.task_expert, cell.language_expert) == ("my swap", ("m1", "m2"), ("s1", "s2"))
    assert texts(cell) == ["s1: 0-4", "m1*0.5 + s2*0.5: 5", "mlp of m2: 6-9", "m1"]
    assert cell == Cell.from_json(json.loads(json.dumps(cell.as_json())))
    assert not is_single(cell)


def test_roles_stand_for_each_of_their_experts() -> None:
    rules = ["language: 0-4", "culture + safety: 30-31", "task"]
    grid = grid_of(compositions={"all": {"rules": rules}}, roles=ROLES)
    found = {(*cell.task_expert, *cell.language_expert, *cell.other_experts): cell for cell in grid.cells}
    wanted = {(m, s, c, "guard") for m in ("m1", "m2") for s in ("s1", "s2", "s3") for c in ("c1", "c2")}
    assert found.keys() == wanted
    assert texts(found["m2", "s3", "c1", "guard"]) == ["s3: 0-4", "c1 + guard: 30-31", "m2"]
    assert {cell.configuration for cell in grid.cells} == {f"rules={'; '.join(rules)}"}
    assert all(cell.default for cell in grid.cells)


def test_pairs_and_souped_sides_hold_for_roles_in_rules() -> None:
    rules = ["language: 0-4", "task"]
    pairs = [{"task": "m1", "language": "s2"}, {"task": "m1", "language": ["s1", "s3"]}]
    grid = grid_of(compositions={"swap": {"rules": rules}}, pairs=pairs)
    assert [texts(cell) for cell in grid.cells] == [["s2: 0-4", "m1"], ["mean(s1, s3): 0-4", "m1"]]
    assert [cell.family for cell in grid.cells] == ["swap", "swap of soups"]
    only = grid_of(compositions={"swap": {"rules": ["task: 0-4", "base"]}}, pairs=pairs)
    assert [texts(cell) for cell in only.cells] == [["m1: 0-4", "base"]]
    mean = grid_of(compositions={"swap": {"rules": ["mean(task, s1): 0-4", "m1"]}}, task_experts={"m1": "x"})
    assert [texts(cell) for cell in mean.cells] == [["mean(m1, s1): 0-4", "m1"]]


def test_experts_of_every_role_are_judged_alone() -> None:
    grid = grid_of(baselines=["base", "task", "language", "roles"], roles=ROLES)
    rows = {cell.family: [] for cell in grid.cells}
    for cell in grid.cells:
        rows[cell.family].append(cell.short)
        assert is_single(cell)
    assert rows["culture expert"] == ["c1", "c2"]
    assert rows["safety expert"] == ["guard"]


@pytest.mark.parametrize(
    ("content", "parameter"),
    [
        ({"compositions": {"x": {"rules": ["m9: 0-4", "m1"]}}}, "compositions"),
        ({"compositions": {"x": {"rules": []}}}, "compositions.x.rules"),
        ({"compositions": {"x": {"rules": ["m1: x"]}}}, "compositions.x.rules.0"),
        ({"compositions": {"x": {"rules": ["m1"], "bottom": 3}}}, "compositions.x.bottom"),
        ({"compositions": {"x": {"rules": ["m1"], "language": "base"}}}, "compositions.x.language"),
        ({"roles": {"culture": {"m1": "x"}}}, "roles"),
        ({"roles": {"culture": {}}}, "roles.culture"),
        ({"roles": {"culture": {"task": "x"}}, "compositions": {"x": {"rules": ["task"]}}}, "compositions"),
    ],
)
def test_invalid_rules_are_refused(content: dict[str, Any], parameter: str) -> None:
    with refused(FieldError, parameter):
        recipe_of(**content)


@pytest.mark.parametrize("role", ["task", "language", "base", "a b", ""])
def test_names_of_roles(role: str) -> None:
    with refused(FieldError, f"roles.{role}"):
        recipe_of(roles={role: {"x": "y"}})


def test_methods_that_are_not_low_rank_need_a_bound() -> None:
    rules = ["m1 + s1 with method=ties, density=0.5"]
    with refused(FieldError, "max_rank"):
        grid_of(compositions={"x": {"rules": rules}})
    assert len(grid_of(compositions={"x": {"rules": rules, "max_rank": 8}}).cells) == 1
    with refused(FieldError, "compositions"):
        grid_of(compositions={"x": {"rules": ["task + m1: 3", "m1"]}})


def test_a_sweep_judges_what_compose_writes(
    content: Callable[..., dict[str, Any]],
    world: Path,
    run: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cell by rules has the scores of the adapter that its own command line writes."""
    recipe = tmp_path / "recipe.yaml"
    more = {"roles": {"culture": {"sw2": str(world / "sw2")}}, "baselines": ["roles"], "selection": {"fraction": 0.4}}
    families = {"three": {"rules": ["language: 0", "task*0.5 + culture*0.5: 1", "task"]}}
    recipe.write_text(yaml.safe_dump(content(compositions=families, **more)))
    options = ["--expert", f"joint={world / 'joint'}", "--rule", "joint: 0", "--rule", "math1"]
    result = run("sweep", recipe, "-o", tmp_path / "run", *options, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "math1+sw1+sw2@rules=language: 0; task*0.5 + culture*0.5: 1; task" in result.stdout
    assert "j joint" in result.stdout
    result = run("sweep", recipe, "-o", tmp_path / "run", *options, "--json")
    assert result.exit_code == 0, result.output
    rows = {row["family"]: row for row in json.loads(result.stdout)["families"]}
    assert rows.keys() == {"culture expert", "three", "rules"} | {"other expert"}
    judged = Run.read(tmp_path / "run")
    cell = next(one for one in judged.results if one.cell.family == "three")
    command = compose_command(judged, cell.cell)
    assert command is not None
    places = {name: str(world / name) for name in ("math1", "sw1", "sw2", "base")}
    monkeypatch.chdir(world)
    words = shlex.split(command)[1:-1]
    assert run(*words, tmp_path / "composed").exit_code == 0
    plan = adapterswap.compose(Composition(rules=["sw1: 0", "math1 + sw2: 1", "math1"]), places)
    plan.write(tmp_path / "expected")
    one, other = (tmp_path / name / "adapter_model.safetensors" for name in ("composed", "expected"))
    assert one.read_bytes() == other.read_bytes()
    alone = SweepRecipe.model_validate(
        content(extra={"composed": str(tmp_path / "composed")}, baselines=[], selection={"fraction": 0.4})
    )
    (again,) = sweep(prepare(alone), tmp_path / "alone").results
    assert again.results["mgsm_direct_sw"].docs == cell.results["mgsm_direct_sw"].docs
    report = adapterswap.report(tmp_path / "run", tmp_path / "report")
    assert "three" in {row.label for target in report.targets for row in target.rows}
