"""The registry of methods: what users may name, and methods that an installed package adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from launching import commands_in
from refusals import refused
from safetensors.numpy import load_file
from tolerances import close

import adapterswap
from adapterswap import Composition, Rule
from adapterswap.cli.compose import compose_command
from adapterswap.core.methods.method import DENSITY, NonlinearMethod, SpanMethod
from adapterswap.core.methods.registry import BUILT_IN, PARAMETERS, RESERVED, find_method, names_of
from adapterswap.core.methods.spectral import CoreMethod
from adapterswap.core.planning.parameters import parameter_keys
from adapterswap.experiments.sweeps.families import GRID_FIELDS, Family
from adapterswap.kit.errors import ArgumentError, FieldError

PACKAGE = """
from adapterswap.core.methods.method import SCALE, NonlinearMethod, Parameter

class Largest(NonlinearMethod):
    name = "largest"
    title = "the larger entry"
    reference = "a test"
    formula = "of each entry, the one of largest absolute value"
    parameters = (SCALE, Parameter("floor", "entries below this become zero", 0.0, ge=0, lt=1))

    def combine(self, deltas, weights, settings):
        import numpy as np

        stacked = np.stack([weights[name] * delta for name, delta in deltas.items()])
        places = np.abs(stacked).argmax(axis=0)
        largest = np.take_along_axis(stacked, places[None], axis=0)[0]
        largest = np.where(np.abs(largest) < settings["floor"], 0, largest)
        return (largest * settings["scale"]).astype(np.float32)

class Wrong:
    name = "wrong"

class Unfinished(NonlinearMethod):
    name = "unfinished"
    title = reference = formula = ""

class Older(Largest):
    name = "older"
    parameters = ("scale",)

class Taken(Largest):
    name = "taken"
    parameters = (Parameter("bottom", "what a composition means zones by", 1),)

class Otherwise(Largest):
    name = "otherwise"
    parameters = (Parameter("density", "of another type", 1),)
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """An environment with an installed package that adds valid and invalid methods."""
    site = tmp_path / "site"
    (site / "larger-1.0.dist-info").mkdir(parents=True)
    (site / "larger.py").write_text(PACKAGE)
    (site / "larger-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: larger\nVersion: 1.0\n")
    (site / "larger-1.0.dist-info" / "entry_points.txt").write_text(
        "[adapterswap.methods]\nlargest = larger:Largest\nwrong = larger:Wrong\nunfinished = larger:Unfinished\n"
        "older = larger:Older\ntaken = larger:Taken\notherwise = larger:Otherwise\n"
        "absent = larger:Absent\nties = larger:Largest\n"
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_is_documented(name: str) -> None:
    method = find_method(name)
    assert method.title
    assert method.reference
    assert method.formula
    for parameter in method.parameters:
        assert parameter.description
        assert parameter.kind is PARAMETERS[parameter.name].kind
    assert method.published.keys() <= {parameter.name for parameter in method.parameters}
    assert isinstance(method, NonlinearMethod | SpanMethod | CoreMethod) or method.linear
    assert method.in_rules or method.as_composition


def test_parameters_are_keys_everywhere() -> None:
    """Parameters do not clash with fields of compositions, rules and families, and some have an option."""
    fields = {*Composition.model_fields, *Rule.model_fields, *Family.model_fields, "rules"}
    assert fields - {"seed"} == RESERVED
    assert not PARAMETERS.keys() & RESERVED
    options = [option.name for option in compose_command.params]
    assert sorted(options) == sorted(set(options))
    assert {name for name, parameter in PARAMETERS.items() if parameter.has_option} <= set(options)
    assert {*parameter_keys(), "parameters"} <= {*Composition.known_keys(), *GRID_FIELDS}
    assert "lambda" in Rule.known_keys()
    assert "scale" not in Rule.known_keys()


def test_a_parameter_is_read_and_written_with_its_method() -> None:
    content = {"method": "ties", "density": 0.5}
    composition = Composition(**content, scale="2")
    assert composition.parameters == {"scale": 2.0, "density": 0.5}
    assert composition == Composition(method="ties", parameters={"scale": 2, "density": 0.5})
    assert composition.model_dump(exclude_defaults=True) == {**content, "scale": 2.0}
    assert Composition.model_validate(composition.model_dump(exclude_defaults=True)) == composition
    rule = Rule(blend={"a": 1, "b": 1}, method="ties", lambda_=2)
    assert rule == Rule.model_validate({"blend": {"a": 1, "b": 1}, "method": "ties", "lambda": 2, "density": 1})
    assert rule.parameters == {"scale": 2.0, "density": 1.0}
    assert rule.as_data() == {"blend": {"a": 1.0, "b": 1.0}, "method": "ties", "lambda": 2.0}
    family = Family.model_validate({"method": ["ties", "dare_ties"], "density": [0.2, 0.5, 0.2], "scale": 1})
    assert family.grid == {"method": ("ties", "dare_ties"), "scale": (1.0,), "density": (0.2, 0.5)}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"density": 2}, "density` is 2, but must be at most 1"),
        ({"density": "much"}, "density` is 'much', but must be a number"),
        ({"density": 0.5, "scale": float("nan")}, "scale` is nan, but must be a finite number"),
        ({"density": 0.5, "scale": 1e10}, "scale` is 1e+10, but must be at most 1e+09"),
        ({"densty": 0.5}, "densty` is not a known key"),
        ({"density": 0.5, "lambda": 2}, "lambda` is not a known key"),
        ({"method": "soup", "density": 0.5}, "density` only applies to ties"),
        ({}, "density"),
    ],
)
def test_a_wrong_parameter_is_named(content: dict[str, object], key: str) -> None:
    for wanted in ({"method": "ties", **content}, {"parameters": content, "method": content.get("method", "ties")}):
        if "method" in content and "parameters" in wanted:
            continue
        with pytest.raises(FieldError) as caught:
            Composition.model_validate(wanted)
        assert key in caught.value.problems[0].message


