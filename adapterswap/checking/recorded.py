"""What a record says of itself and of its folder, whatever the sources are. Knows records; opens no expert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.records.record import FORMAT, SourceRecord

__all__ = ["FILES", "added_files", "contradicting", "marked"]

FILES = "files"  # the list that `atomic_folder` adds

_NOT_IN_SOURCES: dict[int, set[str]] = {1: {"base_model", "base_revision", "origin"}, 2: {"origin"}, 3: set()}
# A source may have moved: of its identity only the hashes are compared, each in its own way.
_WHERE = {"source", "revision", "sha256", "entered"}


def contradicting(*sources: SourceRecord | None) -> bool:
    """Whether a source contradicts itself: an id on the Hub has a revision, and a folder has none."""
    return any(source is not None and ("/" in source.source) != (source.revision is not None) for source in sources)


def added_files(folder: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """A note about files in a result's folder that its record does not list, if there are any."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    listed = content.get(FILES, found)
    added = sorted(name for name in found if name not in listed and not name.startswith("."))
    return (f"Files that were not written with it: {', '.join(added)}",) if added else ()


def marked(entry: Mapping[str, Any], record_format: int) -> dict[str, Any]:
    """A source's keys with what can be compared of their values. Since format 3, no key may be missing."""
    ignored = {"fingerprints", *_NOT_IN_SOURCES[record_format], *(_WHERE if record_format < FORMAT else ())}
    return {key: None if key in _WHERE else value for key, value in entry.items() if key not in ignored}
