"""Experts that call one base differently: which name is written, and what `verify` says without the base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from refusals import refused

import adapterswap
from adapterswap.kit.errors import ArgumentError

Renamed = Callable[[Path, str, str], Path]


@pytest.fixture
def renamed(tmp_path: Path) -> Renamed:
    """`renamed(math, "math", "org/base")` is a copy of an adapter, named so, whose config names that base."""

    def make(adapter: Path, name: str, base_model: str) -> Path:
        out = tmp_path / "experts" / name
        shutil.copytree(adapter, out)
        config = json.loads((out / "adapter_config.json").read_text())
        (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base_model}))
        return out

    return make


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (("org/tiny", "unsloth/tiny-bnb-4bit"), "org/tiny"),
        (("unsloth/tiny-bnb-4bit", "org/tiny"), "org/tiny"),
        (("unsloth/tiny-bnb-4bit", "/elsewhere/tiny"), None),
        (("/here/tiny", "/there/tiny-other"), None),
    ],
)
def test_the_written_base_and_what_verify_says(
    names: tuple[str, str],
    written: str | None,
    math: Path,
    swahili: Path,
    base: Callable[[str], Path],
    renamed: Renamed,
    run: Callable[..., Result],
    tmp_path: Path,
) -> None:
    """An id on the Hub instead of the folder that was passed; the folder where no expert names the original's id."""
    experts = [renamed(math, "math", names[0]), renamed(swahili, "swahili", names[1])]
    out = tmp_path / "out"
    pair = ["-t", experts[0], "-l", experts[1]]
    run("compose", *pair, "--base-model", base("llama"), "--bottom", 1, "-o", out, exit_code=0)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == (written or str(base("llama")))
    assert (f"base_model: {written}" in (out / "README.md").read_text()) == (written is not None)

    named = ["--expert", f"math={experts[0]}", "--expert", f"swahili={experts[1]}"]
    for sources in (named, pair):
        checked = run("verify", out, *sources, exit_code=0)
        assert "equal" in checked.stdout
        run("verify", out, *sources, "--base-model", base("llama"), exit_code=0)

    # Another expert, and another base in the config, are still found.
    assert run("verify", out, "-t", experts[1], "-l", experts[0]).exit_code == 1
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/another"}))
    assert run("verify", out, *named).exit_code == 1


def test_experts_by_role_are_those_of_the_record(math: Path, swahili: Path, tmp_path: Path) -> None:
    swapped = adapterswap.layer_swap(math, swahili, bottom=1, top=1).write(tmp_path / "swapped")
    assert adapterswap.verify(swapped, task_expert=[math], language_expert=[swahili]).equal
    with refused(ArgumentError, "task_expert"):
        adapterswap.verify(swapped, task_expert=[math, swahili])
    rules = adapterswap.compose("math+swahili@method=soup", {"math": math, "swahili": swahili})
    assert adapterswap.verify(rules.write(tmp_path / "soup"), task_expert=[math], language_expert=[swahili]).equal
    converted = tmp_path / "converted"
    adapterswap.convert(math, converted, layout="portable")
    with refused(ArgumentError, "language_expert"):
        adapterswap.verify(converted, language_expert=[math])
