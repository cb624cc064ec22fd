"""Task names → lm-evaluation-harness tasks: MGSM, TyDi QA and XCOPA from the data shipped here, FLORES from files that
the user has, all others from the harness itself.

Shipped tasks bear the names of the harness's own, need no network, take their shots in a fixed order, and carry one
filter more, `normalized`, where answers are written. Knows nothing of models.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap.errors import AdapterswapError, Problems, reason_of
from adapterswap.evaluation.flores import flores_folder, flores_task, is_flores
from adapterswap.evaluation.mgsm import LANGUAGES, MODES, mgsm_task_names
from adapterswap.evaluation.settings import Settings
from adapterswap.evaluation.tydiqa import MAX_SHOTS as TYDIQA_SHOTS
from adapterswap.evaluation.tydiqa import tydiqa_task_names
from adapterswap.evaluation.unsafe_code import code_allowed, unsafe_tasks
from adapterswap.evaluation.xcopa import MAX_SHOTS as XCOPA_SHOTS
from adapterswap.evaluation.xcopa import xcopa_task_names

__all__ = ["MAX_SHOTS", "load_tasks", "require_lm_eval"]

MAX_SHOTS = 8  # as many exemplars as MGSM has
_SHIPPED = {**dict.fromkeys(tydiqa_task_names(), TYDIQA_SHOTS), **dict.fromkeys(xcopa_task_names(), XCOPA_SHOTS)}
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
            `mgsm_*_sw`; those of `tydiqa` and `xcopa`, by their whole names; `flores_eng_Latn-swh_Latn` and other
            pairs, see `flores`; and whatever the harness knows: its tasks, groups and tags.
        settings: of these `num_fewshot`, `gen_kwargs`, `include_path` and `confirm_run_unsafe_code` matter to tasks.

    Raises:
        AdapterswapError: lm-evaluation-harness is not installed; an unknown name (the nearest known ones are told); too
            many shots; a task's data that cannot be loaded; a task that needs images, or runs code unconfirmed.
    """
    require_lm_eval()
    settings = settings or Settings()
    num_fewshot, include_path = settings.num_fewshot, settings.include_path
    if not names:
        raise AdapterswapError("no task is named", f"Name tasks, for instance {', '.join(list(_FAMILIES)[:2])}")
    asked = _resolve(names)
    problems = Problems()
    if num_fewshot is not None:
        _check_shots(asked, num_fewshot, problems)
    if asked.theirs:
        with problems.collect():
            _check_known(asked.theirs, include_path)
    folder = None
    if asked.flores:
        with problems.collect():
            for name in asked.flores:
                flores_task(name)
            folder = flores_folder()
    problems.raise_if_any()
    generation = json.dumps(dict(settings.gen_kwargs), sort_keys=True)
    include = str(include_path) if include_path else None
    return _load(asked, folder, num_fewshot, generation, include, settings.confirm_run_unsafe_code)


class _Asked(NamedTuple):
    """Names by where their tasks come from, patterns and families of MGSM's written out."""

    mgsm: tuple[str, ...]
    shipped: tuple[str, ...]
    flores: tuple[str, ...]
    theirs: tuple[str, ...]


def _resolve(names: Sequence[str]) -> _Asked:
    sorted_out: tuple[dict[str, None], ...] = ({}, {}, {}, {})
    mgsm, shipped, flores, theirs = sorted_out
    for name in names:
        if found := _FAMILIES.get(name) or fnmatch.filter(mgsm_task_names(), name):
            mgsm.update(dict.fromkeys(found))
        elif name in _SHIPPED:
            shipped[name] = None
        else:
            (flores if is_flores(name) else theirs)[name] = None
    return _Asked(*map(tuple, sorted_out))


def _check_shots(asked: _Asked, num_fewshot: int, problems: Problems) -> None:
    if num_fewshot < 0:
        problems.add(f"the number of shots is {num_fewshot}", "Give 0 or more")
    elif asked.mgsm and num_fewshot > MAX_SHOTS:
        problems.add(f"{num_fewshot} shots are asked for, and MGSM has {MAX_SHOTS} exemplars", f"Give 0 to {MAX_SHOTS}")
    for name in asked.shipped:
        if num_fewshot > (most := _SHIPPED[name]):
            problems.add(f"{num_fewshot} shots are asked for, and {name} has {most}", f"Give 0 to {most}")


