"""Tasks of lm-evaluation-harness over data that the user has: MGSM-Rev2, MultiJail and FLORES.

Imports the harness, so import this module only where it is needed. Knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path

from lm_eval.api.task import ConfigurableTask

from adapterswap.evaluation.flores import is_flores
from adapterswap.evaluation.flores_tasks import build_flores_task
from adapterswap.evaluation.harness import OfflineTask, build_mgsm_task
from adapterswap.evaluation.multijail import multijail_task_names, read_multijail

__all__ = ["build_local_task"]


def build_local_task(name: str, folder: Path, num_fewshot: int = 0) -> ConfigurableTask:
    """The task of that name, over the files in `folder`.

    Args:
        name: one that `local_names` gives.
        folder: see `local_folders`.
        num_fewshot: see `build_flores_task`.

    Raises:
        AdapterswapError: see `build_flores_task`, `read_mgsm_rev2` and `read_multijail`.
    """
    if is_flores(name):
        return build_flores_task(name, folder, num_fewshot)
    return _build_multijail(name, folder) if name in multijail_task_names() else build_mgsm_task(name, folder)


def _build_multijail(name: str, folder: Path) -> ConfigurableTask:
    """The request is the whole prompt, and there is no score: see `multijail.score_labels`."""
    config = {
        "task": name,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda row: row["request"],
        "doc_to_target": lambda row: "",
        "num_fewshot": 0,
        "generation_kwargs": {"until": [], "do_sample": False},
        "process_results": lambda row, results: {},
        "metric_list": [],
        "metadata": {"version": "1.0"},
    }
    return OfflineTask({"test": read_multijail(folder, name)}, config)
