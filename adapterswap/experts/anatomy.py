"""A model's weights, as transformers builds it: the ones that LoRA can change, their shapes, orientations and ties, and
the names by which PEFT knows them.

A checkpoint's keys may differ from the model's names (GPT-2's lack `transformer.`, NeoX calls its head `embed_out`),
Conv1D stores its weights transposed, and a mixture's experts are one parameter in memory but many in the file. So this
module takes them from transformers: from an empty model, and from its renaming rules. Knows configs and names; reads no
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.empty_models import empty_language_model, empty_model_as_saved, read_config
from adapterswap.experts.layers import HEADS, Kind, before_layers, check_one_list, kind_of, layer_container, layer_of

__all__ = [
    "AdaptableWeight",
    "Anatomy",
    "adaptable_weights",
    "build_empty",
    "class_of",
    "conversions",
    "read_anatomy",
    "rename_keys",
    "shape_of",
]


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

    Raises:
        BaseModelError: transformers has no such model, or cannot build one without remote code.
    """
    folder, name = checkpoint.source.folder, checkpoint.name
    config = read_config(folder, name)
    if config.get_text_config() is not config:
        return empty_model_as_saved(folder, name)
    return empty_language_model(config, name)


def class_of(checkpoint: Checkpoint) -> str:
    """The name of the class of transformers that loads a checkpoint with the modules of `build_empty`.

    Raises:
        BaseModelError: see `build_empty`.
    """
    config = read_config(checkpoint.source.folder, checkpoint.name)
    if config.get_text_config() is config:
        return "AutoModelForCausalLM"
    return type(build_empty(checkpoint)).__name__


def read_anatomy(checkpoint: Checkpoint) -> Anatomy:
    """The anatomy of a checkpoint's model, from its config.

    Raises:
        BaseModelError: see `build_empty`.
        ExpertError, UnsupportedError: see `layer_container` and `check_one_list`.
    """
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
