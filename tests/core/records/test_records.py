"""adapterswap.json: defaults, the base, and experts that adapterswap wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from refusals import refused
from safetensors.numpy import save_file

import adapterswap
from adapterswap import AdapterswapError
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.functions import slice_layers
from adapterswap.kit.errors import ExpertError
from adapterswap.tools.verification import verify


def make_base(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 6, **sizes}))
    weights = np.random.default_rng(seed).standard_normal((4, 32), np.float32)
    save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")
    return folder


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "adapterswap.json").read_text())
    return content


@pytest.mark.parametrize(
    ("settings", "filled_in"),
    [
        ({}, {"bottom": 1, "top": 0, "bottom_transition": 0, "top_transition": 0, "weights": "equal"}),
        ({"bottom": 2, "top_transition": 1, "top": 1}, {"bottom": 2, "top": 1, "bottom_transition": 0,
                                                        "top_transition": 1, "weights": "equal"}),
        ({"partition": "A"}, {"partition": "A", "weights": "equal"}),
        ({"method": "soup", "weights": "magnitude"}, {"weights": "magnitude"}),
        ({"method": "task_arithmetic"}, {"weights": "equal", "scale": 1.0}),
        ({"method": "ties", "density": 0.5}, {"weights": "equal", "scale": 1.0, "density": 0.5}),
        ({"method": "dare_ties", "density": 0.5}, {"weights": "equal", "scale": 1.0, "density": 0.5, "seed": 0}),
    ],
)  # fmt: skip
def test_defaults_are_filled_in(
    settings: dict[str, Any], filled_in: dict[str, Any], math: Path, swahili: Path, tmp_path: Path
) -> None:
    requested = {"task": "math", "language": "swahili", "num_layers": 6, **settings}
    plan = adapterswap.compose(Composition.model_validate(requested), {"math": math, "swahili": swahili})
    adapterswap.write_adapter(plan, tmp_path / "out", max_rank=4 if "density" in settings else None)
    sides = {"task": ["math"], "language": ["swahili"], "task_weight": 1.0, "language_weight": 1.0}
    method = settings.get("method", "layer_swap")
    assert read(tmp_path / "out")["composition"] == {"method": method, **sides, **filled_in}
    again = Composition.model_validate({**read(tmp_path / "out")["composition"], "num_layers": 6})
    assert again.rules(6) == plan.rules


def test_a_base_that_was_used_is_recorded_with_its_files(
    math: Path, swahili: Path, tmp_path: Path, run: Callable[..., Result]
) -> None:
    base = make_base(tmp_path / "base")
    experts = {"math": math, "swahili": swahili}
    for name, settings in {
        "needed": {"base_model": str(base)},
        "given": {"base_model": str(base), "num_layers": 6},
        "neither": {"num_layers": 6},
    }.items():
        composition = Composition.model_validate({"task": "math", "language": "swahili", **settings})
        adapterswap.write_adapter(adapterswap.compose(composition, experts), tmp_path / name)
    recorded = read(tmp_path / "needed")["base"]
    assert recorded["source"] == "base"
    assert recorded["sha256"].keys() == {"config.json"}
    assert recorded["fingerprints"].keys() == {"model.safetensors"}
    assert read(tmp_path / "given")["base"] == recorded
    assert read(tmp_path / "neither")["base"] is None

    assert verify(tmp_path / "needed", experts, base_model=str(base)).equal
    other = make_base(tmp_path / "elsewhere" / "base", seed=1)
    result = verify(tmp_path / "needed", experts, base_model=str(other))
    assert (result.equal, result.changed_sources) == (False, {"base": "model.safetensors"})
    unsaid = verify(tmp_path / "needed", experts)
    assert (unsaid.equal, unsaid.unchecked) == (True, ("base",))
    shown = run(
        "verify", tmp_path / "needed", "--expert", f"math={math}", "--expert", f"swahili={swahili}", exit_code=0
    )
    assert "--base-model" in shown.stderr


def test_a_slice_of_a_composition_records_its_origin(
    math: Path, swahili: Path, tmp_path: Path, run: Callable[..., Result]
) -> None:
    composed = tmp_path / "composed"
    adapterswap.write_adapter(adapterswap.layer_swap(math, swahili, num_layers=6), composed)
    shell = tmp_path / "shell"
    adapterswap.write_adapter(slice_layers(adapterswap.open_adapter(composed), "0-1", num_layers=6), shell)
    origin = read(shell)["experts"]["composed"]["origin"]
    assert origin["experts"] == read(composed)["experts"]
    assert origin["composition"] == read(composed)["composition"]
    assert f"composed was composed from {math.name} ({math.name}), " in (shell / "README.md").read_text()
    assert verify(shell, {"composed": composed}).equal
    shown = run("inspect", shell).stdout
    assert "the layers 0-1 of composed from composed" in shown
    assert f"composed was composed from {math.name} ({math.name}), " in shown
    output = json.loads(run("inspect", shell, "--json").stdout)["composed_of"]
    assert (output["slice"], output["origins"].keys()) == ("0-1", {"composed"})

    forgetful = shutil.copytree(composed, tmp_path / "forgetful" / "composed")
    (forgetful / "adapterswap.json").unlink()
    assert verify(shell, {"composed": forgetful}).record_differs == ("experts",)


def test_origins_end_where_json_would_nest_too_deep(swahili: Path, tmp_path: Path) -> None:
    expert = swahili
    for generation in range(16):
        expert = adapterswap.write_adapter(
            slice_layers(adapterswap.open_adapter(expert), "0-3", num_layers=6), tmp_path / f"g{generation}"
        )
    assert verify(expert, {"g14": tmp_path / "g14"}).equal
    depth, entry = 0, read(expert)
    while (origin := next(iter(entry["experts"].values())).get("origin")) is not None:
        depth, entry = depth + 1, origin
    assert depth == 8


@pytest.mark.parametrize(
    "origin", [7, {"experts": 7}, {"experts": {"a": {}}}, {"extraction": {}}, {"slice": {"layers": [1]}, "experts": {}}]
)
def test_an_invalid_origin_is_refused(origin: object, math: Path, swahili: Path, tmp_path: Path) -> None:
    out = adapterswap.write_adapter(adapterswap.layer_swap(math, swahili, num_layers=6), tmp_path / "out")
    record = read(out)
    next(iter(record["experts"].values()))["origin"] = origin
    (out / "adapterswap.json").write_text(json.dumps(record))
    with pytest.raises(AdapterswapError):
        verify(out, {"math": math, "swahili": swahili})
    assert adapterswap.inspect(out).record is None


@pytest.mark.parametrize("version", [0, 2, 3, "1", True, 1.0, None])
def test_a_record_of_another_format_is_refused(
    version: object, math: Path, swahili: Path, tmp_path: Path, run: Callable[..., Result]
) -> None:
    """Wherever it is read: what it says of layers that were left out may mean something else."""
    part = tmp_path / "part"
    slice_layers(math, "0-1", num_layers=6).write(part)
    content = read(part) | {"format": version}
    (part / "adapterswap.json").write_text(json.dumps(content))
    with refused(ExpertError, "path", match="format"):
        verify(part, {"math": math})
    for refuses in (
        lambda: adapterswap.inspect(part),
        lambda: adapterswap.soup(part, swahili, num_layers=6),
        lambda: adapterswap.convert(part, tmp_path / "out"),
    ):
        with pytest.raises(ExpertError, match="has the format"):
            refuses()
    assert run("inspect", part).exit_code == 3
