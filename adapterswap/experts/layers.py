"""Which transformer layer a module belongs to, what kind of module it is, and how many layers a model has.

Names are all that this module looks at: the modules' own, and the keys of a base model's config.json. It never guesses
the number of layers from the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from adapterswap.errors import ExpertError, UnsupportedError

__all__ = [
    "EMBEDDINGS",
    "HEADS",
    "MAX_LAYERS",
    "NO_LAYER",
    "STACKS",
    "KeptLayers",
    "Kind",
    "NumLayers",
    "Stack",
    "before_layers",
    "deepest",
    "depth_of",
    "ends_of",
    "format_depth",
    "format_layers",
    "has_both_stacks",
    "is_ahead",
    "is_vocabulary",
    "kind_of",
    "language_config",
    "layer_container",
    "layer_of",
    "layers_ahead",
    "num_layers_in_config",
    "of_any_stack",
    "parse_layers",
    "same_depth",
    "stack_in",
    "stack_of",
    "stacked_layers_in_config",
    "within_layer",
]

Kind = Literal["attention", "mlp", "other"]
Stack = Literal["encoder", "decoder"]
NumLayers = int | Mapping[Stack, int]
"""How deep a model is: one number of layers, or one for each stack of a model with an encoder and a decoder."""

STACKS: tuple[Stack, ...] = get_args(Stack)

# The last segment of an input embedding's name and of a head's that may be tied to it.
EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"})
HEADS = frozenset({"lm_head", "embed_out"})

MAX_LAYERS = 9999  # far beyond any model; a base's config that says more is not a real one

NO_LAYER = "none"  # the selection of modules outside the layers: embeddings, heads

# The first numbered segment of a name, and the container before it: `model.layers` in
# `model.layers.3.mlp.experts.1.w1`.
_NUMBERED = re.compile(r"^(?P<container>(?:\d*[^.\d][^.]*\.)+?)(?P<layer>\d+)\.")

# Parts of a model beside its language model, which have lists of layers of their own: towers that see or hear, what
# joins them to the language model, heads that predict further tokens or draw. One of these words in a segment of a
# container's name is enough (`model.vision_tower.encoder.layers`, `thinker.model.visual.blocks`, `mtp.layers`).
_OTHER_PARTS = re.compile(
    r"vision|visual|^vit$|image|video|audio|speech|acoustic|semantic_tokenizer|codec|tower|sam_encoder|protein"
    r"|projector|^projection|merger|connector|resampler|qformer|aligner|cross_attn_layers|adapter"
    r"|^mtp(_|$)|nextn|talker|token2wav|^dit$|diffusion|flow_head|depth_decoder|timestamp|altup|embed_tokens|lm_heads"
)
_AHEAD = re.compile(r"(^|\.)mtp(_|\.|$)|nextn")
_LANGUAGE_PARTS = {"language_model", "text_model", "text_decoder", "thinker"}

_ATTENTION = {
    "self_attn", "self_attention", "attn", "attention", "linear_attn", "cross_attn", "cross_attention",
    "crossattention", "encoder_attn", "multi_head_attention", "SelfAttention", "EncDecAttention",
    "LocalSelfAttention", "TransientGlobalSelfAttention",
}  # fmt: skip
_MLP = {
    "mlp", "mlps", "ffn", "feed_forward", "feedforward", "block_sparse_moe", "moe", "fc1", "fc2", "shared_mlp",
    "mlp_block", "DenseReluDense",
}  # fmt: skip
# Blocks that are attention in one layer and something else in the next (Nemotron-H, RecurrentGemma): the projections
# in them tell. A state-space or convolution block is neither attention nor MLP.
_MIXED = {"mixer", "temporal_block"}
_IN_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
_IN_MLP = {"up_proj", "down_proj", "gate_proj", "gate", "experts", "shared_experts"}

# The same number under the names that model families gave it; `text_config` and its like hold the language model's
# part.
# (Of a decoder that was taken out of an encoder-decoder, `num_hidden_layers` may be the encoder's.)
_NUM_LAYERS_KEYS = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_STACKED_KEYS: tuple[tuple[str, str], ...] = (  # (encoder, decoder)
    ("encoder_layers", "decoder_layers"),  # BART, M2M100 (NLLB), Marian, Whisper
    ("num_layers", "num_decoder_layers"),  # T5 and its like
    ("num_encoder_layers", "num_decoder_layers"),  # ProphetNet
    ("encoder_num_hidden_layers", "decoder_num_hidden_layers"),  # Moonshine
)
_LAYER_TYPES_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern")  # one entry for each layer
_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


_ANY_STACK = "*"  # in the list of layers of both stacks: `model.*.layers`


def layer_container(names: Iterable[str]) -> str | None:
    """The module list that holds the language model's layers, such as `model.layers`.

    Lists of layers in other parts of a model (a vision tower, a projector, a multi-token-prediction head) do not count:
    their modules lie outside the layers. An encoder and a decoder whose lists have one name are written as
    `model.*.layers`.

    Returns:
        The list's name; None if no name lies in one.

    Raises:
        UnsupportedError: several lists are left, and not exactly one of them is in a `language_model` or `text_model`.
        ExpertError: a name has a layer beyond any model's.
    """
    names = list(names)
    if deep := next((name for name in names if _is_too_deep(name)), None):
        raise ExpertError(
            f"{deep} has a layer beyond {MAX_LAYERS - 1}, and no model is that deep", "Save the weights again"
        )
    containers = sorted({match["container"][:-1] for name in names if (match := _NUMBERED.match(name))})
    parts = {container: container.split(".") for container in containers}
    inside = [name for name in containers if not any(map(_OTHER_PARTS.search, parts[name]))]
    if len(inside) > 1:
        named = [name for name in inside if _LANGUAGE_PARTS.intersection(parts[name])]
        for lists in (named, inside):
            if len(lists) == len(STACKS) and len({of_any_stack(name) for name in lists}) == 1:
                return of_any_stack(lists[0])
        if len(named) != 1:
            raise UnsupportedError(
                f"The modules lie in several lists of layers: {', '.join(inside)}",
                "Use experts of a model with one list of layers, with one under `language_model`, or with an encoder "
                "and a decoder that name their layers alike",
            )
        return named[0]
    return inside[0] if inside else None


def stack_of(name: str) -> Stack | None:
    """The stack that a name lies in, by its first segment that is `encoder` or `decoder`; None where there is none.

    Decoder-only models may have such a segment too (OPT's `model.decoder.layers`): see `stack_in`.
    """
    return next((segment for segment in name.split(".") if segment in STACKS), None)


def stack_in(name: str, num_layers: NumLayers) -> Stack | None:
    """The stack that a name lies in, of a model that has both; None for other models."""
    return None if isinstance(num_layers, int) else stack_of(name)


def has_both_stacks(container: str | None) -> bool:
    """Whether a list of layers is that of an encoder and of a decoder."""
    return container is not None and _ANY_STACK in container.split(".")


def of_any_stack(container: str) -> str:
    """The name of a list of layers for either stack: `model.*.layers` for `model.decoder.layers`."""
    parts = container.split(".")
    place = next((place for place, part in enumerate(parts) if part in STACKS), None)
    return container if place is None else ".".join([*parts[:place], _ANY_STACK, *parts[place + 1 :]])


def before_layers(container: str) -> str:
    """What stands before the list of layers in the names of a model's modules, such as `model.`.

    Of an encoder-decoder, what stands before both stacks.
    """
    parts = container.split(".")
    parts = parts[: parts.index(_ANY_STACK)] if _ANY_STACK in parts else parts[:-1]
    return "".join(f"{part}." for part in parts)


def within_layer(name: str, layer: int) -> str:
    """What follows the layer in the name of a module: `self_attn.q_proj`."""
    return name.partition(f".{layer}.")[2]


def _is_too_deep(name: str) -> bool:
    match = _NUMBERED.match(name)
    return match is not None and len(match["layer"].lstrip("0")) >= len(str(MAX_LAYERS + 1))


def layer_of(name: str, container: str | None) -> int | None:
    """The index of the transformer layer that module `name` belongs to; None for embeddings, heads, other towers."""
    match = _NUMBERED.match(name)
    if match is None or container is None:
        return None
    found = match["container"][:-1]
    same = found == container or (_ANY_STACK in container and of_any_stack(found) == container)
    return int(match["layer"]) if same else None


def kind_of(name: str) -> Kind:
    """What module `name` is part of, by the names that model families use."""
    segments = name.split(".")
    for place, segment in enumerate(segments):
        if segment in _ATTENTION:
            return "attention"
        if segment in _MLP:
            return "mlp"
        if segment in _MIXED:
            within = set(segments[place + 1 :])
            return "attention" if within & _IN_ATTENTION else "mlp" if within & _IN_MLP else "other"
    return "other"


def ends_of(name: str) -> Iterator[str]:
    """`name`, and what follows each of its dots."""
    yield name
    for place, character in enumerate(name):
        if character == ".":
            yield name[place + 1 :]


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: all of it, where there is nothing else."""
    nested = next((found for key in _TEXT_CONFIG_KEYS if isinstance(found := config.get(key), Mapping)), None)
    return config if nested is None else language_config(nested)


def num_layers_in_config(config: Mapping[str, Any]) -> int | None:
    """The number of layers of the language model that a config.json describes; None where it does not say.

    Raises:
        UnsupportedError: the model has an encoder and a decoder; `stacked_layers_in_config` reads those too.
    """
    found = stacked_layers_in_config(config)
    if found is None or isinstance(found, int):
        return found
    raise UnsupportedError(
        f"the base model ({config.get('model_type', 'unknown type')}) has an encoder and a decoder",
        "Use a decoder-only model",
    )


def stacked_layers_in_config(config: Mapping[str, Any]) -> NumLayers | None:
    """The number of layers of the language model that a config.json describes, or that of each of its stacks.

    None where it does not say.

    Raises:
        UnsupportedError: the model has an encoder and a decoder, and the config does not say how deep both are.
    """
    if config.get("is_encoder_decoder"):
        return _stacked(config)
    for key in _TEXT_CONFIG_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping) and (found := stacked_layers_in_config(nested)) is not None:
            return found
    for key in _NUM_LAYERS_KEYS:
        value = config.get(key)
        if _is_depth(value):
            return int(value or 0)
    for key in _LAYER_TYPES_KEYS:  # hybrid models whose config states no number
        value = config.get(key)
        if isinstance(value, list | str) and 0 < len(value) <= MAX_LAYERS:
            return len(value)
    return None


