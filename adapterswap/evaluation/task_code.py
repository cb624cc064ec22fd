"""Python code in a folder of task files: refused before any of it runs, unless the user trusts it.

A task file can name functions (`!function utils.docs`), which the harness imports when it loads the task. It can name a
metric that the harness lacks, which the evaluate library then runs as a script. Its templates can reach all of Python
unless they are rendered in Jinja's sandbox. The harness's own task files are installed code, and trusted. A recipe
cannot trust code, because its author may also have written the code.

Knows task files and the harness's index of them; knows nothing of models and scores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from adapterswap.errors import ArgumentError, DataError, Problems, reason_of

__all__ = ["harness_folder", "refuse_task_code", "rendering"]

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PYTHON = "tag:yaml.org,2002:python/"  # PyYAML's own tags for Python objects
_REMEDY = "Review the code, and pass `trust_task_code=True` if you trust it"


def harness_folder() -> Path | None:
    """The folder of the harness's own task files; None if the harness is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    places = (spec.submodule_search_locations if spec else None) or ()
    return next((Path(place).resolve() / "tasks" for place in places), None)


def refuse_task_code(names: Iterable[str], index: Mapping[str, Any], problems: Problems) -> None:
    """Find the code that would run if these tasks, groups and tags were loaded from the user's task files.

    The files are read with everything that they include, and nothing is imported.

    Args:
        names: of tasks, groups and tags.
        index: `TaskManager.task_index`.
        problems: receives one problem for each place that runs code.

    Raises:
        DataError: a task file that cannot be read.
    """
    waiting = list(names)
    seen = set()
    for name in waiting:  # grows while it is read
        entry = index.get(name)
        if entry is None or name in seen:
            continue
        seen.add(name)
        if entry.yaml_path is None:  # a tag
            waiting += sorted(entry.tags)
        elif _is_ours(entry.yaml_path):
            waiting += _members(entry.cfg or {})
        else:
            waiting += _members(_read(entry.yaml_path, problems, set()))


def _is_ours(path: Path) -> bool:
    folder = harness_folder()
    return folder is not None and path.expanduser().resolve().is_relative_to(folder)


def _members(config: Mapping[str, Any]) -> list[str]:
    """The names of a group's members, with those of groups inside it."""
    tasks = config.get("task")
    names = []
    for member in tasks if isinstance(tasks, list) else ():
        if isinstance(member, str):
            names.append(member)
        elif isinstance(member, dict):
            names += [name for key in ("group", "task") if isinstance(name := member.get(key), str)]
            names += _members(member)
    return names


class _Function(str):
    """The name after `!function`, which is not imported here."""


def _read(path: Path, problems: Problems, seen: set[Path]) -> dict[str, Any]:
    """A task file joined with its includes, as in the harness; each place that runs code is a problem."""
    path = path.expanduser().resolve()
    if path in seen:
        return {}  # the harness refuses cycles
    seen.add(path)
    code_places: list[str] = []

    class Loader(_SAFE):  # type: ignore[misc]
        pass

    def function(loader: Any, node: Any) -> _Function:
        code_places.append(f"{path}, line {node.start_mark.line + 1}, runs Python code: !function {node.value}")
        return _Function(node.value)

    def python_object(loader: Any, suffix: str, node: Any) -> None:
        code_places.append(f"{path}, line {node.start_mark.line + 1}, runs Python code: !!python/{suffix}")

    Loader.add_constructor("!function", function)
    Loader.add_multi_constructor(_PYTHON, python_object)
    try:
        content = yaml.load(path.read_bytes(), Loader=Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{path} cannot be read: {reason_of(error)}", "Correct the task file", parameter="include_path"
        ) from None
    content = content if isinstance(content, dict) else {}
    if not _is_ours(path):
        for problem in (*code_places, *(f"{path} {problem}" for problem in _scripts(content))):
            problems.add(problem, _REMEDY, parameter="trust_task_code", kind=ArgumentError)
    includes = content.pop("include", None) or []
    merged: dict[str, Any] = {}
    for include in includes if isinstance(includes, list) else [includes]:
        merged |= _read(path.parent / str(include), problems, seen)
    return merged | content


def _scripts(content: Any) -> Iterator[str]:
    """Other places in a task file that make the harness's libraries run code of the file's author."""
    from lm_eval.api import metrics  # noqa: F401  registers the harness's metrics
    from lm_eval.api.registry import metric_registry

    if isinstance(content, list):
        for item in content:
            yield from _scripts(item)
    if not isinstance(content, dict):
        return
    if content.get("dataset_path") == "pandas":
        yield "reads pickled data, which may run Python code: dataset_path: pandas"
    listed = content.get("metric_list")
    for metric in listed if isinstance(listed, list) else ():
        name = metric.get("metric") if isinstance(metric, dict) else None
        known = isinstance(name, _Function) or (isinstance(name, str) and name in metric_registry)
        if name is not None and (not known or metric.get("hf_evaluate") is True):
            yield f"runs a metric as Python code: metric: {name}"
    for value in content.values():
        yield from _scripts(value)


@contextmanager
def rendering(*, sandboxed: bool) -> Iterator[None]:
    """Render the tasks' templates inside the block; in Jinja's sandbox, where they cannot reach Python, if asked to.

    Raises:
        ArgumentError: a template that tries to leave the sandbox.
        DataError: a template that cannot be rendered.
    """
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    before = utils.env
    if sandboxed:
        utils.env = SandboxedEnvironment(
            loader=before.loader, undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
        )
        utils.env.filters = before.filters
    try:
        yield
    except SecurityError as error:
        raise ArgumentError(
            f"a task's template runs Python code: {reason_of(error)}", _REMEDY, parameter="trust_task_code"
        ) from None
    except TemplateError as error:
        raise DataError(
            f"a task's template cannot be rendered: {reason_of(error)}",
            "Correct the template in the task file",
            parameter="tasks",
        ) from None
    finally:
        utils.env = before
