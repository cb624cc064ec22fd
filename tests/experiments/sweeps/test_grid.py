"""From a recipe to cells, against the grid written out by hand; and invalid recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from inspect import signature
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import adapterswap
from adapterswap.cli import find_command
from adapterswap.core.planning.composition import Composition, parse_composition
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.languages import language_of
from adapterswap.experiments.recipes import check_recipe
from adapterswap.experiments.sweeps import Cell, SweepRecipe
from adapterswap.experiments.sweeps.families import GRID_FIELDS, Family
from adapterswap.experiments.sweeps.grid import Grid, make_cells
from adapterswap.experiments.sweeps.recipe import DocumentSplit, SweepSettings, SweepTasks
from adapterswap.kit.errors import CompositionError, FieldError

SIDES = {"task_experts": {"m1": "a", "m2": "b"}, "language_experts": {"s1": "c", "s2": "d", "s3": "e"}}


def recipe_of(**content: Any) -> SweepRecipe:
    return SweepRecipe.model_validate({"base_model": "base", "tasks": ["t"], "baselines": [], **SIDES, **content})


def grid_of(num_layers: int = 32, **content: Any) -> Grid:
    recipe = recipe_of(**content)
    target = {name: tuple(tasks) for name, tasks in recipe.target_groups().items()}
    return make_cells(recipe, SweepTasks(target, tuple(recipe.retention)), num_layers)


def test_the_first_papers_grid_has_81_configurations_of_9_pairs() -> None:
    zones = {"bottom": [3, 4, 5], "top": [0, 1, 2], "bottom_transition": [0, 1, 2], "top_transition": [0, 1, 2]}
    sides = {"task_experts": dict.fromkeys(("m1", "m2", "m3"), "x"), "language_experts": SIDES["language_experts"]}
    result = grid_of(compositions=[zones], **sides)
    assert (len(result.cells), result.left_out, result.repeated) == (9 * 81, 0, 0)
    assert len({cell.cell for cell in result.cells}) == 729
    default = [cell for cell in result.cells if cell.default]
    assert len(default) == 9
    assert {cell.configuration for cell in default} == {"bottom=5,top=2,bottom_transition=0,top_transition=0"}


@settings(deadline=None)  # the first example imports pydantic models; slowness is not a failure
@given(st.integers(2, 12), *[st.lists(st.integers(0, 5), min_size=1, max_size=3) for _ in range(4)])
def test_a_grid_is_every_combination_that_fits(
    num_layers: int, bottom: list[int], top: list[int], above: list[int], below: list[int]
) -> None:
    family = {"bottom": bottom, "top": top, "bottom_transition": above, "top_transition": below}
    combinations = set(product(bottom, top, above, below))
    fitting = {zones for zones in combinations if sum(zones) <= num_layers}
    if not fitting:
        with refused(CompositionError, "compositions"):
            grid_of(num_layers, compositions=[family])
        return
    result = grid_of(num_layers, compositions=[family])
    assert result.left_out == 6 * (len(combinations) - len(fitting))
    for pair in product(("m1", "m2"), ("s1", "s2", "s3")):
        cells = [cell for cell in result.cells if (*cell.task_expert, *cell.language_expert) == pair]
        requested = [cell.parsed for cell in cells]
        assert {c.zones(num_layers) for c in requested if c is not None} == fitting
        assert len(cells) == len(fitting)


def test_short_names_match_the_composition() -> None:
    families = [
        {"bottom": [3], "top": [0, 1]},
        {"partition": ["A", "Z"]},
        {"method": ["soup", "slerp"], "task_weight": 2.5},
        {"method": "task_arithmetic", "scale": [1 / 3, 0.3333333]},  # equal in six digits
        {},
    ]
    cells = grid_of(compositions=families, baselines=["soup", "magnitude_soup"]).cells
    assert len(cells) == 6 * (2 + 2 + 2 + 2 + 1 + 2)
    for cell in cells:
        assert cell.parsed == parse_composition(cell.short)
    assert len({cell.short for cell in cells}) == len(cells)


def test_rows_are_named_after_the_method() -> None:
    families = [
        {"bottom": 3},
        {"partition": ["A", "B"]},
        {"method": "ties", "density": 0.2, "max_rank": 8},
        {"language": "base", "bottom": 3},
        {"name": "mine", "bottom": 4},
        {"weights": "magnitude", "bottom_transition": 1},
    ]
    result = grid_of(
        compositions=families, baselines=["base", "task", "language", "magnitude_soup"], extra={"sft": "x"}
    )
    rows = {cell.family: len([c for c in result.cells if c.family == cell.family]) for cell in result.cells}
    assert rows == {
        "base": 1, "task expert": 2, "language expert": 3, "sft": 1, "magnitude soup": 6, "layer_swap": 6,
        "partition A": 6, "partition B": 6, "ties": 6, "reset": 2, "mine": 6, "magnitude layer_swap": 6,
    }  # fmt: skip
    reset = next(cell for cell in result.cells if cell.family == "reset")
    assert (reset.language_expert, reset.short) == ((), "m1+base@bottom=3")


def test_each_extra_adapter_is_a_row_with_one_cell() -> None:
    cells = grid_of(extra={"joint SFT": ["x", "y"], "joint-SFT": "z"}).cells
    assert [(cell.family, cell.short) for cell in cells] == [
        ("joint SFT", "joint SFT 1"), ("joint SFT", "joint SFT 2"), ("joint-SFT", "joint-SFT"),
    ]  # fmt: skip
    assert [cell.composition["allocation"][0]["expert"] for cell in cells] == ["extra-1", "extra-2", "extra-3"]


def test_families_may_have_names_as_keys() -> None:
    result = grid_of(compositions={"one": {"bottom": 1}, "two": {"bottom": 2}, "gone": None})
    assert {cell.family for cell in result.cells} == {"one", "two"}


@pytest.mark.parametrize(
    ("family", "defaults"),
    [
        ({"bottom": [4, 5], "top": 2}, {"bottom=5,top=2"}),
        ({"bottom": [5], "top_transition": [0, 1]}, {"bottom=5,top_transition=0"}),
        ({"bottom": [5], "task_weight": [1, 2]}, {"bottom=5,task_weight=1"}),
        ({"bottom": [4]}, set()),
        ({"method": "soup"}, {"method=soup"}),
        ({"method": "task_arithmetic", "scale": [0.5, 1]}, {"method=task_arithmetic,scale=1"}),
        (
            {"method": "ties", "density": [0.2, 0.5], "max_rank": 4},
            {"method=ties,density=0.2,max_rank=4"},
        ),
        ({"method": "dare_ties", "density": [0.2, 0.5], "max_rank": 4}, set()),
        ({"method": "dare_ties", "density": [0.3], "max_rank": 4}, {"method=dare_ties,density=0.3,max_rank=4"}),
        ({"partition": ["A", "B"]}, {"partition=A", "partition=B"}),  # two rows, each with one configuration
        ({"name": "partitions", "partition": ["A", "B", "C"]}, set()),
        ({"name": "partitions", "partition": "A"}, {"partition=A"}),
        ({"name": "soups", "method": "soup", "weights": ["equal", "magnitude"]}, {"method=soup,weights=equal"}),
        ({"name": "swaps", "bottom": 5, "weights": ["equal", "magnitude"]}, {"bottom=5,weights=equal"}),
        ({"name": "swaps", "bottom": 5, "weights": "magnitude"}, set()),
        ({"method": "soup", "weights": "magnitude"}, {"method=soup,weights=magnitude"}),
    ],
)
def test_which_configuration_is_the_papers_default(family: dict[str, Any], defaults: set[str]) -> None:
    cells = grid_of(compositions=[family]).cells
    assert {cell.configuration for cell in cells if cell.default} == defaults


def test_a_row_of_several_families_has_one_default_at_most() -> None:
    ties = [{"method": "ties", "density": 0.2, "max_rank": rank} for rank in (4, 8)]
    assert not any(cell.default for cell in grid_of(compositions=ties).cells)
    soups = [{"method": "soup"}, {"method": "soup", "task_weight": [1, 2]}]
    # The default twice; the second one is left out.
    result = grid_of(compositions=soups, baselines=["soup"])
    assert {cell.configuration for cell in result.cells if cell.default} == {"method=soup"}
    assert sum(cell.default for cell in result.cells) == 6


def test_sides_are_souped_as_rows_of_their_own() -> None:
    cells = grid_of(compositions=[{"bottom": 3}], soup_sides=True, baselines=["soup"]).cells
    souped = [cell for cell in cells if len(cell.task_expert) > 1]
    assert [cell.family for cell in souped] == ["soup of soups", "layer_swap of soups"]
    assert souped[1].as_json()["language_expert"] == ["s1", "s2", "s3"]
    assert souped[1].parsed == Composition(task=("m1", "m2"), language=("s1", "s2", "s3"), bottom=3)


def test_every_method_averages_souped_sides_first() -> None:
    """Slerp among them."""
    methods = ["slerp", "dare_linear"]
    families = [{"method": methods[0]}, {"method": methods[1], "density": 0.5, "max_rank": 4}]
    souped = [cell for cell in grid_of(compositions=families, soup_sides=True).cells if len(cell.task_expert) > 1]
    assert [cell.composition["method"] for cell in souped] == methods
    for cell in souped:
        (rule,) = cell.parsed.rules(32)
        assert list(rule.blend) == ["mean(m1, m2)", "mean(s1, s2, s3)"]


def test_a_method_for_two_experts_has_no_reset() -> None:
    with refused(FieldError, match="slerp"):
        grid_of(compositions=[{"method": "slerp", "language": "base"}])


def test_pairs_restrict_and_soup() -> None:
    pairs = [{"task": "m1", "language": "s3"}, {"task": ["m1", "m2"], "language": "s1"}]
    cells = grid_of(compositions=[{"bottom": 3}], pairs=pairs).cells
    assert [(cell.task_expert, cell.language_expert) for cell in cells] == [(("m1",), ("s3",)), (("m1", "m2"), ("s1",))]


def test_each_language_is_judged_on_its_own_tasks() -> None:
    tasks = {"s[12]": ["swahili"], "s3": ["telugu", "hindi"]}
    content = {"compositions": [{"bottom": 3}], "retention": ["english"], "soup_sides": True}
    result = grid_of(tasks=tasks, baselines=["base", "task", "language"], **content)
    requested = {cell.short: cell.tasks for cell in result.cells}
    everything = ("swahili", "telugu", "hindi", "english")
    assert requested["base"] == requested["m2"] == everything
    assert requested["s2"] == requested["m1+s1@bottom=3"] == requested["m1&m2+s1&s2@bottom=3"] == ("swahili", "english")
    assert requested["s3"] == requested["m1&m2+s3@bottom=3"] == ("telugu", "hindi", "english")
    groups = [cell.tasks for cell in result.cells]
    assert sum(one != other for one, other in pairwise(groups)) == 2  # each set of tasks once


def test_cells_can_be_read_back() -> None:
    for cell in grid_of(compositions=[{"bottom": 3}, {"method": "ties", "density": 0.2, "max_rank": 8}]).cells:
        assert Cell.from_json(cell.as_json()) == cell


def test_the_split_is_seeded_and_takes_parallel_documents_alike() -> None:
    select, report = DocumentSplit().split(250)
    assert (len(select), len(report)) == (125, 125)
    assert sorted([*select, *report]) == list(range(250))
    assert DocumentSplit().split(250) == (select, report)
    assert DocumentSplit(seed=1).split(250)[0] != select
    assert len(DocumentSplit(fraction=0.2).split(250)[0]) == 50
    assert DocumentSplit().split(1) == ((), (0,))
    assert DocumentSplit(fraction=0.01).split(10)[0] != ()


def test_settings_are_those_of_evaluate() -> None:
    """But for running code, a model's or a task's, to which no recipe can consent."""
    fields = {field.name for field in dataclasses.fields(Settings)}
    own = {"in_flight", "chat_template_from"}  # the second is an argument of `evaluate` beside the settings
    assert SweepSettings.model_fields.keys() == fields - {"confirm_run_unsafe_code", "trust_task_code"} | own
    assert SweepSettings().as_settings() == Settings()
    of_command = find_command("evaluate").make_context("evaluate", ["--base-model", "b", "--tasks", "t"]).params
    of_function = {name: param.default for name, param in signature(adapterswap.evaluate).parameters.items()}
    assert all("chat_template_from" in defaults for defaults in (of_command, of_function))
    for name, default in dataclasses.asdict(Settings()).items():
        for defaults in (of_command, of_function):
            assert (defaults["sampling_seed" if name == "seed" else name] or default) == default, name


def test_a_family_takes_the_fields_of_a_composition() -> None:
    elsewhere = {"experts", "chains", "base_model", "num_layers", "task", "language", "allocation", "allow_negative"}
    elsewhere |= {"task_type"}  # of the result, which no score depends on
    elsewhere |= {"stack"}  # causal language models have one
    elsewhere |= {"tokenizer", "config_from"}  # of the recipe: all cells have one tokenizer
    assert SweepRecipe.model_fields.keys() >= {"tokenizer", "config_from"}
    assert set(GRID_FIELDS) == Composition.model_fields.keys() - elsewhere
    assert set(GRID_FIELDS) <= Family.model_fields.keys()


@pytest.mark.parametrize(
    ("task", "language"),
    [
        ("mgsm_native_cot_sw", "sw"),
        ("belebele_swh_Latn", "swh_Latn"),
        ("flores_eng_Latn-swh_Latn", "swh_Latn"),
        ("flores_dev_swh_Latn-eng_Latn", "eng_Latn"),
        ("xcopa_sw", "sw"),
        ("arc_easy", None),
        ("gsm8k", None),
    ],
)
def test_a_tasks_language_is_in_its_name(task: str, language: str | None) -> None:
    assert language_of(task) == language


BAD = {
    "unknown keys": ({"botom": 1}, "botom"),
    "an unknown field of a family": ({"compositions": [{"botom": 3}]}, "compositions.0.botom"),
    "a value out of range": ({"compositions": [{"bottom": [1, -1]}]}, "compositions.0.bottom.1"),
    "an empty grid": ({"compositions": [{"bottom": []}]}, "compositions.0.bottom"),
    "two bounds": ({"compositions": [{"max_rank": 4, "max_error": 0.1}]}, "compositions.0"),
    "an expert with a dot": ({"task_experts": {"m.1": "a"}}, "task_experts.m.1"),
    "an expert called as extras are": ({"language_experts": {"extra-1": "a"}}, "language_experts.extra-1"),
    "an expert called base": ({"language_experts": {"base": "a"}}, "language_experts.base"),
    "no task": ({"tasks": []}, "tasks"),
    "a language without tasks": ({"tasks": {"s1": []}}, "tasks"),
    "a tokenizer of nobody": ({"tokenizer": "m3"}, "tokenizer"),
    "a tokenizer of a role": ({"tokenizer": "task"}, "tokenizer"),
    "a config of nobody": ({"config_from": "tusk"}, "config_from"),
    "a share above 1": ({"selection": {"fraction": 1.5}}, "selection.fraction"),
    "an unknown baseline": ({"baselines": ["nothing"]}, "baselines.0"),
}

BAD_TOGETHER = {
    "a name on both sides": ({"task_experts": {"s1": "a"}}, "rename one"),
    "a pair of strangers": ({"pairs": [{"task": "m1", "language": "m2"}]}, "'m2' is not a language expert"),
    "nothing to evaluate": ({"baselines": [], "compositions": []}, "nothing to evaluate"),
    "a row that is there": ({"extra": {"base": "x"}}, "already the name of another row"),
}


def test_the_owners_of_a_recipe_are_in_the_compositions_that_they_take_part_in() -> None:
    """A tokenizer's owner in each with that expert; a config's only where there are full checkpoints."""
    recipe = recipe_of(
        tokenizer="m1", config_from="task", baselines=["base", "task", "language"],
        compositions=[{"bottom": 3}, {"name": "outer", "rules": ["language: 0-2", "base"]}],
    )  # fmt: skip
    target = {name: tuple(tasks) for name, tasks in recipe.target_groups().items()}
    cells = make_cells(recipe, SweepTasks(target, ()), 32, full=["m1", "s1", "s2"]).cells
    owners = {
        cell.short: tuple(cell.composition.get(key) for key in ("tokenizer", "config_from"))
        for cell in cells
        if not cell.short.startswith(("s3", "m2+s3", "m1+s3"))
    }
    assert owners == {
        "base": (None, None), "m1": ("m1", "m1"), "m2": (None, None), "s1": (None, "s1"), "s2": (None, "s2"),
        "m1+s1@bottom=3": ("m1", "m1"), "m1+s2@bottom=3": ("m1", "m1"), "m2+s1@bottom=3": (None, None),
        "m2+s2@bottom=3": (None, None), "s1@rules=language: 0-2; base": (None, None),
        "s2@rules=language: 0-2; base": (None, None),
    }  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_recipes_are_refused_with_their_key(name: str, tmp_path: Path) -> None:
    changes, parameter = BAD[name]
    with refused(FieldError, parameter):
        SweepRecipe.read(written(tmp_path, changes))


@pytest.mark.parametrize("name", BAD_TOGETHER)
def test_keys_that_do_not_go_together_are_refused(name: str, tmp_path: Path) -> None:
    changes, reason = BAD_TOGETHER[name]
    with refused(FieldError, match=reason):
        SweepRecipe.read(written(tmp_path, changes))


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """A recipe's file."""
    content = {"base_model": "base", "tasks": ["t"], **SIDES, **changes}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


