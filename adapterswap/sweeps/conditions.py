"""The conditions under which cells were evaluated: base, experts, tasks, settings and versions.

Scores can be compared only if their conditions are equal.
Knows the description of a sweep, as plain data; knows nothing of folders or scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["conditions_of", "differing", "shown_value"]

_OF_TASKS = ("sha256", "primary", "num_docs")
_NOT_COMPARED = ("source",)  # only a name; two experts are the same if their hashes are
_DIGITS = 12
_LONGEST = 60


def conditions_of(
    described: Mapping[str, Any], experts: Collection[str] | None = None, tasks: Collection[str] | None = None
) -> dict[str, Any]:
    """The conditions by name: `settings.num_fewshot`, `base_model.revision`, `experts.math1.sha256`, ….

    Args:
        described: the content of sweep.json.
        experts, tasks: the experts and tasks to include; None for all.
    """
    conditions = {name: described[name] for name in ("adapterswap_version", "num_layers") if name in described}
    for part in ("base_model", "settings", "versions"):
        conditions |= _named(part, described.get(part, {}))
    for name, expert in described.get("experts", {}).items():
        if experts is None or name in experts:
            conditions |= _named(f"experts.{name}", expert)
    for name, task in described.get("tasks", {}).items():
        if tasks is None or name in tasks:
            conditions |= _named(f"tasks.{name}", {key: task[key] for key in _OF_TASKS if key in task})
    if described.get("task_files"):
        conditions["task_files"] = _digest(described["task_files"])
    return conditions


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The conditions that differ: (name, value in `one`, value in `other`); None for a missing value.

    Experts and tasks that only one of the two contains are not compared.
    """
    things = {_thing(name) for name in one} & {_thing(name) for name in other}
    names = [*one, *(name for name in other if name not in one)]
    return [
        (name, one.get(name), other.get(name))
        for name in names
        if one.get(name) != other.get(name) and _thing(name) in {None, *things}
    ]


def shown_value(value: Any) -> str:
    """A value for an error message."""
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _thing(name: str) -> str | None:
    """The expert or task that a condition belongs to; None for conditions of the whole sweep."""
    return name.rpartition(".")[0] if name.startswith(("experts.", "tasks.")) else None


def _named(part: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{part}.{key}": _digest(value) if key == "files" and value is not None else value
        for key, value in content.items()
        if key not in _NOT_COMPARED
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]
