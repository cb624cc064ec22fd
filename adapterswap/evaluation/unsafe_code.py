"""Tasks that run code written by the model (MBPP, HumanEval): find them before they are loaded, and allow them.

The harness marks them with `unsafe_code: true`. Loading one already downloads and runs a metric from the Hub, so only
their task files are read. Knows nothing of models and scores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["code_allowed", "unsafe_tasks"]

_VARIABLE = "HF_ALLOW_CODE_EVAL"  # the evaluate library's own permission, needed besides the harness's


def unsafe_tasks(names: Iterable[str], index: Mapping[str, Any]) -> list[str]:
    """Those of these tasks, and of the tasks in these groups and tags, that declare to run the model's code.

    Args:
        names: of tasks, groups and tags.
        index: `TaskManager.task_index`.
    """
    unsafe: dict[str, None] = {}
    waiting: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names]
    seen = set()
    for name, inline_config in waiting:  # grows while it is read
        entry = index.get(name)
        config = entry.cfg or {} if entry else {}
        if inline_config.get("unsafe_code") or config.get("unsafe_code"):
            unsafe[name] = None
        members = [
            member
            for tasks in (inline_config.get("task"), config.get("task"))
            if isinstance(tasks, list)
            for member in tasks
        ]
        if entry and entry.cfg is None:  # a tag
            members += sorted(entry.tags)
        if name not in seen:
            waiting += [_named(member) for member in members]
        seen.add(name)
    return list(unsafe)


def _named(member: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A member of a group: its name, and the group's settings for it."""
    if isinstance(member, str):
        return member, {}
    return str(member.get("group") or member.get("task")), member


@contextmanager
def code_allowed(allowed: bool) -> Iterator[None]:
    """Set the evaluate library's permission inside the block, if the user has confirmed that code may run."""
    before = os.environ.get(_VARIABLE)
    if allowed:
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if allowed and before is None:
            del os.environ[_VARIABLE]
        elif before is not None:
            os.environ[_VARIABLE] = before
