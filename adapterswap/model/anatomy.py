"""A model's weights as transformers builds it, on the meta device: adaptable, tied and fused ones.

Nothing is downloaded, and no code of a repository is run. Knows configs; reads no tensor.

the names by which PEFT knows them.

A checkpoint's keys may differ from the model's names (GPT-2's lack `transformer.`, NeoX calls its head `embed_out`),
Conv1D stores its weights transposed, and a mixture's experts are one parameter in memory but many in the file. So this
module takes them from transformers: from an empty model, and from its renaming rules. Knows configs and names; reads no
tensor.

Model families name them differently (`embed_tokens` and `lm_head`, `tokens_embed`, `output_projection`, …), and without
`tie_word_embeddings` in the config the model's class decides. So transformers builds an empty model. Knows modules;
knows nothing of adapters.

transformers 5 keeps a layer's experts in two parameters, `experts.gate_up_proj` and `experts.down_proj`, with a matrix
for each expert. Checkpoints store them in this form or matrix by matrix (`experts.3.up_proj.weight`), and transformers'
conversion rules relate the two forms. Knows models and names; reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterswap.errors import BaseModelError, reason_of
from adapterswap.model.checkpoints import Checkpoint
from adapterswap.model.layers import HEADS, Kind, before_layers, check_one_list, kind_of, layer_container, layer_of

# PEFT's task types that change the model's class → transformers' class for them.
_TASK_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


def read_config(folder: Path, name: str) -> Any:
    """The transformers config in a folder; `name` is the model's name in messages."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # with an untested config, a model class can raise anything
        raise BaseModelError(
            f"{name} cannot be opened: {reason_of(error)}",
            "Use a model with a valid config.json that transformers supports without remote code",
            parameter="base_model",
        ) from None


def empty_language_model(config: Any, name: str) -> Any:
    """The modules of a config's causal language model; `name` is the model's name in messages."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as in `read_config`
        raise BaseModelError(
            f"{name} cannot be loaded: {reason_of(error)}",
            "Use a causal language model that transformers supports, with a valid config.json",
            parameter="base_model",
        ) from None


def empty_model_as_saved(folder: Path, name: str) -> Any:
    """The modules, without weights, of the model class in `architectures` of a folder's config.json.

    This may be more than a language model, for example a vision model, or less, without a head. A config that names no
    class gets transformers' own choice: the multimodal model if there is one, else the causal language model.

    Args:
        folder: the folder with config.json.
        name: the model's name in messages.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        names = config.architectures or []
        kind = getattr(transformers, names[0], None) if names else _auto_class(config)
        if kind is None:
            raise ValueError(f"transformers has no {names[0]}")
        with torch.device("meta"):
            build = kind._from_config if names else kind.from_config
            return build(config)
    except Exception as error:  # as in `read_config`
        raise BaseModelError(
            f"{name} cannot be built to look up its modules: {reason_of(error)}",
            "Use a model that the installed transformers supports without remote code",
            parameter="base_model",
        ) from None


def empty_model_for(folder: Path, name: str, task_type: str | None) -> Any:
    """The modules, without weights, of the model class for a task type of PEFT, where transformers has one.

    Otherwise, and for language models, that of `empty_model_as_saved`; the arguments and errors are the same.
    """
    import torch
    import transformers

    config, task_class = read_config(folder, name), getattr(transformers, _TASK_CLASSES.get(task_type or "", ""), None)
    if task_class is None or type(config) not in task_class._model_mapping:
        return empty_model_as_saved(folder, name)
    with torch.device("meta"):
        return task_class.from_config(config, trust_remote_code=False)


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    multimodal = config.get_text_config() is not config and type(config) in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM


@dataclass(frozen=True)
class AdaptableWeight:
    """The weight of a module that LoRA can adapt.

    Attributes:
        name: the module's full name in the model.
        out_features, in_features: the size of its ΔW.
        embedding: whether it belongs to an `nn.Embedding`; its ΔW is width×vocabulary.
        transposed: whether it is stored in×out, as a Conv1D's or an embedding's weight is.
        tied: the other modules with the same weight, such as the head that is tied to an embedding.
        layer: the index of its transformer layer; None outside the layers, and in the result of `adaptable_weights`.
    """

    name: str
    out_features: int
    in_features: int
    embedding: bool
    transposed: bool
    tied: tuple[str, ...] = ()
    layer: int | None = None

    @property
    def kind(self) -> Kind:
        """Attention, mlp or other, by the module's name."""
        return kind_of(self.name)

    @property
    def shape(self) -> str:
        """The shape as text, in the form of `LoraModule.shape`."""
        return f"{self.out_features}×{self.in_features}{' (an embedding)' if self.embedding else ''}"


