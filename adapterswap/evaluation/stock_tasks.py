"""The tasks of lm-evaluation-harness and of a folder with task files: check their names, and load them.

Knows nothing of the tasks shipped here, or of settings.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from adapterswap.errors import (
    AdapterswapError,
    ArgumentError,
    DataError,
    NotFoundError,
    Problems,
    UnsupportedError,
    did_you_mean,
    reason_of,
)
from adapterswap.evaluation.task_code import harness_folder, refuse_task_code, rendering
from adapterswap.evaluation.unsafe_code import code_allowed, unsafe_tasks

__all__ = ["check_known", "check_mentioned", "explained_task_errors", "load_stock", "mentioned_names"]

_NAMES = re.compile(rb"^(?:task|group|tag)\s*:\s*[\"']?([\w.-]+)", re.MULTILINE)
_TASK = os.path.join("lm_eval", "api", "task.py")  # the harness's file that calls a task's templates and functions
_PATTERN = set("*?[")
_LISTED = "Run `lm_eval ls tasks` to list the tasks of lm-evaluation-harness"


@lru_cache(maxsize=2)
def _manager(include_path: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)  # indexing the harness's tasks takes seconds


def _task_files(folder: Path) -> bytes:
    """The text of all task files (YAML) in a folder, and of what they include, whose names often end in `_yaml`."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*y*ml")) if path.is_file())


@lru_cache(maxsize=1)
def _harness_files() -> bytes:
    folder = harness_folder()
    return b"" if folder is None else _task_files(folder)


def check_mentioned(names: Sequence[str], include_path: str | Path | None, *, others: Iterable[str]) -> None:
    """Refuse names that no task file of the harness or of `include_path` mentions.

    Searching the files as text takes a tenth of the time that the harness takes to index them, so a misspelt name is
    reported at once. Patterns pass; `check_known` is exact.

    Raises:
        ArgumentError: with the nearest names, of `others` too.
        NotFoundError: `include_path` is not a folder.
    """
    _check_folder(include_path)
    text = _harness_files() + (_task_files(Path(include_path)) if include_path is not None else b"")
    problems = Problems(ArgumentError)
    for name in names:
        if not _PATTERN & set(name) and name.encode("utf-8", "surrogatepass") not in text:
            known = {*others, *(mentioned.decode() for mentioned in _NAMES.findall(text))}
            _add_unknown(name, sorted(known), problems)
    problems.raise_if_any()


def mentioned_names(start: str) -> list[str]:
    """The names in the harness's task files that begin with `start`; none if the harness is not installed."""
    known = {name.decode() for name in _NAMES.findall(_harness_files())}
    return sorted(name for name in known if name.startswith(start))


def _add_unknown(name: str, known: Sequence[str], problems: Problems) -> None:
    remedy = did_you_mean(name, known, _LISTED, at_most=3)
    problems.add(f"There is no task {name!r}", remedy, parameter="tasks")


def _check_folder(include_path: str | Path | None) -> None:
    if include_path is not None and not Path(include_path).is_dir():
        raise NotFoundError(
            f"`include_path` is {include_path}, which is not a folder",
            "Pass the folder that holds your task files (YAML)",
            parameter="include_path",
        )


def check_known(names: Sequence[str], include_path: str | Path | None, *, others: Iterable[str]) -> None:
    """Refuse names and patterns that match no task, group or tag.

    Raises:
        ArgumentError: with the nearest names, of `others` too.
        NotFoundError: `include_path` is not a folder.
    """
    problems = Problems(ArgumentError)
    _check_folder(include_path)
    manager = _manager(str(include_path) if include_path else None)
    known = sorted({*others, *manager.all_tasks})
    for name in names:
        if not manager.match_tasks([name]):
            _add_unknown(name, known, problems)
    problems.raise_if_any()


def load_stock(names: Sequence[str], include_path: str | None, unsafe_code: bool, trust_task_code: bool) -> Any:
    """The tasks and groups of these names, as the harness loads them.

    Raises:
        ArgumentError: a task runs code that the user has not allowed: the model's, or that of `include_path`.
        DataError: data or task files that cannot be loaded.
        UnsupportedError: a task needs images or sound.
    """
    from datasets.exceptions import DatasetsError

    manager = _manager(include_path)
    matched = manager.match_tasks(list(names))
    problems = Problems(ArgumentError)
    if include_path is not None and not trust_task_code:
        refuse_task_code(matched, manager.task_index, problems)
    if not unsafe_code:
        with problems.collect():
            _refuse_code(unsafe_tasks(matched, manager.task_index))
    problems.raise_if_any()
    try:
        with code_allowed(unsafe_code), rendering(sandboxed=include_path is not None and not trust_task_code):
            loaded = manager.load(matched)
    except AdapterswapError:
        raise
    except UnicodeError as error:
        raise DataError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {reason_of(error)}",
            "Save the task's files and data as UTF-8 text, without unpaired surrogates such as \\ud800",
            parameter="tasks",
        ) from None
    except DatasetsError as error:
        raise DataError(
            f"the data of {', '.join(names)} cannot be read: {reason_of(error.__cause__ or error)}",
            "Correct the data file that the task names, or download it again",
            parameter="tasks",
        ) from None
    except Exception as error:  # a task's data loader and its own code may raise anything
        raise DataError(
            f"lm-evaluation-harness cannot load {', '.join(names)}: {reason_of(error)}",
            "Its data comes from the Hub: check the network and HF_HUB_OFFLINE, and install the packages that the task "
            "needs. For your own task, check its files and data",
            parameter="tasks",
        ) from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "MULTIMODAL", False):
            raise UnsupportedError(
                f"the task {name} needs images or audio", "Run it with lm_eval instead", parameter="tasks"
            )
    if not unsafe_code:  # tasks written in Python declare it only once they are loaded
        _refuse_code([name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)])
    return loaded


@contextmanager
def explained_task_errors(names: Iterable[str]) -> Iterator[None]:
    """Turn errors raised inside a task into `DataError`: its templates or its code may not fit its data.

    Raises:
        DataError: one of these tasks raised an error.
    """
    from jinja2 import TemplateError

    try:
        yield
    except (AdapterswapError, TemplateError):  # `rendering` explains errors of templates
        raise
    except Exception as error:
        if not any(frame.filename.endswith(_TASK) for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise DataError(
            f"a document of {', '.join(names)} cannot be evaluated: {reason_of(error)}",
            "Correct the task's files or its data",
            parameter="tasks",
        ) from error


def _refuse_code(names: Sequence[str]) -> None:
    if names:
        raise ArgumentError(
            f"{', '.join(names)} would run code written by the model on this machine, with your permissions",
            "Use a container or another isolated machine, and pass `confirm_run_unsafe_code=True`",
            parameter="confirm_run_unsafe_code",
        )
