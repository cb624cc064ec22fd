"""Check whether LoRA in GGUF still matches its sources: export them again and compare.

Knows the files that `export` writes; finds and compares sources and records like `verifying`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from adapterswap.arithmetic.outputs import Form
from adapterswap.checking.gguf import REMEDY, GgufFile, open_gguf
from adapterswap.checking.result import Verification
from adapterswap.errors import ExpertError
from adapterswap.experts.adapters import Adapter
from adapterswap.files.scratch import scratch_folder
from adapterswap.files.smallfiles import is_folder
from adapterswap.planning.making import make_plan
from adapterswap.writing.gguf import write_gguf
from adapterswap.writing.gguf_layout import prepare_gguf

__all__ = ["verify_gguf"]

_METADATA = "the GGUF metadata"
_NOT_COMPARED = ("adapterswap.version", "adapterswap.record")  # the record is compared separately


def verify_gguf(path: str | Path, experts: Mapping[str, str | Path], base_model: str | None) -> Verification:
    """Export the sources again and compare every tensor, the metadata and the record; see `verify`.

    A single piece is compared on its own; a folder must hold every piece that was written.

    Raises:
        ExpertError: no record, or one that is not understood; a file is damaged; see also `verify` and `export`.
    """
    from adapterswap.checking.verifying import FORMATS, find_sources, of_sources, recorded_composition

    opened = open_gguf(path)
    record, content = opened.record, opened.content
    known = record is not None and record.format in FORMATS and record.output.get("format") == "gguf"
    if record is None or content is None or not known:
        raise ExpertError(
            f"{opened.source} has no record that this version can read, so its sources are unknown",
            REMEDY,
            parameter="path",
        )
    output = {key: value for key, value in record.output.items() if key not in ("format", "outtype", "pieces")}
    pieces = record.output.get("pieces")
    sources = find_sources(record, experts)
    adapters = {name: expert for name, expert in sources.items() if isinstance(expert, Adapter)}
    plan = make_plan(recorded_composition(opened.source, record, base_model), adapters, recorded=True)
    try:
        form = Form(**{"truncation": "float32", **output})
    except TypeError:
        raise ExpertError(f"this version cannot read the record of {opened.source}", REMEDY, parameter="path") from None
    with scratch_folder("verify") as scratch:
        again = scratch / "again"
        write_gguf(prepare_gguf(plan, form), again, outtype=str(record.output.get("outtype")), pieces=pieces)
        rewritten = open_gguf(again)
        ours = {file.piece: file for file in opened.files}
        theirs = {file.piece: file for file in rewritten.files}
        if not is_folder(opened.source):
            theirs = {piece: file for piece, file in theirs.items() if piece in ours}
        differing, fields = [], False
        for piece in sorted({**theirs, **ours}, key=str):
            if piece not in ours or piece not in theirs:
                differing.append(f"{piece}.gguf")
                continue
            tensors = _differing(ours[piece], theirs[piece])
            if not tensors and not np.array_equal(ours[piece].data, theirs[piece].data):
                tensors = [f"{ours[piece].path.name} (bytes outside its tensors)"]
            differing += tensors
            fields = fields or _fields(ours[piece]) != _fields(theirs[piece])
        found = of_sources(content, record, rewritten.content or {}, sources, base_model)
        records = {file.fields.get("adapterswap.record") for file in opened.files}
        return replace(
            found, differing=tuple(differing), config_differs=fields, config=_METADATA,
            record_differs=(*found.record_differs, *(["adapterswap.record"] if len(records) > 1 else [])),
        )  # fmt: skip


def _differing(first: GgufFile, second: GgufFile) -> list[str]:
    """The tensors whose format, shape or bytes differ."""
    names = sorted(first.tensors.keys() | second.tensors.keys())

    def alike(name: str) -> bool:
        if name not in first.tensors or name not in second.tensors:
            return False
        (dtype, shape, data), (other_dtype, other_shape, other_data) = first.tensors[name], second.tensors[name]
        same = (dtype, shape) == (other_dtype, other_shape)
        return same and np.array_equal(data.view(np.uint8), other_data.view(np.uint8))

    return [name for name in names if not alike(name)]


def _fields(file: GgufFile) -> dict[str, Any]:
    return {key: value for key, value in file.fields.items() if key not in _NOT_COMPARED}
