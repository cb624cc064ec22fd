"""A rough estimate of the memory that training takes, from shapes alone. Knows nothing of devices."""

from __future__ import annotations

from typing import Any

from adapterswap.files.dtypes import DTYPE_BYTES, FLOAT_NAMES
from adapterswap.training.recipe import TrainRecipe

__all__ = ["memory"]

# Values that a layer keeps for the backward pass, for each token, as counted on a Llama with LoRA on every projection:
# 8·hidden + 4·intermediate in float32; in bfloat16 the adapters' float32 copies of their inputs come on top.
_HIDDEN = {"float32": 8, "bfloat16": 14}
_INTERMEDIATE = 4
_TILE = 4096, 32768  # tokens and entries of the vocabulary whose logits TRL computes at once


def memory(
    config: Any, recipe: TrainRecipe, trainable: int, base_parameters: int, *, dtype: str, longest: int
) -> dict[str, int]:
    """Bytes by part, and their `total`: of one process that holds everything, as without FSDP.

    Args:
        config: the base's text config.
        trainable, base_parameters: numbers of parameters.
        longest: tokens of the longest row as trained on; with packing, sequences are max_length long.
    """
    options = recipe.training
    size = DTYPE_BYTES[FLOAT_NAMES[dtype]]
    hidden = int(config.hidden_size)
    intermediate = int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden)
    tokens = options.batch_size * (options.max_length if options.packing else longest)
    layer = tokens * size * (_HIDDEN[dtype] * hidden + _INTERMEDIATE * intermediate)
    layers = int(config.num_hidden_layers)
    # With checkpointing, each layer keeps only its input, and one layer at a time is recomputed.
    activations = layers * tokens * size * hidden + layer if options.gradient_checkpointing else layers * layer
    parts = {
        **_weights(recipe, trainable, base_parameters, size),
        "activations": activations + size * min(tokens, _TILE[0]) * min(int(config.vocab_size), _TILE[1]),
    }
    return {**parts, "total": sum(parts.values())}


def _weights(recipe: TrainRecipe, trainable: int, base_parameters: int, size: int) -> dict[str, int]:
    """Bytes of the base's weights, `size` each unless the recipe says otherwise, and of what training adds."""
    moment = 1 if "8bit" in recipe.training.optimizer else None  # bytes; otherwise as many as a trained weight has
    if recipe.adapter.method == "none":
        bytes_per_weight = DTYPE_BYTES[FLOAT_NAMES[recipe.training.weight_dtype]]
        return {
            "base": base_parameters * bytes_per_weight,
            "training": trainable * (bytes_per_weight + 2 * (moment or bytes_per_weight)),
        }
    base = base_parameters * recipe.quantization.bits // 8 if recipe.quantization else base_parameters * size
    return {"base": base, "training": trainable * (4 + 4 + 2 * (moment or 4))}  # an adapter is trained in float32
