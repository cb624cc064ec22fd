"""Write a plan as LoRA in GGUF, for llama.cpp and engines built on it: one file, or pieces.

llama.cpp computes ΔW = alpha / rank · B·A, with one alpha for the whole file and the rank of each B. So alpha is the
most common s·r, and B of the other modules is multiplied by the remaining factor. The file appears complete or not at
all, and the same inputs give the same bytes. Its metadata holds the record of the composition.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap import __version__
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.layers import Kind
from adapterswap.core.model.sources import Reference
from adapterswap.core.planning.functions import adapter_plan
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.writing.outputs import Form
from adapterswap.core.writing.records import CompositionRecord, SourceRecord
from adapterswap.engines.gguf.architectures import load_gguf
from adapterswap.engines.gguf.layout import DIVISIONS, Division, GgufTensor, PreparedGguf, divide
from adapterswap.kit.errors import ArgumentError, UnsupportedError, check_type, did_you_mean
from adapterswap.kit.files.folders import FileKind, OutputKind
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.numbers import Dtype, write_at
from adapterswap.kit.files.tensorfile import open_files
from adapterswap.kit.files.text import expand

OUTTYPES = ("f32", "f16", "bf16", "q8_0")
"""The number formats that can be written, by llama.cpp's names."""

_VERSION = "adapterswap.version"  # the key of the metadata that says who wrote a file

GGUF = FileKind(b"GGUF", struct.pack("<Q", len(_VERSION)) + _VERSION.encode())
"""The files that `export` writes: a key follows its length."""

PIECES = OutputKind(None, names=lambda: ("layer-*.gguf", "zone-*.gguf", "outside.gguf"), files=GGUF)
"""The files that `export` with `pieces` writes."""

_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_BLOCK = 32  # numbers of a row that share a scale in Q8_0, so the length of a row must be a multiple of it
_LARGEST_F16 = 65504.0
# The largest relative errors of a tensor that the format's digits cause. Below float16's normal numbers, which q8_0's
# scales are too, more is lost, up to everything.
_MOST_LOST = {"f16": 2.0**-8, "q8_0": 2.0**-5}
_ALIGNMENT = 32  # bytes; the default of GGUF files


@dataclass(frozen=True)
class ExportedFile:
    """One GGUF file.

    Attributes:
        path: its path.
        layer: the layer that it changes; None if it changes several, or modules outside the layers.
        kind: the kind of modules that it changes, if layers are divided by kind.
        layers: the layers that it changes.
        modules: how many modules it changes.
        nbytes: the size of its tensors.
    """

    path: Path
    layer: int | None
    kind: Kind | None
    layers: tuple[int, ...]
    modules: int
    nbytes: int


@dataclass(frozen=True)
class Exported:
    """The result of `export`, or of a dry run.

    Attributes:
        path: the file, or the folder of the pieces.
        files: the files; more than one if they are pieces.
        architecture: llama.cpp's name of the base's architecture.
        outtype: the number format.
        alpha: `adapter.lora.alpha` of every file.
        base_model: the public name (a Hub id or a folder's name) of the base that was passed, else of the one that the
            experts name; None if it is unknown.
    """

    path: Path
    files: tuple[ExportedFile, ...]
    architecture: str
    outtype: str
    alpha: float
    base_model: str | None

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(file.nbytes for file in self.files)

    def server_command(self, base: str = "base.gguf") -> list[str]:
        """The command line that starts llama-server with these adapters on `base`, the base in GGUF.

        Pieces are loaded with scale 0. A request sets `"lora": [{"id": 0, "scale": 1.0}, …]`; ids are positions in
        `files`. (`--lora-init-without-apply` is not enough: a request without `lora` would get scale 1.) Without
        `--cache-ram 0`, a request may get cached states of the same prompt with other scales.
        """
        if not self.is_pieces:
            return ["llama-server", "-m", base, "--lora", _csv([str(self.path)])]
        loaded = _csv([f"{file.path}:0" for file in self.files])
        return ["llama-server", "-m", base, "--cache-ram", "0", "--lora-scaled", loaded]

    def modelfile(self, base: str = "./base.gguf") -> str | None:
        """An Ollama Modelfile for `base`, the base in GGUF; None for pieces, which Ollama's requests cannot scale.

        Its paths are relative to its own folder, which is that of the adapter's file.
        """
        if self.is_pieces:
            return None
        return f"FROM {base}\nADAPTER ./{self.path.name}\n"

    @property
    def is_pieces(self) -> bool:
        """Whether the result is a folder of several files."""
        return self.files[0].path != self.path


