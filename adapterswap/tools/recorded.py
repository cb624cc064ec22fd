"""What a verification says, and how a record is compared with the recomputed one and with today's sources.

A source may have moved, and numbers may differ by the rounding of another processor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.sources import CONFIG, Reference, Source, base_fingerprints
from adapterswap.core.planning.rules import BASE
from adapterswap.core.writing.records import CompositionRecord, SourceRecord
from adapterswap.kit.files.folders import CARD, OutputKind
from adapterswap.kit.files.text import expand

_ABSENT = object()
_RELATIVE = 1e-5  # how far a recorded number may be from the recomputed one


@dataclass(frozen=True)
class Verification:
    """The differences between an adapter or a model and the result recomputed from its sources.

    Attributes:
        changed_sources: experts, or `base`, that have changed since they were composed or cut: name → the file that
            differs, or `weights`.
        differing: tensors that differ from the recomputed ones, are missing, or should not be there. Of an extracted
            adapter: its file, if it is not the one that was written, and modules whose ‖ΔW‖ or error differs from the
            record.
        config_differs: whether the config differs from the recomputed one, or from the one that was extracted.
        config: the config's file name.
        made: how it was made. What was composed is composed again; of what was cut out of a full fine-tune, the error
            of each module's ΔW is computed if the sources are known; nothing is converted or trained again.
        record_differs: the keys of adapterswap.json whose values differ from the recomputed ones.
        unchecked: sources that were not compared, because their location is not known: those of an extracted adapter,
            or `base`.
        notes: what else was found and makes no difference to the result: files beside it, an edited model card, and a
            revision that could not be compared because a folder was passed.
    """

    changed_sources: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    config_differs: bool = False
    config: str = CONFIG
    made: Literal["composed", "cut", "converted", "trained"] = "composed"
    unchecked: tuple[str, ...] = ()
    record_differs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.changed_sources or self.differing or self.config_differs or self.record_differs)

    def as_json(self) -> dict[str, Any]:
        """As plain data: what `adapterswap verify --json` prints."""
        return {
            "equal": self.equal,
            "changed_sources": dict(self.changed_sources),
            "differing": list(self.differing),
            "config_differs": self.config_differs,
            "record_differs": list(self.record_differs),
            "unchecked": list(self.unchecked),
            "notes": list(self.notes),
        }


# A source may have moved: of its identity only the hashes are compared, each in its own way.
_WHERE = {"source", "revision", "sha256", "entered"}


def contradicting(*sources: SourceRecord | None) -> bool:
    """Whether a source contradicts itself: an id on the Hub has a revision, and a folder has none."""
    return any(source is not None and ("/" in source.source) != (source.revision is not None) for source in sources)


def files_in(folder: Path) -> list[str]:
    """The files of a folder and of its subfolders, such as `1_Pooling/config.json`, in order."""
    names = []
    for path in folder.rglob("*"):
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return sorted(names)


def differing_names(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The names that have different values, such as hashes, or that only one of the two has, in order."""
    return sorted({name for name, _ in ours.items() ^ theirs.items()})


