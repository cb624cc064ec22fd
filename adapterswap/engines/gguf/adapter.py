"""Open LoRA in GGUF: one file, or a folder of pieces.

The metadata of each file holds the record of the composition; `verify` compares it with the sources.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from adapterswap.core.companions.files import MODEL_CONFIG
from adapterswap.core.model.layers import Kind
from adapterswap.core.model.sources import CONFIG
from adapterswap.engines.gguf.header import read_gguf
from adapterswap.kit.errors import ExpertError, FieldError, NotFoundError, UnsupportedError, reason_of
from adapterswap.kit.files.text import expand

if TYPE_CHECKING:
    from adapterswap.core.writing.records import CompositionRecord

_SUFFIX = ".gguf"


@dataclass(frozen=True)
class GgufModule:
    """LoRA on one llama.cpp weight: ΔW = alpha / rank · B·A.

    Attributes:
        name: llama.cpp's, such as `blk.0.attn_q`.
        layer: the index of its layer; None outside them.
        kind: attention, mlp or other.
        rank, out_features, in_features: the sizes of B (out×rank) and A (rank×in).
        dtype: the number format of its factors, such as F16.
        experts: the number of matrices, each with factors of these sizes; above 1 in a mixture of experts.
    """

    name: str
    layer: int | None
    kind: Kind
    rank: int
    out_features: int
    in_features: int
    dtype: str
    experts: int = 1


@dataclass(frozen=True)
class GgufFile:
    """One file, opened.

    Attributes:
        path: where it is.
        fields: its metadata, except for what describes the file itself.
        tensors: by name: the format, the shape and the bytes.
        data: all bytes after the metadata.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...], Any]]
    data: Any

    @property
    def piece(self) -> str | None:
        """The name that `export` gave the piece; None if it is not a piece."""
        name = self.fields.get("adapterswap.piece")
        if not isinstance(name, str):
            return None
        return name

    @cached_property
    def modules(self) -> dict[str, GgufModule]:
        """Its modules by name."""
        modules = {}
        names = dict.fromkeys(key.removesuffix(".lora_a").removesuffix(".lora_b") for key in self.tensors)
        for name in names:
            if not {f"{name}.lora_a", f"{name}.lora_b"} <= self.tensors.keys():
                raise ExpertError(f"{self.path} holds only one factor of {name}", GgufAdapter.REMEDY, parameter="path")
            dtype, (*counts, rank, into), _ = self.tensors[f"{name}.lora_a"]
            _, (*_, out, _), _ = self.tensors[f"{name}.lora_b"]
            if name.startswith("token_embd"):  # its A is stored in×rank
                rank, into = into, rank
            name = name.removesuffix(".weight")
            kind: Kind = "other"
            layer = None
            block = re.match(r"blk\.(\d+)\.", name)
            if block:
                layer = int(block[1])
            if ".attn_" in name:
                kind = "attention"
            elif ".ffn_" in name:
                kind = "mlp"
            modules[name] = GgufModule(name, layer, kind, rank, out, into, dtype, *counts)
        return modules

    @staticmethod
    def is_gguf(path: str | Path) -> bool:
        """Whether it is a local GGUF file, or a folder that holds some and neither an adapter nor a model."""
        path = expand(path)
        try:
            if os.path.isdir(path):
                names = os.listdir(path)
                return any(name.endswith(_SUFFIX) for name in names) and not {CONFIG, MODEL_CONFIG} & set(names)
            return path.is_file() and path.suffix == _SUFFIX
        except OSError:
            return False


@dataclass(frozen=True)
class GgufAdapter:
    """LoRA in GGUF, opened.

    Attributes:
        source: the file, or the folder of pieces.
        files: the files, in the order of their names.
    """

    REMEDY: ClassVar = "Pass a GGUF file that `adapterswap export` wrote, or its folder of pieces"

    source: Path
    files: tuple[GgufFile, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the base's architecture."""
        return str(self.files[0].fields.get("general.architecture"))

    @property
    def alpha(self) -> float:
        """`adapter.lora.alpha`; ΔW is alpha / rank · B·A."""
        return float(self.files[0].fields.get("adapter.lora.alpha", 0.0))

    @property
    def modules(self) -> dict[str, GgufModule]:
        """All files' modules by name."""
        modules: dict[str, GgufModule] = {}
        for file in self.files:
            modules |= file.modules
        return modules

    @property
    def size(self) -> int:
        """The size of the files."""
        return sum(file.path.stat().st_size for file in self.files)

    @cached_property
    def content(self) -> dict[str, Any] | None:
        """The record, as plain data; None if another program wrote the file."""
        text = self.files[0].fields.get("adapterswap.record")
        if not isinstance(text, str):
            return None
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(content, dict):
            return None
        return content

    @property
    def record(self) -> CompositionRecord | None:
        """The record of the composition; None if there is none that this version can read."""
        from adapterswap.core.writing.records import CompositionRecord

        if self.content is None:
            return None
        try:
            return CompositionRecord.model_validate(self.content)
        except FieldError:
            return None

    @staticmethod
    def open(path: str | Path) -> GgufAdapter:
        """Open LoRA in GGUF: a file, or a folder of pieces."""
        path = expand(path)
        paths = [path]
        if os.path.isdir(path):
            paths = sorted(path.glob(f"*{_SUFFIX}"))
        if not paths or not paths[0].is_file():
            raise NotFoundError(f"{path} does not exist", GgufAdapter.REMEDY, parameter="path")
        return GgufAdapter(path, tuple(map(_open, paths)))


def _open(path: Path) -> GgufFile:
    """Read a GGUF file, and check that it holds LoRA."""
    try:
        reader = read_gguf(path)
        fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {}
        for tensor in reader.tensors:
            shape = tuple(map(int, reversed(tensor.shape)))
            tensors[tensor.name] = tensor.tensor_type.name, shape, tensor.data
    except (ValueError, KeyError, IndexError, OSError, TypeError, OverflowError) as error:
        raise ExpertError(
            f"{path} is not a complete GGUF file: {reason_of(error)}", GgufAdapter.REMEDY, parameter="path"
        ) from None

    says_lora = (fields.get("general.type"), fields.get("adapter.type")) == ("adapter", "lora")
    are_factors = bool(tensors)
    for name, (_, shape, _) in tensors.items():
        if not re.search(r"\.lora_[ab]$", name) or len(shape) not in (2, 3):
            are_factors = False
    if not says_lora or not are_factors:
        raise UnsupportedError(f"{path} is a GGUF file, but does not hold LoRA", GgufAdapter.REMEDY, parameter="path")
    file = GgufFile(path, fields, tensors, reader.data[reader.data_offset :])
    file.modules  # noqa: B018  # raises if one is damaged
    return file
