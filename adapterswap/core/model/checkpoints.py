"""Open a full checkpoint, a base or a full-parameter expert: config, index, headers, identity.

A model is built from config.json. If its tensors disagree, the result cannot be loaded, or loads with layers missing or
random. Only the language model's number of layers and hidden size are compared: checking other shapes would need the
model's code, which takes seconds to import. In doubt, nothing is refused.

No tensor is read and torch is not imported. An index is always compared with the shards.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adapterswap.core.companions.config import ConfigDifferences
from adapterswap.core.companions.files import COMPANION_FILES, MODEL_CONFIG
from adapterswap.core.model.architectures import architectures_in
from adapterswap.core.model.base import Base, FusedParameter
from adapterswap.core.model.layers import (
    EMBEDDINGS,
    KeptLayers,
    Kind,
    ModelConfig,
    ModuleName,
    Stack,
    before_layers,
    has_both_stacks,
    layer_container,
)
from adapterswap.core.model.quantization import Quantization, quantization_in
from adapterswap.core.model.sources import CONFIG as ADAPTER_CONFIG
from adapterswap.core.model.sources import MODEL_WEIGHTS, PROVENANCE, TRAINING_RECORD, Records, Source
from adapterswap.core.model.stored import StoredModules
from adapterswap.kit.errors import BaseModelError, ExpertError, Problems, UnsupportedError
from adapterswap.kit.files.hashes import fingerprint, sha256_of
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import Tensor, TensorFile, open_files
from adapterswap.kit.files.text import read_json

# The last two are for OPT and ALBERT, whose embeddings may be narrower than their layers.
_WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model", "embedding_size", "word_embed_proj_dim")

_NUMBERS, _LEAST_NUMBERS = 2**22, 2**8  # in all, and of each tensor, by which two checkpoints are known as one model

_REMEDY = "Use a folder whose config.json and weights belong to one model: download or save it again"


def check_config(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], container: str | None) -> None:
    """Compare the config's number of layers with the stored ones, and its hidden size with the embedding's.

    Layers that predict further tokens may follow the layers that the config counts: see `layers_ahead`.

    Args:
        folder: the checkpoint's folder, for messages.
        config: the content of its config.json.
        tensors: all stored tensors, by name.
        container: the language model's list of layers; see `layer_container`.
    """
    if container is None:
        return
    problems = Problems(ExpertError)

    # The number of layers
    configured = ModelConfig(config).stacked_layers
    if not isinstance(configured, int | None):
        _check_stacks(folder, configured, tensors, container, problems)
        configured = None
    indices = [ModuleName(name).layer(container) for name in tensors]
    stored = 1 + max(layer for layer in indices if layer is not None)
    most = (configured or 0) + ModelConfig(config).layers_ahead
    if configured is not None and not configured <= stored <= most:
        problems.add(
            f"{folder}: config.json says {configured} layers, but the weights have {stored} in {container}", _REMEDY
        )

    # The width of the embedding
    stated = [ModelConfig(config).language.get(key) for key in _WIDTHS]
    widths = [width for width in stated if type(width) is int]
    for end in sorted(EMBEDDINGS):
        name = f"{before_layers(container)}{end}.weight"
        tensor = tensors.get(name)
        if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in Dtype.FLOATS:
            continue
        if widths and tensor.shape[1] not in widths:
            problems.add(
                f"{folder}: config.json says a hidden size of {widths[0]}, but {name} is {list(tensor.shape)}", _REMEDY
            )
    problems.raise_if_any()


def _check_stacks(
    folder: Path, configured: Mapping[Stack, int], tensors: Iterable[str], container: str, problems: Problems
) -> None:
    for stack, count in configured.items():
        stored = 0
        for name in tensors:
            layer = ModuleName(name).layer(container)
            if layer is not None and ModuleName(name).stack == stack:
                stored = max(stored, 1 + layer)

        if stored not in (0, count):  # an encoder alone has no decoder
            message = f"{folder}: config.json says {count} {stack} layers, but the weights have {stored}"
            problems.add(message, _REMEDY)


MODEL_INDEX = "model.safetensors.index.json"

# A remedy for checkpoints that lack each other's tensors. By default transformers saves under the names that it read.
OTHER_NAMES = (
    ". If different versions of transformers saved them, load each with the installed version and save it by "
    "save_pretrained(PATH, save_original_format=False)"
)

_WEIGHT_FILES = [
    MODEL_CONFIG, ADAPTER_CONFIG, "model*.safetensors", MODEL_INDEX, "*.bin.index.json", "README.md", *COMPANION_FILES,
]  # fmt: skip
_RECORDS = [PROVENANCE, TRAINING_RECORD]


class StoredTensor(NamedTuple):
    """One stored tensor of a checkpoint.

    Attributes:
        name: its key in the file, such as `model.layers.0.self_attn.q_proj.weight`.
        module: the module's name, which is the key without its last part.
        layer: the index of its transformer layer, or None.
        kind: attention, mlp or other, by the module's name.
        tensor: its place in its shard.
        path: the shard.
    """

    name: str
    module: str
    layer: int | None
    kind: Kind
    tensor: Tensor
    path: Path

    @property
    def has_tokens(self) -> bool:
        """Whether it has a row for each token: an embedding's or a head's tensor, but not a single number there."""
        return bool(self.tensor.shape) and ModuleName(self.module).is_vocabulary(self.layer)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: pure data, no open file. It says what its tensors are called in the model, and how they are
    stored: by the headers or, where these leave it open, by `base`.

    Attributes:
        source: the folder, and its name or Hub id.
        config: the content of its config.json.
        shards: the headers of its safetensors files, in the order of their names.
        parameters: every stored tensor by name, in the order of the shards and of the bytes in them.
        container: the list of layers, such as `model.layers`; None if no tensor is in a layer, or there are several.
        base_fingerprints: for an expert, the local base's weights; see `Adapter.base_fingerprints`.
        kept_layers: the layers of the slice that was merged into it, whose other layers were cut away; else None.
    """

    source: Source
    config: Mapping[str, Any]
    shards: tuple[TensorFile, ...]
    parameters: Mapping[str, StoredTensor]
    container: str | None
    base_fingerprints: Mapping[str, str] = field(default_factory=dict)
    kept_layers: KeptLayers | None = None

    def __repr__(self) -> str:
        layers = len({part.layer for part in self.parameters.values() if part.layer is not None})
        return f"<Checkpoint {self.name!r}, {len(self.parameters)} tensors, {layers} layers>"

    @property
    def name(self) -> str:
        return str(self.source)

    @property
    def identity(self) -> dict[str, Any]:
        """See `model_identity`."""
        return model_identity(self.source)

    @property
    def has_both_stacks(self) -> bool:
        """Whether its list of layers stands for both an encoder's and a decoder's."""
        return has_both_stacks(self.container)

    @cached_property
    def base(self) -> Base:
        """Its model as transformers builds it. Ask this only where the headers do not decide."""
        return Base.at(self.source.folder, self.name)

    @property
    def quantization(self) -> Quantization | None:
        """How its weights are quantized, by its config; None if they are not."""
        return quantization_in(self.config)

    def compared_config(self, other: Checkpoint) -> ConfigDifferences:
        """Where the config of another checkpoint computes differently from this one's."""
        return ConfigDifferences.between(self.config, other.config)

    def dequantized(self) -> Checkpoint:
        """The weights that it computes with, if it is quantized; see `dequantization.dequantized`."""
        from adapterswap.core.model.dequantization import dequantized  # which imports transformers

        return dequantized(self)

    @cached_property
    def ahead(self) -> frozenset[str]:
        """The stored tensors that predict further tokens (MTP). transformers neither loads nor saves them, so a
        fine-tune may lack those of its base."""
        depth = ModelConfig(self.config).stacked_layers
        ahead = set()
        for key in self.parameters:
            name = ModuleName(key)
            if name.is_ahead(name.layer(self.container), depth):
                ahead.add(key)
        return frozenset(ahead)

    @cached_property
    def rows_of_tokens(self) -> Mapping[str, int]:
        """The number of rows of each stored tensor that has one for each token: embeddings and heads."""
        rows = {}
        for name, parameter in self.parameters.items():
            if parameter.has_tokens:
                rows[name] = parameter.tensor.shape[0]
        return rows

    @cached_property
    def modules(self) -> StoredModules:
        """Its tensors by module."""
        return StoredModules({name: parameter.tensor for name, parameter in self.parameters.items()})

    def rounded_from(self, other: Checkpoint, *, without: Container[str] = ()) -> str | None:
        """The dtype to which it holds the weights of `other` rounded, so that both are one model in two dtypes; None if
        they are of one dtype, or of two models. The first numbers of every tensor that both store decide.

        Args:
            other: the checkpoint with the more precise weights.
            without: tensors that are expected to differ.
        """
        pairs = []
        for name, parameter in self.parameters.items():
            if name in other.parameters and name not in without:
                pairs.append((parameter, other.parameters[name]))

        # The shapes are the same, and no tensor is more precise here than there; FLOATS has the precise ones first.
        rounded = None
        for ours, theirs in pairs:
            own, precise = ours.tensor.dtype, theirs.tensor.dtype
            if ours.tensor.shape != theirs.tensor.shape or not {own, precise} <= {*Dtype.FLOATS}:
                return None
            if Dtype.FLOATS.index(own) < Dtype.FLOATS.index(precise):
                return None
            if rounded is None and own != precise:
                rounded = own

        most = max(_LEAST_NUMBERS, _NUMBERS // max(len(pairs), 1))
        with open_files([*self.shards, *other.shards]) as files:
            for ours, theirs in pairs:
                dtype, count = ours.tensor.dtype, min(prod(ours.tensor.shape), most)
                numbers = theirs.tensor.read_elements(other.name, files[theirs.path], 0, count)
                held = ours.tensor.read_bytes(files[ours.path], 0, count * Dtype.BYTES[dtype])
                if not np.array_equal(Dtype(dtype).pack(numbers), held):
                    return None
        return rounded

    def is_transposed(self, key: str) -> bool:
        """Whether the weight stored under `key` is a Conv1D's, and so in×out; False for an embedding's, and for other
        tensors.

        An adapter's config does not say: PEFT keeps one `fan_in_fan_out` for all modules, the value of the last one
        that it adapted. But a Conv1D always has a bias, with one entry per column of its weight, and a Linear's bias
        has one entry per row. So the headers decide for all weights that have no bias or are not square. For the rest,
        the model does, unless no other weight belongs to a Conv1D and the model's type is not known to have them.
        """
        shape, bias = self._shapes.get(key, ()), self._shapes.get(f"{key.removesuffix('weight')}bias")
        if len(shape) != 2 or not key.endswith(".weight") or bias != shape[1:]:
            return False
        return shape[0] != shape[1] or key in self._conv1d_keys

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: parameter.tensor.shape for name, parameter in self.parameters.items()}

    @cached_property
    def _conv1d_keys(self) -> frozenset[str]:
        has_conv1d = any(architecture.has_conv1d for architecture in architectures_in(self.config))
        if not has_conv1d:
            oblong = [key for key, shape in self._shapes.items() if len(shape) == 2 and shape[0] != shape[1]]
            has_conv1d = any(map(self.is_transposed, oblong))
        if not has_conv1d:
            return frozenset()

        keys = set()
        for name, weight in self.base.items():
            if weight.transposed and not weight.embedding and f"{name}.weight" in self._stored_keys:
                keys.add(self._stored_keys[f"{name}.weight"])
        return frozenset(keys)

    @cached_property
    def _stored_keys(self) -> Mapping[str, str]:
        """The name of each parameter in the model of transformers → the key under which the checkpoint stores it.

        Parameters that transformers builds from several keys (fused experts) are left out.
        """
        names = {key: self.base.rename(key) for key in self._shapes}
        return {name: key for key, name in names.items() if name is not None}

    def stored_key(self, parameter: str, container: str | None) -> str | None:
        """The key under which the checkpoint stores a parameter; None if it does not.

        Args:
            parameter: its full name in an expert, which may differ from the checkpoint's.
            container: the expert's list of layers.
        """
        return self._stored_keys.get(self.base.find_parameter(parameter, container) or "")

    def source_of(self, parameter: str, container: str | None) -> str | None:
        """A stored tensor from which transformers computes a parameter, rather than renaming it: it may hold queries,
        keys and values. None if there is none. The arguments are those of `stored_key`.
        """
        return self._sources.get(self.base.find_parameter(parameter, container) or "")

    @cached_property
    def _sources(self) -> Mapping[str, str]:
        sources: dict[str, str] = {}
        for key in self._shapes:
            name, rule, _ = self.base.convert(key)
            if not rule:
                continue
            for target in rule.target_patterns:
                sources.setdefault(name.replace(rule.target_patterns[0], target, 1), key)
        return sources

    @property
    def lacking(self) -> list[str]:
        """The parameters of its model for which it stores nothing, so that transformers would draw them at random."""
        stored = self._stored_keys.keys() | self._sources.keys()
        return [name for name, first in self.base.parameters.items() if not {name, first} & stored]

    def fused(self, parameter: str, container: str | None) -> FusedParameter | None:
        """The parameter with a matrix for each expert of a mixture; None if the model has none of this name.

        Args:
            parameter: its name in the expert, which may differ from the model's.
            container: the expert's list of layers.
        """
        name = self.base.find(parameter, container)
        if name is None:
            return None
        return self._fused.get(name)

    @cached_property
    def _fused(self) -> Mapping[str, FusedParameter]:
        return self.base.fused(self._shapes)

    @cached_property
    def tied_keys(self) -> tuple[str, str] | None:
        """The keys of an embedding and of the head that shares its weight; None if no head does, or neither is stored.

        For the one of them that is not stored, this is the key under which transformers would load it.
        """
        if self.base.tied_head is None or self._stored_keys.keys().isdisjoint(self.base.tied_head):
            return None
        embedding, head = self.base.tied_head
        return self._stored_keys.get(embedding, embedding), self._stored_keys.get(head, head)

    @staticmethod
    def find(reference: str | Path, *, what: str = "base model", parameter: str | None = None) -> Source:
        """The folder of a checkpoint, downloaded if it is a Hub id; see `Source.find`. Nothing in it is read."""
        return Source.find(reference, [*_WEIGHT_FILES, *_RECORDS], what=what, parameter=parameter)

    @staticmethod
    def read(source: Source, *, what: str = "base model", config: Mapping[str, Any] | None = None) -> Checkpoint:
        """Open the checkpoint of a source; see `open_checkpoint`. `config` is its config.json, if that was read."""
        try:
            return _read_checkpoint(source, what, config)
        except ExpertError as error:
            if what != "base model":
                raise
            raise error.recast(BaseModelError, parameter="base_model") from None


