"""Which transformer layer a module belongs to, which kind of module it is, and how many layers a base has.

All of it follows from names: those of modules, and the keys of a base model's config.json. The number of layers is
never guessed from the modules. transformers is asked only for the default of a language model inside a multimodal
config that leaves the number out.

An adapter without a module in a layer does not change that layer; a slice without it does not know, so a slice's record
says which layers it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from adapterswap.core.model.architectures import Architecture, architecture_of
from adapterswap.core.model.lengths import Lengths
from adapterswap.kit.errors import AdapterswapError, BaseModelError, CompositionError, ExpertError, UnsupportedError

Kind = Literal["attention", "mlp", "other"]
Stack = Literal["encoder", "decoder"]
NumLayers = int | Mapping[Stack, int]
"""How deep a model is: one number of layers, or one for each stack of a model with an encoder and a decoder."""

_Layers = TypeVar("_Layers", bound=NumLayers)

STACKS: tuple[Stack, ...] = get_args(Stack)

# The last segment of an input embedding's name and of a head's that may be tied to it.
EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"})
_HEADS = frozenset({"lm_head", "embed_out"})

MAX_LAYERS = 9999  # far beyond any model; a config with more layers is not a real one
_MOST_DIGITS = len(str(MAX_LAYERS))

NO_LAYER = "none"  # the selection of modules outside the layers: embeddings, heads

# The first numbered segment of a name, and the container before it: `model.layers` in
# `model.layers.3.mlp.experts.1.w1`.
_NUMBERED = re.compile(r"^(?P<container>(?:\d*[^.\d][^.]*\.)+?)(?P<layer>\d+)\.")

# Parts of a model besides its language model that have their own lists of layers: vision and audio towers, the modules
# that connect them to the language model, and heads that predict further tokens or images. One of these words in a
# segment of a container's name is enough (`model.vision_tower.encoder.layers`, `thinker.model.visual.blocks`).
_OTHER_PARTS = re.compile(
    r"vision|visual|^vit$|image|video|audio|speech|acoustic|semantic_tokenizer|codec|tower|sam_encoder|protein"
    r"|projector|^projection|merger|connector|resampler|qformer|aligner|cross_attn_layers|adapter"
    r"|^mtp(_|$)|nextn|talker|token2wav|^dit$|diffusion|flow_head|depth_decoder|timestamp|altup|embed_tokens|lm_heads"
)
# Whole models whose own name contains such a word: transformers' `base_model_prefix`, and never the name of a part.
_OWN_NAMES = frozenset({
    "audio_spectrogram_transformer", "bridgetower", "data2vec_audio", "data2vec_vision", "fastspeech2_conformer",
    "speecht5", "unispeech", "unispeech_sat", "videomae", "visual_bert", "vit",
})  # fmt: skip
# Lists of blocks that several layers share, so that an index in them is no layer's (ALBERT's `albert_layer_groups`).
_SHARED_LIST = re.compile(r"(^|\.)\w*layer_groups$")
_AHEAD = re.compile(r"(^|\.)mtp(_|\.|$)|nextn")
_LANGUAGE_PARTS = {"language_model", "text_model", "text_encoder", "text_decoder", "thinker"}
_STACK = re.compile(r"(?P<before>(?:^|\.)(?:text_)?)(?P<stack>encoder|decoder)(?=\.|$)")

_ATTENTION = {
    "self_attn", "self_attention", "attn", "attention", "linear_attn", "cross_attn", "cross_attention",
    "crossattention", "encoder_attn", "multi_head_attention", "SelfAttention", "EncDecAttention",
    "LocalSelfAttention", "TransientGlobalSelfAttention",
}  # fmt: skip
_MLP = {
    "mlp", "mlps", "ffn", "feed_forward", "feedforward", "block_sparse_moe", "moe", "fc1", "fc2", "shared_mlp",
    "mlp_block", "DenseReluDense",
}  # fmt: skip
# Blocks that are attention in one layer and something else in another (Nemotron-H, RecurrentGemma): their projections
# decide. A state-space or convolution block is neither attention nor MLP.
_MIXED = {"mixer", "temporal_block"}
_IN_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
_IN_MLP = {"up_proj", "down_proj", "gate_proj", "gate", "experts", "shared_experts"}

# Model families use different keys for this number. `text_config` and similar keys hold the language model's part.
# (For a decoder that was taken out of an encoder-decoder, `num_hidden_layers` may be the encoder's.)
_NUM_LAYERS_KEYS = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_STACKED_KEYS: tuple[tuple[str, str], ...] = (  # (encoder, decoder)
    ("encoder_layers", "decoder_layers"),  # BART, M2M100 (NLLB), Marian, Whisper
    ("num_layers", "num_decoder_layers"),  # T5 and similar models
    ("num_encoder_layers", "num_decoder_layers"),  # ProphetNet
    ("encoder_num_hidden_layers", "decoder_num_hidden_layers"),  # Moonshine
)
_LAYER_TYPES_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern")  # one entry for each layer
_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


# A stack inside itself (SpeechT5's `encoder.wrapped_encoder.layers`).
_WRAPPED_STACK = re.compile(r"(?<=^wrapped_)(encoder|decoder)$")
_ANY_STACK = "*"  # in the list of layers of both stacks: `model.*.layers`


def layer_container(names: Iterable[str]) -> str | None:
    """The module list that holds the language model's layers, such as `model.layers`.

    Lists of layers in other parts of a model (a vision tower, a projector, a multi-token-prediction head) do not count,
    nor do lists of blocks that several layers share: their modules are outside the layers. If an encoder and a decoder
    use the same name for their lists, the result is `model.*.layers`.

    Returns:
        The list's name; None if no name is in a list, or if several lists remain (see `check_one_list`).
    """
    lists = _lists_of_layers(names)
    if len(lists) != 1:
        return None
    return lists[0]


def check_one_list(expert: str, names: Iterable[str], *, shared: bool = False) -> None:
    """Raise `UnsupportedError` if modules are in several lists of layers, so that a layer's number means several, or in
    blocks that several layers share, unless `shared` allows that."""
    names = list(names)
    lists = _lists_of_layers(names)
    if len(lists) > 1:
        raise UnsupportedError(
            f"{expert} has several lists of layers: {', '.join(lists)}",
            "Choose a composition without layers, such as a soup. Layers need a model with one list of them, with one "
            "under `language_model`, or with an encoder and a decoder that use the same name for theirs",
        )
    if lists or shared:
        return

    for name in names:
        blocks = ModuleName(name).shared_list
        if blocks is not None:
            raise UnsupportedError(
                f"{expert} adapts blocks that several layers share ({blocks}), so no layer has weights of its own",
                "Choose a composition without layers, such as a soup",
            )


def _lists_of_layers(names: Iterable[str]) -> list[str]:
    """The lists that may hold the language model's layers."""
    containers = set()
    for name in names:
        match = _NUMBERED.match(name)
        if match is None:
            continue
        if len(match["layer"].lstrip("0")) > _MOST_DIGITS:
            raise ExpertError(
                f"{name} has a layer number above {MAX_LAYERS - 1}, but no model is that deep",
                "Save the weights again",
            )
        containers.add(match["container"][:-1])

    # Blocks that several layers share, towers and projectors are left out.
    inside = []
    for container in sorted(containers):
        if not _SHARED_LIST.search(container) and not _is_of_another_part(container.split(".")):
            inside.append(container)
    if len(inside) <= 1:
        return inside

    # Of several, one under the language model's name, or the two of an encoder and a decoder
    named = [name for name in inside if _LANGUAGE_PARTS.intersection(name.split("."))]
    for lists in (named, inside):
        if len(lists) == len(STACKS) and len({of_any_stack(name) for name in lists}) == 1:
            return [of_any_stack(lists[0])]
    if len(named) == 1:
        return named
    return inside


