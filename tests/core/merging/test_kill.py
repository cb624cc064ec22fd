"""A merge that is killed at any moment leaves nothing, the old folder, or the complete new one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafting import BASE_CONFIG, Tensors, file_bytes, parts

Crashing = Callable[..., dict[str, Any]]


def checkpoint(folder: Path, seed: int) -> Path:
    """Four layers of one matrix and one norm each, in two shards, made byte by byte."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    weight_map = {}
    for shard in (1, 2):
        file = f"model-{shard:05d}-of-00002.safetensors"
        content: Tensors = {}
        for layer in (2 * shard - 2, 2 * shard - 1):
            for name, shape in (("mlp.down_proj", (4, 8)), ("input_layernorm", (8,))):
                data = random.standard_normal(shape).astype(np.float32).tobytes()
                content[f"model.layers.{layer}.{name}.weight"] = ("F32", shape, data)
        (folder / file).write_bytes(file_bytes(*parts(content)))
        weight_map |= dict.fromkeys(content, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG))
    return folder


@pytest.fixture
def crashing(tmp_path: Path) -> Crashing:
    """Run a mode of tests/crashing.py with two checkpoints, copied layer by layer, so that no child imports torch."""
    experts = {name: str(checkpoint(tmp_path / name, seed)) for seed, name in enumerate(("math", "swahili"))}
    folder = tmp_path / "outputs"
    folder.mkdir()

    def command(layers: str) -> list[str]:
        rules = [{"layers": layers, "expert": "swahili"}, {"expert": "math"}]
        recipe = tmp_path / f"{layers}.yaml"
        recipe.write_text(json.dumps({"experts": experts, "allocation": rules}))  # JSON is YAML
        return ["merge", str(recipe), "-o", str(folder / "out")]

    def call(mode: str, **settings: Any) -> dict[str, Any]:
        settings |= {"folder": str(folder), "first": command("0"), "arguments": command("1-2")}
        program = [sys.executable, str(Path(__file__).parents[2] / "crashing.py"), mode, json.dumps(settings)]
        process = subprocess.run(program, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        output: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return output

    return call


@pytest.mark.full  # the next test kills it at fifteen moments
def test_killed_at_every_step(crashing: Crashing) -> None:
    result = crashing("every", overwrite=True)
    assert result["kills"] >= 12
    assert set(result["states"]) <= {"old", "absent", "new"}
    assert result["states"].count("absent") == 1  # between the two renames; the next run puts the old one back
    assert result["recovered"][result["states"].index("absent")] == "old"
    assert result["left"] == []


def test_killed_at_a_random_moment(crashing: Crashing) -> None:
    result = crashing("random", kills=15, seed=1)
    assert set(result["states"]) <= {"absent", "old", "new", "finished"}
    assert result["left"] == []
