"""Recompute what was composed or merged from its sources and compare, by what its adapterswap.json says.

Finds the sources again (Hub ids by themselves, folders where the caller says), writes the composition anew to a
temporary folder and compares byte for byte; what was extracted is left to `extracted`. Knows provenance; knows nothing
of how a composition is asked for.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from adapterswap.arithmetic.outputs import Form
from adapterswap.arithmetic.tensors import open_files, read_bytes, row_ranges
from adapterswap.checking.extracted import is_extraction, verify_extracted
from adapterswap.checking.record import SourceRecord
from adapterswap.checking.result import Verification
from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.adapters import CONFIG, PROVENANCE, WEIGHTS, Adapter, open_adapter
from adapterswap.experts.checkpoints import MODEL_CONFIG, WEIGHT_FILES, Checkpoint, read_shards
from adapterswap.experts.opening import open_expert
from adapterswap.experts.sources import at_revision, find_source
from adapterswap.files.smallfiles import exists, read_json
from adapterswap.files.tensorfile import TensorFile, read_header
from adapterswap.files.yamlfiles import validate
from adapterswap.planning.allocation import BASE
from adapterswap.planning.compositions import Composition
from adapterswap.planning.model_plan import AnyPlan
from adapterswap.planning.model_planning import make_model_plan
from adapterswap.planning.plan import make_plan
from adapterswap.writing import write_adapter
from adapterswap.writing.provenance import FORMAT

__all__ = ["Verification", "verify"]

Expert = Adapter | Checkpoint

_MEND = "Give a folder that `adapterswap compose`, `adapterswap merge` or `adapterswap extract` wrote"

_SINCE_FORMAT_2 = ("auto_mapping",)  # keys of adapter_config.json that no result of format 1 has

# Not compared in format 1: its rules are followed, as today's methods give other ones, and it knew no revisions.
_NOT_IN_FORMAT_1 = {"format", "composition", "rules", "base_revision"}

_FILES = "files"  # the list that `atomic_folder` adds
_ABSENT = object()
_RELATIVE = 1e-5  # how far a recorded number may be from the recomputed one

_BLOCK = 2**24  # bytes compared at a time


def verify(
    path: str | Path, experts: Mapping[str, str | Path] | None = None, *, base_model: str | None = None
) -> Verification:
    """Recompute the composed adapter, or the full weights, in `path` and compare them, byte for byte.

    The record is compared too, except for the version of adapterswap, the names of sources and, in format 1, the
    composition. Numbers in it may differ by rounding.

    Full weights are written anew to the folder for temporary files, and take their own size there. An extracted adapter
    is compared as `verify_extracted` says.

    Args:
        path: a folder or Hub id.
        experts: where the sources lie, by name; those that came from the Hub are found by themselves. What an adapter
            was extracted from is called `full`.
        base_model: the base, where the composition needed it and it did not come from the Hub.

    Raises:
        AdapterswapError: no adapterswap.json or one that is not understood; a source that cannot be found; see also
            `verify_extracted`.
    """
    folder = find_source(path, [WEIGHTS, CONFIG, PROVENANCE], what="adapter or model").folder
    if not exists(folder / WEIGHTS):
        folder = find_source(path, [*WEIGHT_FILES, PROVENANCE], what="model").folder
    content = _content(folder)
    if is_extraction(content):
        return verify_extracted(folder, content, experts or {}, base_model, _MEND)
    record = _record(folder, content)
    opened = _sources(record, experts or {})
    is_model = record.get("kind") == "model"
    if is_model:
        base_model = _base(record, base_model)
    composition = _composition(folder, record, base_model)
    with tempfile.TemporaryDirectory(prefix="adapterswap-verify-") as scratch:
        again = Path(scratch) / "again"
        return (
            _model(folder, record, composition, opened, again)
            if is_model
            else _adapter(folder, record, composition, opened, again)
        )


def _composition(folder: Path, record: Mapping[str, Any], base_model: str | None) -> Composition:
    """What was composed. Records of format 1 are read by their rules: their methods gave other rules than today's."""
    content = {**record["composition"], "num_layers": record["num_layers"], "base_model": base_model}
    if record["format"] == 1:
        kept = {key: content[key] for key in ("num_layers", "base_model", "seed", "row_threshold") if key in content}
        content = {**kept, "allocation": record["rules"], "allow_negative": True}
    return validate(content, Composition, where=str(folder / PROVENANCE))