def open_checkpoint(reference: str | Path, *, what: str = "base model") -> Checkpoint:
    """Open a checkpoint from a local folder or a Hub id `org/name[/subfolder][@revision]`.

    Args:
        reference: the folder or Hub id.
        what: the checkpoint's role in messages, such as "base model" or "expert".

    Raises:
        NotFoundError: it exists neither on this machine nor on the Hub.
        BaseModelError: a shard is missing or damaged, a tensor is stored twice, the index does not match the shards, or
            the config's number of layers or hidden size differs from the tensors'.
        ExpertError: the same, if `what` is not "base model".
        UnsupportedError: it holds only pickled weights.
    """
    parameter = None if what == "base model" else "reference"
    return Checkpoint.read(Checkpoint.find(reference, what=what, parameter=parameter), what=what)


def _read_checkpoint(source: Source, role: str, config: Mapping[str, Any] | None) -> Checkpoint:
    if config is None:
        config = read_json(source.folder / MODEL_CONFIG, f"Pass the {role}'s folder, with a valid config.json")
    check_alone(source.folder)
    other_file = config.get("transformers_weights")
    if other_file:
        raise UnsupportedError(
            f"{source.folder}: config.json names another file of weights ({other_file!r}, transformers_weights)",
            f"Remove the entry, and call the file {MODEL_WEIGHTS}",
        )

    shards = read_shards(source.folder)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= shard.tensors
    container = layer_container(tensors)
    check_config(source.folder, config, tensors, container)

    depth = ModelConfig(config).stacked_layers
    parameters = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            module = name.rpartition(".")[0]
            layer = ModuleName(name).layer(container)
            if layer is not None and isinstance(depth, int) and layer >= depth:
                layer = None  # a layer after the language model's that predicts further tokens (DeepSeek, GLM)
            parameters[name] = StoredTensor(name, module, layer, ModuleName(module).kind, tensor, shard.path)

    records = Records(source.folder)
    return Checkpoint(source, config, shards, parameters, container, records.base(), records.kept_layers())


