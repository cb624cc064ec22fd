"""Compositions: zones, defaults, names, weights, recipes; all mistakes are reported together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import adapterswap
from adapterswap.core.model.layers import format_layers, parse_layers
from adapterswap.core.planning.composition import Composition, parse_composition
from adapterswap.core.planning.functions import slice_layers
from adapterswap.core.planning.rules import Rule
from adapterswap.kit.errors import ArgumentError, CompositionError, FieldError
from adapterswap.kit.files.yaml import apply_overrides, read_recipe


@given(st.frozensets(st.integers(0, 200)))
def test_layers_round_trip_through_text(layers: frozenset[int]) -> None:
    assert parse_layers(format_layers(layers)) == layers


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "-1", "1,,2", "0–4", "1.5"])
def test_bad_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of layers|backwards"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("num_layers", "bottom", "top"), [(32, 5, 2), (28, 4, 2), (16, 3, 1), (24, 4, 2), (6, 1, 0), (80, 13, 5)]
)
def test_the_papers_defaults_scale_with_depth(num_layers: int, bottom: int, top: int) -> None:
    assert Composition().zones(num_layers) == (bottom, top, 0, 0)


def test_halves_are_rounded_up() -> None:
    assert [Composition().requested_zones(n)[1] for n in (7, 8, 23, 24)] == [0, 1, 1, 2]  # 2 of 32


@given(st.data())
def test_zones_are_algorithm_1(data: st.DataObject) -> None:
    """Each layer goes where the conditions of the first paper's Algorithm 1 put it (line 5 read as "and")."""
    layers = data.draw(st.integers(1, 40))
    b, u, t_b, t_u = data.draw(st.tuples(*[st.integers(0, layers)] * 4).filter(lambda zones: sum(zones) <= layers))
    rules = Composition(bottom=b, top=u, bottom_transition=t_b, top_transition=t_u).rules(layers)
    for layer in range(layers):
        coefficients = next(rule for rule in rules if rule.matches("x.mlp.y", layer, "mlp")).coefficients()
        if layer < b or layer > layers - 1 - u:
            assert coefficients == {"language": 1}
        elif layer > b - 1 + t_b and layer < layers - u - t_u:
            assert coefficients == {"task": 1}
        else:
            assert coefficients == {"task": 0.5, "language": 0.5}


def test_zones_that_overlap_are_refused() -> None:
    with refused(
        CompositionError, "bottom", match=r"bottom 4 \+ top 2 \+ top_transition 1 = 7 layers, but the model has 6"
    ):
        Composition(bottom=4, top=2, top_transition=1).rules(6)


def test_defaults_that_give_the_language_nothing_are_refused() -> None:
    with refused(CompositionError, "bottom"):
        Composition().rules(2)


def test_souped_sides_share_their_weight() -> None:
    composition = Composition(task=("m1", "m2"), language=("s1", "s2", "s3"), task_weight=3, bottom=1, top=1)
    outer, non_layer, middle = composition.rules(4)
    assert outer.coefficients() == pytest.approx({"s1": 1 / 3, "s2": 1 / 3, "s3": 1 / 3})
    assert middle.coefficients() == {"m1": 0.5, "m2": 0.5}
    assert non_layer.coefficients() == pytest.approx(
        {"m1": 3 / 8, "m2": 3 / 8, "s1": 1 / 12, "s2": 1 / 12, "s3": 1 / 12}
    )


@pytest.mark.parametrize(
    ("content", "parameter", "message"),
    [
        ({"task_weight": float("nan")}, "task_weight", "not a finite number"),
        ({"task_weight": float("inf")}, "task_weight", "not a finite number"),
        ({"task_weight": 0, "language_weight": 0}, "task_weight", "all weights are 0"),
        ({"task_weight": 1, "language_weight": -1, "allow_negative": True}, "task_weight", "sum to 0"),
        ({"task_weight": -2}, "task_weight", "negative"),
        ({"method": "task_arithmetic", "scale": -1}, "scale", "negative"),
        ({"method": "task_arithmetic", "scale": 0}, "scale", "scale must not be 0"),
        ({"method": "soup", "bottom": 3}, "bottom", "bottom only applies to a layer swap"),
        ({"partition": "A", "top": 3, "bottom": 1}, "bottom", "bottom and top only apply to a layer swap"),
        ({"partition": "A", "method": "soup"}, "partition", "partition only applies to a layer swap"),
        ({"scale": 0.5}, "scale", "scale only applies to task_arithmetic"),
        ({"bottom": -1}, "bottom", "bottom is -1, but must be 0 or more"),
        ({"experts": {"base": "x"}}, "experts", "reserved"),
        ({"allocation": []}, "allocation", "is empty"),
        ({"allocation": [{"expert": "a"}], "bottom": 1}, "bottom", "cannot be set with them"),
        ({"allocation": [{"layers": 0}]}, "allocation.0", "exactly one"),
        ({"allocation": [{"expert": "a", "blend": {"a": 1}}]}, "allocation.0", "exactly one"),
        ({"allocation": [{"blend": {"a": 1, "b": -1}}], "allow_negative": True}, "allocation.0.blend", "sum to 0"),
        ({"allocation": [{"blend": {"a": 1, "b": -0.5}}]}, "allocation", "negative"),
        ({"allocation": [{"blend": {}}]}, "allocation.0.blend", "no expert"),
        ({"allocation": [{"expert": "a", "layers": "4-2"}]}, "allocation.0.layers", "backwards"),
        ({"allocation": [{"expert": "a", "modules": []}]}, "allocation.0.modules", "empty"),
        ({"bootom": 3}, "bootom", "Did you mean 'bottom'"),
        ({"allocation": [{"layer": 3, "expert": "a"}]}, "allocation.0.layer", "Did you mean 'layers'"),
    ],
)
def test_mistakes_are_named(content: dict[str, object], parameter: str, message: str) -> None:
    with refused(FieldError, parameter, match=message):
        Composition.read_content(content, where="recipe.yaml")


