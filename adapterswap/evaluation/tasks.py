"""Task names → lm-evaluation-harness tasks: MGSM from the data shipped here, FLORES from files that the user has, all
others from the harness itself.

Our MGSM tasks bear the names of the harness's own, need no network, take their shots in a fixed order, and carry a
third filter, `normalized`, beside its two. Knows nothing of models.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.evaluation.flores import flores_folder, flores_task, is_flores
from adapterswap.evaluation.mgsm import LANGUAGES, MODES, mgsm_task_names
from adapterswap.evaluation.settings import Settings

__all__ = ["MAX_SHOTS", "load_tasks", "require_lm_eval"]

MAX_SHOTS = 8  # as many exemplars as MGSM has
_FAMILIES = {f"mgsm_{mode}": [f"mgsm_{mode}_{code}" for code in LANGUAGES] for mode in MODES}


def require_lm_eval() -> None:
    """Raise `AdapterswapError` where lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise AdapterswapError(
            "lm-evaluation-harness is not installed", "pip install 'adapterswap[eval]' installs it"
        ) from None


def load_tasks(names: Sequence[str], settings: Settings | None = None) -> dict[str, Any]:
    """The tasks of these names, in the form that lm-evaluation-harness's `evaluate` takes.

    Args:
        names: task names; `mgsm_direct`, `mgsm_native_cot`, `mgsm_en_cot` for all eleven languages; patterns such as
            `mgsm_*_sw`; `flores_eng_Latn-swh_Latn` and other pairs, see `flores`; and whatever the harness knows: its
            tasks, groups and tags.
        settings: of these `num_fewshot`, `gen_kwargs` and `include_path` matter to tasks.

    Raises:
        AdapterswapError: lm-evaluation-harness is not installed; an unknown name (the nearest known ones are told); too
            many shots; a task's data that cannot be loaded; a task that needs images or runs code.
    """
    require_lm_eval()
    settings = settings or Settings()
    num_fewshot, include_path = settings.num_fewshot, settings.include_path
    if not names:
        raise AdapterswapError("no task is named", f"Name tasks, for instance {', '.join(list(_FAMILIES)[:2])}")
    ours, flores, theirs = _resolve(names)
    problems = Problems()
    if num_fewshot is not None and num_fewshot < 0:
        problems.add(f"the number of shots is {num_fewshot}", "Give 0 or more")
    elif ours and num_fewshot is not None and num_fewshot > MAX_SHOTS:
        problems.add(f"{num_fewshot} shots are asked for, and MGSM has {MAX_SHOTS} exemplars", f"Give 0 to {MAX_SHOTS}")
    if theirs:
        with problems.collect():
            _check_known(theirs, include_path)
    folder = None
    if flores:
        with problems.collect():
            for name in flores:
                flores_task(name)
            folder = flores_folder()
    problems.raise_if_any()
    generation = json.dumps(dict(settings.gen_kwargs), sort_keys=True)
    include = str(include_path) if include_path else None
    return _load(tuple(ours), tuple(flores), folder, tuple(theirs), num_fewshot, generation, include)


def _resolve(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Names split into our MGSM tasks, patterns and families written out; FLORES; and what is left to the harness."""
    ours: dict[str, None] = {}
    flores: dict[str, None] = {}
    theirs: dict[str, None] = {}
    for name in names:
        found = _FAMILIES.get(name) or fnmatch.filter(mgsm_task_names(), name)
        (ours if found else flores if is_flores(name) else theirs).update(dict.fromkeys(found or [name]))
    return list(ours), list(flores), list(theirs)


@lru_cache(maxsize=2)
def _manager(include_path: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)  # indexing the harness's tasks takes seconds


def _check_known(names: Sequence[str], include_path: str | Path | None) -> None:
    problems = Problems()
    if include_path is not None and not Path(include_path).is_dir():
        raise AdapterswapError(f"{include_path} is not a folder", "Give the folder that holds your task files (YAML)")
    manager = _manager(str(include_path) if include_path else None)
    known = sorted({*mgsm_task_names(), *_FAMILIES, *manager.all_tasks})
    for name in names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, known)
            mend = f"Did you mean {' or '.join(near)}" if near else "`lm_eval ls tasks` lists the harness's tasks"
            problems.add(f"no task is named {name!r}", mend)
    problems.raise_if_any()


# The same composition loop asks for the same tasks again and again, and loading the harness's data takes seconds.
@lru_cache(maxsize=4)
def _load(
    ours: tuple[str, ...],
    flores: tuple[str, ...],
    folder: Path | None,
    theirs: tuple[str, ...],
    num_fewshot: int | None,
    settings: str,
    include_path: str | None,
) -> dict[str, Any]:
    from adapterswap.evaluation.flores_tasks import build_flores_task
    from adapterswap.evaluation.harness import build_mgsm_task

    tasks: dict[str, Any] = {name: build_mgsm_task(name) for name in ours}
    if folder is not None:
        tasks |= {name: build_flores_task(name, folder, num_fewshot or 0) for name in flores}
    groups: dict[str, Any] = {}
    if theirs:
        loaded = _load_theirs(theirs, include_path)
        clash = tasks.keys() & loaded["tasks"].keys()
        if clash:
            raise AdapterswapError(
                f"{sorted(clash)[0]} is asked for twice: as shipped here, and in a group of lm-evaluation-harness",
                "Name the tasks one by one",
            )
        tasks |= loaded["tasks"]
        groups = loaded["groups"]
    for task in tasks.values():
        _configure(task, num_fewshot, json.loads(settings))
    return {"tasks": tasks, "groups": groups}


def _load_theirs(names: Sequence[str], include_path: str | None) -> Any:
    manager = _manager(include_path)
    try:
        loaded = manager.load(manager.match_tasks(list(names)))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:  # whatever a task's data loader raises
        reason = (" ".join(str(error).split()) or type(error).__name__).removesuffix(".")[:200]
        raise AdapterswapError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {reason}",
            "Its data comes from the Hub: check the network and HF_HUB_OFFLINE, and what the task needs installed",
        ) from None
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            what = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "needs images or sound"
            raise AdapterswapError(f"the task {name} {what}", "Run it with lm_eval itself")
    return loaded


def _configure(task: Any, num_fewshot: int | None, gen_kwargs: dict[str, Any]) -> None:
    """Shots and generation settings by the harness's own rules: a task that sets 0 shots keeps them."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config("num_fewshot", num_fewshot)
    elif own is None:
        task.set_config("num_fewshot", 0)
    if gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config("generation_kwargs", gen_kwargs, update=True)
