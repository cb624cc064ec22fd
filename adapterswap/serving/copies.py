"""Whether the copies of the base's weights that an expert carries are those of the base that is served.

vLLM leaves copies out: an expert of another base would be answered for with base + ΔW, where PEFT has copy + ΔW.
Compared where the base is a folder on this machine, and once; nothing is downloaded for it. Knows nothing of
compositions.
"""

from __future__ import annotations

import os

from adapterswap.arithmetic.copies import is_one_weight, stored_weight
from adapterswap.arithmetic.tensors import open_files
from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.adapter_keys import copies_in
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint, open_checkpoint
from adapterswap.experts.orientation import Orientation
from adapterswap.files.smallfiles import expand, is_folder
from adapterswap.files.tensorfile import FLOATS
from adapterswap.planning.locating import find_tied_head, locate, with_head
from adapterswap.serving.memo import Memo

__all__ = ["check_copies"]


def check_copies(adapter: Adapter, base_model: str, memo: Memo, name: str) -> None:
    """Compare every copy with the base's weight, up to the rounding of the narrower of their dtypes.

    Args:
        adapter: the expert.
        base_model: a folder, or a Hub id, of which nothing is compared.
        memo: where it is kept that they are equal; an embedding of 8B takes a gigabyte to read.
        name: what to call the expert in messages.

    Raises:
        AdapterswapError: the expert carries another weight than the base has.
    """
    if not copies_in(adapter.file) or not is_folder(folder := expand(base_model)):
        return
    try:
        base = open_checkpoint(folder)
    except AdapterswapError:  # vLLM reads more kinds of weights, and tells of those that it cannot read
        return
    files = [adapter.file, *base.shards]
    key = " ".join(["copies", *(f"{os.path.realpath(file.path)} {file.stamp}" for file in files)])
    if memo.get(key):
        return
    _compare(adapter, base, name)
    memo.put(key, True)


def _compare(adapter: Adapter, base: Checkpoint, name: str) -> None:
    problems = Problems()
    stored = with_head(base.parameters, find_tied_head(base, {name: adapter}))
    located = locate(name, adapter, stored, "the base", Orientation(base), problems)
    with open_files([adapter.file, *base.shards]) as files:
        for key, found in located.items():
            copy, own = copies_in(adapter.file).get(found.module), stored[key]
            if copy is None or own.tensor.dtype not in FLOATS:
                continue
            if not is_one_weight(
                stored_weight(copy, files[adapter.file.path]), stored_weight(own.tensor, files[own.path])
            ):
                problems.add(
                    f"{name} was trained on another {key} than the base has: it carries a copy ({copy.name}), which "
                    "vLLM leaves out",
                    "Serve experts of this base model",
                )
    problems.raise_if_any()