def _adapter(
    folder: Path, record: Mapping[str, Any], composition: Composition, opened: Mapping[str, Expert], again: Path
) -> Verification:
    adapters = {name: expert for name, expert in opened.items() if isinstance(expert, Adapter)}
    named = {(adapter.config.base_model, adapter.config.revision) for adapter in adapters.values()}
    revision = record.get("base_revision")
    another = len(named) > 1 or revision not in (None, *(of_expert for _, of_expert in named))
    if composition.base_model is None and record["base_model"] is not None and another:
        # A base was declared when they were composed, which is not judged again.
        declared = at_revision(record["base_model"], revision)
        composition = composition.model_copy(update={"base_model": declared})
    form = Form(**record.get("output", {}))
    write_adapter(
        make_plan(composition, adapters, recorded=True),
        again,
        layout=form.layout,
        max_rank=form.max_rank,
        max_error=form.max_error,
    )
    differing = _differing([read_header(folder / WEIGHTS)], [read_header(again / WEIGHTS)])
    ours, theirs = read_json(folder / CONFIG, _MEND), read_json(again / CONFIG, _MEND)
    if record["format"] == 1:
        theirs = {key: value for key, value in theirs.items() if key in ours or key not in _SINCE_FORMAT_2}
    recomputed = read_json(again / PROVENANCE)
    return Verification(
        _changed(record["experts"], recomputed["experts"]),
        differing,
        ours != theirs,
        record_differs=_record_differs(record, recomputed),
    )


def _model(
    folder: Path, record: Mapping[str, Any], composition: Composition, opened: Mapping[str, Expert], again: Path
) -> Verification:
    from adapterswap.merging import ModelForm, prepare_model, write_model

    form = ModelForm(**record["output"])
    adapters = {name: expert for name, expert in opened.items() if isinstance(expert, Adapter)}
    plan: AnyPlan = (
        make_plan(composition, adapters, recorded=True)
        if len(adapters) == len(opened)
        else make_model_plan(composition, opened, recorded=True)
    )
    write_model(prepare_model(plan, form, composition.base_model), again)
    recomputed = read_json(again / PROVENANCE)
    changed = _changed(*({**found["experts"], BASE: found["base_model"] or {}} for found in (record, recomputed)))
    differing = _differing(read_shards(folder), read_shards(again))
    config_differs = read_json(folder / MODEL_CONFIG, _MEND) != read_json(again / MODEL_CONFIG, _MEND)
    return Verification(
        changed, differing, config_differs, MODEL_CONFIG, record_differs=_record_differs(record, recomputed)
    )


def _content(folder: Path) -> dict[str, Any]:
    if not (folder / PROVENANCE).exists():
        raise AdapterswapError(f"{folder} has no {PROVENANCE}, so nothing says what it was composed of", _MEND)
    return read_json(folder / PROVENANCE, _MEND)


