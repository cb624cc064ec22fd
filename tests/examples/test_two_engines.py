"""The example of one sweep in two engines: its commands run, and the comparison finds equal answers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engines.serving.environment import environment, needs_vllm, vllm_python
from experiments.reporting.crafting import craft, recipe

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engines"


def test_two_runs_are_compared(tmp_path: Path) -> None:
    """The last line of the page, on two folders with made-up scores, one answer of which was changed."""
    requested = recipe(
        task_experts={"math1": "experts/math1"}, language_experts={"sw1": "experts/sw1"},
        compositions=[{"bottom": 3, "top": 1}], baselines=["task"], retention=[],
    )  # fmt: skip
    runs = [craft(tmp_path / name, requested, documents=5) for name in ("ours", "theirs")]
    command = [sys.executable, EXAMPLE / "compare.py", *runs]
    (task,) = requested.tasks
    for equal in (10, 9):
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert printed[1].split()[:3] == [task, "10", str(equal)]
        changed = next((runs[1] / "samples").iterdir())
        changed.write_text(re.sub(r'"output": "[^"]*"', '"output": "other"', changed.read_text(), count=1))


@needs_vllm
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_every_answer_of_the_page_is_equal(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "engines")
    (block,) = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL)
    variables = {"PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for line in block.splitlines():
        program, *words = shlex.split(line)
        python = vllm_python() if "vllm" in words else sys.executable
        words = words if program == "python" else ["-m", "adapterswap", *words]
        process = subprocess.run(
            [python, *words], cwd=tmp_path, env=environment(variables), capture_output=True, text=True
        )
        assert process.returncode == 0, f"{line}\n{process.stderr}"
    rows = {name: numbers for name, *numbers in map(str.split, process.stdout.splitlines()[1:3])}
    assert [rows[name][:2] for name in ("words_generate", "words_choose")] == [["112", "112"]] * 2
    assert float(rows["words_choose"][2]) < 1e-3
    changed = next((tmp_path / "run-vllm" / "samples").iterdir())
    changed.write_text(re.sub(r'"output": "[^"]*"', '"output": "other"', changed.read_text(), count=1))
    command = [sys.executable, "examples/engines/compare.py", "run-transformers", "run-vllm"]
    compared = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert re.search(r"words_generate +112 +111 ", compared)
    assert "/ 'other'" in compared
