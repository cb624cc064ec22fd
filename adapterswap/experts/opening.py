"""Open an expert of either form, an adapter or a full checkpoint, which the config in its folder tells apart."""

from __future__ import annotations

from pathlib import Path

from adapterswap.experts.adapters import ADAPTER_FILES, CONFIG, Adapter, read_adapter
from adapterswap.experts.checkpoints import (
    MODEL_CONFIG,
    MODEL_INDEX,
    MODEL_WEIGHTS,
    Checkpoint,
    check_alone,
    open_checkpoint,
    read_checkpoint,
)
from adapterswap.experts.sources import find_source
from adapterswap.files.smallfiles import exists

__all__ = ["open_expert"]


def open_expert(reference: str | Path) -> Adapter | Checkpoint:
    """Open the adapter or full checkpoint in a local folder or with a Hub id `org/name[/subfolder][@revision]`.

    An adapter's folder may also hold the base's config.json, so adapter_config.json decides. A folder with
    adapter_config.json and full weights is refused.

    Raises:
        ExpertError: the folder holds neither, or both.
        NotFoundError, ExpertError, UnsupportedError: see `open_adapter` and `open_checkpoint`.
    """
    source = find_source(reference, [*ADAPTER_FILES, MODEL_CONFIG], what="expert", parameter="reference")
    folder = source.folder
    if not exists(folder / CONFIG) and exists(folder / MODEL_CONFIG):
        if source.revision is None:
            return read_checkpoint(source, what="expert")
        return open_checkpoint(str(source), what="expert")  # fetches the weights of the same commit
    if exists(folder / MODEL_WEIGHTS) or exists(folder / MODEL_INDEX):
        check_alone(folder)
    return read_adapter(source)  # reports what is missing