def _is_of_another_part(segments: Sequence[str]) -> bool:
    """Whether a segment names a tower, a projector or the like; the first one may be the model's own name."""
    if segments[0] in _OWN_NAMES:
        segments = segments[1:]
    return any(map(_OTHER_PARTS.search, segments))


class ModuleName(str):
    """The name of a module in a model, and what it says about the module."""

    __slots__ = ()

    @property
    def stack(self) -> Stack | None:
        """The stack, from the first segment of the name that is an encoder's or a decoder's; None without one.

        Decoder-only models may have such a segment too (OPT's `model.decoder.layers`): see `Depth.stack_of`.
        """
        match = _STACK.search(self)
        if match is None:
            return None
        return "encoder" if match["stack"] == "encoder" else "decoder"

    def in_stack(self, stack: Stack) -> str:
        """The name of the same module in the encoder or the decoder."""
        return _STACK.sub(rf"\g<before>{stack}", self, count=1)

    def within(self, layer: int) -> str:
        """The part of the name after the layer: `self_attn.q_proj`."""
        return self.partition(f".{layer}.")[2]

    def layer(self, container: str | None) -> int | None:
        """The index of the module's transformer layer; None for embeddings, heads and other towers."""
        match = _NUMBERED.match(self)
        if match is None or container is None:
            return None
        own_container = match["container"][:-1]
        if own_container == container or (_ANY_STACK in container and of_any_stack(own_container) == container):
            return int(match["layer"])
        return None

    @property
    def shared_list(self) -> str | None:
        """The list of blocks that holds the module, if several layers share each block; else None."""
        match = _NUMBERED.match(self)
        if match is None or not _SHARED_LIST.search(match["container"][:-1]):
            return None
        return match["container"][:-1]

    @property
    def kind(self) -> Kind:
        """The kind of the module, by the names that model families use."""
        segments = self.split(".")
        for place, segment in enumerate(segments):
            if segment in _ATTENTION:
                return "attention"
            if segment in _MLP:
                return "mlp"
            if segment in _MIXED:
                within = set(segments[place + 1 :])
                if within & _IN_ATTENTION:
                    return "attention"
                if within & _IN_MLP:
                    return "mlp"
                return "other"
        return "other"

    def ends(self) -> Iterator[str]:
        """The name, and the part of it after each of its dots."""
        yield str(self)
        for place, character in enumerate(self):
            if character == ".":
                yield self[place + 1 :]

    def is_ahead(self, layer: int | None, num_layers: NumLayers | None) -> bool:
        """Whether it predicts further tokens, by its name or because its layer follows the last one."""
        if _AHEAD.search(self) is not None:
            return True
        return layer is not None and isinstance(num_layers, int) and layer >= num_layers

    @property
    def is_embedding(self) -> bool:
        """Whether it ends like an input embedding."""
        return self.rpartition(".")[2] in EMBEDDINGS

    @property
    def is_head(self) -> bool:
        """Whether it ends like a head that may be tied to an embedding."""
        return self.rpartition(".")[2] in _HEADS

    def is_vocabulary(self, layer: int | None) -> bool:
        """Whether it is an embedding or a head, whose weight has a row for each token."""
        return layer is None and (self.is_embedding or self.is_head)

    def is_other_part(self, container: str | None) -> bool:
        """Whether it belongs to a tower, a projector or the like, which sees images or audio instead of tokens."""
        layer = self.layer(container)
        return layer is None and not self.is_vocabulary(layer) and _is_of_another_part(self.split("."))


