"""The names in lm-evaluation-harness: reading its thousands of files takes long, so a process does it once."""

from __future__ import annotations

from functools import cache

from adapterswap.experiments.evaluation.mgsm import mgsm_task_names


@cache
def known_tasks() -> frozenset[str]:
    """Every task, group and tag of the harness, and the tasks of MGSM that the package adds."""
    from lm_eval.tasks import TaskManager

    return frozenset({*TaskManager().all_tasks, *mgsm_task_names()})
