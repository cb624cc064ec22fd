"""Check that a checkpoint's config.json fits its tensors, as far as names and a few sizes show.

A model is built from config.json. If its tensors disagree, the result cannot be loaded, or loads with layers missing or
random. Only the language model's number of layers and hidden size are compared: checking other shapes would need the
model's code, which takes seconds to import. In doubt, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adapterswap.errors import ExpertError, Problems
from adapterswap.experts.layers import (
    EMBEDDINGS,
    Stack,
    before_layers,
    language_config,
    layer_of,
    layers_ahead,
    stack_of,
    stacked_layers_in_config,
)
from adapterswap.files.dtypes import FLOATS
from adapterswap.files.tensorfile import Tensor

__all__ = ["check_config"]

# The last two are for OPT and ALBERT, whose embeddings may be narrower than their layers.
_WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model", "embedding_size", "word_embed_proj_dim")
_SHARED = "num_hidden_groups"  # ALBERT runs its stored layers several times

_REMEDY = "Use a folder whose config.json and weights belong to one model: download or save it again"


def check_config(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], container: str | None) -> None:
    """Compare the config's number of layers with the stored ones, and its hidden size with the embedding's.

    Layers that predict further tokens may follow the layers that the config counts: see `layers_ahead`.

    Args:
        folder: the checkpoint's folder, for messages.
        config: the content of its config.json.
        tensors: all stored tensors, by name.
        container: the language model's list of layers; see `layer_container`.

    Raises:
        ExpertError: config and tensors differ.
    """
    if container is None:
        return
    problems = Problems(ExpertError)
    model = language_config(config)
    configured = stacked_layers_in_config(config)
    if not isinstance(configured, int | None):
        _check_stacks(folder, configured, tensors, container, problems)
        configured = None
    stored = _num_layers(tensors, container)
    most = (configured or 0) + layers_ahead(config)
    if configured is not None and _SHARED not in model and not configured <= stored <= most:
        problems.add(
            f"{folder}: config.json says {configured} layers, but the weights have {stored} in {container}", _REMEDY
        )
    widths = [value for key in _WIDTHS if type(value := model.get(key)) is int]
    for name in (f"{before_layers(container)}{end}.weight" for end in sorted(EMBEDDINGS)):
        tensor = tensors.get(name)
        if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in FLOATS:
            continue
        if widths and tensor.shape[1] not in widths:
            problems.add(
                f"{folder}: config.json says a hidden size of {widths[0]}, but {name} is {list(tensor.shape)}", _REMEDY
            )
    problems.raise_if_any()


def _check_stacks(
    folder: Path, configured: Mapping[Stack, int], tensors: Iterable[str], container: str, problems: Problems
) -> None:
    for stack, count in configured.items():
        inside = [name for name in tensors if stack_of(name) == stack and layer_of(name, container) is not None]
        stored = _num_layers(inside, container) if inside else 0
        if stored not in (0, count):  # an encoder alone has no decoder
            message = f"{folder}: config.json says {count} {stack} layers, but the weights have {stored}"
            problems.add(message, _REMEDY)


def _num_layers(tensors: Iterable[str], container: str) -> int:
    return 1 + max(layer for name in tensors if (layer := layer_of(name, container)) is not None)
