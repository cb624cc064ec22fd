"""Sweeps: many compositions judged over one loaded base, in a folder that can be gone on with and read back.

`sweep` runs a recipe, `read_run` reads its folder. Imports neither torch nor lm-evaluation-harness until something is
evaluated.
"""

from __future__ import annotations

from adapterswap.sweeps.results import Cell, CellResult, Run, TaskInfo, TaskValue, read_run, read_samples

__all__ = ["Cell", "CellResult", "Run", "TaskInfo", "TaskValue", "read_run", "read_samples"]