def check_alone(folder: Path) -> None:
    """Check that a folder of full weights is not an adapter and holds none, which transformers would add to them."""
    if not os.path.exists(folder / ADAPTER_CONFIG):
        return
    if not os.path.exists(folder / MODEL_CONFIG):
        raise ExpertError(
            f"{folder} is an adapter, not a full model", "Pass the folder of the full model", parameter="reference"
        )
    raise ExpertError(
        f"{folder} holds both an adapter and full weights, and transformers would load both",
        "Pass a folder with one of them: move the other away",
        parameter="reference",
    )


def read_shards(folder: Path) -> tuple[TensorFile, ...]:
    """The headers of the safetensors files that transformers loads from a folder, sorted by file name.

    A single file comes before an index, which may be left from an earlier save, and an index must match its shards.
    """
    if os.path.exists(folder / MODEL_WEIGHTS):
        return (TensorFile.read(folder / MODEL_WEIGHTS),)

    # What the index names
    index = folder / MODEL_INDEX
    if not os.path.exists(index):
        raise _missing(folder)
    remedy = "Download or save the model again"
    weight_map = read_json(index, remedy).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_shard, weight_map.values())):
        raise ExpertError(f"{index} is not an index of safetensors shards", remedy)

    problems = Problems(ExpertError)
    shards = []
    for name in sorted(set(weight_map.values())):
        with problems.collect():
            shards.append(TensorFile.read(folder / name))
    problems.raise_if_any()

    # Each tensor is in the shard that the index says, and in no other.
    owners: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor in owners:
                problems.add(f"{folder}: {tensor} is in both {owners[tensor]} and {shard.path.name}", remedy)
            owners[tensor] = shard.path.name
    odd = sorted(name for name in owners.keys() | weight_map.keys() if owners.get(name) != weight_map.get(name))
    if odd:
        actual = owners.get(odd[0], "no shard")
        message = f"{index} says that {odd[0]} is in {weight_map.get(odd[0], 'no shard')}, but it is in {actual}"
        if len(odd) > 1:
            message += f"; {len(odd) - 1} more differ"
        problems.add(message, remedy)
    problems.raise_if_any()
    return tuple(shards)


