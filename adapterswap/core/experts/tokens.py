"""Read trained rows of embeddings and heads: `trainable_token_indices` beside LoRA, or TRAINABLE_TOKENS alone.

Errors name the module; the caller puts the adapter's folder before them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adapterswap.core.experts.config import AdapterConfig
from adapterswap.core.experts.keys import MISMATCH, TOKENS, TRAINABLE_TOKENS
from adapterswap.core.model.layers import ModuleName
from adapterswap.core.model.sources import CONFIG, WEIGHTS
from adapterswap.kit.errors import ExpertError, UnsupportedError, and_more
from adapterswap.kit.files.tensorfile import Tensor


def tied_rows(
    own_rows: Mapping[str, Tensor], ignored: Collection[str], config: AdapterConfig
) -> dict[str, dict[str, Tensor]]:
    """For TRAINABLE_TOKENS: each targeted module → the modules tied to it.

    If the base ties its head to its embedding, PEFT stores the rows under both names, but targets only the embedding.

    Args:
        own_rows: the trained rows by the names of their modules.
        ignored: the modules among these that the config does not target.
        config: the adapter's.

    Raises:
        ExpertError: the config leaves the target to PEFT's default, and the file does not say which it was.
    """
    tied: dict[str, dict[str, Tensor]] = {name: {} for name in own_rows if name not in ignored}
    embeddings = [name for name in tied if not ModuleName(name).is_head]

    is_unclear = len(tied) > 1 or len(embeddings) < len(tied)
    if config.targets.modules is None and is_unclear:
        raise ExpertError(
            f"{CONFIG}: target_modules is null, and {WEIGHTS} has rows of {and_more(sorted(tied))}",
            "Name the embedding that was trained in target_modules",
        )

    if len(embeddings) == 1:
        (embedding,) = embeddings
        for name in ignored:
            if own_rows[name].shape == own_rows[embedding].shape:
                tied[embedding][name] = own_rows[name]
    return tied


def trained_rows(name: str, layer: int | None, tensors: Mapping[str, Tensor], config: AdapterConfig) -> tuple[int, ...]:
    """The rows of the weight of the embedding or head `name` that its trained tokens hold.

    Raises:
        ExpertError: the tensor does not fit the config, or full weights stand beside it.
        UnsupportedError: the module is in a layer, or a token is named twice.
    """
    if layer is not None:
        raise UnsupportedError(
            f"{name} has trained tokens, but it is a module of layer {layer}, whose rows are not tokens",
            "Train rows of the embedding or the head, and LoRA on the layers",
        )
    if len(tensors) > 1:
        raise ExpertError(f"{name} has both trained tokens and full weights", "Save the adapter again")

    rows, shape = config.tokens_of(name), tensors[TOKENS].shape
    if len(shape) != 2 or shape[0] != len(rows):
        raise ExpertError(
            f"{name} has trained tokens of shape {list(shape)}, but {CONFIG} names {len(rows)} tokens", MISMATCH
        )

    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if rows.count(row) > 1)
        setting = "trainable_token_indices"
        if config.peft_type == TRAINABLE_TOKENS:
            setting = "token_indices"
        raise UnsupportedError(
            f"{setting} names the token {twice} twice, so it has two rows for {name}",
            "Remove one of them from the config and from the file",
        )
    return rows