def shape_of(module: Any) -> tuple[int, int] | None:
    """(out, in) of the ΔW of a linear layer, an embedding, or a LoRA layer around either; None for anything else.

    Layers of other libraries, such as quantised ones, have the same attributes as torch's.
    """
    attributes = (("out_features", "in_features"), ("embedding_dim", "num_embeddings"), ("nf", "nx"))
    for out, into in attributes:
        sizes = getattr(module, out, None), getattr(module, into, None)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return sizes[0], sizes[1]
    return None


def adaptable_weights(model: Any) -> dict[str, AdaptableWeight]:
    """Every Linear, Conv1D and Embedding of a transformers model, by module name, in the model's order."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    first = _first_names(model)
    sharing: dict[str, list[str]] = {}
    for name in modules:
        sharing.setdefault(first.get(f"{name}.weight", name), []).append(name)
    weights = {}
    for names in sharing.values():
        for name in names:
            module, shape = modules[name], shape_of(modules[name])
            assert shape is not None  # true of all three kinds
            embedding = isinstance(module, torch.nn.Embedding)
            weights[name] = AdaptableWeight(
                name,
                *shape,
                embedding=embedding,
                transposed=embedding or isinstance(module, Conv1D),
                tied=tuple(other for other in names if other != name),
            )
    return {name: weights[name] for name in modules}


def _first_names(model: Any) -> dict[str, str]:
    """Parameter name → the first name of the same parameter: tied parameters have several names."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def rename_keys(model: Any) -> Callable[[str], str | None]:
    """A function from a checkpoint's key to the parameter's name in `model`, as `from_pretrained` renames it.

    It returns None for a key that is more than renamed: see `conversions`.
    """
    convert = conversions(model)

    def rename(key: str) -> str | None:
        name, rule, _ = convert(key)
        return None if rule else name

    return rename


def conversions(model: Any) -> Callable[[str], tuple[str, Any, str | None]]:
    """A function from a checkpoint's key to a parameter's name, the rule that makes it of this key and others, and the
    rule's pattern of this key: transformers may fuse tensors (a mixture's experts), split them (Nomic BERT's queries,
    keys and values) or reorder their rows. The name is the first that the rule makes; the rule is None if the key is
    only renamed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters = model.state_dict()

    def convert(key: str) -> tuple[str, Any, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
        return name, next((rule for rule in converters if pattern in rule.source_patterns), None), pattern

    return convert


@dataclass(frozen=True)
class Anatomy:
    """A model's parameters.

    Attributes:
        weights: the weights that LoRA can change, by parameter name, such as `model.layers.0.self_attn.q_proj.weight`;
            of tied weights only the first.
        parameters: parameter name → the first name of the same parameter.
        rename: a checkpoint's key → the parameter's name in the model; None for a key that is fused with others.
        language: the prefix of the language model's modules in a multimodal model; empty in others.
    """

    weights: Mapping[str, AdaptableWeight]
    parameters: Mapping[str, str]
    rename: Callable[[str], str | None]
    language: str = ""

    @property
    def tied(self) -> bool:
        """Whether a head is tied to an embedding."""
        return any(weight.tied for weight in self.weights.values())

    def name_of(self, key: str) -> str | None:
        """The parameter that holds exactly a checkpoint's key; None if there is none."""
        return self.parameters.get(self.rename(key) or "")

    def is_in_tower(self, module: str) -> bool:
        """Whether a module belongs to a vision or audio tower or a projector, not to the language model or its head."""
        return not module.startswith(self.language) and module.rpartition(".")[2] not in HEADS


def build_empty(checkpoint: Checkpoint) -> Any:
    """The model of a checkpoint's config, without weights: on torch's meta device.

    A multimodal model has the class that it was saved as, with its towers. Other models are causal language models.
    """
    folder, name = checkpoint.source.folder, checkpoint.name
    config = read_config(folder, name)
    if config.get_text_config() is not config:
        return empty_model_as_saved(folder, name)
    return empty_language_model(config, name)


def class_of(checkpoint: Checkpoint) -> str:
    """The name of the class of transformers that loads a checkpoint with the modules of `build_empty`."""
    config = read_config(checkpoint.source.folder, checkpoint.name)
    if config.get_text_config() is config:
        return "AutoModelForCausalLM"
    return type(build_empty(checkpoint)).__name__