def _csv(values: Sequence[str]) -> str:
    """Several values as one argument of llama.cpp; those with commas or quotation marks are quoted."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()


def export(
    plan: Plan | Adapter | str | Path,
    out_path: str | Path,
    *,
    base_model: str | Path | None = None,
    outtype: str = "f32",
    pieces: bool | Division = False,
    max_rank: int | None = None,
    max_error: float | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write an expert, a slice or a composition as LoRA in GGUF, for llama.cpp, Ollama and similar engines.

    Convert the base itself with llama.cpp's `convert_hf_to_gguf.py`; only its config.json is read here. Numbers are
    computed in float32 and rounded once to `outtype`; `f32` is exact.

    Args:
        plan: a plan, or an adapter (opened, a folder or a Hub id).
        out_path: the file to write, or a folder with `pieces`.
        base_model: the base, if the experts do not name it or name it differently.
        outtype: f32, f16, bf16 or q8_0; q8_0 needs ranks and widths that are multiples of 32.
        pieces: write several files that a request to llama-server can scale separately. True or `layer`:
            `layer-NN.gguf` for each layer and `outside.gguf`, which can form any layer swap. `kind`:
            `layer-NN-attention.gguf` and `layer-NN-mlp.gguf`, which can also form partitions. `zone`: a file for each
            zone of this composition.
        max_rank: truncate modules of a higher rank; nonlinear methods need this or `max_error`.
        max_error: truncate blends to the smallest rank with at most this relative error of ΔW (Frobenius norm).
        overwrite: replace the file, or the folder of pieces, if `export` wrote it.

    Returns:
        The files that were written.

    Raises:
        UnsupportedError: the base's architecture cannot be exported; an expert changes a module to which llama.cpp
            applies no LoRA (trained in full, or a tied embedding or head); rows do not fit q8_0; a number overflows
            f16, or is so small that f16 or q8_0 would change it by more than their usual rounding.
        DependencyError: the package gguf is missing.
        BaseModelError: no base is named, or its config lacks its sizes.
        ExpertError: an expert does not fit the base, or holds NaN or infinity.
        ArgumentError: `outtype` is unknown, or an argument has the wrong type.
        AdapterswapError: the output exists (without `overwrite`), overlaps an input or cannot be written; see also
            `open_adapter`, `make_plan` and `write_adapter`.
    """
    check_type(
        plan,
        (Plan, Adapter, str, Path),
        "plan",
        "Pass a plan, as `compose` and `layer_swap` return it, or an adapter (opened, a folder or a Hub id)",
    )
    check_type(out_path, (str, Path), "out_path", "Pass the path of the file to write")
    check_type(base_model, (str, Path, type(None)), "base_model", "Pass a local folder or a Hub id such as org/name")
    by = check_pieces(pieces)
    check_outtype(outtype)
    if base_model is not None:
        base_model = str(base_model)

    if isinstance(plan, Adapter | str | Path):
        plan = adapter_plan(plan, base_model)
    elif base_model is not None and base_model != plan.composition.base_model:
        plan = make_plan(plan.composition.model_copy(update={"base_model": base_model}), plan.experts)
    check_gguf(plan, out_path, pieces=by, overwrite=overwrite)  # before anything is computed
    prepared = PreparedGguf.of(plan, Form(max_rank=max_rank, max_error=max_error))
    return write_gguf(prepared, out_path, outtype=outtype, pieces=by, overwrite=overwrite)


def check_outtype(outtype: str) -> None:
    """Raise an `ArgumentError` for a format that is not one of `OUTTYPES`."""
    check_type(outtype, str, "outtype", f"Choose one of {', '.join(OUTTYPES)}")
    if outtype not in OUTTYPES:
        raise ArgumentError(
            f"{outtype!r} is not an outtype",
            did_you_mean(outtype, OUTTYPES, f"Choose one of {', '.join(OUTTYPES)}"),
            parameter="outtype",
        )