@pytest.mark.parametrize("rule", [True, False])
def test_the_seed_belongs_to_the_composition(rule: bool) -> None:
    content = {"method": "dare_ties", "density": 0.5, "parameters": {"seed": 3}}
    with pytest.raises(FieldError, match="set `seed`") as caught:
        Composition.model_validate({"rules": [{"blend": {"a": 1, "b": 1}, **content}]} if rule else content)
    assert "only applies" not in str(caught.value)


def test_mistakes_in_parameters_are_reported_with_the_others() -> None:
    with pytest.raises(FieldError) as caught:
        Composition.model_validate({"method": "ties", "density": 2, "bottm": 3, "row_threshold": -1})
    assert len(caught.value.problems) == 3
    near = next(problem for problem in caught.value.problems if "bottm" in problem.message)
    assert "'bottom'" in near.remedy
    with pytest.raises(FieldError) as caught:
        Family.model_validate({"method": "ties", "density": [0.5, 2], "scal": 1})
    assert len(caught.value.problems) == 2


def test_where_methods_may_be_used() -> None:
    fields = {"density": 0.5}
    for name in names_of():
        parameters: dict[str, object] = dict(fields) if find_method(name).has(DENSITY) else {}
        parameters |= {"language": ("target", "source")} if name == "adamergex" else {}
        assert Composition.model_validate({"method": name, **parameters}).method == name
    for name in names_of(in_rules=True):
        assert Rule.model_validate({"blend": {"a": 1, "b": 1}, "method": name}).method == name
    for wrong in ({"method": "linear"}, {"method": "tis"}):
        with pytest.raises(ValueError, match="method"):
            Composition.model_validate(wrong)
    with pytest.raises(ValueError, match="method"):
        Rule.model_validate({"blend": {"a": 1, "b": 1}, "method": "soup"})


