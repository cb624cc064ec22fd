"""The notebooks run from the first cell to the last, on briefly trained experts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from importing import loaded

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def script() -> Any:
    return loaded(ROOT / "scripts" / "run_notebooks.py")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of Jupyter's own libraries
@pytest.mark.parametrize(
    "notebook",
    [  # the pages call the functions of the others: docs/python.md with a sweep and its report
        pytest.param(path, id=path.stem, marks=[] if path.stem == "live" else pytest.mark.full) for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(
    notebook: Path, script: Any, small_lab_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")  # where `adapterswap` is
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    shutil.copytree(small_lab_run, tmp_path / "lab-run")
    shown = script.executed(notebook, tmp_path)
    kept = [output for cell in script.nbformat.read(notebook, 4).cells for output in cell.get("outputs", [])]
    outputs = [output for cell in shown.cells for output in cell.get("outputs", [])]
    assert [output.output_type for output in outputs if output.output_type != "stream"] == [
        output.output_type for output in kept if output.output_type != "stream"
    ]


def test_notebooks_contain_no_local_paths() -> None:
    assert len(NOTEBOOKS) == 4
    for notebook in NOTEBOOKS:
        text = notebook.read_text()
        assert "/home/" not in text
        assert "/tmp/" not in text