def test_mistakes_of_the_grid_are_reported_together() -> None:
    families = [
        {"method": "soup", "density": 0.5},
        {"method": "ties", "density": 0.5},
        {"method": "soup", "bottom": 3},
        {"task_weight": [1, -2]},
    ]
    with pytest.raises(FieldError) as error:
        grid_of(compositions=families)
    assert "max_rank" in {problem.parameter for problem in error.value.problems}
    for part in ("density only applies to ties", "bottom only applies to a layer swap", "negative"):
        assert part in str(error.value)
    assert grid_of(compositions=[{"task_weight": [1, -2], "allow_negative": True}]).cells


def test_patterns_of_languages_must_match() -> None:
    with refused(FieldError, "tasks", match="'te[*]'.*\n.*'s2' has no task"):
        recipe_of(tasks={"te*": ["x"], "s1": ["y"]}, compositions=[{}]).target_groups()


def test_paths_are_relative_to_the_recipe(
    content: Callable[..., dict[str, Any]], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "math").symlink_to(world / "math1")
    (tmp_path / "here" / "tasks").mkdir()
    file = tmp_path / "here" / "recipe.yaml"
    changes = {"task_experts": {"math": "math"}, "extra": {"one": "math", "two": ["math", "org/hub"]}}
    file.write_text(yaml.safe_dump(content(**changes, settings={"include_path": "tasks"})))
    monkeypatch.chdir(tmp_path)
    recipe = SweepRecipe.read("here/recipe.yaml", ["settings.limit=5"])
    assert recipe.task_experts == {"math": "here/math"}
    assert recipe.extra == {"one": ["here/math"], "two": ["here/math", "org/hub"]}
    assert (recipe.settings.include_path, recipe.settings.limit) == ("here/tasks", 5)