def has_both_stacks(container: str | None) -> bool:
    """Whether a list of layers stands for both an encoder's and a decoder's."""
    return container is not None and _ANY_STACK in container.split(".")


def of_any_stack(container: str) -> str:
    """The name of a list of layers for either stack: `model.*.layers` for `model.decoder.layers`, and for the encoder
    beside a vision tower (T5Gemma 2's `model.encoder.text_model.layers`)."""
    parts = container.split(".")
    place = next((place for place, part in enumerate(parts) if _STACK.fullmatch(part)), None)
    if place is None:
        return container

    renamed = [*parts[:place], _ANY_STACK]
    for part in parts[place + 1 :]:
        if part not in _LANGUAGE_PARTS:
            renamed.append(_WRAPPED_STACK.sub(_ANY_STACK, part))
    return ".".join(renamed)


def before_layers(container: str) -> str:
    """The prefix of the list of layers in module names, such as `model.`; for two stacks, their common prefix."""
    parts = container.split(".")
    end = len(parts) - 1
    if _ANY_STACK in parts:
        end = parts.index(_ANY_STACK)
    return "".join(f"{part}." for part in parts[:end])


class ModelConfig(NamedTuple):
    """The content of a model's config.json, and what it says about the language model."""

    content: Mapping[str, Any]

    @property
    def language(self) -> Mapping[str, Any]:
        """The part that describes the language model; the whole config if it has no such part."""
        for key in _TEXT_CONFIG_KEYS:
            nested = self.content.get(key)
            if isinstance(nested, Mapping):
                return ModelConfig(nested).language
        return self.content

    @property
    def stacked_layers(self) -> NumLayers | None:
        """The number of the language model's layers, or that of each of its stacks; None if it does not say."""
        if self.content.get("is_encoder_decoder"):
            return _stacked(self.content)
        for key in _TEXT_CONFIG_KEYS:
            nested = self.content.get(key)
            if isinstance(nested, Mapping):
                depth = ModelConfig(nested).stacked_layers
                if depth is not None:
                    return depth

        for key in _NUM_LAYERS_KEYS:
            value = self.content.get(key)
            if _is_depth(value):
                return int(value or 0)
        for key in _LAYER_TYPES_KEYS:  # hybrid models whose config has no number of layers
            value = self.content.get(key)
            if isinstance(value, list | str) and 0 < len(value) <= MAX_LAYERS:
                return len(value)

        if self.language is self.content:
            return None
        return _depth_by_default(self.content)

    @property
    def num_layers(self) -> int | None:
        """The number of layers of the language model; None if the config does not say."""
        num_layers = self.stacked_layers
        if num_layers is None or isinstance(num_layers, int):
            return num_layers
        raise UnsupportedError(
            f"The base model ({self.content.get('model_type', 'unknown type')}) has an encoder and a decoder",
            "Use a decoder-only model",
        )

    @property
    def lengths(self) -> Lengths:
        """How long texts may be; `content` is that of a config as transformers opens it (`config.to_dict()`)."""
        return Lengths.of(self.language)

    @property
    def layers_ahead(self) -> int:
        """How many layers that predict further tokens may follow the language model's in their list (DeepSeek, GLM).

        They belong to no layer of the language model; transformers does not load them.
        """
        ahead = self.language.get("num_nextn_predict_layers")
        return ahead if type(ahead) is int and 0 < ahead <= MAX_LAYERS else 0

    @property
    def is_mixture(self) -> bool:
        """Whether its layers may hold a mixture of experts: all such configs count them, under various names."""
        return any("expert" in key for key in self.language)

    @property
    def architecture(self) -> Architecture:
        """What is special about its type of model, without the models nested in it."""
        return architecture_of(self.content)


