"""Results of an expert that was composed itself: the strip shows its owners, and `verify` takes its experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from refusals import refused
from safetensors.torch import load_file, save_file

import adapterswap
from adapterswap.kit.errors import ArgumentError

Run = Callable[..., Result]
PROVENANCE = "adapterswap.json"


def rows(text: str) -> dict[str, str]:
    """The rows of the strip in a command's output, by kind."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in lines if words and words[0] in ("layers", "attention", "mlp")}


@pytest.fixture
def made(math: Path, swahili: Path, base: Callable[[str], Path], run: Run, tmp_path: Path) -> dict[str, Path]:
    """A composed adapter with a transition, and what is made of it."""
    out = {name: tmp_path / name for name in ("ms", "merged", "lora.gguf", "slice", "again", "deeper")}
    named = ("--expert", f"math={math}", "--expert", f"swahili={swahili}")
    rules = ("--rule", "swahili: 0-1", "--rule", "math + swahili: 2", "--rule", "mlp of swahili: 5", "--rule", "math")
    run("compose", *named, *rules, "-o", out["ms"], exit_code=0)
    run("merge", out["ms"], "--base-model", base("llama"), "-o", out["merged"], exit_code=0)
    run("export", out["ms"], "-o", out["lora.gguf"], exit_code=0)
    run("slice", out["ms"], "--layers", "1-5", "-o", out["slice"], exit_code=0)
    run("compose", "--expert", f"ms={out['ms']}", "--rule", "ms", "-o", out["again"], exit_code=0)
    run("merge", out["again"], "--base-model", base("llama"), "-o", out["deeper"], exit_code=0)
    return out


def test_the_strip_shows_the_owners_of_a_composed_expert(made: dict[str, Path], run: Run, tmp_path: Path) -> None:
    drawn = {"attention": "ss+mmm", "mlp": "ss+mms"}
    for name in ("ms", "merged", "lora.gguf", "again", "deeper"):
        shown = run("inspect", made[name], exit_code=0).stdout
        assert rows(shown) == drawn, name
        assert "s swahili, m math, + 0.5·math + 0.5·swahili" in shown
    assert rows(run("inspect", made["slice"]).stdout) == {"attention": "s+mmm", "mlp": "s+mms"}
    assert rows(run("merge", made["ms"], "-o", tmp_path / "dry", "--dry-run", exit_code=0).stdout) == drawn
    assert "swahili" in (made["merged"] / "README.md").read_text()

    # In a composition of several experts its own name is what tells it from the others.
    pair = ("--expert", f"ms={made['ms']}", "--expert", f"slice={made['slice']}", "--rule", "slice: 3", "--rule", "ms")
    both = run("compose", *pair, "-o", tmp_path / "both", exit_code=0).stdout
    assert rows(both) == {"layers": "mmmsmm"}
    assert both.splitlines()[2].split(", ") == [" " * 8 + "s slice", "m ms"]


def test_a_record_that_cannot_be_read_leaves_the_name(made: dict[str, Path], run: Run, tmp_path: Path) -> None:
    content = json.loads((made["ms"] / PROVENANCE).read_text())
    for number, rules in enumerate(([{"layers": "x", "expert": "math"}], "math", [7], None)):
        (made["ms"] / PROVENANCE).write_text(json.dumps(content | {"rules": rules}))
        planned = run("merge", made["ms"], "-o", tmp_path / f"dry-{number}", "--dry-run", exit_code=0).stdout
        assert rows(planned)["mlp"] == "mmmmmm"


@pytest.mark.parametrize("name", ["merged", "lora.gguf", "again", "deeper"])
def test_verify_takes_the_experts_of_a_composed_expert(
    name: str, made: dict[str, Path], math: Path, swahili: Path, base: Callable[[str], Path], run: Run, tmp_path: Path
) -> None:
    """They are composed again; folders may have moved, and an expert with other weights is named."""
    moved = tmp_path / "elsewhere" / "m"
    shutil.copytree(math, moved)
    named = ("--expert", f"math={moved}", "--expert", f"swahili={swahili}")
    with_base = ("--base-model", base("llama"))
    for made_of in (named, ("--expert", f"ms={made['ms']}")):
        if name == "deeper" and made_of is not named:
            made_of = ("--expert", f"again={made['again']}")
        checked = run("verify", made[name], *made_of, *with_base)
        assert checked.exit_code == 0, checked.output
        assert checked.stdout.startswith("equal")
        assert "Not compared" not in checked.stderr

    with refused(ArgumentError, "experts"):
        adapterswap.verify(made[name], {"math": math}, base_model=base("llama"))
    with refused(ArgumentError, "experts"):
        adapterswap.verify(made[name], {"math": math, "french": swahili}, base_model=base("llama"))

    weights = load_file(moved / "adapter_model.safetensors")
    changed = {key: tensor * 2 if "layers.4." in key else tensor for key, tensor in weights.items()}
    save_file(changed, moved / "adapter_model.safetensors")
    found = adapterswap.verify(made[name], {"math": moved, "swahili": swahili}, base_model=base("llama"))
    assert isinstance(found, adapterswap.Verification)
    assert found.changed_sources["math"] == "adapter_model.safetensors"
    assert not found.equal


def test_verify_takes_roles_of_a_composed_expert(
    math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    swapped = adapterswap.layer_swap(math, swahili, bottom=1, top=1).write(tmp_path / "swapped")
    merged = adapterswap.merge(swapped, base("llama"), out_path=tmp_path / "merged")
    roles = {"task_expert": [math], "language_expert": [swahili]}
    assert adapterswap.verify(merged, **roles, base_model=base("llama")).equal
    other = {"task_expert": [swahili], "language_expert": [math]}
    assert not adapterswap.verify(merged, **other, base_model=base("llama")).equal


def test_names_in_a_record_are_no_paths(
    made: dict[str, Path], math: Path, swahili: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    """A composed expert is composed again in the folder for temporary files, whatever the record calls it."""
    record = json.loads((made["again"] / PROVENANCE).read_text())
    text = json.dumps(record).replace('"ms"', json.dumps(str(tmp_path / "stranger")))
    (made["again"] / PROVENANCE).write_text(text)
    adapterswap.verify(made["again"], {"math": math, "swahili": swahili})
    assert not (tmp_path / "stranger").exists()
