"""The base as transformers builds it, without weights: one name, layer, kind, shape and tie for each of its weights.

The canonical name of a module is that in the model that the installed transformers builds from the base's config. An
expert or a checkpoint may use another one: transformers 4 called the layers of a multimodal model
`language_model.model.layers`, the text-only model with the same decoder calls them `model.layers`, Mixtral's router was
in `block_sparse_moe`, GPT-2's keys lack `transformer.`, and NeoX calls its head `embed_out`. Names are matched by
transformers' own renaming rules, then by exchanging the prefix of the list of layers. A name that fits no module has no
canonical name. (Wrappers such as `_orig_mod.` are removed when a file is read: see `experts.keys`.)

Families also name ends and ties differently (`embed_tokens` and `lm_head`, `tokens_embed`, `output_projection`, …), and
without `tie_word_embeddings` in the config the model's class decides; Conv1D stores its weights transposed; and
transformers 5 keeps a layer's experts in two parameters, which checkpoints may store matrix by matrix.

An empty model takes a second or two, most of it for importing transformers, so it is built only where headers do not
decide (see `Checkpoint`), and once for one config. Nothing is downloaded, no code of a repository is run, and no tensor
is read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap.core.model.layers import (
    Kind,
    ModuleName,
    before_layers,
    has_both_stacks,
    layer_container,
    of_any_stack,
)
from adapterswap.kit.errors import AdapterswapError, BaseModelError, reason_of
from adapterswap.kit.files.text import read_small

Shape = tuple[int, int]  # out, in

# PEFT's task types that change the model's class → transformers' class for them.
_TASK_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}

# Prefixes of the list of layers that one class of a model has and another class with the same decoder lacks.
_NEUTRAL = frozenset({"model", "language_model", "text_model", "thinker", "llm"})
_EXPERTS = ".experts."
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Name the model in whatever transformers raises: with an untested config, a model class can raise anything."""
    try:
        yield
    except AdapterswapError:
        raise
    except Exception as error:
        raise BaseModelError(
            f"{name} cannot be built by transformers: {reason_of(error)}",
            "Use a model with a valid config.json that the installed transformers supports without remote code",
            parameter="base_model",
        ) from None


def read_config(folder: Path, name: str) -> Any:
    """The transformers config in a folder; `name` is the model's name in messages."""
    with _explained(name):
        return _config(folder)


