"""Open an expert whatever it is: an adapter, or a full checkpoint. Knows the two by the config in their folder."""

from __future__ import annotations

from pathlib import Path

from adapterswap.errors import ExpertError
from adapterswap.experts.adapters import ADAPTER_FILES, CONFIG, Adapter, read_adapter
from adapterswap.experts.checkpoints import MODEL_CONFIG, MODEL_WEIGHTS, Checkpoint, open_checkpoint, read_checkpoint
from adapterswap.experts.sources import find_source
from adapterswap.files.smallfiles import exists

__all__ = ["open_expert"]


def open_expert(reference: str | Path) -> Adapter | Checkpoint:
    """Open the adapter or the full checkpoint in a local folder, or with a Hub id
    `org/name[/subfolder][@revision]`.

    PEFT and transformers may save an adapter's folder with a config.json of the base beside it, so adapter_config.json
    decides, unless full weights lie there too.

    Raises:
        ExpertError: it is neither, or both.
        NotFoundError, ExpertError, UnsupportedError: see `open_adapter` and `open_checkpoint`.
    """
    source = find_source(reference, [*ADAPTER_FILES, MODEL_CONFIG], what="expert", parameter="reference")
    folder = source.folder
    if not exists(folder / CONFIG) and exists(folder / MODEL_CONFIG):
        if source.revision is None:
            return read_checkpoint(source, what="expert")
        return open_checkpoint(str(source), what="expert")  # fetches its weights, of the commit that was found
    if exists(folder / CONFIG) and exists(folder / MODEL_WEIGHTS):
        raise ExpertError(
            f"{folder} holds both an adapter and full weights",
            "Give a folder with one of them: move the other away",
            parameter="reference",
        )
    return read_adapter(source)  # which says what is missing
