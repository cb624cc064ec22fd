"""The example on choosing layers: its commands run on a lab run, and its sweep is valid."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "which_layers"


@pytest.fixture(scope="module")
def lab_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lab-run/seed-0: a shipped base, and experts trained for one step."""
    import json

    from adapterswap.experiments.lab.bases import write_base
    from adapterswap.experiments.lab.scenes import SCENES, language_rows, math_rows
    from adapterswap.experiments.training import TrainRecipe, train

    here = tmp_path_factory.mktemp("which-layers")
    seed = here / "lab-run" / "seed-0"
    seed.mkdir(parents=True)
    write_base(SCENES["gap"], 0, seed / "base")
    for name, rows in (("math", math_rows), ("language", language_rows)):
        chosen = [{"prompt": row.prompt, "completion": row.completion} for row in rows(SCENES["gap"], 0)][:64]
        (seed / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
        content = {
            "base_model": str(seed / "base"),
            "adapter": {"r": 4},
            "datasets": [{"path": str(seed / f"{name}.jsonl"), "prompt": "{prompt}", "completion": " {completion}"}],
            "training": {"max_steps": 2, "learning_rate": 1e-2, "device": "cpu", "save_every_samples": None},
        }
        train(TrainRecipe.model_validate(content), out_path=seed / name, progress=False)
    shutil.copytree(EXAMPLE, here / "examples" / "which_layers")
    return here


def test_every_command_of_the_page_runs(
    run: Callable[..., Result], lab_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab_run)
    blocks = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert len(lines) == 9
    for line in lines:
        if "papers.py" in line:  # test_papers.py runs this command with less training
            continue
        program, *words = shlex.split(line)
        if program == "adapterswap":
            result = run(*words)
            assert result.exit_code == 0, f"{line}\n{result.output}"
            continue
        process = subprocess.run([sys.executable, *words, "--problems", "6"], capture_output=True, text=True)
        assert process.returncode == 0, f"{line}\n{process.stderr}"
    assert (lab_run / "lab-sweep-report" / "report.html").is_file()
    assert len((lab_run / "lab-sweep" / "cells.jsonl").read_text().splitlines()) > 25
