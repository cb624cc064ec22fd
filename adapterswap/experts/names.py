"""Map the names in an expert's file to the base's modules, and tell how the base stores them: out×in or in×out.

The canonical name is the module's name in the model that the installed transformers builds from the base's config. An
expert may use another one: transformers 4 called the layers of a multimodal model `language_model.model.layers`, the
text-only model with the same decoder calls them `model.layers`, and Mixtral's router was in `block_sparse_moe`. Names
are matched by transformers' own renaming rules, then by exchanging the prefix of the list of layers. A name that fits
no module is refused. (Wrappers such as `_orig_mod.` are removed when a file is read: see `experts.keys`.)

Building an empty model takes a second or two, so it is done only if names differ. Knows models and names; reads no
tensor.

An adapter's config does not say which: PEFT keeps one `fan_in_fan_out` for all modules, the value of the last one that
it adapted, so GPT-2 with LoRA on `attn.c_proj` and `lm_head` says false. The class of the base's own module decides. If
the checkpoint's headers leave it open, transformers builds an empty model. Importing transformers takes seconds, so
this is skipped for models without Conv1D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from adapterswap.errors import AdapterswapError, BaseModelError, ExpertError
from adapterswap.experts.adapter import Adapter, LoraModule, OpaqueModule, Part, by_layer
from adapterswap.experts.keys import is_bias
from adapterswap.files.text import read_small
from adapterswap.model.anatomy import (
    FusedParameter,
    adaptable_weights,
    conversions,
    empty_language_model,
    empty_model_as_saved,
    fused_parameters,
    rename_keys,
    shape_of,
)
from adapterswap.model.checkpoints import Checkpoint
from adapterswap.model.layers import (
    EMBEDDINGS,
    HEADS,
    before_layers,
    has_both_stacks,
    kind_of,
    layer_container,
    layer_of,
    of_any_stack,
)

Shape = tuple[int, int]  # out, in

# Prefixes of the list of layers that one class of a model has and another class with the same decoder lacks.
_NEUTRAL = frozenset({"model", "language_model", "text_model", "thinker", "llm"})
_EXPERTS = ".experts."

_Module = TypeVar("_Module", bound=Part)


class ModelNames:
    """The modules of a model by name, and the names under which experts may have stored them.

    Attributes:
        name: the model's name in messages.
        container: the language model's list of layers; None if there is none.
    """

    def __init__(self, model: Any, name: str) -> None:
        """Args: model: a transformers model, with or without weights; name: its name in messages."""
        self.name = name
        self._shapes: dict[str, Shape | None] = {
            module: shape_of(getattr(part, "base_layer", part)) for module, part in model.named_modules() if module
        }
        adaptable = (
            name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.dim() in (2, 3)
        )
        self._shapes |= dict.fromkeys(adaptable)  # PEFT adapts them by their own names (`target_parameters`)
        self.container = layer_container(adaptable_weights(model))
        self._rename = rename_keys(model)
        self._model = model

    def find(self, module: str, container: str | None, shape: Shape | None = None) -> str | None:
        """The canonical name of a module; None if no module of the model fits, or several do.

        Args:
            module: its name in an expert.
            container: the expert's own list of layers.
            shape: (out, in) of its weight, which must match unless the name is already the model's own.
        """
        if module in self._shapes:
            return module
        start, within, end = module.rpartition(_EXPERTS)
        if within and end[:1].isdigit():  # one expert of a layer; in memory all experts are one module
            parent = self.find(start, container)
            return f"{parent}{within}{end}" if parent and f"{parent}.experts" in self._shapes else None
        fitting = (name for name in self._candidates(module, container) if self._fits(name, shape))
        return next(fitting, None)

    @property
    def is_multimodal(self) -> bool:
        """Whether the language model is only a part of the model."""
        config = self._model.config
        return config.get_text_config() is not config

    def are_text_only(self, modules: Iterable[str]) -> bool:
        """Whether all these modules are in the text-only class with the same language model, under these names."""
        config = self._model.config.get_text_config()
        try:
            model = ModelNames(empty_language_model(config, self.name), self.name)
        except AdapterswapError:  # transformers has no such class
            return False
        return all(named(module, partial(model.find, container=None)) == module for module in modules)

    def older(self, module: str) -> str:
        """The module's name in transformers 4 and in the Hub's checkpoints, by transformers' renamings in reverse."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(self._model, add_legacy=False)
        back = [
            rule.reverse_transform()
            for rule in rules[::-1]
            # A prefix change of the whole model belongs to another class; it is not an older name of this one.
            if isinstance(rule, WeightRenaming) and not (isinstance(rule, PrefixChange) and not rule.scope_prefix)
        ]
        old: str = rename_source_key(f"{module}.weight", back, [], reverse=True)[0].removesuffix(".weight")
        if self.find(old, layer_container([old])) != module:
            raise BaseModelError(
                f"transformers has no rule that maps a name of transformers 4 to {module} in {self.name}",
                "Choose other `names` for the result",
                parameter="names",
            )
        return old

    def exchange(self, module: str, ours: str | None, theirs: str | None) -> str | None:
        """`module` with the prefix of the list `ours` replaced by that of `theirs`.

        None if the module does not have this prefix, or the lists differ in more than the language model's prefix.
        """
        if ours is None or theirs is None:
            return None
        if has_both_stacks(ours) or has_both_stacks(theirs):
            ours, theirs = of_any_stack(ours), of_any_stack(theirs)
        if not _same_decoder(ours, theirs):
            return None
        start, root = before_layers(ours), before_layers(theirs)
        return f"{root}{module.removeprefix(start)}" if module.startswith(start) else None

    def _candidates(self, module: str, container: str | None) -> Iterator[str]:
        yield self._renamed(module)
        moved = self.exchange(module, container, self.container)
        if moved is not None:
            yield from (moved, self._renamed(moved))
        last = module.rpartition(".")[2]
        if last in EMBEDDINGS | HEADS:  # outside the layers, under its own prefix
            ends = [name for name in self._shapes if name.rpartition(".")[2] == last]
            yield from ends if len(ends) == 1 else ()

    def _renamed(self, module: str) -> str:
        return (self._rename(f"{module}.weight") or "").removesuffix(".weight")

    def _fits(self, name: str, shape: Shape | None) -> bool:
        return name in self._shapes and (shape is None or self._shapes[name] in (None, shape))