def check_pieces(pieces: bool | Division) -> Division | None:
    """How the files are divided; None for one file."""
    check_type(pieces, (bool, str), "pieces", f"Pass True, False, or one of {', '.join(DIVISIONS)}")
    if pieces is True:
        return "layer"
    if pieces is False:
        return None
    if pieces not in DIVISIONS:
        raise ArgumentError(
            f"`pieces` is {pieces!r}, which is unknown",
            did_you_mean(pieces, DIVISIONS, f"Choose one of {', '.join(DIVISIONS)}"),
            parameter="pieces",
        )
    return pieces


def check_gguf(plan: Plan, out_path: str | Path, *, pieces: Division | None, overwrite: bool) -> None:
    """Check that the output path can be written and that the package gguf is installed."""
    if pieces:
        PIECES.check(out_path, overwrite=overwrite, inputs=plan.inputs)
    else:
        GGUF.check(out_path, overwrite=overwrite, inputs=plan.inputs)
    load_gguf()


def write_gguf(
    prepared: PreparedGguf,
    out_path: str | Path,
    *,
    outtype: str = "f32",
    pieces: Division | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Exported:
    """Write the result of `PreparedGguf.of`; see `export`. A dry run makes all checks that need no tensors."""
    check_outtype(outtype)
    _check_rows(prepared, outtype)
    out_path, inputs = expand(out_path), prepared.plan.inputs

    # The files, each with its tensors
    if pieces is None:
        layers = {tensor.layer for tensor in prepared.tensors if tensor.layer is not None}
        whole = ExportedFile(out_path, None, None, tuple(sorted(layers)), *_size(prepared.tensors, outtype))
        contents = [(whole, prepared.tensors)]
    else:
        contents = []
        for part in divide(prepared, pieces):
            layer = part.layers[0] if len(part.layers) == 1 else None
            path = out_path / f"{part.name}.gguf"
            piece = ExportedFile(path, layer, part.kind, part.layers, *_size(part.tensors, outtype))
            contents.append((piece, part.tensors))
    named = prepared.plan.composition.base_model or prepared.plan.base.name
    exported = Exported(
        out_path,
        tuple(file for file, _ in contents),
        prepared.architecture,
        outtype,
        prepared.alpha,
        named and Reference(named).public_name,
    )
    if dry_run:
        return exported

    metadata = _metadata(prepared, outtype, pieces)
    if pieces:
        with PIECES.folder(out_path, overwrite=overwrite, inputs=inputs) as folder:
            for file, tensors in contents:
                _write_file(folder / file.path.name, prepared, tensors, metadata, outtype, file)
    else:
        with GGUF.file(out_path, overwrite=overwrite, inputs=inputs) as building:
            _write_file(building, prepared, prepared.tensors, metadata, outtype, None)
    return exported


def _size(tensors: Sequence[GgufTensor], outtype: str) -> tuple[int, int]:
    """The number of modules that the tensors change, and the tensors' size in bytes."""
    return len(tensors) // 2, sum(_nbytes(tensor.shape, outtype) for tensor in tensors)


def _metadata(prepared: PreparedGguf, outtype: str, pieces: Division | None) -> dict[str, str | int]:
    """The metadata of each file: adapterswap's record, and the base under the keys of llama.cpp's own converter."""
    plan, facts = prepared.plan, prepared.plan.base
    with ThreadPoolExecutor(1) as worker:
        hashes = worker.map(sha256_of, [adapter.file.path for adapter in plan.adapters.values()])
        sha256 = dict(zip(plan.adapters, hashes, strict=True))

    source = None
    if facts.source:
        source = SourceRecord.of_base(facts.source, facts.local.config_sha256)
    output: dict[str, Any] = {"format": "gguf", "outtype": outtype}
    if pieces:
        output["pieces"] = pieces
    record = CompositionRecord.of(
        plan,
        {name: SourceRecord.of_adapter(adapter, sha256[name]) for name, adapter in plan.adapters.items()},
        source,
        output=output | prepared.output,
        measured=prepared.adapter.measured,
    )

    base: dict[str, str | int] = {}
    if prepared.base_name is not None:
        base = {"general.base_model.count": 1, "general.base_model.0.name": prepared.base_name}
        if Reference(prepared.base_name).is_hub_id:
            base["general.base_model.0.repo_url"] = f"https://huggingface.co/{prepared.base_name}"
    return {
        "general.name": "+".join(plan.experts),
        **base,
        _VERSION: __version__,
        "adapterswap.record": json.dumps(record.content(), ensure_ascii=False, allow_nan=False),
    }


def _write_file(
    path: Path,
    prepared: PreparedGguf,
    tensors: Sequence[GgufTensor],
    metadata: Mapping[str, str | int],
    outtype: str,
    piece: ExportedFile | None,
) -> None:
    """Write one GGUF file at `path`, a tensor at a time."""
    gguf = load_gguf()
    kind = gguf.GGMLQuantizationType[outtype.upper()]

    # What the file says of itself
    writer = gguf.GGUFWriter(None, prepared.architecture, endianess=gguf.GGUFEndian.LITTLE)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, prepared.alpha)
    file_type = f"MOSTLY_{outtype.upper()}"
    if outtype == "f32":
        file_type = "ALL_F32"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    if outtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if piece is not None:
        writer.add_string("adapterswap.piece", piece.path.stem)
        if piece.layer is not None:
            writer.add_uint32("adapterswap.layer", piece.layer)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in tensors:
        nbytes = _nbytes(tensor.shape, outtype)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()

    # The numbers behind it
    places = []
    end = _aligned(path.stat().st_size)
    for tensor in tensors:
        places.append(end)
        end = _aligned(end + _nbytes(tensor.shape, outtype))

    def write(tensor: GgufTensor, place: int) -> None:
        write_at(output.fileno(), _encoded(tensor, files, outtype, gguf), place)

    with (
        path.open("r+b", buffering=0) as output,
        open_files(adapter.file for adapter in prepared.plan.adapters.values()) as files,
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers,
    ):
        output.truncate(end)  # gaps between tensors read as zeros
        list(workers.map(write, tensors, places))


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _encoded(tensor: GgufTensor, files: Mapping[Path, int], outtype: str, gguf: ModuleType) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor."""
    kind = gguf.GGMLQuantizationType[outtype.upper()]
    if outtype == "q8_0":  # each block has a scale in float16, its largest number / 127
        values = tensor.values(files)
        encoded, fits = None, bool(np.abs(values).max(initial=0) <= 127 * _LARGEST_F16)
        if fits:
            encoded = gguf.quants.quantize(values, kind).reshape(-1)
    else:
        dtype = _DTYPES[outtype]
        copied = tensor.copied(files, dtype)
        if copied is not None:
            return copied
        values = tensor.values(files)
        encoded = Dtype(dtype).pack(values)
        fits = Dtype(dtype).is_finite(encoded)

    if fits and outtype in _MOST_LOST:
        written = gguf.quants.dequantize(encoded, kind).reshape(values.shape)
        lost = float(np.linalg.norm((values - written).astype(np.float64)))
        norm = float(np.linalg.norm(values.astype(np.float64)))
        if lost > _MOST_LOST[outtype] * norm:
            raise UnsupportedError(
                f"{tensor.name} holds numbers too small for {outtype}, which would change it by {lost / norm:.1%}",
                "Pass `outtype=bf16` or `outtype=f32`",
                parameter="outtype",
            )
    if not fits:
        raise UnsupportedError(
            f"{tensor.name} holds numbers beyond the range of {outtype}", "Pass `outtype=f32`", parameter="outtype"
        )
    return np.asarray(encoded, np.uint8)


def _nbytes(shape: tuple[int, ...], outtype: str) -> int:
    """The size of a tensor in a number format; q8_0 has a scale of two bytes for each block."""
    count = math.prod(shape)
    if outtype == "q8_0":
        return count // _BLOCK * (_BLOCK + 2)
    if outtype == "f32":
        return count * 4
    return count * 2


def _check_rows(prepared: PreparedGguf, outtype: str) -> None:
    """Raise an `UnsupportedError` if a row is not a whole number of q8_0's blocks."""
    if outtype != "q8_0":
        return
    for tensor in prepared.tensors:
        if tensor.shape[-1] % _BLOCK:
            raise UnsupportedError(
                f"{tensor.name} has rows of {tensor.shape[-1]} numbers, but q8_0 needs multiples of {_BLOCK}",
                "Pass `outtype=f16`",
                parameter="outtype",
            )
