"""What a model consists of, as transformers builds it: which weights LoRA can change, and under which names PEFT knows
them.

A checkpoint's keys are not the model's names everywhere (GPT-2's lack `transformer.`, NeoX calls its head `embed_out`),
Conv1D stores its weights transposed, and a mixture's experts are one parameter in memory and many in the file. So
transformers is asked: for the model, built without memory for its weights, and for its rules of renaming. Knows configs
and names; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterswap.bases import Base
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.layers import Kind, kind_of, layer_container, layer_of
from adapterswap.experts.orientation import adaptable_weights, rename_keys

__all__ = ["Anatomy", "Slot", "build_empty", "read_anatomy"]


@dataclass(frozen=True)
class Slot:
    """A weight that LoRA can change.

    Attributes:
        name: its module's full name in the model.
        layer: the index of its transformer layer, or None.
        kind: attention, mlp or other, by its name.
        transposed: it is stored in×out (Conv1D), or as one row per token (an embedding).
        embedding: it is an embedding.
        heads: the modules that share the weight: the head that is tied to an embedding.
    """

    name: str
    layer: int | None
    kind: Kind
    transposed: bool
    embedding: bool
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Anatomy:
    """A model's parameters.

    Attributes:
        slots: the weights that LoRA can change, by parameter name, such as `model.layers.0.self_attn.q_proj.weight`.
        parameters: every parameter's name; a tied one has several, which lead to the first.
        rename: a checkpoint's key → the name that transformers gives it when it loads the model; None where it makes
            one parameter of several keys.
    """

    slots: Mapping[str, Slot]
    parameters: Mapping[str, str]
    rename: Callable[[str], str | None]

    @property
    def tied(self) -> bool:
        """Whether a head is an embedding."""
        return any(slot.heads for slot in self.slots.values())

    def name_of(self, key: str) -> str | None:
        """The parameter that a checkpoint's key is loaded into alone; None if there is no such."""
        return self.parameters.get(self.rename(key) or "")


def build_empty(checkpoint: Checkpoint) -> Any:
    """The causal language model of a checkpoint's config, without weights: on torch's meta device.

    Raises:
        AdapterswapError: transformers has no causal language model for it, or cannot build one without remote code.
    """
    from adapterswap.bases import empty_model, read_config

    config = read_config(checkpoint.source.folder, checkpoint.name)
    return empty_model(Base(checkpoint.name, checkpoint.source, config, tokenizer=None))


def read_anatomy(checkpoint: Checkpoint) -> Anatomy:
    """The anatomy of a checkpoint's model, from its config.

    Raises:
        AdapterswapError: see `build_empty`.
    """
    model = build_empty(checkpoint)
    first: dict[int, str] = {}
    parameters = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    weights = adaptable_weights(model)
    container = layer_container(weights)
    sharing: dict[str, list[str]] = {}
    for name in weights:
        sharing.setdefault(parameters[f"{name}.weight"], []).append(name)
    slots = {
        f"{name}.weight": Slot(
            name,
            layer_of(name, container),
            kind_of(name),
            transposed=weight.transposed,
            embedding=weight.embedding,
            heads=tuple(other for other in sharing[f"{name}.weight"] if other != name),
        )
        for name, weight in weights.items()
        if f"{name}.weight" in sharing
    }
    return Anatomy(slots, parameters, rename_keys(model))
