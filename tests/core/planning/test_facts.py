"""The facts of a base are found once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMPOSE = """
import sys

import adapterswap

opened = []
sys.addaudithook(lambda event, details: opened.append(str(details[0])) if event == "open" else None)
adapterswap.compose("math+swahili", {"math": sys.argv[1], "swahili": sys.argv[2]}).write(sys.argv[3])
print(sum(path == sys.argv[4] for path in opened))
"""


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_compose_reads_the_config_of_the_base_once(
    with_weights: bool, base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for path in base("llama").iterdir():
        if with_weights or path.name == "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    experts = []
    for expert in (math, swahili):
        experts.append(tmp_path / expert.name)
        experts[-1].mkdir()
        for path in expert.iterdir():
            (experts[-1] / path.name).write_bytes(path.read_bytes())
        config = json.loads((expert / "adapter_config.json").read_text())
        (experts[-1] / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(folder)}))

    arguments = [*experts, tmp_path / "out", folder / "config.json"]
    done = subprocess.run([sys.executable, "-c", COMPOSE, *arguments], check=True, capture_output=True, text=True)

    # An opener of our own makes a file appear twice in the audit: as a file, and as the descriptor under it.
    assert int(done.stdout) == 2
    record = json.loads((tmp_path / "out" / "adapterswap.json").read_text())
    assert record["base"]["sha256"] == {
        "config.json": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    }
