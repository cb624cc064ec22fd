"""Python arguments of the wrong type raise an AdapterswapError that names the parameter, and no other error."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

import adapterswap
from adapterswap import Composition, Rule
from adapterswap.experiments.sweeps.families import Family, Method
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.experiments.training.recipe import TrainingOptions
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    CompositionError,
    ExpertError,
    FieldError,
    NotFoundError,
)

SIDES: dict[str, Any] = {"task": ("math",), "language": ("swahili",)}


def test_compose_takes_a_short_name(math: Path, swahili: Path) -> None:
    experts = {"math": math, "swahili": swahili}
    plan = adapterswap.compose("math+swahili@bottom=2,top=1", experts)
    assert plan.rules == Composition(**SIDES, bottom=2, top=1).rules(6)
    assert adapterswap.make_plan("math+swahili@bottom=2,top=1", plan.experts).rules == plan.rules


def test_an_unknown_expert_is_named_with_all_known_ones(math: Path, swahili: Path) -> None:
    experts = {"math": math, "swahili": swahili}
    for composition in ("maths+swahili", Composition(task="maths", language="swahili")):
        with refused(
            CompositionError, "experts", match=r"no expert 'maths' \(experts: math, swahili\). Did you mean 'math'\?"
        ):
            adapterswap.compose(composition, experts)


Call = Callable[[Any, Any, Path], Any]

WRONG: dict[str, tuple[str, Call]] = {
    "compose None": ("composition", lambda plan, math, out: adapterswap.compose(None)),
    "compose dict": ("composition", lambda plan, math, out: adapterswap.compose({"task": "math"})),
    "compose list": ("experts", lambda plan, math, out: adapterswap.compose("math+swahili", [math])),
    "compose 5": ("experts", lambda plan, math, out: adapterswap.compose("math+base", {"math": 5})),
    "soup": ("task", lambda plan, math, out: adapterswap.soup(5, math)),
    "layer_swap": ("language", lambda plan, math, out: adapterswap.layer_swap(math, [math])),
    "layer_swap bottom": ("bottom", lambda plan, math, out: adapterswap.layer_swap(math, math, bottom="many")),
    "layer_swap depth": ("num_layers", lambda plan, math, out: adapterswap.layer_swap(math, math, num_layers="six")),
    "task_arithmetic": ("task", lambda plan, math, out: adapterswap.task_arithmetic(None, math)),
    "make_plan": ("composition", lambda plan, math, out: adapterswap.make_plan(5, {})),
    "make_plan experts": ("experts", lambda plan, math, out: adapterswap.make_plan("math+base", math)),
    "make_plan expert": ("experts", lambda plan, math, out: adapterswap.make_plan("math+base", {"math": math})),
    "make_plan depth": (
        "num_layers", lambda plan, math, out: adapterswap.make_plan("math+base", plan.experts, num_layers="six"),
    ),
    "write plan": ("plan", lambda plan, math, out: adapterswap.write_adapter("math", out)),
    "write place": ("out_path", lambda plan, math, out: adapterswap.write_adapter(plan, None)),
    "write layout": ("layout", lambda plan, math, out: adapterswap.write_adapter(plan, out, layout="exactly")),
    "write rank": ("max_rank", lambda plan, math, out: adapterswap.write_adapter(plan, out, max_rank="8")),
    "write rank true": ("max_rank", lambda plan, math, out: adapterswap.write_adapter(plan, out, max_rank=True)),
    "extract rank true": ("rank", lambda plan, math, out: adapterswap.extract(math, math, out, rank=True)),
    "write error": ("max_error", lambda plan, math, out: adapterswap.write_adapter(plan, out, max_error="8")),
    "merge plan": ("plan", lambda plan, math, out: adapterswap.merge(5, out_path=out)),
    "merge base": ("base_model", lambda plan, math, out: adapterswap.merge(plan, 5, out_path=out)),
    "merge place": ("out_path", lambda plan, math, out: adapterswap.merge(plan, out_path=5)),
    "merge shards": (
        "max_shard_size", lambda plan, math, out: adapterswap.merge(plan, out_path=out, max_shard_size=5),
    ),
    "open adapter": ("reference", lambda plan, math, out: adapterswap.open_adapter(5)),
    "open expert": ("reference", lambda plan, math, out: adapterswap.open_expert(None)),
    "open checkpoint": ("base_model", lambda plan, math, out: adapterswap.open_checkpoint([])),
    "parse": ("name", lambda plan, math, out: adapterswap.parse_composition(5)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_value_of_the_wrong_kind_names_its_parameter(case: str, math: Path, swahili: Path, tmp_path: Path) -> None:
    plan = adapterswap.compose("math+swahili", {"math": math, "swahili": swahili})
    parameter, call = WRONG[case]
    kind = FieldError if case in ("layer_swap bottom", "layer_swap depth") else ArgumentError
    with refused(kind, parameter):
        call(plan, math, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_live_model_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(AdapterswapError, match="`model`"):
        adapterswap.LiveComposer(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: Rule(expert="a", blend={"a": 1}), None),
        (lambda: Rule(expert="a", modles="mlp"), "modles"),
        (lambda: Rule(layers="x", expert="a"), "layers"),
        (lambda: Rule.model_validate({"blend": {"a": float("nan")}}), "blend"),
        (lambda: Composition(bottm=1), "bottm"),
        (lambda: Composition(bottom=True), "bottom"),
        (lambda: Composition(num_layers=True), "num_layers"),
        (lambda: Composition(method="linear", allocation=({"blend": {"a": True}},)), "allocation.0.blend.a"),
        (lambda: Composition(method="ties", density=True), "density"),
        (lambda: Composition(method="dare_linear", density=0.5, seed=True), "seed"),
        (lambda: Composition(method="ties", density=0.5, seed=1), "seed"),
        (lambda: Family(method="layer_swap", bottom=[1, True]), "bottom.1"),
        (lambda: TrainingOptions(learning_rate=True), "learning_rate"),
        (lambda: Composition.model_validate([]), None),
        (lambda: Composition(allocation=({"layers": "x"},)), "allocation.0.layers"),
        (lambda: Composition(method="ties"), "density"),
        (lambda: SweepRecipe.model_validate({}), "base_model"),
    ],
)
def test_invalid_fields(make: Callable[[], Any], parameter: str | None) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert parameter in {problem.parameter for problem in caught.value.problems}


def test_an_expert_that_cannot_be_opened_is_named_by_its_parameter(math: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refused(NotFoundError, "task"):
        adapterswap.layer_swap("./nowhere", math)
    with refused(ExpertError, "language"):
        adapterswap.layer_swap(math, tmp_path / "empty")
    with refused(NotFoundError, "experts"):
        adapterswap.compose("math+swahili", {"math": math, "swahili": "./nowhere"})
    with refused(NotFoundError, "reference"):
        adapterswap.open_expert("./nowhere")
    for place in ("./nowhere", tmp_path / "empty"):
        kind = BaseModelError if place == tmp_path / "empty" else NotFoundError
        with refused(kind, "base_model"):
            adapterswap.open_checkpoint(place)
    for layers in ("9", "x", ""):
        with refused(ArgumentError, "layers"):
            adapterswap.slice_layers(math, layers)
    with refused(CompositionError, "layers"):
        adapterswap.slice_layers(math, "0-9")


@pytest.mark.parametrize(
    ("name", "parameter", "message"),
    [
        ("math+swahili@bottm=2", "bottm", "unknown setting 'bottm'. Did you mean 'bottom'?"),
        ("math+swahili@bottom", "bottom", "bottom has no value"),
        ("math+swahili@bottom=1,bottom=2", "bottom", "bottom is set twice"),
        ("math+swahili@bottom=-1", "bottom", "but must be 0 or more"),
        ("math+swahili@task_weight=-2", "task_weight", "`allow_negative=True`"),
    ],
)
def test_an_invalid_setting_in_a_short_name(name: str, parameter: str, message: str) -> None:
    with refused(FieldError, parameter, match=re.escape(message)):
        adapterswap.parse_composition(name)


def test_all_mistakes_in_nested_rules_are_reported_together() -> None:
    with pytest.raises(FieldError) as caught:
        Composition.model_validate({"bottm": 1, "allocation": [{"expert": "a", "blend": {"b": 1}}, {"layers": "x"}]})
    parameters = {problem.parameter for problem in caught.value.problems}
    assert parameters == {"bottm", "allocation.0", "allocation.1.layers"}


@pytest.mark.parametrize("method", Method.__args__)
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"task": ("math", "code")}, {"language": ("base",)}, {"language": ("math",)}, {"task": ("math", "math")},
        {"task": ("base",), "language": ("base",)}, {"task_weight": -1, "allow_negative": True},
        {"task_weight": 1e9, "scale": 1e9}, {"task_weight": 1e-300, "language_weight": 1e-300, "scale": 1e-300},
        {"task": ("math", "base"), "task_weight": 0},
    ],
)  # fmt: skip
def test_rules_are_accepted_or_refused(method: str, changes: dict[str, Any]) -> None:
    """A composition raises AdapterswapError or nothing, whatever its fields."""
    options = {**SIDES, "method": method, **changes}
    if method in ("ties", "dare_linear", "dare_ties", "magnitude_prune"):
        options["density"] = 0.5
    with suppress(AdapterswapError):
        assert Composition(**options).rules(32)
