"""How a base stores a weight: out×in like `nn.Linear`, or in×out like transformers' Conv1D and `nn.Embedding`.

An adapter's config does not say which: PEFT keeps one `fan_in_fan_out` for all modules, the value of the last one that
it adapted, so GPT-2 with LoRA on `attn.c_proj` and `lm_head` says false. The class of the base's own module decides. If
the checkpoint's headers leave it open, transformers builds an empty model. Importing transformers takes seconds, so
this is skipped for models without Conv1D.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from adapterswap.experts.anatomy import adaptable_weights, conversions, rename_keys
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.empty_models import empty_model_as_saved
from adapterswap.experts.fused import FusedParameter, fused_parameters
from adapterswap.experts.naming import ModelNames

__all__ = ["Orientation"]

# The model types of transformers 5 that are built from Conv1D.
_CONV1D_TYPES = frozenset({"clvp_decoder", "decision_transformer", "gpt-sw3", "gpt2", "imagegpt", "openai-gpt"})


class Orientation:
    """Which weights of a checkpoint belong to a Conv1D, and so are stored in×out.

    A Conv1D always has a bias, with one entry per column of its weight; a Linear's bias has one entry per row. So the
    headers decide for all weights that have no bias or are not square. For the rest, transformers builds an empty
    model, unless no other weight belongs to a Conv1D and the model's type is not known to have them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._shapes = {name: parameter.tensor.shape for name, parameter in checkpoint.parameters.items()}

    def is_transposed(self, key: str) -> bool:
        """Whether the weight stored under `key` is a Conv1D's; False for an embedding's, and for other tensors.

        Raises:
            BaseModelError: the weight is square, the model has Conv1D modules, and transformers cannot build it
                without remote code.
        """
        shape, bias = self._shapes.get(key, ()), self._shapes.get(f"{key.removesuffix('weight')}bias")
        if len(shape) != 2 or not key.endswith(".weight") or bias != shape[1:]:
            return False
        return shape[0] != shape[1] or key in self._conv1d_keys

    @cached_property
    def _conv1d_keys(self) -> frozenset[str]:
        types = set(_model_types(self._checkpoint.config))
        if types.isdisjoint(_CONV1D_TYPES) and not any(
            len(shape) == 2 and shape[0] != shape[1] and self.is_transposed(key) for key, shape in self._shapes.items()
        ):
            return frozenset()
        weights = adaptable_weights(self._model)
        conv1d = (f"{name}.weight" for name, weight in weights.items() if weight.transposed and not weight.embedding)
        return frozenset(self.stored_keys[name] for name in conv1d if name in self.stored_keys)

    @cached_property
    def stored_keys(self) -> Mapping[str, str]:
        """The name of each parameter in the model of transformers → the key under which the checkpoint stores it.

        Parameters that transformers builds from several keys (fused experts) are left out.

        Raises:
            BaseModelError: transformers cannot build the model without remote code.
        """
        rename = rename_keys(self._model)
        names = {key: rename(key) for key in self._shapes}
        return {name: key for key, name in names.items() if name is not None}

    def stored_key(self, module: str, parameter: str, container: str | None) -> str | None:
        """The key under which the checkpoint stores a parameter of an adapter's module; None if it does not.

        Args:
            module: the module's name in the adapter, which may differ from the checkpoint's.
            parameter: the parameter's name within the module, such as `weight`.
            container: the adapter's list of layers.

        Raises:
            AdapterswapError: transformers cannot build the model without remote code.
        """
        name = self._names.find(module, container)
        return None if name is None else self.stored_keys.get(f"{name}.{parameter}")

    def source_of(self, module: str, parameter: str, container: str | None) -> str | None:
        """A stored tensor from which transformers computes a parameter of an adapter's module, rather than renaming it:
        it may hold queries, keys and values. None if there is none. The arguments are those of `stored_key`.

        Raises:
            AdapterswapError: transformers cannot build the model without remote code.
        """
        name = self._names.find(module, container)
        return self._sources.get(f"{name}.{parameter}")

    @cached_property
    def _sources(self) -> Mapping[str, str]:
        convert = conversions(self._model)
        sources: dict[str, str] = {}
        for key in self._shapes:
            name, rule, _ = convert(key)
            for target in rule.target_patterns if rule else ():
                sources.setdefault(name.replace(rule.target_patterns[0], target, 1), key)
        return sources

    def fused(self, parameter: str, container: str | None) -> FusedParameter | None:
        """The parameter with a matrix for each expert of a mixture; None if the model has none of this name.

        Args:
            parameter: its name in the adapter, which may differ from the model's.
            container: the adapter's list of layers.

        Raises:
            BaseModelError: transformers cannot build the model without remote code.
        """
        name = self._names.find(parameter, container)
        return None if name is None else self._fused.get(name)

    @cached_property
    def _fused(self) -> Mapping[str, FusedParameter]:
        return fused_parameters(self._model, self._shapes)

    @cached_property
    def _names(self) -> ModelNames:
        return ModelNames(self._model, self._checkpoint.name)

    @cached_property
    def _model(self) -> Any:
        return empty_model_as_saved(self._checkpoint.source.folder, self._checkpoint.name)


def _model_types(config: Mapping[str, Any]) -> Iterator[Any]:
    yield str(config.get("model_type"))
    for nested in config.values():
        if isinstance(nested, Mapping):
            yield from _model_types(nested)