def layers_ahead(config: Mapping[str, Any]) -> int:
    """How many layers that predict further tokens may follow the language model's in their list (DeepSeek, GLM).

    They belong to no layer of the language model; transformers does not load them.
    """
    ahead = language_config(config).get("num_nextn_predict_layers")
    return ahead if type(ahead) is int and 0 < ahead <= MAX_LAYERS else 0


def is_ahead(name: str, layer: int | None, num_layers: NumLayers | None) -> bool:
    """Whether a module predicts further tokens, by its name or as one of a layer after the last."""
    return _AHEAD.search(name) is not None or (
        layer is not None and isinstance(num_layers, int) and layer >= num_layers
    )


def _stacked(config: Mapping[str, Any]) -> dict[Stack, int]:
    for keys in _STACKED_KEYS:
        values = [config[key] for key in keys if _is_depth(config.get(key))]
        if len(values) == len(STACKS):
            return dict(zip(STACKS, values, strict=True))
    if _is_depth(config.get("num_layers")) and config.get("num_decoder_layers") is None:  # T5: as deep as the encoder
        return dict.fromkeys(STACKS, config["num_layers"])
    nested = [config.get(stack) for stack in STACKS]
    depths = [num_layers_in_config(each) if isinstance(each, Mapping) else None for each in nested]
    if None not in depths:
        return {stack: depth for stack, depth in zip(STACKS, depths, strict=True) if depth is not None}
    raise UnsupportedError(
        f"the base model ({config.get('model_type', 'unknown type')}) has an encoder and a decoder, and its config "
        "does not say how many layers each has",
        "Use a model whose config.json has them, such as T5, BART, M2M100 (NLLB) or Whisper",
    )


