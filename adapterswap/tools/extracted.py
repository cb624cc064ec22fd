"""Check an extracted adapter against its record.

The last digits of a singular value decomposition depend on the machine, so nothing is cut again. The files are compared
by their SHA-256. If the fine-tune and its base are available, so are their files, and every module's ‖ΔW‖ and error are
computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapterswap.core.changes.factors import Factors
from adapterswap.core.companions.companions import Companions
from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.model.checkpoints import Checkpoint, open_checkpoint
from adapterswap.core.model.sources import CONFIG, PROVENANCE, WEIGHTS, Reference, base_fingerprints
from adapterswap.core.writing.outputs import torch_threads
from adapterswap.core.writing.records import ExtractionRecord, SourceRecord
from adapterswap.kit.errors import ArgumentError, Problems
from adapterswap.kit.files.folders import CARD, OutputKind
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.tensorfile import open_files
from adapterswap.tools.cut import norm_and_error
from adapterswap.tools.pairs import Selection, WeightMatrix, pair
from adapterswap.tools.recorded import (
    Verification,
    added_files,
    contradicting,
    differing_names,
    files_in,
    marked,
    reprinted,
)

_FULL, _BASE = "full", "base"  # the names of an adapter's sources in its record

_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # how far a norm or an error may be from the recorded one: float32 products round


_KEYS = {*ExtractionRecord.model_fields, OutputKind.LIST, OutputKind.PRINTS}
_WRITTEN = _KEYS - {"slice", "in_full"}  # always written


def verify_extracted(
    folder: Path,
    content: Mapping[str, Any],
    record: ExtractionRecord,
    source_paths: Mapping[str, str | Path],
    base_model: str | None,
) -> Verification:
    """Check the adapter in `folder`, whose adapterswap.json holds `content`.

    Args:
        folder: the adapter's.
        content: its record as raw data.
        record: the same, parsed.
        source_paths: the path of the fine-tune, as `full`, to compare it if it is not on the Hub.
        base_model: the path of the base, to compare it if it is not on the Hub.
    """
    opened = _open(record, source_paths, base_model)

    # The files of the folder
    differing: list[str] = []
    if sha256_of(folder / WEIGHTS) != record.sha256.get(WEIGHTS):
        differing.append(WEIGHTS)
    present = files_in(folder)
    for name in sorted(record.sha256.keys() - {WEIGHTS, CONFIG}):
        if name not in present or sha256_of(folder / name) != record.sha256[name]:
            differing.append(name)

    # The changes, and meanwhile the sources' hashes
    unfounded: list[str] = []
    with hashed(list(opened.values())) as hashes:
        if len(opened) == 2:
            differing += _other_changes(open_adapter(folder), opened[_FULL], opened[_BASE], record, unfounded)
        shard_hashes = dict(zip(opened, hashes(), strict=True))

    # The sources
    changed = {}
    for name, source in ((_FULL, record.extraction.full), (_BASE, record.extraction.base)):
        files = shard_hashes.get(name, source.sha256)
        differing_files = differing_names(files, source.sha256)
        if name == _BASE and name in opened and source.revision is None:
            prints = base_fingerprints(opened[name].source.folder)
            differing_files += differing_names(prints, source.fingerprints)
        if differing_files:
            changed[name] = differing_files[0]

    # The record: what it says of the sources, apart from their hashes, and of the adapter
    keys: list[str] = []
    for name, checkpoint in opened.items():
        source_today = SourceRecord.of_shards(checkpoint, {}).content()
        if marked(content["extraction"][name]) != marked(source_today):
            keys.append("extraction")
    keys += _record_differs(folder, content, record)
    keys += unfounded

    unchecked = [name for name in (_FULL, _BASE) if name not in opened]
    return Verification(
        changed,
        tuple(differing),
        sha256_of(folder / CONFIG) != record.sha256.get(CONFIG),
        made="cut",
        unchecked=tuple(unchecked),
        record_differs=tuple(dict.fromkeys(keys)),
        notes=added_files(folder, content),
    )


def _record_differs(folder: Path, content: Mapping[str, Any], record: ExtractionRecord) -> tuple[str, ...]:
    """The keys of the record that contradict each other or the written adapter."""
    differing_keys = [key for key in content if key not in _KEYS]
    differing_keys += [key for key in sorted(_WRITTEN) if key not in content]

    # The request
    request = record.extraction
    is_above = request.rank is not None and any(module.rank > request.rank for module in record.extracted.values())
    lacking = request.model_fields.keys() - content["extraction"].keys()
    if is_above or lacking or contradicting(request.full, request.base):
        differing_keys.append("extraction")
    if content.get(OutputKind.LIST) != sorted([*record.sha256, CARD, PROVENANCE]):
        differing_keys.append(OutputKind.LIST)
    expected_slice: Mapping[str, Any] | None = None
    if request.layers is not None:
        expected_slice = {"layers": request.layers}
    elif request.full.origin is not None and request.full.origin.slice is not None:
        expected_slice = request.full.origin.slice.content()
    if content.get("slice") != expected_slice:
        differing_keys.append("slice")
    unchanged = content.get("unchanged")
    if not isinstance(unchanged, list) or any(name in record.extracted for name in map(str, unchanged)):
        differing_keys.append("unchanged")

    # The folder that was written
    if any(sha256_of(folder / name) != record.sha256.get(name) for name in (WEIGHTS, CONFIG)):
        return tuple(differing_keys)  # a changed adapter is reported elsewhere
    if content.get(OutputKind.PRINTS) != reprinted(content, OutputKind.prints_of(folder, [WEIGHTS])):
        differing_keys.append(OutputKind.PRINTS)
    beside = dict.fromkeys(Companions(folder).kinds, _FULL)
    added_later = added_files(folder, content) and record.companions.items() <= beside.items()
    if record.companions != beside and not added_later:
        differing_keys.append("companions")

    # The adapter in it
    adapter = open_adapter(folder)
    for name, module in content["extracted"].items():
        if name not in adapter.modules or adapter.modules[name].rank != module.get("rank"):
            differing_keys.append("extracted")
            break
    base_name = adapter.config.base_model
    if base_name:
        base_name = Reference(base_name).public_name
    if content.get("base_model") != base_name:
        differing_keys.append("base_model")
    layers = [module.layer for module in adapter.modules.values() if module.layer is not None]
    depth = content.get("num_layers")
    if type(depth) is not int or depth <= max(layers, default=0):
        differing_keys.append("num_layers")
    return tuple(differing_keys)


def _open(
    record: ExtractionRecord, source_paths: Mapping[str, str | Path], base_model: str | None
) -> dict[str, Checkpoint]:
    """The checkpoints that were passed or are on the Hub, by their names in the record."""
    problems = Problems(ArgumentError)
    for name in source_paths.keys() - {_FULL}:
        problems.add(
            f"`experts` names {name!r}, but the adapter was cut out of one fine-tune, called {_FULL!r}",
            f"Pass `experts={{{_FULL!r}: PATH}}`, and its base as `base_model`",
            parameter="experts",
        )

    full = source_paths.get(_FULL) or record.extraction.full.reference
    base = base_model or record.extraction.base.reference
    opened = {}
    for name, place, label in ((_FULL, full, "full fine-tune"), (_BASE, base, "base model")):
        if place is not None:
            with problems.collect():
                opened[name] = open_checkpoint(place, what=label)
    problems.raise_if_any()
    return opened


def _other_changes(
    adapter: Adapter, full: Checkpoint, base: Checkpoint, record: ExtractionRecord, unfounded: list[str]
) -> list[str]:
    """The modules whose ‖ΔW‖ or error differs from the record, and those that only one side has.

    `unfounded` collects keys of the record that say something else than the two checkpoints.
    """
    extraction = record.extraction
    selection = Selection(extraction.layers, tuple(extraction.modules), extraction.embeddings)
    matched = pair(full, base, selection, config_from=extraction.config_from)
    matrices = {matrix.weight.name: matrix for matrix in matched.matrices}
    heads: set[str] = set()
    for matrix in matrices.values():
        heads.update(matrix.weight.tied)
    names = dict.fromkeys([*matrices, *record.extracted, *(adapter.modules.keys() - heads)])
    unchanged = []
    if record.num_layers != matched.num_layers:
        unfounded.append("num_layers")
    with open_files([*full.shards, *base.shards, adapter.file]) as files, torch_threads():

        def as_recorded(name: str) -> bool:
            recorded, matrix = record.extracted.get(name), matrices.get(name)
            if matrix is None or (recorded is None and name in adapter.modules):
                return False

            # Unchanged, or not loadable by the PEFT of that time
            if recorded is None:
                left_out = record.left_out.get(f"{name}.weight")
                expected = 0.0
                if left_out:
                    expected = left_out.norm
                norm = norm_and_error(matrix, None, files, (full.name, base.name))[0]
                if not norm:
                    unchanged.append(name)
                return math.isclose(norm, expected, rel_tol=_RELATIVE)

            # The adapter's factors, and those of each tied head
            if not {name, *matrix.weight.tied} <= adapter.modules.keys():
                return False
            for factors in _factors(adapter, matrix, files):
                if factors.shape != matrix.shape:
                    return False
                norm, residual = norm_and_error(matrix, factors, files, (full.name, base.name))
                if not math.isclose(norm, recorded.norm, rel_tol=_RELATIVE):
                    return False
                if not math.isclose(residual / norm, recorded.relative_error, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
                    return False
            return True

        differing = [name for name in names if not as_recorded(name)]
    if unchanged != record.unchanged:
        unfounded.append("unchanged")
    return differing


def _factors(adapter: Adapter, matrix: WeightMatrix, files: Mapping[Path, int]) -> Iterator[Factors]:
    """The adapter's factors of a weight, then those of each tied head, transposed."""
    file = files[adapter.file.path]
    yield Factors.read(adapter.name, file, adapter.modules[matrix.weight.name])
    for head in matrix.weight.tied:
        yield Factors.read(adapter.name, file, adapter.modules[head]).T


@contextmanager
def hashed(checkpoints: Sequence[Checkpoint]) -> Iterator[Callable[[], list[dict[str, str]]]]:
    """Hash the shards in the background; the yielded function waits for each checkpoint's SHA-256 by file."""
    with ThreadPoolExecutor(1) as worker:
        waiting: list[dict[str, Future[str]]] = []
        for checkpoint in checkpoints:
            waiting.append({shard.path.name: worker.submit(sha256_of, shard.path) for shard in checkpoint.shards})

        def hashes() -> list[dict[str, str]]:
            finished: list[dict[str, str]] = []
            for futures in waiting:
                finished.append({name: future.result() for name, future in futures.items()})
            return finished

        try:
            yield hashes
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