def test_slerp_refuses_magnitude_weights() -> None:
    """They used to be accepted without changing the result."""
    with pytest.raises(ValueError, match="magnitude"):
        Composition.model_validate({"method": "slerp", "weights": "magnitude"})


def test_the_command_lists_methods(run: Callable[..., Result]) -> None:
    listed = json.loads(run("methods", "--json").stdout)
    assert listed.keys() == BUILT_IN.keys()
    assert listed["ties"]["parameters"] == ["scale", "density"]
    shown = run("methods").stdout
    assert all(name in shown for name in BUILT_IN)


@pytest.mark.slow
def test_a_package_adds_a_method(package: dict[str, str], math: Path, swahili: Path, tmp_path: Path) -> None:
    module = "base_model.model.model.layers.2.mlp.up_proj"

    def delta(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        tensors = load_file(folder / "adapter_model.safetensors")
        scale = adapterswap.open_adapter(folder).modules[module.removeprefix("base_model.model.")].scale
        return np.asarray(scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"])

    one, other = delta(math), delta(swahili)
    larger = np.where(np.abs(one) >= np.abs(other), one, other)
    floor = float(np.median(np.abs(larger)))
    options = ["-t", math, "-l", swahili, "--num-layers", 6, "--max-rank", 64, "--scale", 2]
    compose = ["compose", *options, "--method", "largest"]
    sources = [f"--expert={place.name}={place}" for place in (math, swahili)]
    done = commands_in(
        package,
        [*compose, "-o", tmp_path / "out"],
        [*compose, "--parameter", f"floor={floor}", "-o", tmp_path / "floored"],
        ["verify", tmp_path / "floored", *sources],
    )
    assert [each.code for each in done] == [0, 0, 0], done
    close(delta(tmp_path / "out"), 2 * larger)
    close(delta(tmp_path / "floored"), 2 * np.where(np.abs(larger) < floor, 0, larger))
    recorded = json.loads((tmp_path / "floored" / "adapterswap.json").read_text())["composition"]
    assert (recorded["floor"], recorded["scale"]) == (floor, 2.0)
    no = ["-o", tmp_path / "no"]
    wrong = [[*compose, "--parameter", text, *no] for text in ("floor=1", "flor=0.5", "floor", "floor=")]
    refused = commands_in(package, *wrong, ["compose", *options, "--method", "largst", *no])
    assert all(each.code in (1, 2) for each in refused)
    assert refused[-1].code == 2
    (without,) = commands_in(dict(os.environ), [*compose, *no])
    assert without.code == 2
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["wrong", "unfinished", "absent", "older", "taken", "otherwise"])
def test_an_invalid_method_is_refused(name: str, package: dict[str, str]) -> None:
    program = (
        "from adapterswap import AdapterswapError, Composition\n"
        f"try:\n    Composition.model_validate({{'method': {name!r}}})\n"
        "except ValueError as error:\n    print('refused', error)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], env=package, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("refused")
    assert f"{name} = 'larger:" in process.stdout
    program = "from adapterswap.core.methods.registry import find_method; print(find_method('ties').title)"
    own = subprocess.run([sys.executable, "-c", program], env=package, capture_output=True, text=True, check=True)
    assert own.stdout.startswith("TIES")


def test_a_packages_parameter_is_a_key_of_short_names_and_grids(package: dict[str, str]) -> None:
    program = (
        "from adapterswap import parse_composition\n"
        "from adapterswap.experiments.sweeps.families import Family\n"
        "print(parse_composition('a+b@floor=0.25,method=largest').parameters)\n"
        "print(Family.model_validate({'method': 'largest', 'floor': [0, 0.5]}).grid)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], env=package, capture_output=True, text=True, check=False)
    assert process.stdout.splitlines() == [
        "{'scale': 1.0, 'floor': 0.25}", "{'method': ('largest',), 'floor': (0.0, 0.5)}",
    ], process.stderr  # fmt: skip


def test_an_unknown_method_names_a_near_one() -> None:
    with refused(ArgumentError, "method", match="'ties'"):
        find_method("tie")