def _depth_by_default(config: Mapping[str, Any]) -> int | None:
    """The number of layers that transformers gives to the language model of a multimodal config that omits it.

    Older files leave out what equals the default: llava-1.5's `text_config` names only Llama's type and vocabulary.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    try:
        depth = CONFIG_MAPPING[model_type].from_dict(dict(config)).get_text_config().num_hidden_layers
    except Exception:  # with an untested config, a config class can raise anything
        return None
    return depth if _is_depth(depth) else None


def _stacked(config: Mapping[str, Any]) -> dict[Stack, int] | None:
    """The number of layers of each stack; None if the config does not say both."""
    for keys in _STACKED_KEYS:
        values = [config[key] for key in keys if _is_depth(config.get(key))]
        if len(values) == len(STACKS):
            return dict(zip(STACKS, values, strict=True))
    if _is_depth(config.get("num_layers")) and config.get("num_decoder_layers") is None:  # T5: as deep as the encoder
        return dict.fromkeys(STACKS, config["num_layers"])

    # Each stack with a config of its own
    depths: dict[Stack, int] = {}
    for stack in STACKS:
        nested = config.get(stack)
        if isinstance(nested, Mapping):
            depth = ModelConfig(nested).num_layers
            if depth is not None:
                depths[stack] = depth
    if len(depths) < len(STACKS):
        return None
    return depths


def _is_depth(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_LAYERS


class Depth(NamedTuple):
    """How deep a model is: its number of layers, or that of each stack of a model with an encoder and a decoder."""

    num_layers: NumLayers

    def of(self, stack: Stack | None) -> int:
        """The number of layers of a stack; for None, of the model or the deeper of its stacks."""
        if isinstance(self.num_layers, int):
            return self.num_layers
        if stack is None:
            return max(self.num_layers.values())
        return self.num_layers[stack]

    @property
    def stacks(self) -> tuple[Stack | None, ...]:
        """The stacks; `(None,)` for a model with one list of layers."""
        return (None,) if isinstance(self.num_layers, int) else STACKS

    @property
    def layers(self) -> list[tuple[Stack | None, int]]:
        """Every layer, with its stack."""
        layers: list[tuple[Stack | None, int]] = []
        for stack in self.stacks:
            layers += [(stack, layer) for layer in range(self.of(stack))]
        return layers

    def stack_of(self, module: str) -> Stack | None:
        """The stack of a module; None for a model with one list of layers."""
        if isinstance(self.num_layers, int):
            return None
        return ModuleName(module).stack

    def by_stack(self, modules: Iterable[str]) -> dict[Stack | None, list[str]]:
        """The modules of each stack; all under None for a model with one list of layers."""
        if isinstance(self.num_layers, int):
            return {None: [*modules]}
        grouped: dict[Stack | None, list[str]] = {}
        for module in modules:
            grouped.setdefault(ModuleName(module).stack, []).append(module)
        return grouped

    @staticmethod
    def known(
        num_layers: _Layers | None,
        of: str,
        remedy: str,
        *,
        parameter: str | None = "base_model",
        kind: type[AdapterswapError] = BaseModelError,
    ) -> _Layers:
        """The number of layers; an error if the config of the model `of` does not say it."""
        if num_layers is None:
            raise kind(f"the config of {of} does not say how many layers it has", remedy, parameter=parameter)
        return num_layers

    @staticmethod
    def check(
        base: str, actual: NumLayers | None, requested: NumLayers | None, remedy: str, *, parameter: str = "num_layers"
    ) -> None:
        """Raise `CompositionError` if a base has another number of layers than was requested, and both are known."""
        if actual is not None and requested is not None and actual != requested:
            raise CompositionError(
                f"`num_layers` is {Depth(requested)}, but {base} has {Depth(actual)} layers",
                remedy,
                parameter=parameter,
            )

    def __str__(self) -> str:
        """`32`, or `6 encoder and 4 decoder`."""
        if isinstance(self.num_layers, int):
            return str(self.num_layers)
        return " and ".join(f"{count} {stack}" for stack, count in self.num_layers.items())


@lru_cache(maxsize=256)  # called by every rule for every module
def parse_layers(text: str) -> frozenset[int]:
    """The layers in a text such as `0-4,30-31`; empty for `none`."""
    if text == NO_LAYER:
        return frozenset()
    if len(text) > MAX_LAYERS:
        raise ValueError(f"a list of layers is {len(text)} characters long; write ranges, such as 0-4,30-31")

    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of layers; write layers such as 0-4,30-31, or none")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"the range {part.strip()} runs backwards")
        layers.update(range(first, last + 1))
    return frozenset(layers)


def format_layers(layers: Iterable[int]) -> str:
    """The shortest text that `parse_layers` reads as these layers: `0-4,30-31`."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])

    texts = []
    for first, last in ranges:
        texts.append(f"{first}-{last}" if first < last else str(first))
    return ",".join(texts) or NO_LAYER


class KeptLayers(NamedTuple):
    """The layers that a slice keeps, by stack; under None, those of any stack."""

    by_stack: Mapping[Stack | None, frozenset[int]]

    @classmethod
    def of(cls, layers: str | Mapping[Stack, str], stack: str | None = None) -> KeptLayers:
        """Parse `0-4,30-31`, of any stack or of one, or such a text for each stack."""
        stated: list[tuple[Any, Any]] = [(stack, layers)]
        if isinstance(layers, Mapping):
            stated = list(layers.items())

        by_stack: dict[Stack | None, frozenset[int]] = {}
        for key, text in stated:
            if key not in (None, *STACKS):
                raise ValueError(f"{key!r} is not one of {', '.join(STACKS)}")
            by_stack[key] = parse_layers(text)
        return cls(by_stack)

    def has(self, stack: Stack | None, layer: int) -> bool:
        """Whether the layer of this stack is kept."""
        return any(layer in layers for key, layers in self.by_stack.items() if key in (None, stack))

    def __str__(self) -> str:
        parts = []
        for stack, layers in self.by_stack.items():
            where = f"{stack} layers" if stack else "layers"
            parts.append(f"{where} {format_layers(layers)}")
        return " and ".join(parts)
