"""Sweeps: evaluate many compositions over one loaded base, in a folder that can be resumed and read again.

`sweep` runs a recipe, `Run` reads its folder, and `summarize` reduces it to a row for each family. Imports neither
torch nor lm-evaluation-harness until something is evaluated.
"""

from __future__ import annotations

from adapterswap.experiments.sweeps.grid import Cell
from adapterswap.experiments.sweeps.prepared import prepare
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.experiments.sweeps.results import (
    CellResult,
    Run,
    RungResult,
    TaskInfo,
    TaskValue,
    read_prompts,
    read_samples,
)
from adapterswap.experiments.sweeps.run import SweepProgress, sweep
from adapterswap.experiments.sweeps.summary import Row, best_of, summarize

__all__ = [
    "Cell",
    "CellResult",
    "Row",
    "Run",
    "RungResult",
    "SweepProgress",
    "SweepRecipe",
    "TaskInfo",
    "TaskValue",
    "best_of",
    "prepare",
    "read_prompts",
    "read_samples",
    "summarize",
    "sweep",
]
