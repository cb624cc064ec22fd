"""Pre-registration: written before the run and compared afterwards; changes are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from adapterswap.experiments.reporting import make_report, open_source
from adapterswap.experiments.sweeps import SweepRecipe, prepare, sweep
from adapterswap.experiments.sweeps.recording import Preregistration
from adapterswap.kit.errors import ArgumentError, DataError, OutputError, RunError
from adapterswap.kit.files.hashes import sha256_of

Recipe = Callable[..., SweepRecipe]
FAMILIES = [{"bottom": [1, 2], "top": 1}]


def test_a_run_follows_its_registration_or_not(recipe: Recipe, tmp_path: Path) -> None:
    requested = recipe(compositions=FAMILIES, baselines=["base", "soup"])
    content = Preregistration.freeze(prepare(requested), tmp_path / "run", reference="soup")
    file = tmp_path / "run" / "preregistration.json"
    written = json.loads(file.read_text())
    assert {**written, "sha256": sha256_of(file)} == content
    assert written["sweep"]["experts"]["math1"]["sha256"]
    again = Preregistration.freeze(prepare(requested), tmp_path / "run", reference="soup")
    assert again == content  # the same again changes nothing
    sweep(requested, tmp_path / "run", device="cpu")
    source = open_source(tmp_path / "run")
    report = make_report(source)
    assert report.preregistration is not None
    assert report.preregistration.sha256 == content["sha256"]
    assert report.preregistration.differences == ()
    other = make_report(source, reference="base", methods=["base", "soup"], units=["sw1"]).preregistration
    assert other is not None
    assert len(other.differences) == 3
    with pytest.raises(RunError) as caught:  # too late after the run
        Preregistration.freeze(prepare(requested), tmp_path / "run")
    assert caught.value.parameter == "out_path"

    changed = recipe(compositions=[{"bottom": [1], "top": 1}], baselines=["base", "soup"])
    sweep(changed, tmp_path / "run", device="cpu", overwrite=True)
    assert json.loads(file.read_text()) == written  # unchanged
    later = make_report(open_source(tmp_path / "run")).preregistration
    assert later is not None
    assert later.differences == ("registered compositions that are missing: 1",)

    file.write_text(json.dumps(written | {"format": "adapterswap-preregistration/2"}))
    with pytest.raises(DataError):
        make_report(open_source(tmp_path / "run"))


def test_invalid_registrations(recipe: Recipe, tmp_path: Path) -> None:
    prepared = prepare(recipe(compositions=FAMILIES))
    for options, parameter in (
        ({"reference": "soup"}, "reference"), ({"methods": ["ties"]}, "methods"), ({"methods": ["base"]}, "methods")
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            Preregistration.freeze(prepared, tmp_path / "run", **options)  # type: ignore[arg-type]
        assert caught.value.parameter == parameter
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(OutputError):
        Preregistration.freeze(prepared, tmp_path / "mine")
    Preregistration.freeze(prepared, tmp_path / "run", reference="base")
    with pytest.raises(OutputError):
        Preregistration.freeze(prepared, tmp_path / "run", reference="layer_swap")


def test_the_command(run: Callable[..., Result], content: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content(compositions=FAMILIES)))
    result = run("sweep", file, "-o", tmp_path / "run", "--freeze", "--reference", "base", "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["reference"], summary["methods"], summary["cells"]) == ("base", None, 5)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["preregistration.json"]
    dry = run("sweep", file, "-o", tmp_path / "dry", "--freeze", "--dry-run")
    assert dry.exit_code == 0
    assert not (tmp_path / "dry").exists()
    assert run("sweep", file, "-o", tmp_path / "x", "--reference", "base", "--dry-run").exit_code == 2
    assert run("sweep", file, "-o", tmp_path / "x", "--freeze", "--overwrite").exit_code == 2
