"""Slices, verification and distances, through the command line and against dense references."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crafting
import numpy as np
import pytest
import torch
from click.testing import Result
from core.writing.test_blends import deltas, handmade
from pico_models import copied
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import near, tolerance

import adapterswap
from adapterswap.kit.errors import ArgumentError, ExpertError
from adapterswap.tools.recorded import Verification
from adapterswap.tools.verification import verify

ZONES = ["--bottom", 2, "--top", 1, "--bottom-transition", 1]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def test_slices_compose_like_whole_experts(
    run: Callable[..., Result], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """Byte for byte, tensors and config, with different ranks, a transition, and LoRA on the embedding and the head."""
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    math, swahili = (expert(seed=seed, r=rank, target_modules=targets) for seed, rank in ((1, 4), (2, 8)))
    run("compose", "-t", math, "-l", swahili, *ZONES, "-o", tmp_path / "whole", exit_code=0)
    assert run("slice", math, "--layers", "2-4", "-o", tmp_path / "core").exit_code == 0
    assert run("slice", swahili, "--layers", "0-2,5", "-o", tmp_path / "shell").exit_code == 0
    run("compose", "-t", tmp_path / "core", "-l", tmp_path / "shell", *ZONES, "-o", tmp_path / "sliced", exit_code=0)
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "sliced" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_slice_holds_its_layers_byte_for_byte(run: Callable[..., Result], swahili: Path, tmp_path: Path) -> None:
    output = json.loads(run("slice", swahili, "--layers", "0-1,5", "-o", tmp_path / "shell", "--json").stdout)
    assert (output["layers"], output["modules"], output["of_modules"]) == ("0-1,5", 21, 42)
    assert output["share"] == pytest.approx(0.5)
    whole, shell = load_file(swahili / WEIGHTS), load_file(tmp_path / "shell" / WEIGHTS)
    assert {int(key.split(".layers.")[1].split(".")[0]) for key in shell} == {0, 1, 5}
    assert all(torch.equal(shell[key], whole[key]) for key in shell)
    assert sum(tensor.nbytes for tensor in shell.values()) == output["bytes"]


def test_the_share_of_a_slice_counts_what_peft_loads(run: Callable[..., Result], tmp_path: Path) -> None:
    """Tensors in the file that the config does not target are not counted."""
    crafting.adapter(tmp_path / "some", settings=crafting.config(layers_to_transform=[0, 1], layers_pattern="layers"))
    options = ("--num-layers", 4, "-o", tmp_path / "shell", "--json", "--dry-run")
    output = json.loads(run("slice", tmp_path / "some", "--layers", "0-1", *options).stdout)
    assert (output["modules"], output["of_modules"], output["share"]) == (4, 4, 1)
    output = json.loads(run("slice", tmp_path / "some", "--layers", "1", *options).stdout)
    assert (output["modules"], output["of_modules"], output["share"]) == (2, 4, 0.5)


def test_compose_counts_the_modules_that_it_writes(run: Callable[..., Result], tmp_path: Path) -> None:
    crafting.adapter(tmp_path / "math")
    zones = ("--num-layers", 4, "--bottom", 1, "--top", 0)
    reset = run("compose", "-t", tmp_path / "math", "-l", "base", *zones, "-o", tmp_path / "reset")
    assert "6 of 8 modules; 12 of 12 tensors" in reset.stderr
    inspected = json.loads(run("inspect", tmp_path / "reset", "--json").stdout)
    assert len(inspected["modules"]) == 6


def test_a_slice_takes_its_depth_from_the_named_base(
    run: Callable[..., Result], expert: Callable[..., Path], math: Path, tmp_path: Path
) -> None:
    base = json.loads((math / CONFIG).read_text())["base_model_name_or_path"]
    moved = copied(math, tmp_path / "moved", base_model_name_or_path=str(tmp_path / "gone"))
    lost = run("slice", moved, "--layers", "0-1", "-o", tmp_path / "shell", exit_code=3)
    assert "--base-model" in lost.stderr
    assert run("slice", moved, "--layers", "0-1", "--base-model", base, "-o", tmp_path / "shell").exit_code == 0
    assert run("slice", moved, "--layers", "0-9", "--base-model", base, "-o", tmp_path / "more").exit_code == 2


def test_a_slice_is_refused_only_if_its_missing_layers_are_needed(
    run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path
) -> None:
    run("slice", swahili, "--layers", "0-1", "-o", tmp_path / "shell")
    for zones in (["--bottom", 3, "--top", 0], ["--bottom", 2, "--top", 1], ["--bottom", 2, "--bottom-transition", 1]):
        declined = run("compose", "-t", math, "-l", tmp_path / "shell", *zones, "-o", tmp_path / "out", exit_code=2)
        assert "shell is a slice with the layers 0-1" in declined.stderr
    weighed = run("compose", "-t", math, "-l", tmp_path / "shell", "--bottom", 1, "--bottom-transition", 1, "--top", 0,
                  "--weights", "magnitude", "-o", tmp_path / "out", exit_code=2)  # fmt: skip
    assert "shell is a slice, but magnitude weights need the magnitude of the whole expert" in weighed.stderr
    assert run("slice", tmp_path / "shell", "--layers", "1", "-o", tmp_path / "smaller").exit_code == 0
    gone = run("slice", tmp_path / "shell", "--layers", "2-3", "-o", tmp_path / "none", exit_code=2)
    assert gone.stderr == "Error: shell adapts none of the layers 2-3. Choose from those that it adapts: 0-1.\n"


def test_a_slice_stays_one_through_every_later_step(
    run: Callable[..., Result], math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also in full weights, and cut out of them again; `verify` makes the same record again."""
    core, llama = tmp_path / "core", base("llama")
    assert run("slice", math, "--layers", "2-4", "-o", core).exit_code == 0
    only = ("--rule", "core: 3", "--rule", "base")
    kept = {
        "reset": (("compose", "-t", core, "-l", "base", "--bottom", 3, "--top", 1), "2-4"),
        "again": (("slice", core, "--layers", "3"), "3"),
        "converted": (("convert", core, "--layout", "portable"), "2-4"),
        "beside": (
            ("compose", "--expert", f"core={core}", "--expert", f"s={swahili}", "--rule", "s: 0", *only),
            "0,2-4",
        ),
        "exported.gguf": (("export", core), "2-4"),
        "merged": (("merge", core), "2-4"),
        "extracted": (("extract", tmp_path / "merged", "--base-model", llama, "--rank", 8), "2-4"),
    }
    for name, (arguments, layers) in kept.items():
        run(*arguments, "-o", tmp_path / name, exit_code=0)
        if name not in ("beside", "extracted"):
            checked = run("verify", tmp_path / name, "--expert", f"core={core}", "--base-model", llama)
            assert checked.stdout.startswith("equal"), (name, checked.stdout, checked.stderr)
        if name == "exported.gguf":
            assert json.loads(run("inspect", tmp_path / name, "--json").stdout)["composed_of"]["slice"] == layers
            continue
        assert json.loads((tmp_path / name / "adapterswap.json").read_text())["slice"] == {"layers": layers}, name
        for needing in (
            ("-t", tmp_path / name, "-l", swahili, "--bottom", 1, "--top", 1),
            ("-t", swahili, "-l", tmp_path / name, "--bottom", 0, "--top", 1),
            ("--expert", f"it={tmp_path / name}", "--rule", "it"),
            ("-t", tmp_path / name, "-l", "base", "--bottom", 1, "--top", 1),
        ):
            declined = run("merge", *needing, "--base-model", llama, "-o", tmp_path / "out")
            assert declined.exit_code in (2, 3), (name, needing, declined.stdout)
            assert "is a slice with the layers" in declined.stderr, declined.stderr
    run("compose", "-t", core, "-l", swahili, "--bottom", 2, "--top", 1, "-o", tmp_path / "filled", exit_code=0)
    assert "slice" not in json.loads((tmp_path / "filled" / "adapterswap.json").read_text())


