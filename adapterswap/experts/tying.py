"""Which head a model ties to its embedding, and under which keys a checkpoint stores the two.

Model families name them differently (`embed_tokens` and `lm_head`, `tokens_embed`, `output_projection`, …), and without
`tie_word_embeddings` in the config the model's class decides. So transformers builds the model without memory for its
weights. Knows modules; knows nothing of adapters.
"""

from __future__ import annotations

from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.orientation import adaptable_weights, rename_keys

__all__ = ["tied_keys"]


def tied_keys(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """The keys of an embedding and of the head that shares its weight; None where no head does.

    A head that is not stored has the key under which transformers would load it.

    Raises:
        AdapterswapError: transformers cannot build the model without remote code.
    """
    from adapterswap.bases import empty_model_as_saved

    model = empty_model_as_saved(checkpoint.source.folder, checkpoint.name)
    sharing: dict[int, list[str]] = {}
    weights = adaptable_weights(model)
    for name in weights:
        sharing.setdefault(id(model.get_submodule(name).weight), []).append(name)
    for names in sharing.values():
        embedding = next((name for name in names if weights[name].embedding), None)
        head = next((name for name in names if not weights[name].embedding), None)
        if embedding is not None and head is not None:
            break
    else:
        return None
    rename = rename_keys(model)
    stored = {rename(key): key for key in checkpoint.parameters}
    key = stored.get(f"{embedding}.weight")
    return None if key is None else (key, stored.get(f"{head}.weight", f"{head}.weight"))