def test_a_ladders_checkpoints_are_experts(
    content: Callable[..., dict[str, Any]], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of steps, from a folder beside the recipe or below the current one; each pair has its cells."""
    for step in ("20", "100", "3", "20.old"):
        (tmp_path / "here" / "math").mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / "math" / f"checkpoint-{step}").symlink_to(world / "math1")
    file = tmp_path / "here" / "recipe.yaml"
    for place in ("math", "here/math"):
        experts = {"math": {"ladder": place}, "last": str(world / "math1")}
        file.write_text(yaml.safe_dump(content(task_experts=experts, compositions=[{}])))
        monkeypatch.chdir(tmp_path)
        recipe = SweepRecipe.read("here/recipe.yaml")
        ladder = {f"math-{step}": f"here/math/checkpoint-{step}" for step in (3, 20, 100)}
        assert recipe.task_experts == ladder | {"last": str(world / "math1")}
        assert list(recipe.task_experts)[1:] == list(ladder)
        assert check_recipe(file) == "sweep"
    cells = make_cells(recipe, SweepTasks(dict.fromkeys(recipe.language_experts, ("t",)), ()), 32).cells
    pairs = {(*cell.task_expert, *cell.language_expert) for cell in cells if cell.language_expert and cell.task_expert}
    assert pairs == {*product(recipe.task_experts, recipe.language_experts)}
    for experts, match in (
        ({"math": {"ladder": str(world / "math1")}}, "holds no checkpoints"),
        ({"math-20": str(world / "math1"), "math": {"ladder": "math"}}, "'math-20' is both"),
        ({"math": {"ladder": "math"}, "math-20": str(world / "math1")}, "'math-20' is both"),
    ):
        file.write_text(yaml.safe_dump(content(task_experts=experts), sort_keys=False))
        with refused(FieldError, "task_experts", match=match):
            SweepRecipe.read(file)
