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
from refusals import refused
from safetensors.numpy import load_file
from tolerances import close

import adapterswap
from adapterswap import Composition, Rule
from adapterswap.errors import ArgumentError
from adapterswap.methods.method import PARAMETERS, NonlinearMethod
from adapterswap.methods.registry import BUILT_IN, find_method, names_of

PACKAGE = """
from adapterswap.methods.method import NonlinearMethod

class Largest(NonlinearMethod):
    name = "largest"
    title = "the larger entry"
    reference = "a test"
    formula = "of each entry, the one of largest absolute value"
    parameters = ("scale",)

    def combine(self, deltas, weights, settings):
        import numpy as np

        stacked = np.stack([weights[name] * delta for name, delta in deltas.items()])
        places = np.abs(stacked).argmax(axis=0)
        return (np.take_along_axis(stacked, places[None], axis=0)[0] * settings.scale).astype(np.float32)

class Wrong:
    name = "wrong"

class Unfinished(NonlinearMethod):
    name = "unfinished"
    title = reference = formula = ""
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """An environment in which a package is installed that adds methods, sound and not."""
    site = tmp_path / "site"
    (site / "larger-1.0.dist-info").mkdir(parents=True)
    (site / "larger.py").write_text(PACKAGE)
    (site / "larger-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: larger\nVersion: 1.0\n")
    (site / "larger-1.0.dist-info" / "entry_points.txt").write_text(
        "[adapterswap.methods]\nlargest = larger:Largest\nwrong = larger:Wrong\nunfinished = larger:Unfinished\n"
        "absent = larger:Absent\nties = larger:Largest\n"
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}


def adapterswap_in(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "adapterswap", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_says_what_it_is(name: str) -> None:
    method = find_method(name)
    assert method.title
    assert method.reference
    assert method.formula
    assert set(method.parameters) <= PARAMETERS.keys()
    assert isinstance(method, NonlinearMethod) is not method.linear
    assert method.in_rules or method.as_composition


def test_what_may_be_named_where() -> None:
    fields = {"density": 0.5}
    for name in names_of():
        given = fields if "density" in find_method(name).parameters else {}
        assert Composition.model_validate({"method": name, **given}).method == name
    for name in names_of(in_rules=True):
        assert Rule.model_validate({"blend": {"a": 1, "b": 1}, "method": name}).method == name
    for wrong in ({"method": "linear"}, {"method": "tis"}):
        with pytest.raises(ValueError, match="method"):
            Composition.model_validate(wrong)
    with pytest.raises(ValueError, match="method"):
        Rule.model_validate({"blend": {"a": 1, "b": 1}, "method": "soup"})


def test_magnitude_weights_are_no_option_of_slerp() -> None:
    """They were accepted, and left the result as it was."""
    with pytest.raises(ValueError, match="magnitude"):
        Composition.model_validate({"method": "slerp", "weights": "magnitude"})


def test_the_command_lists_them(run: Callable[..., Result]) -> None:
    listed = json.loads(run("methods", "--json").stdout)
    assert listed.keys() == BUILT_IN.keys()
    assert listed["ties"]["parameters"] == ["scale", "density"]
    shown = run("methods").stdout
    assert all(name in shown for name in BUILT_IN)


def test_a_package_adds_a_method(package: dict[str, str], math: Path, swahili: Path, tmp_path: Path) -> None:
    options = ["-t", math, "-l", swahili, "--num-layers", 6, "--max-rank", 64, "--scale", 2]
    done = adapterswap_in(package, "compose", *options, "--method", "largest", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    module = "base_model.model.model.layers.2.mlp.up_proj"

    def delta(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        tensors = load_file(folder / "adapter_model.safetensors")
        scale = adapterswap.open_adapter(folder).modules[module.removeprefix("base_model.model.")].scale
        return np.asarray(scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"])

    one, other = delta(math), delta(swahili)
    close(delta(tmp_path / "out"), 2 * np.where(np.abs(one) >= np.abs(other), one, other))
    listed = adapterswap_in(package, "compose", "-t", math, "-l", swahili, "--method", "largst", "-o", tmp_path / "no")
    assert listed.returncode == 2
    assert not (tmp_path / "no").exists()
    without = adapterswap_in(dict(os.environ), "compose", *options, "--method", "largest", "-o", tmp_path / "no")
    assert without.returncode == 2


@pytest.mark.parametrize("name", ["wrong", "unfinished", "absent"])
def test_a_method_that_is_not_sound_is_refused(name: str, package: dict[str, str]) -> None:
    program = (
        "from adapterswap import AdapterswapError, Composition\n"
        f"try:\n    Composition.model_validate({{'method': {name!r}}})\n"
        "except ValueError as error:\n    print('refused', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused")
    assert f"{name} = 'larger:" in done.stdout
    program = "from adapterswap.methods.registry import find_method; print(find_method('ties').title)"
    own = subprocess.run([sys.executable, "-c", program], env=package, capture_output=True, text=True, check=True)
    assert own.stdout.startswith("TIES")


def test_an_unknown_method_names_a_near_one() -> None:
    with refused(ArgumentError, "method", match="'ties'"):
        find_method("tie")
