"""Hashes of tasks, by which a resumed run notices that a task has changed.

A hash covers a task's config with its includes, its documents, the rows for its shots, and the files next to it in
`include_path`. The location of the data does not count. Knows lm-evaluation-harness's tasks; knows nothing of runs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from adapterswap.experts.identity import fingerprint
from adapterswap.files.smallfiles import expand

__all__ = ["task_files", "task_fingerprint"]

_PLACES = (
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
)  # the location of the documents, which are hashed themselves
_SOURCE = "config_source"  # the path of the task's file, which the harness adds to the metadata
_PASSING = ("__pycache__", ".")  # prefixes of caches and hidden files
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def task_fingerprint(task: Any) -> str:
    """A hash of a loaded task's config, its documents, and the rows for its shots."""
    config = {name: value for name, value in vars(task.config).items() if name not in _PLACES}
    if isinstance(metadata := config.get("metadata"), Mapping):
        config["metadata"] = {key: value for key, value in metadata.items() if key != _SOURCE}
    digest = hashlib.sha256(_json(config))
    sampler = getattr(task, "sampler", None)
    shots = task.fewshot_docs() if sampler is None else sampler.df
    for rows in (task.eval_docs, shots or ()):
        digest.update(b"\n")
        for row in rows:
            digest.update(_json(row) + b"\n")
    return digest.hexdigest()


def task_files(include_path: str | Path | None) -> dict[str, str]:
    """Path below the folder → fingerprint, of all files in a folder with the user's own tasks."""
    if include_path is None:
        return {}
    folder = expand(include_path)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        name.as_posix(): fingerprint(folder / name)
        for name in names
        if not any(part.startswith(_PASSING) for part in name.parts)
    }


def _json(value: Any) -> bytes:
    return json.dumps(_plain(value), ensure_ascii=False, default=_unknown).encode("utf-8", errors="surrogatepass")


def _unknown(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _plain(value: Any) -> Any:
    """A value of a task's config as plain data; functions and classes as their source, which may be the user's."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, str | bytes) and isinstance(value, Iterable) and not isinstance(value, type):
        return [_plain(item) for item in value]
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return _unknown(value)
    return value
