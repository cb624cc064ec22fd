"""Import a Python file outside any package: a script or an example."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def loaded(path: Path) -> Any:
    """Run the file `path` afresh and return it as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
