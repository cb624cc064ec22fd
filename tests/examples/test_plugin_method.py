"""The example of a method in another package: installed as its pyproject.toml says, it works by name."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
from core.writing.test_blends import deltas, handmade
from launching import commands_in
from tolerances import close

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_method"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The files that `pip install` would create from pyproject.toml: the module, and metadata with the entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site" / "adapterswap_median-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(groups))
    paths = [str(EXAMPLE), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_example_composes_and_verifies(environment: dict[str, str], tmp_path: Path) -> None:
    names = ("math", "swahili")
    folders = [
        handmade(tmp_path / name, layers=2, rank=2, alpha=4, rslora=True, seed=i) for i, name in enumerate(names)
    ]

    sides = ["-t", folders[0], "-l", folders[1], "--num-layers", 2, "--method", "median", "--max-rank", 12]
    done = commands_in(
        environment,
        ["compose", *sides, "--scale", 0.5, "--parameter", "softness=0.2", "-o", tmp_path / "out"],
        ["verify", tmp_path / "out", *(f"--expert={name}={tmp_path / name}" for name in names)],
        ["methods", "--json"],
    )
    assert [each.code for each in done] == [0, 0, 0], done
    sources = [deltas(folder) for folder in folders]
    for name, written in deltas(tmp_path / "out").items():
        close(written, 0.5 * np.mean([source[name] for source in sources], axis=0), depth=4)
    listed = json.loads(done[-1].stdout)["median"]
    assert listed["defaults"] == {"scale": 1.0, "softness": 0.0}
    assert not listed["built_in"]