_ATTENTION = (None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    parts = [config]
    for name in config.sub_configs:
        parts.append(getattr(config, name, None))

    for part in parts:
        chosen = getattr(part, "_attn_implementation", None)
        names = chosen.values() if isinstance(chosen, dict) else [chosen]
        for name in names:
            if name not in _ATTENTION:  # of a repository on the Hub, transformers would run compiled code
                raise ValueError(f"its config asks for the attention {name!r}, which is not one of transformers' own")
    return config


def language_model_class(config: Any, name: str) -> Any:
    """The auto class of transformers that opens a config's model to read and write text.

    That is the causal language model if transformers has one for the config: it may be the text model inside of a
    multimodal one. Otherwise it is the multimodal model, whose language model answers texts without images or audio.

    Args:
        config: the transformers config.
        name: the model's name in messages.

    Raises:
        BaseModelError: transformers has neither for this config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM

    if type(config) in AutoModelForMultimodalLM._model_mapping:
        model = AutoModelForMultimodalLM._model_mapping[type(config)]
        # Their texts go through an encoder, or they write no text.
        if not config.is_encoder_decoder and model.can_generate():
            return AutoModelForMultimodalLM

    raise BaseModelError(
        f"{name} is of the type {config.model_type}, and transformers has no decoder for it that continues texts",
        "Use a causal language model, or a multimodal model whose language model is a decoder",
        parameter="base_model",
    )


def empty_language_model(config: Any, name: str) -> Any:
    """The modules of a config's language model; `name` is the model's name in messages. See `language_model_class`."""
    import torch

    with _explained(name), torch.device("meta"):
        return language_model_class(config, name).from_config(config, trust_remote_code=False)


def empty_model(
    folder: Path, name: str, *, to_adapt: bool = False, task_type: str | None = None, model_class: str | None = None
) -> Any:
    """A model of a folder's config.json without weights, on torch's meta device, for a caller that changes it.

    Its class is that of `architectures` in the config. This may be more than a language model, for example a vision
    model, or less, without a head. A config that names no class gets transformers' own choice: the multimodal model if
    there is one, else the causal language model.

    Args:
        folder: the folder with config.json.
        name: the model's name in messages.
        to_adapt: the class for a new adapter instead: a causal language model, unless the model is multimodal.
        task_type: PEFT's, for the class of this task instead, where transformers has one.
        model_class: the name of this class of transformers instead.
    """
    with _explained(name):
        return _empty(_config(folder), to_adapt=to_adapt, task_type=task_type, model_class=model_class)


def _empty(config: Any, *, to_adapt: bool, task_type: str | None = None, model_class: str | None = None) -> Any:
    import torch
    import transformers

    if model_class is not None:
        build = getattr(transformers, model_class)._from_config
    else:
        build = _builder(config, to_adapt=to_adapt, task_type=task_type)
    with torch.device("meta"):
        return build(config)


def _builder(config: Any, *, to_adapt: bool, task_type: str | None) -> Callable[[Any], Any]:
    """What builds the model of a config; see `empty_model`."""
    import transformers  # whose auto classes take half a second to import

    multimodal = config.get_text_config() is not config

    # The auto class for the task, or for a new adapter
    chosen = getattr(transformers, _TASK_CLASSES.get(task_type or "", ""), None)
    if chosen is not None and type(config) not in chosen._model_mapping:
        chosen = None
    if chosen is None and to_adapt and not multimodal:
        chosen = transformers.AutoModelForCausalLM

    # Else the class that the config names
    names = config.architectures or []
    if chosen is None and names:
        if not hasattr(transformers, names[0]):
            raise ValueError(f"transformers has no {names[0]}")
        build: Callable[[Any], Any] = getattr(transformers, names[0])._from_config
        return build

    # Else transformers' own choice
    if chosen is None:
        chosen = transformers.AutoModelForCausalLM
        if multimodal and type(config) in transformers.AutoModelForMultimodalLM._model_mapping:
            chosen = transformers.AutoModelForMultimodalLM
    return partial(chosen.from_config, trust_remote_code=False)


@lru_cache(maxsize=4)
def _built(folder: Path, config: bytes, to_adapt: bool, model_class: str | None) -> Base:
    opened = _config(folder)
    named = opened.architectures or [None]
    if (model_class is not None and model_class == named[0]) or (to_adapt and _is_saved_to_adapt(opened)):
        return _built(folder, config, False, None)
    return Base(_empty(opened, to_adapt=to_adapt, model_class=model_class))


def _is_saved_to_adapt(config: Any) -> bool:
    """Whether a model was saved in the class that a new adapter is for."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if not config.architectures:
        return True
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if config.architectures[0] == getattr(language_model, "__name__", None):
        return True
    # A multimodal model is adapted in its own class.
    return config.get_text_config() is not config


class Weight(NamedTuple):
    """The weight of a module that LoRA can adapt.

    Attributes:
        name: the module's full name in the model.
        out_features, in_features: the size of its ΔW.
        embedding: whether it belongs to an `nn.Embedding`; its ΔW is width×vocabulary.
        transposed: whether it is stored in×out, as a Conv1D's or an embedding's weight is.
        tied: the other modules with the same weight, such as the head that is tied to an embedding.
        layer: the index of its transformer layer; None outside the layers.
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
        return ModuleName(self.name).kind

    @property
    def shape(self) -> str:
        """The shape as text, in the form of `LoraModule.shape`."""
        text = f"{self.out_features}×{self.in_features}"
        if self.embedding:
            text += " (an embedding)"
        return text


def shape_of(module: Any) -> Shape | None:
    """(out, in) of the ΔW of a linear layer, an embedding, or a LoRA layer around either; None for anything else.

    Layers of other libraries, such as quantized ones, have the same attributes as torch's.
    """
    attributes = (("out_features", "in_features"), ("embedding_dim", "num_embeddings"), ("nf", "nx"))
    for out, into in attributes:
        sizes = getattr(module, out, None), getattr(module, into, None)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return sizes[0], sizes[1]
    return None


class ExpertRows(NamedTuple):
    """Rows `start` to `stop` of one expert's matrix in a mixture."""

    expert: int
    start: int
    stop: int


class FusedParameter(NamedTuple):
    """A parameter with a matrix for each expert: (experts, rows, columns).

    Attributes:
        name: its name in the model.
        shape: its shape.
        transposed: whether each matrix is in×out, as PEFT sees it.
        key: the stored tensor that equals the parameter; None if there is none.
        parts: otherwise the stored tensors that hold the rows of its matrices; empty if they do not have this form.
    """

    name: str
    shape: tuple[int, int, int]
    transposed: bool
    key: str | None
    parts: Mapping[str, ExpertRows]


class Base(Mapping[str, Weight]):
    """The weights of a transformers model that LoRA can adapt, by module name and in the model's order: those of every
    Linear, Conv1D and Embedding. Tied modules have one each. It also knows the model's other modules and parameters by
    name, and what files call them."""

    def __init__(self, model: Any) -> None:
        """Args: model: a transformers model, with or without weights."""
        self._model = model

    def __getitem__(self, module: str) -> Weight:
        return self._weights[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @cached_property
    def _weights(self) -> dict[str, Weight]:
        import torch
        from transformers.pytorch_utils import Conv1D

        kinds = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
        modules = {name: module for name, module in self._model.named_modules() if isinstance(module, kinds)}

        # Which of them share a weight
        parameter_of = {name: self.parameters.get(f"{name}.weight", name) for name in modules}
        sharing: dict[str, list[str]] = {}
        for name, parameter in parameter_of.items():
            sharing.setdefault(parameter, []).append(name)

        container = layer_container(modules)
        weights = {}
        for name, module in modules.items():
            shape = shape_of(module)
            assert shape is not None  # true of all three kinds
            out_features, in_features = shape
            embedding = isinstance(module, torch.nn.Embedding)
            others = [other for other in sharing[parameter_of[name]] if other != name]
            weights[name] = Weight(
                name,
                out_features,
                in_features,
                embedding=embedding,
                transposed=embedding or isinstance(module, Conv1D),
                tied=tuple(others),
                layer=ModuleName(name).layer(container),
            )
        return weights

    @staticmethod
    def class_for(task_type: str) -> str:
        """transformers' class for one of PEFT's task types."""
        return _TASK_CLASSES.get(task_type, "AutoModelForCausalLM")

    @property
    def class_name(self) -> str:
        """The model's class in transformers."""
        return type(self._model).__name__

    @property
    def task(self) -> str | None:
        """PEFT's task type for this class; None if it has none. PEFT's class for a task calls the model with token ids,
        and that for causal language models prepares inputs for generation."""
        import transformers

        model_class = type(self._model)
        if self._model.can_generate():
            return "CAUSAL_LM"
        if "input_ids" not in inspect.signature(model_class.forward).parameters:
            return None
        for task, auto_class in _TASK_CLASSES.items():
            mapping = getattr(transformers, auto_class)._model_mapping
            if mapping.get(type(self._model.config), None) is model_class:
                return task
        return None

    @property
    def auto_mapping(self) -> Mapping[str, str]:
        """The class, as PEFT names it in the config of an adapter without a task type."""
        model_class = type(self._model)
        return {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}

    @property
    def is_multimodal(self) -> bool:
        """Whether the language model is only a part of the model."""
        config = self._model.config
        return config.get_text_config() is not config

    @staticmethod
    def class_of_its_own(folder: Path, name: str) -> str | None:
        """The class in which a model was saved, if that is neither a causal language model nor multimodal: a masked
        language model, a classifier, a reward model, a model without a head.

        Args:
            folder: the folder with config.json.
            name: the model's name in messages.
        """
        import transformers

        with _explained(name):
            config = _config(folder)
        saved = getattr(transformers, (config.architectures or [""])[0] or "", None)
        if saved is None or getattr(saved, "config_class", None) is not type(config):
            return None
        if _is_saved_to_adapt(config):
            return None
        return str(saved.__name__)

    @cached_property
    def container(self) -> str | None:
        """The language model's list of layers; None if there is none."""
        return layer_container(self)

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """Parameter name → the first name of the same parameter: tied parameters have several names."""
        first: dict[int, str] = {}
        names = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names[name] = first.setdefault(id(parameter), name)
        return names

    @cached_property
    def by_parameter(self) -> Mapping[str, Weight]:
        """The weights by parameter name, such as `model.layers.0.self_attn.q_proj.weight`; of tied ones only the
        first."""
        weights = {}
        for module, weight in self.items():
            name = f"{module}.weight"
            if self.parameters.get(name) == name:
                weights[name] = weight
        return weights

    @cached_property
    def tied_head(self) -> tuple[str, str] | None:
        """The parameters of an embedding and of a head that shares its weight; None if no head does."""
        for weight in self.values():
            if not weight.embedding:
                continue
            for other in weight.tied:
                if not self[other].embedding:
                    return f"{weight.name}.weight", f"{other}.weight"
        return None

    @cached_property
    def shared_embeddings(self) -> Mapping[str, tuple[str, ...]]:
        """Embeddings that share a weight, as an encoder's and a decoder's: module → the others that share it."""
        embeddings = {name for name, weight in self.items() if weight.embedding}
        shared = {}
        for name, weight in self.items():
            if len(embeddings & {name, *weight.tied}) > 1:
                shared[name] = weight.tied
        return shared

    def is_in_tower(self, module: str) -> bool:
        """Whether a module belongs to a vision or audio tower or a projector, not to the language model or its head."""
        return not module.startswith(self.language) and not ModuleName(module).is_head

    @property
    def language(self) -> str:
        """The prefix of the language model's modules in a multimodal model; empty in others."""
        if self.container and self.is_multimodal:
            return before_layers(self.container)
        return ""

    @cached_property
    def convert(self) -> Callable[[str], tuple[str, Any, str | None]]:
        """A function from a checkpoint's key to a parameter's name, the rule that makes it of this key and others, and
        the rule's pattern of this key: transformers may fuse tensors (a mixture's experts), split them (Nomic BERT's
        queries, keys and values) or reorder their rows. The name is the first that the rule makes; the rule is None if
        the key is only renamed."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        parameters, prefix = self._model.state_dict(), self._model.base_model_prefix

        def convert(key: str) -> tuple[str, Any, str | None]:
            name, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
            rule = next((rule for rule in converters if pattern in rule.source_patterns), None)
            return name, rule, pattern

        return convert

    def rename(self, key: str) -> str | None:
        """The name that `from_pretrained` gives to a checkpoint's key; None if it does more than rename it."""
        name, rule, _ = self.convert(key)
        if rule is not None:
            return None
        return name

    def find(self, module: str, container: str | None, shape: Shape | None = None) -> str | None:
        """The canonical name of a module; None if no module of the model fits, or several do.

        Args:
            module: its name in an expert, or that of its bias, for whose canonical name this also asks.
            container: the expert's own list of layers.
            shape: (out, in) of its weight, which must match unless the name is already the model's own.
        """
        if module in self._shapes:
            return module
        holder = _holder_of_bias(module)
        if holder:
            holder = self.find(holder, container)
            return holder and f"{holder}.bias"

        # One expert of a layer: in memory all experts are one module.
        start, within, end = module.rpartition(_EXPERTS)
        if within and end[:1].isdigit():
            parent = self.find(start, container)
            name = f"{parent}{within}{end}"
            if parent and (self._is_stacked(module) or self._is_stacked(name)):
                return name
            return None

        for name in self._candidates(module, container):
            if name in self._shapes and (shape is None or self._shapes[name] in (None, shape)):
                return name
        return None

    def _is_stacked(self, module: str) -> bool:
        """Whether a mixture's checkpoints may hold the matrix of this one expert, which transformers stacks on others;
        those of gpt-oss hold all experts of a layer in one tensor."""
        name, rule, _ = self.convert(f"{module}.weight")
        return rule is not None and name in self._shapes

    def parameter_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter as the model holds it; None if it has none of this name."""
        try:
            return tuple(self._model.get_parameter(name).shape)
        except AttributeError:
            return None

    def find_parameter(self, name: str, container: str | None) -> str | None:
        """The canonical name of a parameter, by that of its module; see `find`."""
        module, _, parameter = name.rpartition(".")
        found = self.find(module, container)
        return found and f"{found}.{parameter}"

    @cached_property
    def _shapes(self) -> dict[str, Shape | None]:
        """Every module, and the parameters that PEFT adapts by their own names (`target_parameters`)."""
        shapes: dict[str, Shape | None] = {}
        for module, part in self._model.named_modules():
            if module:
                shapes[module] = shape_of(getattr(part, "base_layer", part))
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if parameter.dim() in (2, 3):
                shapes[name] = None
        return shapes

    def are_text_only(self, modules: Iterable[str]) -> bool:
        """Whether all these modules are in the text-only class with the same language model, under these names."""
        config = self._model.config.get_text_config()
        try:
            model = Base(empty_language_model(config, "the language model"))
        except AdapterswapError:  # transformers has no such class
            return False
        return all(model.find(module, None) == module for module in modules)

    def older(self, module: str) -> str:
        """The name of a module, or of its bias, in transformers 4 and in the Hub's checkpoints: by transformers'
        renamings in reverse."""
        holder = _holder_of_bias(module)
        if holder:
            return f"{self.older(holder)}.bias"

        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

        # A prefix change of the whole model belongs to another class; it is not an older name of this one.
        back = []
        for rule in get_model_conversion_mapping(self._model, add_legacy=False)[::-1]:
            is_of_another_class = isinstance(rule, PrefixChange) and not rule.scope_prefix
            if isinstance(rule, WeightRenaming) and not is_of_another_class:
                back.append(rule.reverse_transform())

        old: str = rename_source_key(f"{module}.weight", back, [], reverse=True)[0].removesuffix(".weight")
        if self.find(old, layer_container([old])) != module:
            raise BaseModelError(
                f"transformers has no rule that maps a name of transformers 4 to {module} of {self.class_name}",
                "Choose other `names` for the result",
                parameter="names",
            )
        return old

    @staticmethod
    def exchange(module: str, ours: str | None, theirs: str | None) -> str | None:
        """`module` with the prefix of the list `ours` replaced by that of `theirs`.

        None if the module does not have this prefix, or the lists differ in more than the language model's prefix.
        """
        if ours is None or theirs is None:
            return None
        if has_both_stacks(ours) or has_both_stacks(theirs):
            ours, theirs = of_any_stack(ours), of_any_stack(theirs)

        # Two lists of layers may be the same if they differ only in prefixes of the language model.
        our_parts = [part for part in ours.split(".") if part not in _NEUTRAL]
        their_parts = [part for part in theirs.split(".") if part not in _NEUTRAL]
        start = before_layers(ours)
        if our_parts != their_parts or not module.startswith(start):
            return None
        return f"{before_layers(theirs)}{module.removeprefix(start)}"

    def _candidates(self, module: str, container: str | None) -> Iterator[str]:
        """The names that the model may have for a module, likelier ones first."""
        yield self._renamed(module)
        moved = self.exchange(module, container, self.container)
        if moved is not None:
            yield from (moved, self._renamed(moved))
        if ModuleName(module).is_vocabulary(None):  # outside the layers, under its own prefix
            last = module.rpartition(".")[2]
            ends = [name for name in self._shapes if name.rpartition(".")[2] == last]
            if len(ends) == 1:
                yield from ends

    def _renamed(self, module: str) -> str:
        return (self.rename(f"{module}.weight") or "").removesuffix(".weight")

    def fused(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, FusedParameter]:
        """The parameters with three axes, by name; `stored` are a checkpoint's keys and shapes."""
        # The stored tensors that are renamed to each parameter, and those that are fused in it
        alone: dict[str, str] = {}
        sources: dict[str, list[tuple[str, Any, str | None]]] = {}
        for key in stored:
            name, rule, pattern = self.convert(key)
            if rule is None:
                alone[name] = key
            else:
                sources.setdefault(name, []).append((key, rule, pattern))

        modules = dict(self._model.named_modules())
        fused = {}
        for name, parameter in self._model.state_dict().items():
            if parameter.dim() != 3:
                continue
            shape = tuple(parameter.shape)
            parts = _parts(shape, sources.get(name, ()), stored)
            transposed = bool(getattr(modules.get(name.rpartition(".")[0]), "is_transposed", False))
            fused[name] = FusedParameter(name, shape, transposed, alone.get(name), parts)
        return fused

    @staticmethod
    def at(folder: Path, name: str, *, to_adapt: bool = False, model_class: str | None = None) -> Base:
        """The model of `empty_model`, built once for one content of config.json. The arguments are the same."""
        try:
            config = read_small(folder / "config.json", "Pass a base model's folder with it", kind=BaseModelError)
        except BaseModelError as error:
            raise error.recast(parameter="base_model") from None
        with _explained(name):
            return _built(folder.resolve(), config, to_adapt, model_class)


def _holder_of_bias(name: str) -> str | None:
    """The module of a bias; None if the name is a module's."""
    if not name.endswith(".bias"):
        return None
    return name.removesuffix(".bias")


def _parts(
    shape: tuple[int, int, int],
    sources: Iterable[tuple[str, Any, str | None]],
    stored: Mapping[str, tuple[int, ...]],
) -> dict[str, ExpertRows]:
    """The place of each stored matrix, if transformers only stacks matrices and concatenates their rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    # The keys by expert, and by their place in the concatenation
    matrices: dict[int, dict[int, str]] = {}
    for key, rule, pattern in sources:
        operations = [(type(operation), getattr(operation, "dim", None)) for operation in rule.operations]
        only_stacks = operations == [(MergeModulelist, 0)] and len(rule.source_patterns) == 1
        stacks_and_concatenates = operations == [(MergeModulelist, 0), (Concatenate, 1)]
        number = _EXPERT.search(key)
        if number is None or not (only_stacks or stacks_and_concatenates):
            return {}
        matrices.setdefault(int(number[1]), {})[rule.source_patterns.index(pattern)] = key
    if set(matrices) != set(range(shape[0])):
        return {}

    # Each matrix's rows, which must fill the parameter
    parts: dict[str, ExpertRows] = {}
    for expert, keys in matrices.items():
        start = 0
        for _, key in sorted(keys.items()):
            sizes = stored[key]
            if len(sizes) != 2 or sizes[1] != shape[2]:
                return {}
            parts[key] = ExpertRows(expert, start, start + sizes[0])
            start += sizes[0]
        if start != shape[1]:
            return {}
    return parts
