"""Whether the copies of the base's weights that adapters carry are the base's own.

PEFT saves an embedding's or head's own weight beside its LoRA, and puts it over the base's when it loads the adapter:
its result is copy + ΔW. Full weights are base + ΔW, so where the two differ the adapter was trained on another base.
Reads a block at a time; writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adapterswap.arithmetic.tensors import decode, encode, open_files, read_bytes
from adapterswap.errors import Problems
from adapterswap.files.tensorfile import DTYPE_BYTES, Tensor
from adapterswap.merging.blocks import row_ranges
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.parameters import LowRankTerm, ParameterPlan, Stored

__all__ = ["check_copies"]

_ELEMENTS = 2**22  # compared at a time


def check_copies(plan: ModelPlan) -> None:
    """Compare every copy with the base's weight, up to the rounding of the narrower of their dtypes.

    Raises:
        AdapterswapError: an adapter carries another weight than the base has.
    """
    carried = [(parameter, term, Stored(term.path, copy)) for parameter, term, copy in _copies(plan)]
    if not carried or plan.base is None:
        return
    problems = Problems()
    used = {copy.path for *_, copy in carried}
    adapters = [adapter.file for adapter in plan.adapters.values() if adapter.file.path in used]
    with open_files([*adapters, *plan.base.shards]) as files:
        for parameter, term, copy in carried:
            if parameter.base is not None and not _same(copy, parameter.base, files):
                problems.add(
                    f"{term.expert} was trained on another {parameter.name} than {plan.base.name} has: it carries a "
                    f"copy ({copy.tensor.name}), which PEFT would put in its place",
                    "Give the base that it was trained on with --base-model",
                )
    problems.raise_if_any()


def _copies(plan: ModelPlan) -> Iterator[tuple[ParameterPlan, LowRankTerm, Tensor]]:
    for parameter in plan:
        for term in parameter.low_rank:
            if term.module.base is not None:
                yield parameter, term, term.module.base


def _same(copy: Stored, base: Stored, files: Mapping[Path, int]) -> bool:
    """Whether the copy is the base's weight, or one of them is the other in a narrower dtype."""
    if copy.tensor.shape != base.tensor.shape:
        return False
    size = int(np.prod(copy.tensor.shape))
    common = base.tensor.dtype if copy.tensor.dtype == "F32" else copy.tensor.dtype
    return all(
        np.array_equal(_rounded(copy, common, files, *cut), _rounded(base, common, files, *cut))
        for cut in row_ranges(size, _ELEMENTS)
    )


def _rounded(stored: Stored, dtype: str, files: Mapping[Path, int], start: int, stop: int) -> npt.NDArray[np.float32]:
    """Elements `start` to `stop` as `dtype` holds them."""
    tensor, width = stored.tensor, DTYPE_BYTES[stored.tensor.dtype]
    raw = read_bytes(files[stored.path], tensor, start * width, stop * width)
    return decode(encode(decode(raw, tensor.dtype, (stop - start,)), dtype), dtype, (stop - start,))
