"""Which transformer layer a module belongs to, what kind of module it is, and how many layers a model has.

Names are all that this module looks at: the modules' own, and the keys of a base model's config.json. It never guesses
the number of layers from the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from adapterswap.errors import ExpertError, UnsupportedError

__all__ = [
    "EMBEDDINGS",
    "HEADS",
    "MAX_LAYERS",
    "NO_LAYER",
    "Kind",
    "ends_of",
    "format_layers",
    "kind_of",
    "language_config",
    "layer_container",
    "layer_of",
    "num_layers_in_config",
    "parse_layers",
]

Kind = Literal["attention", "mlp", "other"]

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
_LANGUAGE_PARTS = {"language_model", "text_model", "text_decoder", "thinker"}

_ATTENTION = {
    "self_attn", "self_attention", "attn", "attention", "linear_attn", "cross_attn", "cross_attention",
    "crossattention", "encoder_attn", "multi_head_attention",
}  # fmt: skip
_MLP = {
    "mlp", "mlps", "ffn", "feed_forward", "feedforward", "block_sparse_moe", "moe", "fc1", "fc2", "shared_mlp",
    "mlp_block",
}  # fmt: skip
# Blocks that are attention in one layer and something else in the next (Nemotron-H, RecurrentGemma): the projections
# in them tell. A state-space or convolution block is neither attention nor MLP.
_MIXED = {"mixer", "temporal_block"}
_IN_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
_IN_MLP = {"up_proj", "down_proj", "gate_proj", "gate", "experts", "shared_experts"}

# The same number under the names that model families gave it; `text_config` and its like hold the language model's
# part.
_NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_TYPES_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern")  # one entry for each layer
_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


def layer_container(names: Iterable[str]) -> str | None:
    """The module list that holds the language model's layers, such as `model.layers`.

    Lists of layers in other parts of a model (a vision tower, a projector, a multi-token-prediction head) do not count:
    their modules lie outside the layers.

    Returns:
        The list's name; None if no name lies in one.

    Raises:
        UnsupportedError: several lists are left (an encoder and a decoder, say), and not exactly one of them is in a
            `language_model` or `text_model`.
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
        if len(named) != 1:
            raise UnsupportedError(
                f"The modules lie in several lists of layers: {', '.join(inside)}",
                "Use experts of a model with one list of layers (decoder-only), or with one under `language_model`",
            )
        return named[0]
    return inside[0] if inside else None


def _is_too_deep(name: str) -> bool:
    match = _NUMBERED.match(name)
    return match is not None and len(match["layer"].lstrip("0")) >= len(str(MAX_LAYERS + 1))


def layer_of(name: str, container: str | None) -> int | None:
    """The index of the transformer layer that module `name` belongs to; None for embeddings, heads, other towers."""
    match = _NUMBERED.match(name)
    return int(match["layer"]) if match and match["container"][:-1] == container else None


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
        UnsupportedError: the model has an encoder and a decoder.
    """
    if config.get("is_encoder_decoder"):
        raise UnsupportedError(
            f"the base model ({config.get('model_type', 'unknown type')}) has an encoder and a decoder",
            "Use a decoder-only model",
        )
    for key in _TEXT_CONFIG_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping) and (found := num_layers_in_config(nested)) is not None:
            return found
    for key in _NUM_LAYERS_KEYS:
        value = config.get(key)
        if type(value) is int and 0 < value <= MAX_LAYERS:
            return value
    for key in _LAYER_TYPES_KEYS:  # hybrid models whose config states no number
        value = config.get(key)
        if isinstance(value, list | str) and 0 < len(value) <= MAX_LAYERS:
            return len(value)
    return None


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


def format_layers(layers: Iterable[int]) -> str:
    """The shortest text that `parse_layers` reads as these layers: `0-4,30-31`."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges) or NO_LAYER
