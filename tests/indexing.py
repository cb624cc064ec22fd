"""lm-evaluation-harness reads its 14,000 task files once in a process (7 s), not once for each folder of others."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any


def index_once() -> None:
    """From now on, where tests that are to run have imported the harness."""
    if "lm_eval" not in sys.modules or hasattr(module := import_module("lm_eval.tasks._index"), "indexed_once"):
        return
    read, home = module.TaskIndex.build, Path(module.__file__).parent
    module.indexed_once = functools.cache(lambda: read([home]))

    def build(paths: Iterable[Path]) -> dict[str, Any]:
        first, *others = paths
        return {**module.indexed_once(), **read(others)} if first == home else read([first, *others])

    module.TaskIndex.build = staticmethod(build)
