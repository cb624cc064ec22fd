"""Which head a model ties to its embedding, and the keys under which a checkpoint stores the two.

Model families name them differently (`embed_tokens` and `lm_head`, `tokens_embed`, `output_projection`, …), and without
`tie_word_embeddings` in the config the model's class decides. So transformers builds an empty model. Knows modules;
knows nothing of adapters.
"""

from __future__ import annotations

from adapterswap.experts.anatomy import adaptable_weights, rename_keys
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.empty_models import empty_model_as_saved

__all__ = ["shared_embeddings", "tied_keys"]


def tied_keys(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """The keys of an embedding and of the head that shares its weight; None if no head does, or neither is stored.

    For the one of them that is not stored, this is the key under which transformers would load it.

    Raises:
        BaseModelError: transformers cannot build the model without remote code.
    """
    model = empty_model_as_saved(checkpoint.source.folder, checkpoint.name)
    weights = adaptable_weights(model)
    pairs = (
        (weight.name, head)
        for weight in weights.values()
        for head in weight.tied
        if weight.embedding and not weights[head].embedding
    )
    embedding, head = next(pairs, (None, None))
    if embedding is None:
        return None
    rename = rename_keys(model)
    stored = {rename(key): key for key in checkpoint.parameters}
    names = f"{embedding}.weight", f"{head}.weight"
    return (stored.get(names[0], names[0]), stored.get(names[1], names[1])) if stored.keys() & set(names) else None


def shared_embeddings(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Embeddings that share one weight, such as an encoder's and a decoder's: module → the other modules that share it.

    Raises:
        BaseModelError: transformers cannot build the model without remote code.
    """
    weights = adaptable_weights(empty_model_as_saved(checkpoint.source.folder, checkpoint.name))
    return {
        name: weight.tied
        for name, weight in weights.items()
        if sum(weights[other].embedding for other in (name, *weight.tied)) > 1
    }
