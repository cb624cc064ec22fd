"""The parts of an adapter or a model, from its header and configs only, and the expert that each part came from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adapterswap.core.companions.companions import Companions
from adapterswap.core.experts.adapter import Adapter, open_expert
from adapterswap.core.experts.parts import FullModule, LoraModule, OpaqueModule
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor
from adapterswap.core.model.layers import Depth, Kind, ModelConfig, ModuleName, layer_container
from adapterswap.core.model.sources import PROVENANCE, Records
from adapterswap.engines.gguf.adapter import GgufAdapter, GgufFile, GgufModule
from adapterswap.kit.errors import AdapterswapError, check_type
from adapterswap.kit.files.tensorfile import Tensor
from adapterswap.tools.tables import PartRow, tables

if TYPE_CHECKING:
    from adapterswap.core.writing.records import CompositionRecord

Part = LoraModule | OpaqueModule | FullModule | StoredTensor | GgufModule


@dataclass(frozen=True)
class Inspection:
    """What an expert holds.

    Attributes:
        expert: the adapter, the full checkpoint, or the LoRA in GGUF, opened.
        record: how adapterswap composed or merged it; None if it did not.
        trained_from: where its training started, as text; None if it started at zero, or that is not known.
    """

    expert: Adapter | Checkpoint | GgufAdapter
    record: CompositionRecord | None = None
    trained_from: str | None = None

    def __repr__(self) -> str:
        strip = "".join(f"\n{line}" for line in self.strip)
        return f"<Inspection of {self.expert!r}{strip}>"

    @property
    def kind(self) -> Literal["adapter", "model", "gguf"]:
        if isinstance(self.expert, GgufAdapter):
            return "gguf"
        if isinstance(self.expert, Adapter):
            return "adapter"
        return "model"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The modules of an adapter (those trained in full last), or the tensors of a checkpoint."""
        if isinstance(self.expert, Checkpoint):
            return tuple(self.expert.parameters.values())
        if isinstance(self.expert, Adapter):
            return tuple(self.expert.parts.values())
        return tuple(self.expert.modules.values())

    @property
    def tables(self) -> dict[str, list[PartRow]]:
        """The parts by what they are, for a reader; see `tools.tables`."""
        return tables(self.expert)

    @property
    def depth(self) -> Depth | None:
        """How many layers the config of a checkpoint says that it has; None if it does not say, and for adapters."""
        if not isinstance(self.expert, Checkpoint):
            return None
        layers = ModelConfig(self.expert.config).stacked_layers
        if layers is None:
            return None
        return Depth(layers)

    @property
    def num_parameters(self) -> int:
        """The number of stored parameters: of an adapter, all except modules trained in full."""
        parts: Iterable[Part] = self.parts
        if isinstance(self.expert, Adapter):
            parts = self.expert.adapted.values()
        return sum(map(_parameters, parts))

    @property
    def num_saved_parameters(self) -> int:
        """The number of parameters of modules that an adapter holds in full (`modules_to_save`)."""
        if not isinstance(self.expert, Adapter):
            return 0
        return sum(map(_parameters, self.expert.saved.values()))

    @property
    def nbytes(self) -> int:
        """The size in bytes of the files that hold its weights."""
        if isinstance(self.expert, Checkpoint):
            return sum(shard.size for shard in self.expert.shards)
        if isinstance(self.expert, Adapter):
            return self.expert.file.size
        return self.expert.size

    @property
    def companions(self) -> dict[str, list[str]]:
        """The files and settings beside the weights, by kind: see `Companions.contents`."""
        if isinstance(self.expert, GgufAdapter):
            return {}
        return Companions(self.expert.source.folder).contents()

    @property
    def strip(self) -> list[str]:
        """The strip of layers, a line each; empty without a record.

        Modules that no expert changed are left out if others of their kind and layer were changed.
        """
        if self.record is None:
            return []
        from adapterswap.core.planning.describe import recorded_strip

        # The name, layer, kind and owner of each module; GGUF has other names than the record
        record = self.record
        owners: list[tuple[str, int | None, Kind, str | Mapping[str, float] | None]] = []
        if isinstance(self.expert, GgufAdapter):
            container = layer_container(record.modules)
            for name in map(ModuleName, record.modules):
                owners.append((name, name.layer(container), name.kind, record.owner_of(name)))
        else:
            for part in self.parts:
                owners.append((part.name, part.layer, part.kind, record.owner_of(part.name)))

        # How the experts themselves were composed, if they were
        origins: dict[str, Mapping[str, Any]] = {}
        for expert, source in record.experts.items():
            origins[expert] = {}
            if source.origin:
                origins[expert] = source.origin.content()
        return recorded_strip(owners, record.num_layers, origins).split("\n")

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data: what `adapterswap inspect --json` prints."""
        if isinstance(self.expert, Adapter):
            facts = self._of_adapter(self.expert)
        elif isinstance(self.expert, GgufAdapter):
            facts = self._of_gguf(self.expert)
        else:
            facts = self._of_model(self.expert)

        content = {"kind": self.kind, "source": str(self.expert.source), **facts}
        companions = self.companions
        if companions:
            content["companions"] = companions
        content |= self._composed_of()
        if self.trained_from is not None:
            content["trained_from"] = self.trained_from
        return content

    def _of_gguf(self, adapter: GgufAdapter) -> dict[str, Any]:
        return {
            "architecture": adapter.architecture,
            "alpha": adapter.alpha,
            "parameters": self.num_parameters,
            "bytes": self.nbytes,
            "files": [{"name": file.path.name, "piece": file.piece} for file in adapter.files],
            "modules": [asdict(module) for module in adapter.modules.values()],
        }

    def _of_adapter(self, adapter: Adapter) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "base_model": adapter.config.base_model,
            "use_rslora": adapter.config.rslora,
            "parameters": self.num_parameters,
            "saved_parameters": self.num_saved_parameters,
            "bytes": self.nbytes,
            "modules": [self._of_part(module) for module in adapter.modules.values()],
        }

        # Other kinds than LoRA
        if adapter.opaque or not adapter.modules:
            facts["peft_type"] = adapter.config.peft_type
        if adapter.opaque:
            facts["opaque"] = [self._of_part(part, method=part.method) for part in adapter.opaque.values()]

        facts["saved"] = []
        for part in adapter.saved.values():
            more: dict[str, Any] = {}
            if part.rows:
                more["tokens"] = list(part.rows)
            facts["saved"].append(self._of_part(part, **more))
        facts["ignored"] = list(adapter.ignored)
        return facts

    def _of_model(self, model: Checkpoint) -> dict[str, Any]:
        return {
            "model_type": model.config.get("model_type"),
            "num_layers": self.depth and self.depth.num_layers,
            "parameters": self.num_parameters,
            "bytes": self.nbytes,
            "shards": [{"name": shard.path.name, "bytes": shard.size} for shard in model.shards],
            "tensors": [self._of_part(parameter) for parameter in model.parameters.values()],
        }

    def _of_part(self, part: LoraModule | OpaqueModule | FullModule | StoredTensor, **more: Any) -> dict[str, Any]:
        """A module or a tensor as plain data, with the expert that it came from."""
        facts: dict[str, Any] = {"name": part.name, "layer": part.layer, "kind": part.kind, **more}

        if isinstance(part, StoredTensor):
            facts |= {**_tensor(part.tensor), "shard": part.path.name}
        elif isinstance(part, LoraModule):
            for name in ("rank", "alpha", "scale", "out_features", "in_features", "embedding", "dtype"):
                facts[name] = getattr(part, name)
            facts["bytes"] = {"A": [part.a.start, part.a.stop], "B": [part.b.start, part.b.stop]}
        else:
            tensors = {name: _tensor(tensor) for name, tensor in part.tensors.items()}
            facts |= {"parameters": _parameters(part), "tensors": tensors}

        if self.record is not None:
            facts["owner"] = self.record.modules.get(part.name)
            if part.name in self.record.rows:
                facts["rows"] = self.record.rows[part.name]
        return facts

    def _composed_of(self) -> dict[str, Any]:
        if self.record is None:
            return {}

        record = self.record
        composed_of: dict[str, Any] = {
            "experts": {name: str(source) for name, source in record.experts.items()},
            "num_layers": record.num_layers,
            "strip": self.strip,
        }
        if record.slice is not None:
            composed_of["slice"] = record.slice.layers
            if record.slice.stack is not None:
                composed_of["stack"] = record.slice.stack
        if record.origins:
            composed_of["origins"] = {}
            for name, source in record.experts.items():
                if source.origin is not None:
                    composed_of["origins"][name] = str(source.origin)
        return {"composed_of": composed_of}


def inspect(path: str | Path) -> Inspection:
    """Show what an adapter or a full checkpoint holds: ranks, scales, layers and, if it was composed, owners.

    Args:
        path: a PEFT LoRA folder, a folder of full weights, a Hub id `org/name[@revision]`, a GGUF file of LoRA, or the
            folder of pieces that `export` wrote.

    Returns:
        The opened expert, and how it was composed.

    Raises:
        ArgumentError: `path` has the wrong type.
        NotFoundError, ExpertError, UnsupportedError: it cannot be opened (see `open_expert`), or its adapterswap.json
            cannot be read.
    """
    check_type(path, (str, Path), "path", "Pass a local folder or a Hub id such as org/name")
    if GgufFile.is_gguf(path):
        adapter = GgufAdapter.open(path)
        return Inspection(adapter, adapter.record)
    try:
        expert = open_expert(path)
    except AdapterswapError as error:
        raise error.recast(parameter="path") from None

    # How it was composed, or else where its training started
    folder = expert.source.folder
    if os.path.exists(folder / PROVENANCE):
        from adapterswap.core.writing.records import CompositionRecord

        return Inspection(expert, CompositionRecord.read(folder))
    if "start" in Records(folder).training():
        from adapterswap.core.writing.records import origin_of

        start = str(origin_of(folder)).removeprefix("was trained ").removeprefix("from ")
        return Inspection(expert, trained_from=start)
    return Inspection(expert)


def _parameters(part: Part) -> int:
    """The number of stored parameters."""
    if isinstance(part, LoraModule | GgufModule):
        return part.experts * part.rank * (part.in_features + part.out_features)
    if isinstance(part, StoredTensor):
        return prod(part.tensor.shape)
    return sum(prod(tensor.shape) for tensor in part.tensors.values())


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": [tensor.start, tensor.stop]}