@lru_cache(maxsize=2)
def _manager(include_path: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)  # indexing the harness's tasks takes seconds


def _check_known(names: Sequence[str], include_path: str | Path | None) -> None:
    problems = Problems()
    if include_path is not None and not Path(include_path).is_dir():
        raise AdapterswapError(f"{include_path} is not a folder", "Give the folder that holds your task files (YAML)")
    manager = _manager(str(include_path) if include_path else None)
    known = sorted({*mgsm_task_names(), *_FAMILIES, *_SHIPPED, *manager.all_tasks})
    for name in names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, known)
            mend = f"Did you mean {' or '.join(near)}" if near else "`lm_eval ls tasks` lists the harness's tasks"
            problems.add(f"no task is named {name!r}", mend)
    problems.raise_if_any()


# The same composition loop asks for the same tasks again and again, and loading the harness's data takes seconds.
@lru_cache(maxsize=4)
def _load(
    asked: _Asked,
    folder: Path | None,
    num_fewshot: int | None,
    settings: str,
    include_path: str | None,
    unsafe_code: bool,
) -> dict[str, Any]:
    from adapterswap.evaluation.flores_tasks import build_flores_task
    from adapterswap.evaluation.harness import build_mgsm_task
    from adapterswap.evaluation.shipped_tasks import build_shipped_task

    tasks: dict[str, Any] = {name: build_mgsm_task(name) for name in asked.mgsm}
    tasks |= {name: build_shipped_task(name) for name in asked.shipped}
    if folder is not None:
        tasks |= {name: build_flores_task(name, folder, num_fewshot or 0) for name in asked.flores}
    groups: dict[str, Any] = {}
    if asked.theirs:
        loaded = _load_theirs(asked.theirs, include_path, unsafe_code)
        clash = tasks.keys() & loaded["tasks"].keys()
        if clash:
            raise AdapterswapError(
                f"{sorted(clash)[0]} is asked for twice: as shipped here, and in a group of lm-evaluation-harness",
                "Name the tasks one by one",
            )
        tasks |= loaded["tasks"]
        groups = loaded["groups"]
    problems = Problems()
    for name, task in tasks.items():
        _configure(task, num_fewshot, json.loads(settings))
        with problems.collect():
            _check_pool(name, task)
    problems.raise_if_any()
    return {"tasks": tasks, "groups": groups}


def _load_theirs(names: Sequence[str], include_path: str | None, unsafe_code: bool) -> Any:
    manager = _manager(include_path)
    matched = manager.match_tasks(list(names))
    if not unsafe_code:
        _refuse_code(unsafe_tasks(matched, manager.task_index))
    try:
        with code_allowed(unsafe_code):
            loaded = manager.load(matched)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:  # whatever a task's data loader raises
        raise AdapterswapError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {reason_of(error)}",
            "Its data comes from the Hub: check the network and HF_HUB_OFFLINE, and what the task needs installed",
        ) from None
    for name, task in loaded["tasks"].items():
        if getattr(task, "MULTIMODAL", False):
            raise AdapterswapError(f"the task {name} needs images or sound", "Run it with lm_eval itself")
    if not unsafe_code:  # tasks written in Python say so only when they are loaded
        _refuse_code([name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)])
    return loaded


def _refuse_code(names: Sequence[str]) -> None:
    if names:
        raise AdapterswapError(
            f"{', '.join(names)}: code that the model writes would be run on this machine, as this user",
            "If that is meant, and the machine is one for it (a container), give --confirm-run-unsafe-code",
        )


def _configure(task: Any, num_fewshot: int | None, gen_kwargs: dict[str, Any]) -> None:
    """Shots and generation settings by the harness's own rules: a task that sets 0 shots keeps them."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config("num_fewshot", num_fewshot)
    elif own is None:
        task.set_config("num_fewshot", 0)
    if gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config("generation_kwargs", gen_kwargs, update=True)


def _check_pool(name: str, task: Any) -> None:
    """Refuse more shots than the task has rows to show, the one that is asked about left out."""
    shots, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if not shots or sampler is None:  # tasks written in Python may show what they like
        return
    config = task.config
    left_out = config.test_split is not None and config.fewshot_config.split == config.test_split
    if shots > (most := len(sampler.df) - left_out):
        raise AdapterswapError(f"{shots} shots are asked for, and {name} has {most}", f"Give 0 to {most}")