def _is_depth(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_LAYERS


def depth_of(stack: Stack | None, num_layers: NumLayers) -> int:
    """The number of layers of a stack; of a model with both stacks and without one named, the deeper one's."""
    if isinstance(num_layers, int):
        return num_layers
    return max(num_layers.values()) if stack is None else num_layers[stack]


def same_depth(one: NumLayers | None, other: NumLayers | None) -> bool:
    """Whether both say the same; one number stands for two stacks of that depth."""
    stacks = [each for each in (one, other) if isinstance(each, Mapping)]
    numbers = [each for each in (one, other) if isinstance(each, int)]
    return one == other or bool(stacks and numbers and set(stacks[0].values()) == {numbers[0]})


def deepest(num_layers: NumLayers) -> int:
    """The number of layers, or that of the deeper stack."""
    return depth_of(None, num_layers)


def format_depth(num_layers: NumLayers) -> str:
    """In words: `32`, or `6 encoder and 4 decoder`."""
    if isinstance(num_layers, int):
        return str(num_layers)
    return " and ".join(f"{count} {stack}" for stack, count in num_layers.items())


@lru_cache(maxsize=256)  # a rule asks for every module
def parse_layers(text: str) -> frozenset[int]:
    """The layers in a text such as `0-4,30-31`; empty for `none`.

    Raises:
        ValueError: the text is not such a list, longer than any list needs to be, or a range runs backwards.
    """
    if text == NO_LAYER:
        return frozenset()
    if len(text) > MAX_LAYERS:
        raise ValueError(f"a list of layers is {len(text)} characters long; write ranges, such as 0-4,30-31")
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of layers; write for instance 0-4,30-31, or none")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"the range {part.strip()} runs backwards")
        layers.update(range(first, last + 1))
    return frozenset(layers)


def is_vocabulary(module: str, layer: int | None) -> bool:
    """Whether a module of that name is an embedding or a head: its weight has a row for each token."""
    return layer is None and module.rpartition(".")[2] in EMBEDDINGS | HEADS


def format_layers(layers: Iterable[int]) -> str:
    """The shortest text that `parse_layers` reads as these layers: `0-4,30-31`."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges) or NO_LAYER


@dataclass(frozen=True)
class KeptLayers:
    """The layers that a slice keeps; with a stack, of that stack alone."""

    layers: frozenset[int]
    stack: Stack | None = None

    @classmethod
    def of(cls, layers: str, stack: str | None = None) -> KeptLayers:
        """From `0-4,30-31`; raises `ValueError` where that is not a list of layers, or there is no such stack."""
        if stack is not None and stack not in STACKS:
            raise ValueError(f"{stack!r} is not one of {', '.join(STACKS)}")
        return cls(parse_layers(layers), next((known for known in STACKS if known == stack), None))

    def holds(self, name: str, layer: int) -> bool:
        """Whether the module of that name and layer is kept."""
        return layer in self.layers and self.stack in (None, stack_of(name))

    def __str__(self) -> str:
        return f"{f'{self.stack} ' if self.stack else ''}layers {format_layers(self.layers)}"
