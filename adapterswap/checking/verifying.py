"""Recompute a composed adapter from its sources and compare, by what its adapterswap.json says.

Finds the sources again (Hub ids by themselves, folders where the caller says), writes the composition anew to a
temporary folder and compares byte for byte. Knows provenance; knows nothing of how a composition is asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapterswap.arithmetic.outputs import Form
from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.adapters import CONFIG, PROVENANCE, WEIGHTS, Adapter, open_adapter
from adapterswap.experts.sources import find_source, is_hub_id
from adapterswap.files.smallfiles import read_json
from adapterswap.files.tensorfile import TensorFile, read_header
from adapterswap.files.yamlfiles import validate
from adapterswap.planning.compositions import Composition
from adapterswap.planning.plan import make_plan
from adapterswap.writing import write_adapter
from adapterswap.writing.copying import sha256_of

__all__ = ["Verification", "verify"]

_MEND = "Give an adapter that `adapterswap compose` wrote"


@dataclass(frozen=True)
class Verification:
    """What a comparison found.

    Attributes:
        changed_sources: experts whose files are not those that were composed: name → the file that differs.
        differing: tensors that are not what the sources give (or are missing, or too many).
        config_differs: adapter_config.json is not what the sources give.
    """

    changed_sources: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    config_differs: bool = False

    @property
    def equal(self) -> bool:
        return not (self.changed_sources or self.differing or self.config_differs)


def verify(
    path: str | Path, experts: Mapping[str, str | Path] | None = None, *, base_model: str | None = None
) -> Verification:
    """Recompute the composed adapter in `path` and compare it, byte for byte.

    Args:
        path: the adapter: a folder or Hub id.
        experts: where the sources lie, by name; those that came from the Hub are found by themselves.
        base_model: the base, where the composition needed it (modules trained in full).

    Raises:
        AdapterswapError: no adapterswap.json or one that is not understood; a source that cannot be found.
    """
    folder = find_source(path, [WEIGHTS, CONFIG, PROVENANCE], what="adapter").folder
    record = _record(folder)
    opened = _sources(record, experts or {})
    changed = {name: file for name, adapter in opened.items() if (file := _changed(record, name, adapter))}
    composition = validate(
        {**record["composition"], "num_layers": record["num_layers"], "base_model": base_model},
        Composition,
        where=str(folder / PROVENANCE),
    )
    if base_model is None and len({adapter.config.base_model for adapter in opened.values()}) > 1:
        # The composition was made with both declared to be one base; that was judged then, and is not judged again.
        composition = composition.model_copy(update={"base_model": record["base_model"]})
    form = Form(**record.get("output", {}))
    plan = make_plan(composition, opened)
    with tempfile.TemporaryDirectory(prefix="adapterswap-verify-") as scratch:
        again = write_adapter(
            plan, Path(scratch) / "again", layout=form.layout, max_rank=form.max_rank, max_error=form.max_error
        )
        differing = _differing(read_header(folder / WEIGHTS), read_header(again / WEIGHTS))
        config_differs = read_json(folder / CONFIG, _MEND) != read_json(again / CONFIG, _MEND)
    return Verification(changed, differing, config_differs)


def _record(folder: Path) -> dict[str, Any]:
    if not (folder / PROVENANCE).exists():
        raise AdapterswapError(f"{folder} has no {PROVENANCE}, so nothing says what it was composed of", _MEND)
    record = read_json(folder / PROVENANCE, _MEND)
    try:
        usable = record["format"] == 1 and isinstance(record["num_layers"], int)
        for each in record["experts"].values():
            usable = usable and isinstance(each["sha256"], dict) and isinstance(each["source"], str)
        usable = usable and isinstance(record["composition"], dict) and isinstance(record.get("output", {}), dict)
        Form(**record.get("output", {}))
    except (KeyError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise AdapterswapError(f"{folder / PROVENANCE} is not understood by this version of adapterswap", _MEND)
    return dict(record)


def _sources(record: Mapping[str, Any], given: Mapping[str, str | Path]) -> dict[str, Adapter]:
    problems = Problems()
    names = ", ".join(record["experts"])
    for name in given.keys() - record["experts"].keys():
        problems.add(f"--expert {name}: the adapter was composed of {names}", "Name one of them")
    opened = {}
    for name, source in record["experts"].items():
        reference = given.get(name)
        noted = f"{source['source']}@{source.get('revision')}"
        if reference is None and source.get("revision") and is_hub_id(noted):  # never a path that a record names
            reference = noted
        if reference is None:
            problems.add(
                f"the expert {name!r} came from a folder named {source['source']!r}, and nothing says where that is",
                f"Give --expert {name}=PATH",
            )
            continue
        with problems.collect():
            opened[name] = open_adapter(reference)
    problems.raise_if_any()
    return opened


def _changed(record: Mapping[str, Any], name: str, adapter: Adapter) -> str | None:
    """The first of a source's files that is not the one that was composed, by its SHA-256."""
    hashes = record["experts"][name]["sha256"]
    return next(
        (file for file in (WEIGHTS, CONFIG) if sha256_of(adapter.source.folder / file) != hashes.get(file)), None
    )


def _differing(one: TensorFile, other: TensorFile) -> tuple[str, ...]:
    names = sorted(one.tensors.keys() | other.tensors.keys())
    with one.path.open("rb") as left, other.path.open("rb") as right:

        def content(file: Any, header: TensorFile, name: str) -> tuple[object, bytes] | None:
            tensor = header.tensors.get(name)
            if tensor is None:
                return None
            file.seek(tensor.start)
            return (tensor.dtype, tensor.shape), file.read(tensor.nbytes)

        return tuple(name for name in names if content(left, one, name) != content(right, other, name))
