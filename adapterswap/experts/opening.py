"""Open an expert whatever it is: an adapter, or a full checkpoint. Knows the two by the config in their folder."""

from __future__ import annotations

from pathlib import Path

from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapters import CONFIG, Adapter, open_adapter
from adapterswap.experts.checkpoints import MODEL_CONFIG, MODEL_WEIGHTS, Checkpoint, open_checkpoint
from adapterswap.experts.sources import find_source
from adapterswap.files.smallfiles import exists

__all__ = ["open_expert"]


def open_expert(reference: str | Path) -> Adapter | Checkpoint:
    """Open the adapter or the full checkpoint in a local folder, or with a Hub id `org/name[@revision]`.

    PEFT and transformers may save an adapter's folder with a config.json of the base beside it, so adapter_config.json
    decides, unless full weights lie there too.

    Raises:
        AdapterswapError: it is neither, or both; see also `open_adapter` and `open_checkpoint`.
    """
    folder = find_source(reference, [CONFIG, MODEL_CONFIG], what="expert").folder
    if not exists(folder / CONFIG):
        if exists(folder / MODEL_CONFIG):
            return open_checkpoint(reference, what="expert")
        return open_adapter(reference)  # which says what is missing
    if exists(folder / MODEL_WEIGHTS):
        raise AdapterswapError(
            f"{folder} holds both an adapter and full weights", "Give a folder with one of them: move the other away"
        )
    return open_adapter(reference)
