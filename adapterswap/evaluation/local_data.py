"""Tasks over data that are not shipped: the user downloads them, and names their folder in the environment.

Finds the names and the folders. Knows nothing of lm-evaluation-harness; `local_tasks` builds the tasks.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from adapterswap.errors import NotFoundError, Problems
from adapterswap.evaluation.flores import FLORES_PATH, flores_task, is_flores
from adapterswap.evaluation.mgsm import LANGUAGES, MGSM_REV2_PATH, MODES, mgsm_rev2_task_names
from adapterswap.evaluation.multijail import MULTIJAIL_PATH, multijail_task_names
from adapterswap.files.smallfiles import expand

__all__ = ["LOCAL_NAMES", "local_folders", "local_names"]

_FAMILIES = {f"mgsm_rev2_{mode}": [f"mgsm_rev2_{mode}_{code}" for code in LANGUAGES] for mode in MODES}
LOCAL_NAMES = (*mgsm_rev2_task_names(), *_FAMILIES, *multijail_task_names())
"""All names but FLORES's, which are too many to list."""

_REMEDIES = {
    FLORES_PATH: "FLORES is not shipped: set {} to the folder that holds its dev/ and devtest/",
    MGSM_REV2_PATH: "MGSM-Rev2 is not shipped: set {} to the folder that holds its mgsm_bn.tsv … mgsm_zh.tsv",
    MULTIJAIL_PATH: "MultiJail is not shipped: set {} to the folder that holds MultiJail.csv",
}


def local_names(name: str) -> list[str]:
    """The tasks that a name, a family such as `mgsm_rev2_direct` or a pattern such as `mgsm_rev2_*_sw` means."""
    if is_flores(name):
        return [name]
    if name.startswith("mgsm_rev2_"):
        return _FAMILIES.get(name) or fnmatch.filter(mgsm_rev2_task_names(), name)
    return fnmatch.filter(multijail_task_names(), name) if name.startswith("multijail_") else []


def local_folders(names: Sequence[str]) -> dict[str, Path]:
    """Task → the folder with its data, which the environment names.

    Raises:
        ArgumentError: a language that FLORES does not have.
        NotFoundError: a variable is not set, or what it names is not a folder.
    """
    problems = Problems(NotFoundError)
    variables = {}
    for name in names:
        if is_flores(name):
            with problems.collect():
                flores_task(name)
            variables[name] = FLORES_PATH
        else:
            variables[name] = MULTIJAIL_PATH if name in multijail_task_names() else MGSM_REV2_PATH
    folders = {}
    for variable in dict.fromkeys(variables.values()):
        folder = os.environ.get(variable)
        if folder is None or not expand(folder).is_dir():
            state = "not set" if folder is None else f"{folder}, which is not a folder"
            problems.add(f"{variable} is {state}", _REMEDIES[variable].format(variable))
        else:
            folders[variable] = expand(folder)
    problems.raise_if_any()
    return {name: folders[variable] for name, variable in variables.items()}
