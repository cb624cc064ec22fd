"""The base of a sweep: the one on which the experts were trained, known by its weights and not by its README."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from refusals import refused

from adapterswap.experiments.sweeps import SweepRecipe, prepare
from adapterswap.kit.errors import BaseModelError


def test_a_sweep_over_another_base_is_refused(recipe: Callable[..., SweepRecipe], world: Path, tmp_path: Path) -> None:
    expert, base = (
        shutil.copytree(world / "math1", tmp_path / "math1"),
        shutil.copytree(world / "base", tmp_path / "base"),
    )
    raw = (base / "model.safetensors").read_bytes()
    fingerprints = {"model.safetensors": hashlib.sha256(str(len(raw)).encode() + raw).hexdigest()}
    (expert / "training.json").write_text(json.dumps({"base": {"fingerprints": fingerprints}}))
    requested = recipe(
        base_model=str(base), task_experts={"math1": str(expert)}, compositions=[{"bottom": 1, "top": 1}]
    )
    described = prepare(requested).described
    (base / "README.md").write_text("About this base")
    assert prepare(requested).described == described
    (base / "model.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with refused(BaseModelError, "base_model"):
        prepare(requested)
