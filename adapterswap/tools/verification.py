"""Recompute an adapter, a model or a GGUF file from the sources in its record and compare.

Finds the sources (Hub ids automatically, folders at the paths that the caller passes), writes the composition again to
a temporary folder and compares byte for byte; `extracted` checks extracted adapters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from adapterswap import __version__
from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.experts.adapter import Adapter, open_adapter, open_expert
from adapterswap.core.model.checkpoints import Checkpoint, open_checkpoint, read_shards
from adapterswap.core.model.sources import (
    CONFIG,
    PROVENANCE,
    TRAINING_RECORD,
    WEIGHTS,
    Records,
    Reference,
    Source,
    base_fingerprints,
    check_format,
)
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import BASE, Rule
from adapterswap.core.writing.adapter import prepare
from adapterswap.core.writing.outputs import Form
from adapterswap.core.writing.records import CompositionRecord, ExtractionRecord, SourceRecord, read_record
from adapterswap.engines.gguf.adapter import GgufAdapter, GgufFile
from adapterswap.engines.gguf.export import write_gguf
from adapterswap.engines.gguf.layout import PreparedGguf
from adapterswap.kit.errors import AdapterswapError, ArgumentError, ExpertError, FieldError, Problems, check_type
from adapterswap.kit.files.folders import CARD, OutputKind, scratch_folder
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.tensorfile import Tensor, TensorFile, open_files
from adapterswap.kit.files.text import read_json
from adapterswap.tools.attribution import Attribution, attribute, check_precision
from adapterswap.tools.comparison import equal_bytes
from adapterswap.tools.conversion import PICKLED
from adapterswap.tools.extracted import verify_extracted
from adapterswap.tools.recorded import Verification, added_files, compare_records, differing_names, reprinted

_METADATA = "the GGUF metadata"
_FIELDS_NOT_COMPARED = ("adapterswap.version", "adapterswap.record")  # the record is compared separately


def _verify_gguf(path: str | Path, experts: Mapping[str, str | Path], base_model: str | None) -> Verification:
    """Export the sources again and compare every tensor, the metadata and the record. A piece is compared alone."""
    opened = GgufAdapter.open(path)
    record, content = opened.record, opened.content
    if content is not None:
        check_format(content.get("format"), opened.source, parameter="path")
    if record is None or content is None or record.output.get("format") != "gguf":
        raise ExpertError(
            f"{opened.source} has no record that this version can read, so its sources are unknown",
            GgufAdapter.REMEDY,
            parameter="path",
        )

    form_content = dict(record.output)
    outtype, pieces = form_content.pop("outtype", None), form_content.pop("pieces", None)
    del form_content["format"]
    try:
        form = Form(**form_content)
    except TypeError:
        raise ExpertError(
            f"This version cannot read the record of {opened.source}", GgufAdapter.REMEDY, parameter="path"
        ) from None

    with scratch_folder("verify") as scratch:
        sources = _find_sources(record, experts, scratch)
        adapters = {name: expert for name, expert in sources.items() if isinstance(expert, Adapter)}
        plan = make_plan(_recorded_composition(opened.source, record, base_model), adapters, recorded=True)
        again = scratch / "again"
        write_gguf(PreparedGguf.of(plan, form), again, outtype=str(outtype), pieces=pieces)
        rewritten = GgufAdapter.open(again)

        # Piece by piece; a piece that was passed alone is not compared with the others
        ours = {file.piece: file for file in opened.files}
        theirs = {file.piece: file for file in rewritten.files}
        if not os.path.isdir(opened.source):
            theirs = {piece: file for piece, file in theirs.items() if piece in ours}
        differing: list[str] = []
        metadata_differs = False
        for piece in sorted({**theirs, **ours}, key=str):
            if piece not in ours or piece not in theirs:
                differing.append(f"{piece}.gguf")
                continue
            file, rewritten_file = ours[piece], theirs[piece]
            tensors = _differing_tensors(file, rewritten_file)
            if not tensors and not np.array_equal(file.data, rewritten_file.data):
                tensors = [f"{file.path.name} (bytes outside its tensors)"]
            differing += tensors
            if _fields(file) != _fields(rewritten_file):
                metadata_differs = True

        # The record, which all pieces have alike
        verification = compare_records(content, record, rewritten.content or {}, sources, base_model)
        record_differs = list(verification.record_differs)
        if len({file.fields.get("adapterswap.record") for file in opened.files}) > 1:
            record_differs.append("adapterswap.record")
        return replace(
            verification,
            changed_sources={**verification.changed_sources, **_changed_inner(record, experts)},
            differing=tuple(differing),
            config_differs=metadata_differs,
            config=_METADATA,
            record_differs=tuple(record_differs),
        )


def _differing_tensors(first: GgufFile, second: GgufFile) -> list[str]:
    """The tensors whose format, shape or bytes differ."""
    differing = list(first.tensors.keys() ^ second.tensors.keys())
    for name in first.tensors.keys() & second.tensors.keys():
        (dtype, shape, data), (other_dtype, other_shape, other_data) = first.tensors[name], second.tensors[name]
        alike = (dtype, shape) == (other_dtype, other_shape)
        if not alike or not np.array_equal(data.view(np.uint8), other_data.view(np.uint8)):
            differing.append(name)
    return sorted(differing)


def _fields(file: GgufFile) -> dict[str, Any]:
    """The metadata that is compared."""
    return {key: value for key, value in file.fields.items() if key not in _FIELDS_NOT_COMPARED}


Expert = Adapter | Checkpoint

_REMEDY = "Pass a folder that `adapterswap compose`, `adapterswap merge` or `adapterswap extract` wrote"

_CONVERSION = {"peft_type", "pickled", "rank", "max_error", "sha256", "modules"}  # always recorded


def verify(
    path: str | Path,
    experts: Mapping[str, str | Path] | None = None,
    *,
    task_expert: Sequence[str | Path] = (),
    language_expert: Sequence[str | Path] = (),
    base_model: str | Path | None = None,
    rules: Sequence[Rule | str] | None = None,
) -> Verification | Attribution:
    """Recompute the composed adapter, or the full weights, in `path` and compare them, byte for byte.

    The record is compared too, except for the version of adapterswap and the names of sources. Numbers in it may differ
    by rounding.

    Full weights are written again to the folder for temporary files, and need their own size there. For an extracted
    adapter see `verify_extracted`. LoRA in GGUF is exported again; of a folder of pieces, all pieces are compared. An
    adapter that was trained from another one is compared by hashes: its files and those of its start.

    A folder without a record, such as another tool's merge, is compared with what `rules` state, within the rounding of
    its dtype: the base, or the base plus experts. The answer says what it is instead, as far as its numbers show it.

    Args:
        path: a folder or Hub id; a GGUF file of `export`, or its folder of pieces.
        experts: the paths of the sources, by name; sources from the Hub are found automatically. The fine-tune that an
            adapter was extracted from is called `full`, and the adapter that training started from `start`.
        task_expert, language_expert: the same paths by role instead of names, in the order of the composition.
        base_model: the base, if it did not come from the Hub. Full weights need it; an adapter's base is compared with
            the record.
        rules: without a record: what is stated of it, such as `math*0.5 + swahili*0.5`; by default that it has the
            only expert with its full ΔW in every layer.

    Returns:
        What differs; `equal` is True if nothing does. Without a record, an `Attribution`.

    Raises:
        ArgumentError: a parameter has the wrong type; `experts` names a source that the record does not have; neither
            the record nor `experts` locates a source; there are fewer or more experts of a role than in the record.
        NotFoundError: the folder, or a source, does not exist.
        ExpertError: adapterswap.json is missing or cannot be read by this version; a source is damaged; see also
            `verify_extracted`.
    """
    check_type(path, (str, Path), "path", "Pass the folder of an adapter or a model, or a Hub id such as org/name")
    check_type(experts, (Mapping, type(None)), "experts", "Pass a mapping from names to folders or Hub ids")
    check_type(base_model, (str, Path, type(None)), "base_model", "Pass a local folder or a Hub id such as org/name")
    if base_model is not None:
        base_model = str(base_model)
    by_role = {"task_expert": task_expert, "language_expert": language_expert}

    # LoRA in GGUF
    if GgufFile.is_gguf(path):
        _check_no_roles(path, by_role)
        return _verify_gguf(path, experts or {}, base_model)

    # A folder without a record of adapterswap: trained from another adapter, or made by another tool
    folder = Source.of_adapter(path, what="adapter or model", parameter="path").folder
    if not os.path.exists(folder / WEIGHTS):
        folder = Checkpoint.find(path, what="model", parameter="path").folder
    if not os.path.exists(folder / PROVENANCE):
        trained: Mapping[str, Any] = {}
        if os.path.exists(folder / TRAINING_RECORD):
            trained = Records(folder).training()
        if "start" in trained:
            _check_no_roles(path, by_role)
            return _verify_trained(folder, trained, experts or {})
        if base_model is not None or experts:
            _check_no_roles(path, by_role)
            return attribute(folder, experts or {}, base_model, rules)

    # What the record says
    content = _content(folder)
    if rules is not None:
        raise ArgumentError(f"{folder} has a record of its rules", "Leave out `rules`", parameter="rules")
    record = _record(folder, content)
    if isinstance(record, ExtractionRecord):
        _check_no_roles(path, by_role)
        return verify_extracted(folder, content, record, experts or {}, base_model)
    named = {**(experts or {}), **_named(record, by_role)}
    if record.conversion is not None:
        return _verify_converted(folder, content, record, named, base_model)
    return _verify_composed(folder, content, record, named, base_model)


_BY_NAME = "Pass `experts` with its name instead"


def _check_no_roles(path: str | Path, by_role: Mapping[str, Sequence[str | Path]]) -> None:
    """Refuse experts by role for a result that was not composed of a task and a language expert."""
    for parameter, paths in by_role.items():
        if paths:
            raise ArgumentError(f"{path} has no record of task and language experts", _BY_NAME, parameter=parameter)


def _named(record: CompositionRecord, by_role: Mapping[str, Sequence[str | Path]]) -> dict[str, str | Path]:
    """The paths that were passed by role, under the names that the record has for these experts."""
    # If the only expert was composed itself, roles are those of its composition
    composition, sources = record.composition, record.experts
    while "task" not in composition and len(sources) == 1:
        [source] = sources.values()
        if source.origin is None:
            break
        request = source.origin.content().get("composition")
        if not isinstance(request, Mapping):
            break
        composition, sources = dict(request), source.origin.experts

    named: dict[str, str | Path] = {}
    for parameter, paths in by_role.items():
        # The recorded names of the role: one, or a list in which the base has no path
        recorded: Any = composition.get(parameter.removesuffix("_expert")) or []
        names: list[str] = [recorded]
        if not isinstance(recorded, str):
            names = [name for name in recorded if name != BASE]

        if paths and len(paths) != len(names):
            listed, remedy = "", _BY_NAME
            if names:
                listed = f": {', '.join(names)}"
                remedy = "Pass them in the order in which they were composed"
            raise ArgumentError(
                f"`{parameter}` has {len(paths)} paths, but the record names {len(names)} such experts{listed}",
                remedy,
                parameter=parameter,
            )
        named |= dict(zip(names, paths, strict=False))
    return named


def _verify_composed(
    folder: Path,
    content: dict[str, Any],
    record: CompositionRecord,
    source_paths: Mapping[str, str | Path],
    base_model: str | None,
) -> Verification:
    """Write an adapter or full weights again, and compare them with those in the folder."""
    is_model = record.kind == "model"
    with scratch_folder("verify") as scratch:
        opened = _find_sources(record, source_paths, scratch)
        if is_model:
            base_model = _base(record, base_model)
            _check_precision(folder, record, base_model)

        composition = _recorded_composition(folder, record, base_model)
        again = scratch / "again"
        try:
            if is_model:
                _write_model(record, composition, opened, again)
            else:
                _write_adapter(folder, record, composition, opened, again)
        except AdapterswapError as error:
            # With other experts than the recorded ones, a composition may be refused.
            adapters = {name: source for name, source in record.experts.items() if WEIGHTS in source.sha256}
            changed, _ = _changed_files(adapters, source_paths, WEIGHTS)
            changed |= _changed_inner(record, source_paths)
            if not changed:
                raise
            reason = error.problems[0].message
            return Verification(changed, notes=(f"Not composed again, because another expert was passed: {reason}",))

        verification = _compare(folder, content, record, opened, again, base_model)
        changed = {**verification.changed_sources, **_changed_inner(record, source_paths)}
        return replace(verification, changed_sources=changed)


def _verify_trained(folder: Path, content: Mapping[str, Any], source_paths: Mapping[str, str | Path]) -> Verification:
    """Compare a trained adapter's files, and those of its start or of the experts that were composed for it, with their
    hashes in training.json.
    """
    try:
        start = SourceRecord.model_validate(content["start"])
        requested = content["recipe"]["start"]
        is_file = isinstance(requested, str) and requested.endswith((".yaml", ".yml"))
        is_composition = is_file or (isinstance(requested, Mapping) and "mode" not in requested)
        sources = {"start": start}
        if is_composition and start.origin:
            sources = start.origin.experts

        written = content["sha256"]
        weights_differ = sha256_of(folder / WEIGHTS) != written[WEIGHTS]
        config_differs = sha256_of(folder / CONFIG) != written[CONFIG]
    except (FieldError, KeyError, TypeError):
        raise ExpertError(
            f"This version of adapterswap cannot read {folder / TRAINING_RECORD}", _REMEDY, parameter="path"
        ) from None

    unknown = sorted(source_paths.keys() - sources.keys())
    if unknown:
        raise ArgumentError(
            f"`experts` names {unknown[0]!r}, but the adapter was trained from {', '.join(sources)}",
            "Use one of these names",
            parameter="experts",
        )
    changed, located = _changed_files(sources, source_paths, WEIGHTS)
    unchecked = [name for name in sources if name not in located]
    differing: tuple[str, ...] = ()
    if weights_differ:
        differing = (WEIGHTS,)
    return Verification(
        changed,
        differing,
        config_differs,
        made="trained",
        unchecked=tuple(unchecked),
        notes=added_files(folder, content),
    )


def _changed_files(
    sources: Mapping[str, SourceRecord], source_paths: Mapping[str, str | Path], *weights: str
) -> tuple[dict[str, str], dict[str, Source]]:
    """The sources that have changed, each with a file that differs from its hash, and all that could be located.

    Of the files `weights` the first that a source has is compared.
    """
    changed: dict[str, str] = {}
    located: dict[str, Source] = {}
    for name, source in sources.items():
        reference = source_paths.get(name) or source.reference
        if reference is None:
            continue

        located[name] = Source.of_adapter(reference, parameter="experts")
        folder = located[name].folder
        files = [file for file in weights if os.path.exists(folder / file)][:1]
        if os.path.exists(folder / CONFIG):
            files.append(CONFIG)
        hashes = {file: sha256_of(folder / file) for file in files}
        differing = differing_names(hashes, source.sha256)
        if differing:
            changed[name] = differing[0]
    return changed, located


def _verify_converted(
    folder: Path,
    content: dict[str, Any],
    record: CompositionRecord,
    source_paths: Mapping[str, str | Path],
    base_model: str | None,
) -> Verification:
    """Compare a converted adapter's files with their hashes, its source's too if it is available, and its record.

    The last digits of a singular value decomposition depend on the machine, so nothing is converted again: the plan is
    made of the converted adapter.
    """
    # The files, and those of the source
    conversion = record.conversion
    assert conversion is not None
    differing: tuple[str, ...] = ()
    if sha256_of(folder / WEIGHTS) != conversion.sha256.get(WEIGHTS):
        differing = (WEIGHTS,)
    config_differs = sha256_of(folder / CONFIG) != conversion.sha256.get(CONFIG)
    own_weights: tuple[str, ...] = (WEIGHTS, Source.MLX_WEIGHTS)
    if conversion.pickled:
        own_weights = (PICKLED,)
    changed, located = _changed_files(record.experts, source_paths, *own_weights)
    unchecked = [name for name in record.experts if name not in located]

    # The converted adapter in place of each source, with what is known of the source beside its weights
    converted = open_adapter(folder)
    opened: dict[str, Adapter] = {}
    for name, recorded in record.experts.items():
        opened[name] = replace(converted, base_fingerprints=recorded.base_fingerprints)
    for name, source in located.items():
        records = Records(source.folder)
        opened[name] = replace(
            converted, source=source, base_fingerprints=records.base(), kept_layers=records.kept_layers()
        )

    # The record that it should have. What was measured, and the list of its files, are taken from the one that it has.
    plan = make_plan(_recorded_composition(folder, record, base_model), opened, recorded=True)
    experts = {name: SourceRecord.of_adapter(adapter, "") for name, adapter in opened.items()}
    recomputed = CompositionRecord.of(plan, experts, record.base, output=record.output, measured={}).content()
    for key in ("conversion", "magnitudes", "kept_rows", "reduced"):
        if key in content:
            recomputed[key] = content[key]
    listed = [name for name in content.get(OutputKind.LIST, ()) if os.path.exists(folder / str(name))]
    recomputed[OutputKind.LIST] = sorted({*listed, WEIGHTS, CONFIG, CARD, PROVENANCE})
    recomputed[OutputKind.PRINTS] = content.get(OutputKind.PRINTS)
    if not differing:
        recomputed[OutputKind.PRINTS] = reprinted(content, OutputKind.prints_of(folder, [WEIGHTS]))
    for name in unchecked:
        recomputed["experts"][name] = content["experts"][name]

    verification = compare_records(content, record, recomputed, opened, base_model)
    if BASE in verification.changed_sources:
        changed = {BASE: verification.changed_sources[BASE], **changed}
    record_differs = list(verification.record_differs)
    if _CONVERSION - content["conversion"].keys():
        record_differs.append("conversion")
    return replace(
        verification,
        changed_sources=changed,
        differing=differing,
        config_differs=config_differs,
        made="converted",
        unchecked=(*unchecked, *verification.unchecked),
        notes=(*verification.notes, *added_files(folder, content)),
        record_differs=tuple(record_differs),
    )


def _recorded_composition(folder: Path, record: CompositionRecord, base_model: str | None) -> Composition:
    """The recorded composition, on the base that was passed."""
    content: dict[str, Any] = {**record.composition, "num_layers": record.num_layers, "base_model": base_model}
    return Composition.read_content(content, where=str(folder / PROVENANCE))


def _write_adapter(
    folder: Path, record: CompositionRecord, composition: Composition, opened: Mapping[str, Expert], again: Path
) -> None:
    adapters = {name: expert for name, expert in opened.items() if isinstance(expert, Adapter)}

    # A base that was passed when they were composed is not checked again. A record has no paths, but the config.
    configs = [adapter.config for adapter in adapters.values()]
    revisions = {config.revision for config in configs}
    bases = {(config.base_model, config.revision) for config in configs}
    base_was_passed = len(bases) > 1 or record.base_revision not in (None, *revisions)
    if composition.base_model is None and record.base_model is not None and base_was_passed:
        name = record.base_model
        written = read_json(folder / CONFIG).get("base_model_name_or_path")
        if isinstance(written, str) and Reference(written).public_name == record.base_model:
            name = written
        composition = composition.model_copy(update={"base_model": Reference(name).at(record.base_revision)})

    prepared = prepare(make_plan(composition, adapters, recorded=True), Form(**record.output))
    prepared.write(again, hashes={}, companions=bool(record.companions))  # a server writes none


def _write_model(
    record: CompositionRecord, composition: Composition, opened: Mapping[str, Expert], again: Path
) -> None:
    from adapterswap.core.writing.stream import ModelForm
    from adapterswap.core.writing.weights import prepare_model

    plan = make_plan(composition, opened, recorded=True)
    prepare_model(plan, ModelForm(**record.output), composition.base_model, recorded=True).write(again)


def _compare(
    folder: Path,
    content: Mapping[str, Any],
    record: CompositionRecord,
    opened: Mapping[str, Expert],
    again: Path,
    base_model: str | None,
) -> Verification:
    """Compare a result with the recomputed one in `again`; `content` is its record as raw data."""
    recomputed = read_json(again / PROVENANCE)
    if record.kind == "model":
        config, ours, theirs = MODEL_CONFIG, read_shards(folder), read_shards(again)
    else:
        config, ours, theirs = CONFIG, (TensorFile.read(folder / WEIGHTS),), (TensorFile.read(again / WEIGHTS),)
    written, rewritten = read_json(folder / config, _REMEDY), read_json(again / config, _REMEDY)

    # Tensors, and the files beside them
    differing = _differing(ours, theirs)
    compared_apart = {PROVENANCE, CARD, config, WEIGHTS, *(file.path.name for file in (*ours, *theirs))}
    for name in recomputed[OutputKind.LIST]:
        if name not in compared_apart and not _same_bytes(folder / name, again / name):
            differing.append(name)
    notes = added_files(folder, content)
    if record.adapterswap_version == __version__ and not _same_bytes(folder / CARD, again / CARD):
        notes += (f"{CARD} is not the one that was written",)

    # The record. Other fingerprints of weights are no second difference.
    if differing:
        recomputed[OutputKind.PRINTS] = content.get(OutputKind.PRINTS)
    else:
        recomputed[OutputKind.PRINTS] = reprinted(content, recomputed[OutputKind.PRINTS])
    sources = compare_records(content, record, recomputed, opened, base_model)
    return replace(
        sources,
        differing=tuple(differing),
        config_differs=written != rewritten,
        config=config,
        notes=(*sources.notes, *notes),
    )


def _same_bytes(one: Path, other: Path) -> bool:
    return os.path.exists(one) and os.path.exists(other) and one.read_bytes() == other.read_bytes()


def _content(folder: Path) -> dict[str, Any]:
    if not (folder / PROVENANCE).exists():
        remedy = f"{_REMEDY}; or say what it should be, with `base_model` and `experts`"
        raise ExpertError(f"{folder} has no {PROVENANCE}, so its sources are unknown", remedy, parameter="path")
    content = read_json(folder / PROVENANCE, _REMEDY)
    check_format(content.get("format"), folder / PROVENANCE, parameter="path")
    return content


def _record(folder: Path, content: dict[str, Any]) -> CompositionRecord | ExtractionRecord:
    """The record of a folder, as far as this version can repeat what it says."""
    record = read_record(folder)
    if isinstance(record, ExtractionRecord):
        return record

    if record is not None and {"format", "composition", "experts"} <= content.keys():
        if record.kind == "model" and record.output.keys() <= {"max_shard_size", "dtype", "dequantize"}:
            return record
        with suppress(TypeError):
            if record.kind == "adapter":
                Form(**record.output)
                return record
    raise ExpertError(f"This version of adapterswap cannot read {folder / PROVENANCE}", _REMEDY, parameter="path")


def _find_sources(
    record: CompositionRecord, source_paths: Mapping[str, str | Path], scratch: Path
) -> dict[str, Expert]:
    """The experts of a record, opened. One that was composed itself is composed again, in the folder `scratch`, if
    those that it was composed of are passed instead."""
    problems = Problems(ArgumentError)
    action = "the adapter was composed"
    if record.kind == "model":
        action = "the model was merged"
    known = record.experts | _inner(record.experts)
    for name in source_paths.keys() - known.keys():
        problems.add(
            f"`experts` names {name!r}, but {action} of {', '.join(known)}",
            "Use one of these names",
            parameter="experts",
        )

    opened: dict[str, Expert] = {}
    for name, source in record.experts.items():
        with problems.collect():
            opened[name] = _find_source(name, source, source_paths, scratch, adapter=record.kind != "model")
    problems.raise_if_any()
    return opened


def _inner(sources: Mapping[str, SourceRecord]) -> dict[str, SourceRecord]:
    """The experts of composed experts, and their experts, by name."""
    inner: dict[str, SourceRecord] = {}
    for source in sources.values():
        if source.origin is not None:
            inner |= source.origin.experts | _inner(source.origin.experts)
    return inner


def _find_source(
    name: str, source: SourceRecord, source_paths: Mapping[str, str | Path], scratch: Path, *, adapter: bool
) -> Expert:
    """Open an expert from its path or, at its recorded commit, from the Hub; or compose it again."""
    reference = source_paths.get(name) or source.reference
    if reference is not None and adapter:
        return open_adapter(reference)
    if reference is not None:
        return open_expert(reference)

    inner = _inner({name: source})
    if source_paths.keys() & inner.keys():
        return _composed_again(name, source, source_paths, scratch)

    remedy = f"Pass `experts={{{name!r}: PATH}}`"
    if inner:
        of_inner = [f"`experts={{{each!r}: PATH}}`" for each in inner]
        remedy += f", or what it was made of: {', '.join(of_inner)}"
    raise ArgumentError(
        f"The expert {name!r} came from a folder named {source.source!r}, whose location is not recorded",
        remedy,
        parameter="experts",
    )


def _composed_again(name: str, source: SourceRecord, source_paths: Mapping[str, str | Path], scratch: Path) -> Adapter:
    """Write a composed expert again, from its own experts and what another record says of it."""
    assert source.origin is not None
    unknown = ArgumentError(
        f"The record does not say how the expert {name!r} was composed",
        f"Pass `experts={{{name!r}: PATH}}`",
        parameter="experts",
    )
    try:
        record = CompositionRecord.model_validate({**source.origin.content(), "modules": {}})
        form = Form(**record.output)
    except (FieldError, TypeError):
        raise unknown from None
    if record.kind == "model" or not record.output:
        raise unknown

    opened: dict[str, Adapter] = {}
    for inner, its_source in record.experts.items():
        expert = _find_source(inner, its_source, source_paths, scratch, adapter=True)
        if not isinstance(expert, Adapter):
            raise unknown
        opened[inner] = replace(expert, source=_as_recorded(expert.source, its_source))

    composition = _recorded_composition(Path(name), record, None)
    if record.base_model is not None and len({expert.config.base_model for expert in opened.values()}) > 1:
        declared = Reference(record.base_model).at(record.base_revision)
        composition = composition.model_copy(update={"base_model": declared})
    prepared = prepare(make_plan(composition, opened, recorded=True), form)
    folder = Path(mkdtemp(dir=scratch)) / "composed"  # a record's names are no paths
    prepared.write(folder, hashes={}, companions=bool(record.companions))

    again = open_adapter(folder)
    config = again.config
    if record.base_model is not None and Reference(record.base_model).hub_id is None:
        # It names the base by its path, which no record has; all else in it follows from what is compared.
        config = replace(config, sha256=source.sha256.get(CONFIG, ""))
    again = replace(again, config=config, base_fingerprints=source.base_fingerprints)
    return replace(again, source=_as_recorded(again.source, source))


def _as_recorded(source: Source, recorded: SourceRecord) -> Source:
    """A source under its recorded name: a folder may have another one today."""
    if source.revision:
        return source
    return replace(source, name=recorded.source, revision=recorded.revision)


def _changed_inner(record: CompositionRecord, source_paths: Mapping[str, str | Path]) -> dict[str, str]:
    """The experts of composed experts that were passed and have changed, each with a file that differs."""
    inner = _inner(record.experts)
    passed = {}
    for name in source_paths:
        if name in inner and name not in record.experts:
            passed[name] = inner[name]
    changed, _ = _changed_files(passed, source_paths, WEIGHTS)
    return changed


def _base(record: CompositionRecord, base_model: str | None) -> str | None:
    """The path of the base of full weights, or None if no base was used."""
    if record.base is None:
        return None
    place = base_model or record.base.reference
    if place is None:
        raise ArgumentError(
            f"The base came from a folder named {record.base.source!r}, whose location is not recorded",
            "Pass `base_model`",
            parameter="base_model",
        )
    return place


def _check_precision(folder: Path, record: CompositionRecord, base_model: str | None) -> None:
    """Refuse a base that is the recorded one in a less precise dtype, before everything is computed with it."""
    if base_model is None:
        return
    base = Checkpoint.find(base_model)
    if record.base is None or not record.base.fingerprints:
        return
    if record.base.fingerprints == base_fingerprints(base.folder):
        return

    changed = {name for name, owner in record.modules.items() if owner != BASE}
    check_precision(open_checkpoint(folder, what="model"), open_checkpoint(base.folder), changed)


def _differing(first: Sequence[TensorFile], second: Sequence[TensorFile]) -> list[str]:
    """The names of tensors whose dtype, shape or bytes differ, in whichever file they are."""
    ours, theirs = _by_name(first), _by_name(second)
    differing = list(ours.keys() ^ theirs.keys())
    with open_files([*first, *second]) as opened:
        for name in ours.keys() & theirs.keys():
            (left, left_file), (right, right_file) = ours[name], theirs[name]
            if not equal_bytes(left, opened[left_file.path], right, opened[right_file.path]):
                differing.append(name)
    return sorted(differing)


def _by_name(files: Sequence[TensorFile]) -> dict[str, tuple[Tensor, TensorFile]]:
    """Each tensor, and the file that holds it."""
    tensors: dict[str, tuple[Tensor, TensorFile]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            tensors[name] = tensor, file
    return tensors