def _record(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    try:
        usable = record["format"] in (1, FORMAT) and isinstance(record["num_layers"], int)
        for each in record["experts"].values():
            usable = usable and isinstance(each["sha256"], dict) and bool(SourceRecord.model_validate(each))
        usable = usable and (record["format"] != 1 or isinstance(record["rules"], list))
        usable = usable and isinstance(record["composition"], dict) and isinstance(record.get("output", {}), dict)
        if record.get("kind") == "model":
            usable = usable and set(record["output"]) <= {"max_shard_size", "dtype"}
            base = record["base_model"]
            usable = usable and (base is None or bool(SourceRecord.model_validate(base)))
        else:
            Form(**record.get("output", {}))
            named = (record["base_model"], record.get("base_revision"))
            usable = usable and all(isinstance(name, str | None) for name in named)
    except (KeyError, TypeError, AttributeError, ValidationError):
        usable = False
    if not usable:
        raise AdapterswapError(f"{folder / PROVENANCE} is not understood by this version of adapterswap", _MEND)
    return record


def _sources(record: Mapping[str, Any], given: Mapping[str, str | Path]) -> dict[str, Expert]:
    problems = Problems()
    names = ", ".join(record["experts"])
    made = "the model was merged" if record.get("kind") == "model" else "the adapter was composed"
    for name in given.keys() - record["experts"].keys():
        problems.add(f"--expert {name}: {made} of {names}", "Name one of them")
    opened = {}
    for name, source in record["experts"].items():
        reference = given.get(name)
        reference = reference or SourceRecord.model_validate(source).reference
        if reference is None:
            problems.add(
                f"the expert {name!r} came from a folder named {source['source']!r}, and nothing says where that is",
                f"Give --expert {name}=PATH",
            )
            continue
        with problems.collect():
            opened[name] = open_expert(reference) if record.get("kind") == "model" else open_adapter(reference)
    problems.raise_if_any()
    return opened


def _base(record: Mapping[str, Any], given: str | None) -> str | None:
    """The base of full weights: where it is, or None where none entered."""
    source = record["base_model"]
    if source is None:
        return None
    if (found := given or SourceRecord.model_validate(source).reference) is None:
        raise AdapterswapError(
            f"the base came from a folder named {source['source']!r}, and nothing says where that is",
            "Give `base_model`",
        )
    return found


def _changed(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Sources that are not those that were composed, by SHA-256: name → the first file that differs, or `weights`."""
    changed = {}
    for name in found:
        ours, theirs = recorded[name].get("sha256", {}), found[name].get("sha256", {})
        if odd := [file for file in {**theirs, **ours} if ours.get(file) != theirs.get(file)]:
            changed[name] = odd[0]
        elif recorded[name].get("entered") != found[name].get("entered"):
            changed[name] = "weights"
    return changed


def _record_differs(record: Mapping[str, Any], recomputed: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a record whose values are not those of the recomputed one."""
    ours, theirs = (_comparable(content, record) for content in (record, recomputed))
    return tuple(key for key in {**theirs, **ours} if not _alike(ours.get(key, _ABSENT), theirs.get(key, _ABSENT)))


def _comparable(content: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """What can be compared of a record, or of what was recomputed for it."""
    unlike = {"adapterswap_version"}
    if record["format"] == 1:
        unlike |= _NOT_IN_FORMAT_1
    if _FILES not in record:
        unlike.add(_FILES)  # no list before edition 0.2
    compared = {key: value for key, value in content.items() if key not in unlike}
    if "composition" in compared:  # the depth is a key of its own, whether or not it was requested
        compared["composition"] = {"num_layers": record["num_layers"], **compared["composition"]}
    where = {"source", "revision", "sha256", "entered"}  # a source may lie elsewhere; `_changed` compares its files
    if record["format"] == 1:
        where |= {"base_model", "base_revision"}
    for name, sources in (("experts", compared["experts"]), ("base_model", {BASE: compared["base_model"]})):
        if isinstance(compared[name], dict):
            plain = {
                source: {key: value for key, value in entry.items() if key not in where}
                for source, entry in sources.items()
            }
            compared[name] = plain
    return compared


def _alike(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; numbers up to the rounding of another processor."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) or isinstance(other, float):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
        return numbers and math.isclose(one, other, rel_tol=_RELATIVE)
    return type(one) is type(other) and bool(one == other)


def _differing(one: Sequence[TensorFile], other: Sequence[TensorFile]) -> tuple[str, ...]:
    """The names of tensors whose dtype, shape or bytes differ, wherever they lie."""
    ours, theirs = (
        {name: (tensor, file) for file in files for name, tensor in file.tensors.items()} for files in (one, other)
    )
    names = sorted(ours.keys() | theirs.keys())
    with open_files([*one, *other]) as opened:

        def alike(name: str) -> bool:
            if name not in ours or name not in theirs:
                return False
            (left, left_file), (right, right_file) = ours[name], theirs[name]
            if (left.dtype, left.shape) != (right.dtype, right.shape):
                return False
            return all(
                np.array_equal(
                    read_bytes(opened[left_file.path], left, *cut), read_bytes(opened[right_file.path], right, *cut)
                )
                for cut in row_ranges(left.nbytes, _BLOCK)
            )

        return tuple(name for name in names if not alike(name))
