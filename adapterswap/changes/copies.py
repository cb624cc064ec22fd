"""Copies of the base's weights that adapters carry: whether two of them are one weight.

PEFT saves an embedding's or head's own weight beside its LoRA, and puts it over the base's when it loads the adapter:
its result is copy + ΔW. So where copies differ, or are not the base's own weight, adapters were trained on different
bases. Compares a block at a time; writes nothing, and knows nothing of running models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.changes.kinds import Change, LowRank, Opaque, Whole
from adapterswap.errors import BaseModelError, ExpertError, Problems
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.files.dtypes import DTYPE_BYTES, FLOATS
from adapterswap.files.numbers import decode, encode, open_files, read_bytes, row_ranges
from adapterswap.files.tensorfile import Tensor

__all__ = ["Carried", "Weight", "check_base", "check_one_base", "copy_beside", "is_one_weight", "stored_weight"]

_ELEMENTS = 2**22  # compared at a time

Numbers = npt.NDArray[np.float32]


class Weight(NamedTuple):
    """A weight that is compared.

    Attributes:
        dtype: what it is held in, as safetensors files name it.
        shape: its shape.
        read: its elements from a first to before a last one, as float32.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], Numbers]


class Carried(NamedTuple):
    """A copy that an expert carries of a weight of its base.

    Attributes:
        expert, adapter: who carries it.
        name: the weight's key in the base.
        copy: the copy, in the adapter's file.
        own: the base's own weight.
    """

    expert: str
    adapter: Adapter
    name: str
    copy: Tensor
    own: Whole


def copy_beside(change: Change) -> Tensor | None:
    """The copy of the base's weight that an adapter carries beside its LoRA; None where it carries none."""
    if isinstance(change, Opaque):
        return None if change.part.lora is None else change.part.lora.base
    return change.lora.base if isinstance(change, LowRank) else None


def stored_weight(tensor: Tensor, file: int) -> Weight:
    """A tensor of the open file `file`."""
    width = DTYPE_BYTES[tensor.dtype]

    def read(start: int, stop: int) -> Numbers:
        return decode(read_bytes(file, tensor, start * width, stop * width), tensor.dtype, (stop - start,))

    return Weight(tensor.dtype, tensor.shape, read)


def is_one_weight(one: Weight, other: Weight) -> bool:
    """Whether they are equal, or one of them is the other rounded to its own dtype.

    Raises:
        ExpertError: see `read_bytes`.
    """
    if one.shape != other.shape:
        return False
    equal_in = {one.dtype, other.dtype}
    for cut in row_ranges(math.prod(one.shape), _ELEMENTS):
        left, right = one.read(*cut), other.read(*cut)
        equal_in = {
            dtype
            for dtype in equal_in
            if np.array_equal(_rounded(left, one.dtype, dtype), _rounded(right, other.dtype, dtype))
        }
        if not equal_in:
            return False
    return True


def _rounded(numbers: Numbers, held_in: str, dtype: str) -> Numbers:
    return numbers if held_in == dtype else decode(encode(numbers, dtype), dtype, numbers.shape)


def check_one_base(adapters: Mapping[str, Adapter]) -> None:
    """Compare the copies that experts carry of the same weight, whether a plan takes them or not.

    Raises:
        ExpertError: two experts carry different copies, or see `is_one_weight`.
    """
    carried: dict[str, dict[str, Tensor]] = {}
    for expert, adapter in adapters.items():
        for module in adapter.factors.values():
            if module.base is not None:
                carried.setdefault(module.name, {})[expert] = module.base
    shared = {name: copies for name, copies in carried.items() if len(copies) > 1}
    if not shared:
        return
    problems = Problems(ExpertError)
    with open_files(adapter.file for adapter in adapters.values()) as files:
        for copies in shared.values():
            found = {expert: stored_weight(copy, files[adapters[expert].file.path]) for expert, copy in copies.items()}
            # Two that are roundings of a third need not be of each other, so all are compared with the finest.
            first = min(found, key=lambda expert: FLOATS.index(found[expert].dtype))
            for expert, copy in found.items():
                if expert != first and not is_one_weight(found[first], copy):
                    problems.add(
                        f"the experts {first!r} and {expert!r} were trained on different bases: each carries a copy "
                        f"of its own ({copies[expert].name}), and they differ",
                        "Compose experts of one base",
                    )
    problems.raise_if_any()


def check_base(
    carried: Iterable[Carried], base: Checkpoint, where: str, *, effect: str, remedy: str, parameter: str | None = None
) -> None:
    """Compare copies with the base's own weights, up to the rounding of the narrower of their dtypes.

    Args:
        carried: the copies.
        base: the base.
        where: what messages call the base.
        effect: what becomes of a copy, for messages: "which PEFT would put in its place".
        remedy: what to do.
        parameter: the parameter that gave the base.

    Raises:
        BaseModelError: an adapter carries another weight than the base has.
    """
    compared = [one for one in carried if one.own.tensor.dtype in FLOATS]
    if not compared:
        return
    problems = Problems(BaseModelError)
    adapters = {one.adapter.file.path: one.adapter.file for one in compared}
    with open_files([*adapters.values(), *base.shards]) as files:
        for one in compared:
            copy = stored_weight(one.copy, files[one.adapter.file.path])
            if not is_one_weight(copy, stored_weight(one.own.tensor, files[one.own.path])):
                problems.add(
                    f"{one.expert} was trained on another {one.name} than {where} has: it carries a copy "
                    f"({one.copy.name}), {effect}",
                    remedy,
                    parameter=parameter,
                )
    problems.raise_if_any()