def _is_shard(name: object) -> bool:
    """Whether an index names a file of this folder, and a safetensors file."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _missing(folder: Path) -> ExpertError | UnsupportedError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.bin.index.json")):
        return UnsupportedError(
            f"{folder} holds pickled weights (.bin), which can run code when loaded",
            "If you trust it, load it with transformers and save it again: save_pretrained writes safetensors",
        )
    return ExpertError(
        f"{folder} has no safetensors weights", "Pass a folder with model.safetensors, or with shards and their index"
    )


def model_fingerprints(folder: Path) -> dict[str, str]:
    """The fingerprints of a model's config, weights, tokenizer and chat template."""
    return fingerprints(folder, [pattern for pattern in _WEIGHT_FILES if pattern != "README.md"])


def model_identity(source: Source) -> dict[str, Any]:
    """The hash of a model's config, and the fingerprints of its files; None for those of a Hub commit.

    A commit identifies its files, which may not all be downloaded yet.
    """
    files = None if source.revision else model_fingerprints(source.folder)
    return {"config_sha256": sha256_of(source.folder / MODEL_CONFIG), "files": files}


def fingerprints(folder: Path, patterns: Iterable[str] = ("*",)) -> dict[str, str]:
    """The fingerprints of the files in a folder that match one of the patterns, by name."""
    files: set[Path] = set()
    for pattern in patterns:
        files |= {path for path in folder.glob(pattern) if path.is_file()}
    return {path.name: fingerprint(path) for path in sorted(files)}