def added_files(folder: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """A note about files in a result's folder that its record does not list, if there are any."""
    found = files_in(folder)
    listed = content.get(OutputKind.LIST, found)
    added = [name for name in found if name not in listed and not name.startswith(".")]
    if not added:
        return ()
    return (f"Files that were not written with it: {', '.join(added)}",)


def marked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A source's keys with what can be compared of their values. No key may be missing."""
    comparable: dict[str, Any] = {}
    for key, value in entry.items():
        if key in _WHERE:
            comparable[key] = None
        elif key != "fingerprints":
            comparable[key] = value
    return comparable


def reprinted(content: Mapping[str, Any], prints: Mapping[str, str]) -> dict[str, str]:
    """The fingerprints that a record should have: `prints`, but the card's as recorded, if it is.

    A card may be edited, and quotes those of the sources, which may have been edited since.
    """
    expected = {name: one for name, one in prints.items() if name != CARD}
    recorded = content.get(OutputKind.PRINTS)
    if isinstance(recorded, dict) and CARD in recorded:
        expected[CARD] = recorded[CARD]
    return expected


def compare_records(
    content: Mapping[str, Any],
    record: CompositionRecord,
    recomputed: Mapping[str, Any],
    opened: Mapping[str, Adapter | Checkpoint],
    base_model: str | None,
) -> Verification:
    """Compare a record, raw and parsed, with the recomputed one, and the sources that it names with those of today."""
    again = CompositionRecord.model_validate(recomputed)
    changed = changed_sources(record.experts, again.experts)
    differing_keys = _record_differs(content, record, recomputed)

    # The base, which an adapter's record has only if it was needed
    base = again.base
    if record.kind != "model":
        base = _find_base(record.base, opened, base_model)
    unchecked: list[str] = []
    if record.base is not None and base is None:
        unchecked.append(BASE)
    if record.base is not None and base is not None:
        base = _as_recorded(base, record, base_model)
        changed |= changed_sources({BASE: record.base}, {BASE: base})
        if marked(content["base"]) != marked(base.content()):
            differing_keys.append("base")

    # What could not be compared
    notes: list[str] = []
    for name, source in record.experts.items():
        if source.revision is not None and again.experts[name].revision is None:
            notes.append(f"The revision of {name} ({source}) was not compared, because a folder was passed")
    if record.base is None and base_model is not None and record.kind == "adapter":
        notes.append("The base was not compared: the record has none, because none was needed")
    return Verification(
        changed,
        unchecked=tuple(unchecked),
        record_differs=tuple(dict.fromkeys(differing_keys)),
        notes=tuple(notes),
    )


def _as_recorded(base: SourceRecord, record: CompositionRecord, base_model: str | None) -> SourceRecord:
    """A base of today with fingerprints where its record should have them: for a local base."""
    assert record.base is not None
    content = base.model_dump(exclude_unset=True) | {"fingerprints": base.fingerprints}
    if record.base.revision is not None:
        del content["fingerprints"]
    elif not base.fingerprints and base_model is not None:  # recorded as a folder, and passed by its id on the Hub
        folder = Checkpoint.find(base_model).folder
        content["fingerprints"] = base_fingerprints(folder)
    return SourceRecord.model_validate(content)


def _find_base(
    recorded: SourceRecord | None, opened: Mapping[str, Adapter | Checkpoint], base_model: str | None
) -> SourceRecord | None:
    """The base as it is today, by its config and, in a folder, its weights; None if it is not recorded or located."""
    if recorded is None:
        return None

    # One that was passed, or that is on the Hub, must be there.
    if base_model is not None:
        return SourceRecord.of_base(Source.of_base(base_model))
    if recorded.reference:
        return SourceRecord.of_base(Source.of_base(recorded.reference))

    # The folder that an adapter names may be gone.
    for expert in opened.values():
        place = None
        if isinstance(expert, Adapter):
            place = expert.config.base_model
        if place is None or Reference(place).public_name != recorded.source:
            continue
        if os.path.isdir(expand(place)):
            return SourceRecord.of_base(Source.of_base(place))
    return None


def changed_sources(recorded: Mapping[str, SourceRecord], found: Mapping[str, SourceRecord]) -> dict[str, str]:
    """Sources whose hashes differ from the record: name → the first file that differs, or `weights`."""
    changed = {}
    for name, theirs in found.items():
        ours = recorded[name]
        differing_files: list[str] = []
        for file in {**theirs.sha256, **ours.sha256}:
            if ours.sha256.get(file) != theirs.sha256.get(file):
                differing_files.append(file)
        differing_files += differing_names(ours.fingerprints, theirs.fingerprints)

        if differing_files:
            changed[name] = differing_files[0]
        elif ours.entered != theirs.entered:
            changed[name] = "weights"
    return changed


def _record_differs(content: Mapping[str, Any], record: CompositionRecord, recomputed: Mapping[str, Any]) -> list[str]:
    """The keys of a record that differ from the recomputed record, are missing, or contradict others."""
    ours, theirs = _comparable(content, record), _comparable(recomputed, record)
    differing: list[str] = []
    for key in {**theirs, **ours}:
        if not _alike(ours.get(key, _ABSENT), theirs.get(key, _ABSENT)):
            differing.append(key)
    differing += [key for key in recomputed if key not in content]

    # Full weights name the base that they were made with.
    made_with: tuple[str | None, str | None] = (None, None)
    if record.base:
        made_with = (record.base.source, record.base.revision)
    if record.kind == "model" and (record.base_model, record.base_revision) != made_with:
        differing.append("base_model")

    # An expert has the revision that was found today, if one was.
    experts_today = recomputed["experts"]
    has_moved = False
    for name, source in record.experts.items():
        if experts_today[name]["revision"] not in (None, source.revision):
            has_moved = True
    if has_moved or contradicting(*record.experts.values()):
        differing.append("experts")
    if _base_contradicts(record, experts_today):
        differing.append("base")
    return differing


def _base_contradicts(record: CompositionRecord, again: Mapping[str, Any]) -> bool:
    """Whether the base contradicts itself, or is a folder and an expert records other weights of its base."""
    if record.base is None or record.base.revision is not None:
        return contradicting(record.base)

    for expert in again.values():
        if "base_fingerprints" in expert and expert["base_fingerprints"] != record.base.fingerprints:
            return True
    return contradicting(record.base)


def _comparable(content: Mapping[str, Any], record: CompositionRecord) -> dict[str, Any]:
    """The keys of a record, or of the recomputed one, that can be compared."""
    ignored = {"adapterswap_version", "base"}
    if record.kind == "model":  # the base is compared by its files; its folder can have another name
        ignored |= {"base_model", "base_revision"}
    compared = {key: value for key, value in content.items() if key not in ignored}
    compared["experts"] = {name: marked(entry) for name, entry in compared["experts"].items()}
    return compared


def _alike(left: Any, right: Any) -> bool:
    """Whether two values of JSON are equal; numbers up to the rounding of another processor."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, float) or isinstance(right, float):
        for value in (left, right):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
        return math.isclose(left, right, rel_tol=_RELATIVE)
    return type(left) is type(right) and bool(left == right)
