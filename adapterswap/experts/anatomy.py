"""What a model consists of, as transformers builds it: which weights LoRA can change, in which shape and orientation,
which of them are one weight, and under which names PEFT knows them.

A checkpoint's keys are not the model's names everywhere (GPT-2's lack `transformer.`, NeoX calls its head `embed_out`),
Conv1D stores its weights transposed, and a mixture's experts are one parameter in memory and many in the file. So
transformers is asked: for the model, built without memory for its weights, and for its rules of renaming. Knows configs
and names; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.empty_models import empty_language_model, read_config
from adapterswap.experts.layers import Kind, kind_of, layer_container, layer_of

__all__ = [
    "AdaptableWeight",
    "Anatomy",
    "adaptable_weights",
    "build_empty",
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
        embedding: it belongs to an `nn.Embedding`; its ΔW is width×vocabulary.
        transposed: it is stored in×out: a Conv1D's, or an embedding's one row per token.
        tied: the other such modules that have the same weight: the head that is tied to an embedding, and back.
        layer: the index of its transformer layer; None outside them, and where only the modules were looked at.
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
        """In the words of `LoraModule.shape`."""
        return f"{self.out_features}×{self.in_features}{' (an embedding)' if self.embedding else ''}"


def shape_of(module: Any) -> tuple[int, int] | None:
    """(out, in) of the ΔW of a linear layer, an embedding, or a LoRA layer around either; None where it does not say.

    Layers of other libraries (quantised ones) say it in the same words as torch's.
    """
    ways = (("out_features", "in_features"), ("embedding_dim", "num_embeddings"), ("nf", "nx"))
    for out, into in ways:
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
    found = {}
    for names in sharing.values():
        for name in names:
            module, shape = modules[name], shape_of(modules[name])
            assert shape is not None  # each of the three kinds says it
            embedding = isinstance(module, torch.nn.Embedding)
            found[name] = AdaptableWeight(
                name,
                *shape,
                embedding=embedding,
                transposed=embedding or isinstance(module, Conv1D),
                tied=tuple(other for other in names if other != name),
            )
    return {name: found[name] for name in modules}


def _first_names(model: Any) -> dict[str, str]:
    """Every parameter's name; a tied one has several, which lead to the first."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def rename_keys(model: Any) -> Callable[[str], str | None]:
    """A function from a checkpoint's key to the parameter's name in `model`, as `from_pretrained` renames it.

    It returns None for a key from which transformers makes one parameter together with others (fused experts).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = model.state_dict()

    def rename(key: str) -> str | None:
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        return None if converter else name

    return rename


@dataclass(frozen=True)
class Anatomy:
    """A model's parameters.

    Attributes:
        weights: the weights that LoRA can change, by parameter name, such as `model.layers.0.self_attn.q_proj.weight`;
            of those that are one weight the first alone.
        parameters: every parameter's name; a tied one has several, which lead to the first.
        rename: a checkpoint's key → the name that transformers gives it when it loads the model; None where it makes
            one parameter of several keys.
    """

    weights: Mapping[str, AdaptableWeight]
    parameters: Mapping[str, str]
    rename: Callable[[str], str | None]

    @property
    def tied(self) -> bool:
        """Whether a head is an embedding."""
        return any(weight.tied for weight in self.weights.values())

    def name_of(self, key: str) -> str | None:
        """The parameter that a checkpoint's key is loaded into alone; None if there is no such."""
        return self.parameters.get(self.rename(key) or "")


def build_empty(checkpoint: Checkpoint) -> Any:
    """The causal language model of a checkpoint's config, without weights: on torch's meta device.

    Raises:
        BaseModelError: transformers has no causal language model for it, or cannot build one without remote code.
    """
    config = read_config(checkpoint.source.folder, checkpoint.name)
    return empty_language_model(config, f"The base model {checkpoint.name}")


def read_anatomy(checkpoint: Checkpoint) -> Anatomy:
    """The anatomy of a checkpoint's model, from its config.

    Raises:
        BaseModelError: see `build_empty`.
        ExpertError, UnsupportedError: see `layer_container`.
    """
    model = build_empty(checkpoint)
    parameters, found = _first_names(model), adaptable_weights(model)
    container = layer_container(found)
    weights = {
        f"{name}.weight": replace(weight, layer=layer_of(name, container))
        for name, weight in found.items()
        if parameters.get(f"{name}.weight") == f"{name}.weight"
    }
    return Anatomy(weights, parameters, rename_keys(model))