@pytest.mark.parametrize("layers", ["", "none", "7", "9-12", "x", "4-2"])
def test_invalid_layers_are_refused(layers: str, run: Callable[..., Result], math: Path, tmp_path: Path) -> None:
    refused = run("slice", math, "--layers", layers, "-o", tmp_path / "out", exit_code=2)
    assert refused.stderr.startswith("Error: ")
    assert refused.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def composed(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> dict[str, Path]:
    """Copies of two experts and three compositions of them."""
    for name, source in (("math", math), ("swahili", swahili)):
        shutil.copytree(source, tmp_path / name)
    experts = ["-t", tmp_path / "math", "-l", tmp_path / "swahili"]
    forms = {
        "swap": ZONES,
        "ties": ["--method", "ties", "--density", 0.5, "--max-rank", 6],
        "portable": [*ZONES, "--weights", "magnitude", "--layout", "portable", "--max-error", 0.3],
    }
    for name, options in forms.items():
        run("compose", *experts, *options, "-o", tmp_path / name, exit_code=0)
    return {name: tmp_path / name for name in (*forms, "math", "swahili")}


def test_a_base_path_that_no_config_can_hold(
    run: Callable[..., Result], base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    """Experts without a base get the one from the option, unless its path could not be read back as text."""
    named = tmp_path / "base\udcff"
    shutil.copytree(base("llama"), named)
    experts = [tmp_path / "math", tmp_path / "swahili"]
    for expert, source in zip(experts, (math, swahili), strict=True):
        copied(source, expert, base_model_name_or_path=None)
    out = ("-o", tmp_path / "out", "--base-model")
    for command in (
        ("compose", "-t", experts[0], "-l", experts[1], "--bottom", 1, "--top", 1),
        ("slice", experts[0], "--layers", "0-1"),
    ):
        refused = run(*command, *out, named, exit_code=3)
        assert "adapter_config.json cannot hold" in refused.stderr
        assert not (tmp_path / "out").exists()
        assert run(*command, *out, base("llama")).exit_code == 0
        assert run("inspect", tmp_path / "out").exit_code == 0
        shutil.rmtree(tmp_path / "out")


def test_verify_says_equal(run: Callable[..., Result], composed: dict[str, Path]) -> None:
    sources = ["--expert", f"math={composed['math']}", "--expert", f"swahili={composed['swahili']}"]
    for name in ("swap", "ties", "portable"):
        result = run("verify", composed[name], *sources)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("equal")


def test_verify_names_the_module_that_differs(run: Callable[..., Result], composed: dict[str, Path]) -> None:
    sources = ["--expert", f"math={composed['math']}", "--expert", f"swahili={composed['swahili']}"]
    file = composed["swap"] / WEIGHTS
    tensors = load_file(file)
    key = "base_model.model.model.layers.3.mlp.up_proj.lora_A.weight"
    tensors[key][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    result = run("verify", composed["swap"], *sources, "--json", exit_code=1)
    assert json.loads(result.stdout) == {
        "equal": False, "changed_sources": {}, "differing": [key], "config_differs": False,
        "record_differs": [], "unchecked": [], "notes": [],
    }  # fmt: skip


def swap_owners(record: dict[str, Any]) -> None:
    other = {"math": "swahili", "swahili": "math"}
    record["modules"] = {name: other.get(str(owner), owner) for name, owner in record["modules"].items()}


def double(key: str) -> Callable[[dict[str, Any]], None]:
    def lie(record: dict[str, Any]) -> None:
        record[key] = {name: 2 * value for name, value in record[key].items()}

    return lie


LIES: dict[str, tuple[str, str, Callable[[dict[str, Any]], object]]] = {
    "swapped owners": ("swap", "modules", swap_owners),
    "a module less": ("ties", "modules", lambda record: record["modules"].popitem()),
    "no rules": ("swap", "rules", lambda record: record.update(rules=[])),
    "other rules": ("ties", "rules", lambda record: record["rules"][0].update(density=0.25)),
    "a slice": ("swap", "slice", lambda record: record.update(slice={"layers": "0-99999999999"})),
    "another base": ("swap", "base_model", lambda record: record.update(base_model="org/other")),
    "another revision": ("swap", "base_revision", lambda record: record.update(base_revision="R9")),
    "an expert's base": ("swap", "experts", lambda record: record["experts"]["math"].update(base_model="org/other")),
    "more of an expert": ("swap", "experts", lambda record: record["experts"]["math"].update(license="mit")),
    "magnitudes": ("portable", "magnitudes", double("magnitudes")),
    "no magnitudes": ("portable", "magnitudes", lambda record: record.pop("magnitudes")),
    "a composition's depth": ("swap", "composition", lambda record: record["composition"].update(num_layers=7)),
    "a default left out": ("swap", "composition", lambda record: record["composition"].pop("task_weight")),
    "an origin": ("swap", "experts", lambda record: record["experts"]["math"].update(origin={"experts": {}})),
    "ranks": ("portable", "reduced", lambda record: next(iter(record["reduced"].values())).update(rank=1)),
    "errors": ("ties", "reduced", lambda record: next(iter(record["reduced"].values())).update(relative_error=0.0)),
    "files": ("swap", "files", lambda record: record["files"].append("thesis.txt")),
    "something else": ("swap", "award", lambda record: record.update(award="best paper")),
}


@pytest.mark.parametrize("lie", LIES)
def test_verify_names_what_is_wrong_in_the_record(
    lie: str, run: Callable[..., Result], composed: dict[str, Path]
) -> None:
    name, key, change = LIES[lie]
    path = composed[name] / "adapterswap.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    result = verify(composed[name], {expert: composed[expert] for expert in ("math", "swahili")})
    assert (result.equal, result.record_differs) == (False, (key,))
    assert run("inspect", composed[name]).exit_code == 0
    if lie == "swapped owners":
        sources = ["--expert", f"math={composed['math']}", "--expert", f"swahili={composed['swahili']}"]
        shown = run("verify", composed[name], *sources, exit_code=1)
        assert shown.stdout == "differs: modules in adapterswap.json\n"
        assert json.loads(run("verify", composed[name], *sources, "--json").stdout)["record_differs"] == ["modules"]


def test_verify_accepts_a_declared_revision_of_the_base(composed: dict[str, Path], tmp_path: Path) -> None:
    """Also where the experts agree on another revision."""
    experts = {name: composed[name] for name in ("math", "swahili")}
    for folder in experts.values():
        content = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": "org/name", "revision": "R1"}
        (folder / CONFIG).write_text(json.dumps(content))
    for base in ("org/name@R2", "org/name@R1", "org/name", None):
        opened = {name: adapterswap.open_adapter(folder) for name, folder in experts.items()}
        composition = adapterswap.Composition(
            task="math", language="swahili", bottom=2, top=1, num_layers=6, base_model=base
        )
        out = adapterswap.write_adapter(
            adapterswap.make_plan(composition, opened), tmp_path / str(base).replace("/", "")
        )
        record = json.loads((out / "adapterswap.json").read_text())
        assert record["base_revision"] == ("R2" if base == "org/name@R2" else "R1")
        assert verify(out, experts) == Verification()
        (out / "adapterswap.json").write_text(json.dumps(record | {"base_revision": "R9"}))
        assert not verify(out, experts).equal


def test_verify_names_the_source_that_changed(run: Callable[..., Result], composed: dict[str, Path]) -> None:
    file = composed["math"] / WEIGHTS
    tensors = load_file(file)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"  # not used: the language expert owns layer 0
    tensors[key] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    result = verify(composed["swap"], {name: composed[name] for name in ("math", "swahili")})
    assert result.changed_sources == {"math": WEIGHTS}
    assert result.differing == ()
    assert not result.equal
    shown = run(
        "verify", composed["swap"], *(f"--expert={name}={composed[name]}" for name in ("math", "swahili")), exit_code=1
    )
    assert "source changed: math's adapter_model.safetensors" in shown.stdout


def test_verify_names_ten_and_counts_the_rest(run: Callable[..., Result], composed: dict[str, Path]) -> None:
    swapped = ["--expert", f"math={composed['swahili']}", "--expert", f"swahili={composed['math']}"]
    result = run("verify", composed["swap"], *swapped)
    everything = json.loads(run("verify", composed["swap"], *swapped, "--json").stdout)["differing"]
    assert len(everything) == 6 * 7 * 2
    lines = [line for line in result.stdout.splitlines() if line.startswith("differs: ")]
    assert lines == [*(f"differs: {key}" for key in everything[:10]), "differs: 74 more; --json lists them all"]


def test_verify_asks_for_missing_sources(run: Callable[..., Result], composed: dict[str, Path], math: Path) -> None:
    missing = run("verify", composed["swap"], "--expert", f"math={composed['math']}", exit_code=2)
    assert "--expert swahili=PATH" in missing.stderr
    assert "--expert names 'code'" in run("verify", composed["swap"], "--expert", f"code={math}").stderr
    with refused(ArgumentError, "experts", match=r"`experts=\{'swahili': PATH\}`"):
        verify(composed["swap"], {"math": composed["math"]})
    with refused(ArgumentError, "experts", match="'code'"):
        verify(composed["swap"], {"code": math})
    with refused(ExpertError, "path", match=str(math)):
        verify(math)
    assert run("verify", composed["swap"], "--expert", "math").exit_code == 2
    (composed["swap"] / "adapterswap.json").write_text('{"format": 1, "num_layers": "six"}')
    with refused(ExpertError, "path"):
        verify(composed["swap"])


def test_diff_is_the_dense_distance_and_cosine(run: Callable[..., Result], tmp_path: Path) -> None:
    one = handmade(tmp_path / "one", layers=3, rank=3, alpha=8, rslora=True, seed=1)
    other = handmade(tmp_path / "other", layers=3, rank=2, alpha=5, rslora=False, seed=2)
    output = json.loads(run("diff", one, other, "--json").stdout)
    pairs = {name: (delta, deltas(other)[name]) for name, delta in deltas(one).items()}
    for name, (x, y) in pairs.items():
        assert output["modules"][name]["distance"] == near(np.linalg.norm(x - y) / np.linalg.norm(x))
        cosine = np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y)
        assert output["modules"][name]["cosine"] == near(cosine, scale=1)
    for layer in range(3):
        x, y = (
            np.concatenate([pair[side].ravel() for name, pair in pairs.items() if f".{layer}." in name])
            for side in (0, 1)
        )
        assert output["layers"][str(layer)]["distance"] == near(np.linalg.norm(x - y) / np.linalg.norm(x))
    shown = run("diff", one, other)
    assert len(shown.stdout.splitlines()) == 5
    assert len(run("diff", one, other, "--modules").stdout.splitlines()) == 8


def test_the_distance_of_an_adapter_from_itself_is_zero(run: Callable[..., Result], math: Path) -> None:
    output = json.loads(run("diff", math, math, "--json").stdout)["total"]
    # The root of a difference of squares in float64, which leaves the root of their rounding.
    assert output["distance"] == pytest.approx(0, abs=tolerance(1.0, dtype=torch.float64) ** 0.5)
    assert output["cosine"] == pytest.approx(1)


def test_missing_modules_count_as_zero(expert: Callable[..., Path], run: Callable[..., Result]) -> None:
    attention = expert(seed=3, target_modules=["q_proj"])
    output = json.loads(run("diff", expert(seed=1), attention, "--json").stdout)
    module = output["modules"]["model.layers.0.mlp.up_proj"]
    assert module["distance"] == pytest.approx(1)
    assert module["cosine"] is None
    assert output["modules"]["model.layers.0.self_attn.q_proj"]["cosine"] is not None
    back = json.loads(run("diff", attention, expert(seed=1), "--json").stdout)
    assert back["modules"]["model.layers.0.mlp.up_proj"]["distance"] is None


def test_adapters_of_other_shapes_cannot_be_compared(run: Callable[..., Result], math: Path, tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(math, "base", bottom=1, top=1)
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    tensors = load_file(out / WEIGHTS)
    key = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    tensors[key] = tensors[key].repeat(2, 1)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    with refused(ExpertError, "other", match=r"layers.2.mlp.up_proj is 96×32 .* 48×32"):
        adapterswap.diff(out, math)


def test_a_small_distance_is_not_rounded_to_zero(run: Callable[..., Result], tmp_path: Path) -> None:
    content = crafting.tensors()
    one = crafting.adapter(tmp_path / "one", content)
    key, (dtype, shape, raw) = next(iter(content.items()))
    values = np.frombuffer(raw, np.float32).copy()
    values[0] *= np.float32(1.0001)
    near = crafting.adapter(tmp_path / "near", content | {key: (dtype, shape, values.tobytes())})
    output = json.loads(run("diff", one, near, "--json").stdout)
    assert 1e-7 < output["layers"]["0"]["distance"] < 5e-5
    rows = [line.split() for line in run("diff", one, near).stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["0"])[3:5] == ["<", "0.0001"]
    assert next(row for row in rows if row[:1] == ["1"])[3] == "0.0000"
    same = run("diff", one, one).stdout
    assert "<" not in same
