"""Which transformer layer a module belongs to, what kind of module it is, and how many layers a model has.

Names are all that this module looks at: the modules' own, and the keys of a base model's config.json. It never guesses
the number of layers from the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from adapterswap.errors import AdapterswapError

__all__ = [
    "MAX_LAYERS",
    "NO_LAYER",
    "Kind",
    "format_layers",
    "kind_of",
    "language_config",
    "layer_container",
    "layer_of",
    "num_layers_in_config",
    "parse_layers",
]

Kind = Literal["attention", "mlp", "other"]

MAX_LAYERS = 9999  # far beyond any model; a base's config that says more is no config

NO_LAYER = "none"  # the selection of modules outside the layers: embeddings, heads

# The first numbered segment of a name, and the container before it: `model.layers` in
# `model.layers.3.mlp.experts.1.w1`.
_NUMBERED = re.compile(r"^(?P<container>(?:\d*[^.\d][^.]*\.)+?)(?P<layer>\d+)\.")

_ATTENTION = {"self_attn", "self_attention", "attn", "attention", "linear_attn", "mixer"}
_MLP = {"mlp", "ffn", "feed_forward", "feedforward", "block_sparse_moe", "moe", "fc1", "fc2", "shared_mlp"}

# The same number under the names that model families gave it; `text_config` and its like hold the language model's
# part.
_NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


def layer_container(names: Iterable[str]) -> str | None:
    """The module list that holds the language model's layers, such as `model.layers`; None if no name is numbered.

    Raises:
        AdapterswapError: there are several (an encoder and a decoder, say), and none is a `language_model`'s.
    """
    containers = sorted({match["container"][:-1] for name in names if (match := _NUMBERED.match(name))})
    if len(containers) > 1:
        # A multimodal model: the towers have layers of their own, which are not the language model's.
        language = [container for container in containers if "language_model" in container.split(".")]
        if len(language) != 1:
            raise AdapterswapError(
                f"the modules lie in several lists of layers: {', '.join(containers)}",
                "Layers are composed where a model has one list of them (decoder-only), or one under `language_model`",
            )
        return language[0]
    return containers[0] if containers else None


def layer_of(name: str, container: str | None) -> int | None:
    """The index of the transformer layer that module `name` belongs to; None for embeddings, heads, other towers."""
    match = _NUMBERED.match(name)
    return int(match["layer"]) if match and match["container"][:-1] == container else None


def kind_of(name: str) -> Kind:
    """What module `name` is part of, by the names that model families use."""
    for segment in name.split("."):
        if segment in _ATTENTION:
            return "attention"
        if segment in _MLP:
            return "mlp"
    return "other"


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: all of it, where there is nothing else."""
    nested = next((found for key in _TEXT_CONFIG_KEYS if isinstance(found := config.get(key), Mapping)), None)
    return config if nested is None else language_config(nested)


def num_layers_in_config(config: Mapping[str, Any]) -> int | None:
    """The number of layers of the language model that a config.json describes; None where it does not say.

    Raises:
        AdapterswapError: the model has an encoder and a decoder.
    """
    if config.get("is_encoder_decoder"):
        raise AdapterswapError(
            f"the base model ({config.get('model_type', 'unknown type')}) has an encoder and a decoder",
            "Layers are composed in decoder-only models",
        )
    for key in _TEXT_CONFIG_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping) and (found := num_layers_in_config(nested)) is not None:
            return found
    for key in _NUM_LAYERS_KEYS:
        value = config.get(key)
        if type(value) is int and 0 < value <= MAX_LAYERS:
            return value
    return None


def parse_layers(text: str) -> frozenset[int]:
    """The layers in a text such as `0-4,30-31`; empty for `none`.

    Raises:
        ValueError: the text is no such list, longer than any list needs to be, or a range runs backwards.
    """
    if text == NO_LAYER:
        return frozenset()
    if len(text) > MAX_LAYERS:
        raise ValueError(f"a list of layers is {len(text)} characters long; write ranges, such as 0-4,30-31")
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of layers; write for instance 0-4,30-31, or none")
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