def names_of_base(folder: Path, name: str) -> ModelNames:
    """The names of the model that the config.json in a folder describes; `name` is the model's name in messages."""
    return _built(folder, name, read_small(folder / "config.json", "Pass a base model's folder, with its config.json"))


@lru_cache(maxsize=4)
def _built(folder: Path, name: str, config: bytes) -> ModelNames:
    return ModelNames(empty_model_as_saved(folder, name), name)


def named(name: str, of_module: Callable[[str], str | None]) -> str | None:
    """The name that `of_module` gives to a module, or to the module of a trained bias; None if it returns None."""
    if not is_bias(name):
        return of_module(name)
    module = of_module(name.removesuffix(".bias"))
    return f"{module}.bias" if module else module


def under_canonical_names(adapter: Adapter, names: ModelNames, expert: str) -> Adapter:
    """The adapter with every module under its canonical name.

    Args:
        adapter: the opened adapter.
        names: the base's names.
        expert: the adapter's name, for messages.
    """
    mapping: dict[str, str] = {}
    for module in adapter.parts.values():
        lora = module.lora if isinstance(module, OpaqueModule) else module
        shape = (lora.out_features, lora.in_features) if isinstance(lora, LoraModule) else None
        canonical = named(module.name, partial(names.find, container=adapter.container, shape=shape))
        if canonical is None:
            raise ExpertError(
                f"{expert} adapts {module.name}, but {names.name} has no module of this shape under this or an older "
                "name",
                "Pass the base that the experts adapt as `base_model`, or save the expert again with this version of "
                "transformers",
                parameter="base_model",
            )
        mapping[module.name] = canonical
    return renamed_adapter(adapter, mapping, expert, names.container)


def renamed_adapter(adapter: Adapter, mapping: Mapping[str, str], expert: str, container: str | None) -> Adapter:
    """The adapter with its modules renamed. Its file keeps the old names and is read by them.

    Args:
        adapter: the adapter.
        mapping: old name → new name, for every module.
        expert: the adapter's name, for messages.
        container: the list of layers under the new names.
    """
    if all(new == old for old, new in mapping.items()):
        return adapter
    for parts in ({**adapter.modules, **adapter.opaque}, adapter.saved):
        check_distinct({old: mapping[old] for old in parts}, expert)
    original = {mapping[name]: adapter.original.get(name, name) for name in adapter.parts}

    def moved(module: _Module) -> _Module:
        name = mapping[module.name]
        place: dict[str, Any] = {"name": name, "layer": layer_of(name, container), "kind": kind_of(name)}
        if isinstance(module, OpaqueModule) and module.lora is not None:
            return replace(module, lora=replace(module.lora, **place), **place)
        return replace(module, **place)

    modules = {module.name: module for module in map(moved, adapter.modules.values())}
    saved = {module.name: module for module in map(moved, adapter.saved.values())}
    opaque = {module.name: module for module in map(moved, adapter.opaque.values())}
    parts_moved: list[Part] = [*modules.values(), *opaque.values(), *saved.values()]
    layered = any(part.layer is not None for part in parts_moved)
    return replace(
        adapter,
        modules=by_layer(modules),
        saved=by_layer(saved),
        opaque=by_layer(opaque),
        container=container if layered else None,
        renamed=True,
        original=original,
    )


def check_distinct(mapping: Mapping[str, str], whose: str) -> None:
    """Raise `ExpertError` if two names of `whose` would become the same."""
    old_names: dict[str, str] = {}
    for old, new in mapping.items():
        if new in old_names:
            raise ExpertError(
                f"{whose}: {old_names[new]} and {old} are two names of one module, {new}", "Save the expert again"
            )
        old_names[new] = old


def _same_decoder(first: str, second: str) -> bool:
    """Whether two lists of layers may be the same: they differ only in prefixes of the language model."""
    first_parts, second_parts = ([part for part in name.split(".") if part not in _NEUTRAL] for name in (first, second))
    return first_parts == second_parts


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
        """Whether the weight stored under `key` is a Conv1D's; False for an embedding's, and for other tensors."""
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
        """
        name = self._names.find(module, container)
        return None if name is None else self.stored_keys.get(f"{name}.{parameter}")

    def source_of(self, module: str, parameter: str, container: str | None) -> str | None:
        """A stored tensor from which transformers computes a parameter of an adapter's module, rather than renaming it:
        it may hold queries, keys and values. None if there is none. The arguments are those of `stored_key`.
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
