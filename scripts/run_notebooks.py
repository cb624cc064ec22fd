"""Run the notebooks of examples/notebooks and save their output: `python scripts/run_notebooks.py FOLDER [NAME …]`.

They run in FOLDER, with or without a lab-run in it. Warnings and progress (standard error) are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"


def executed(notebook: Path, folder: Path) -> NotebookNode:
    """The notebook with its outputs, run in `folder`; raises nbclient's CellExecutionError where a cell fails."""
    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(content, timeout=900, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in content.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    content.metadata.language_info = {"name": "python"}
    return content


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if path.stem in sys.argv[2:] or len(sys.argv) == 2:
            nbformat.write(executed(path, folder), path)
