"""Check that an expert's copies of base weights equal the weights of the served base.

vLLM leaves copies out: with an expert of another base it would compute base + ΔW, where PEFT computes copy + ΔW. They
are compared once, and only if the base is a folder on this machine; nothing is downloaded. Knows nothing of
compositions.
"""

from __future__ import annotations

import os

from adapterswap.changes.copies import check_base
from adapterswap.changes.locating import carried_copies
from adapterswap.errors import AdapterswapError
from adapterswap.experts.adapter_keys import copies_in
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import open_checkpoint
from adapterswap.files.smallfiles import expand, is_folder
from adapterswap.serving.memo import Memo

__all__ = ["check_copies"]


def check_copies(adapter: Adapter, base_model: str, memo: Memo, name: str, engine: str = "vLLM") -> None:
    """Compare every copy with the base's weight, up to the rounding of the narrower of their dtypes.

    Args:
        adapter: the expert.
        base_model: a folder. With a Hub id nothing is compared.
        memo: stores that they are equal, because the embedding of an 8B model has a gigabyte to read.
        name: the expert's name in messages.
        engine: the server's name in messages.

    Raises:
        BaseModelError: a copy differs from the base's weight; see `check_base`.
    """
    if not copies_in(adapter.file) or not is_folder(folder := expand(base_model)):
        return
    try:
        base = open_checkpoint(folder)
    except AdapterswapError:  # vLLM reads more kinds of weights, and reports those that it cannot read
        return
    files = [adapter.file, *base.shards]
    key = " ".join(["copies", *(f"{os.path.realpath(file.path)} {file.stamp}" for file in files)])
    if memo.get(key):
        return
    check_base(
        carried_copies(adapter, base, name), base, "the base",
        effect=f"which {engine} leaves out", remedy="Serve experts of this base model", parameter="base_model",
    )  # fmt: skip
    memo.put(key, True)