def read_anatomy(checkpoint: Checkpoint) -> Anatomy:
    """The anatomy of a checkpoint's model, from its config."""
    model = build_empty(checkpoint)
    parameters, adaptable = _first_names(model), adaptable_weights(model)
    check_one_list(checkpoint.name, adaptable)
    container = layer_container(adaptable)
    weights = {
        f"{name}.weight": replace(weight, layer=layer_of(name, container))
        for name, weight in adaptable.items()
        if parameters.get(f"{name}.weight") == f"{name}.weight"
    }
    multimodal = container is not None and model.config.get_text_config() is not model.config
    return Anatomy(weights, parameters, rename_keys(model), before_layers(container or "") if multimodal else "")


def tied_keys(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """The keys of an embedding and of the head that shares its weight; None if no head does, or neither is stored.

    For the one of them that is not stored, this is the key under which transformers would load it.
    """
    model = empty_model_as_saved(checkpoint.source.folder, checkpoint.name)
    weights = adaptable_weights(model)
    pairs = (
        (weight.name, head)
        for weight in weights.values()
        for head in weight.tied
        if weight.embedding and not weights[head].embedding
    )
    embedding, head = next(pairs, (None, None))
    if embedding is None:
        return None
    rename = rename_keys(model)
    stored = {rename(key): key for key in checkpoint.parameters}
    names = f"{embedding}.weight", f"{head}.weight"
    return (stored.get(names[0], names[0]), stored.get(names[1], names[1])) if stored.keys() & set(names) else None


def shared_embeddings(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Embeddings that share a weight, as an encoder's and a decoder's: module → the other modules that share it."""
    weights = adaptable_weights(empty_model_as_saved(checkpoint.source.folder, checkpoint.name))
    return {
        name: weight.tied
        for name, weight in weights.items()
        if sum(weights[other].embedding for other in (name, *weight.tied)) > 1
    }


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor that holds the rows `start` to `stop` of one expert's matrix."""

    key: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class FusedParameter:
    """A parameter with a matrix for each expert: (experts, rows, columns).

    Attributes:
        name: its name in the model.
        shape: its shape.
        transposed: whether each matrix is in×out, as PEFT sees it.
        key: the stored tensor that equals the parameter; None if there is none.
        parts: otherwise the stored tensors whose rows form its matrices; empty if they do not have this form.
    """

    name: str
    shape: tuple[int, int, int]
    transposed: bool
    key: str | None
    parts: tuple[StoredPart, ...]


def fused_parameters(model: Any, stored: Mapping[str, tuple[int, ...]]) -> dict[str, FusedParameter]:
    """A model's parameters with three axes, by name.

    Args:
        model: a transformers model, with or without weights.
        stored: the checkpoint's keys and shapes.
    """
    convert = conversions(model)
    alone: dict[str, str] = {}
    sources: dict[str, list[tuple[str, Any, str | None]]] = {}
    for key in stored:
        name, rule, pattern = convert(key)
        if rule is None:
            alone[name] = key
        else:
            sources.setdefault(name, []).append((key, rule, pattern))
    modules = dict(model.named_modules())
    fused = {}
    for name, parameter in model.state_dict().items():
        if parameter.dim() != 3:
            continue
        holder = modules.get(name.rpartition(".")[0])
        shape = tuple(parameter.shape)
        parts = _parts(shape, sources.get(name, ()), stored)
        transposed = bool(getattr(holder, "is_transposed", False))
        fused[name] = FusedParameter(name, shape, transposed, alone.get(name), parts)
    return fused


def _parts(
    shape: tuple[int, int, int],
    sources: Iterable[tuple[str, Any, str | None]],
    stored: Mapping[str, tuple[int, ...]],
) -> tuple[StoredPart, ...]:
    """The place of each stored matrix, if transformers only stacks matrices and concatenates their rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    parts: list[StoredPart] = []
    matrices: dict[int, dict[int, str]] = {}
    for key, rule, pattern in sources:
        kinds = [type(operation) for operation in rule.operations]
        dims = [getattr(operation, "dim", None) for operation in rule.operations]
        stacked = (kinds, dims) == ([MergeModulelist], [0])
        below = (kinds, dims) == ([MergeModulelist, Concatenate], [0, 1])
        number = _EXPERT.search(key)
        if number is None or not (below or (stacked and len(rule.source_patterns) == 1)):
            return ()
        matrices.setdefault(int(number[1]), {})[rule.source_patterns.index(pattern)] = key
    if set(matrices) != set(range(shape[0])):
        return ()
    for expert, keys in matrices.items():
        start = 0
        for _, key in sorted(keys.items()):
            sizes = stored[key]
            if len(sizes) != 2 or sizes[1] != shape[2]:
                return ()
            parts.append(StoredPart(key, expert, start, start + sizes[0]))
            start += sizes[0]
        if start != shape[1]:
            return ()
    return tuple(parts)