def test_unnormalised_weights_may_sum_to_zero() -> None:
    rule = Rule(blend={"task": 1, "source": -1, "target": 0}, normalize=False)
    assert rule.coefficients() == {"task": 1, "source": -1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("math+swahili", Composition(task="math", language="swahili")),
        ("math+swahili@bottom=4,top=1", Composition(task="math", language="swahili", bottom=4, top=1)),
        ("m.1+sw-2@task_weight=0.5", Composition(task="m.1", language="sw-2", task_weight=0.5)),
        ("math+base@bottom=3,top=0", Composition(task="math", language="base", bottom=3, top=0)),
    ],
)
def test_short_names(name: str, expected: Composition) -> None:
    assert parse_composition(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "math",
        "math+",
        "a+b+c",
        "a+b@",
        "a+b@bottom",
        "a+b@bottom=x",
        "a+b@bottom=1,bottom=2",
        "../x+b",
        "a+b@experts=1",
    ],
)
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises((ArgumentError, FieldError)):
        parse_composition(name)


def test_a_recipe_reports_all_its_mistakes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("bottom: x\ntop: -1\nnum_layer: 3\nmethod: layerswap\n")
    with pytest.raises(FieldError) as caught:
        read_recipe(recipe, Composition)
    message = str(caught.value)
    parameters = {problem.parameter for problem in caught.value.problems}
    assert parameters == {"bottom", "top", "num_layer", "method"}
    assert "bottom is 'x'" in message
    assert "top is -1" in message
    assert "num_layer is not a known key. Did you mean 'num_layers'" in message
    assert "method is 'layerswap'" in message
    assert "layer_swap" in message


def test_names_that_yaml_reads_as_numbers(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("experts: {1: here, 7: there}\ntask: '1'\nlanguage: '7'\n")
    with pytest.raises(FieldError) as caught:
        read_recipe(recipe, Composition)
    assert {problem.parameter for problem in caught.value.problems} == {"experts.1", "experts.7"}


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "- 1\n", "a: [\n", "a: !!python/object:os.system {}\n", "\x00"])
def test_bad_yaml_is_refused(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with refused(FieldError, match=r"recipe\.yaml"):
        read_recipe(recipe, Composition)


def test_overrides_reach_into_recipes() -> None:
    content = {"a": {"b": [1, {"c": 2}]}}
    assert apply_overrides(content, ["a.b.1.c=3e-4", "d.e=true"]) == {"a": {"b": [1, {"c": 3e-4}]}, "d": {"e": True}}
    assert content == {"a": {"b": [1, {"c": 2}]}}
    for bad in ("a", "=1", "a.b.7=1", "a.b.x=1"):
        with refused(ArgumentError, "overrides"):
            apply_overrides(content, [bad])


def test_compositions_are_immutable() -> None:
    with pytest.raises(AttributeError, match="top"):
        Composition().top = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bottom": 2, "top": 1}, "layer swapping (Bandarkar et al. 2025)"),
        ({"partition": "B"}, "layer swapping by partition B (Bandarkar & Peng 2025)"),
        ({"method": "soup"}, "a model soup (Wortsman et al. 2022)"),
        ({"allocation": [{"layers": "0-2", "expert": "language"}, {"expert": "task"}]}, "rules for layers and modules"),
    ],
)
def test_the_card_names_the_method(
    options: dict[str, Any], words: str, math: Path, swahili: Path, tmp_path: Path
) -> None:
    plan = adapterswap.compose(Composition.model_validate(options), {"task": math, "language": swahili})
    card = (adapterswap.write_adapter(plan, tmp_path / "out") / "README.md").read_text()
    assert f"composed from 2 experts by\n{words} with adapterswap" in card


def test_the_card_of_a_slice_does_not_call_it_a_composition(math: Path, tmp_path: Path) -> None:
    plan = slice_layers(adapterswap.open_adapter(math), "0-1,5")
    card = (adapterswap.write_adapter(plan, tmp_path / "out") / "README.md").read_text()
    assert "extracted from one expert:\nits layers 0-1,5 and" in card
    assert "composed" not in card.split("\n## ")[0].split("| expert")[0]


def test_paths_are_accepted_as_text() -> None:
    fields: Any = {"base_model": Path("bases/b"), "experts": {"math": Path("experts/m")}}
    assert Composition(**fields) == Composition(base_model="bases/b", experts={"math": "experts/m"})
