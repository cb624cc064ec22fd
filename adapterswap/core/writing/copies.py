"""Compare the copies of base weights that adapters carry, block by block.

PEFT saves an embedding's or head's own weight next to its LoRA, and replaces the base's weight with it on loading the
adapter: the result is copy + ΔW. So if copies differ from each other or from the base, the adapters were trained on
different bases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.kinds import Whole
from adapterswap.core.changes.locations import locate_all
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.kit.errors import BaseModelError, ExpertError, Problems
from adapterswap.kit.files.numbers import Dtype, row_ranges
from adapterswap.kit.files.tensorfile import Tensor, open_files

_ELEMENTS = 2**22  # elements to compare at a time

Numbers = npt.NDArray[np.float32]


class Comparable(NamedTuple):
    """A weight to compare.

    Attributes:
        dtype: its dtype, as safetensors files name it.
        shape: its shape.
        read: returns its elements from `start` to before `stop`, as float32.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], Numbers]

    @staticmethod
    def of(tensor: Tensor, file: int) -> Comparable:
        """A tensor in the open file `file`, ready to be compared."""
        width = Dtype.BYTES[tensor.dtype]

        def read(start: int, stop: int) -> Numbers:
            return Dtype(tensor.dtype).unpack(tensor.read_bytes(file, start * width, stop * width), (stop - start,))

        return Comparable(tensor.dtype, tensor.shape, read)

    def is_one_with(self, other: Comparable) -> bool:
        """Whether two weights are equal, or one is the other rounded to its own dtype."""
        if self.shape != other.shape:
            return False

        # The dtypes in which all blocks so far are equal
        equal_in = {self.dtype, other.dtype}
        for cut in row_ranges(math.prod(self.shape), _ELEMENTS):
            left, right = self.read(*cut), other.read(*cut)
            for dtype in list(equal_in):
                if not np.array_equal(_rounded(left, self.dtype, dtype), _rounded(right, other.dtype, dtype)):
                    equal_in.remove(dtype)
            if not equal_in:
                return False
        return True


class Carried(NamedTuple):
    """An expert's copy of a weight of its base.

    Attributes:
        expert, adapter: the expert's name, and its adapter.
        name: the weight's key in the base.
        copy: the copy, in the adapter's file.
        own: the base's own weight.
    """

    expert: str
    adapter: Adapter
    name: str
    copy: Tensor
    own: Whole


def _rounded(numbers: Numbers, held_in: str, dtype: str) -> Numbers:
    if held_in == dtype:
        return numbers
    return Dtype(dtype).unpack(Dtype(dtype).pack(numbers), numbers.shape)


def check_one_base(adapters: Mapping[str, Adapter]) -> None:
    """Check that experts carry the same copies of each weight, whether or not a plan uses them."""
    copies_of: dict[str, dict[str, Tensor]] = {}
    for expert, adapter in adapters.items():
        for module in adapter.factors.values():
            if module.base is not None:
                copies_of.setdefault(module.name, {})[expert] = module.base
    shared = [copies for copies in copies_of.values() if len(copies) > 1]
    if not shared:
        return

    problems = Problems(ExpertError)
    with open_files(adapter.file for adapter in adapters.values()) as files:
        for copies in shared:
            weights: dict[str, Comparable] = {}
            for expert, copy in copies.items():
                weights[expert] = Comparable.of(copy, files[adapters[expert].file.path])

            # Two roundings of a third weight may differ, so compare all copies with the most precise one.
            first = min(weights, key=lambda expert: Dtype.FLOATS.index(weights[expert].dtype))
            for expert, weight in weights.items():
                if expert != first and not weights[first].is_one_with(weight):
                    problems.add(
                        f"The experts {first!r} and {expert!r} were trained on different bases: each carries a copy "
                        f"of its own ({copies[expert].name}), and they differ",
                        "Compose experts of one base",
                    )
    problems.raise_if_any()


def check_tied_rows(adapters: Mapping[str, Adapter]) -> None:
    """Check that trained rows which PEFT stores again under the name of a tied head are the embedding's.

    PEFT loads both into one parameter, so the later one would win.
    """
    tied = []
    for name, adapter in adapters.items():
        for part in adapter.tokens.values():
            if part.tied:
                tied.append((name, part))
    if not tied:
        return

    problems = Problems(ExpertError)
    with open_files(adapters[expert].file for expert, _ in tied) as files:
        for expert, part in tied:
            file = files[adapters[expert].file.path]
            own = Comparable.of(part.first, file)
            for name, tensor in part.tied.items():
                again = Comparable.of(tensor, file)
                if own.dtype != again.dtype or not own.is_one_with(again):
                    problems.add(
                        f"{expert} holds different rows of {part.name} and of {name}, which are tied: PEFT would load "
                        "both into one weight",
                        "Save the adapter again with PEFT",
                    )
    problems.raise_if_any()


def check_copies(expert: str, adapter: Adapter, base: Checkpoint, *, effect: str, remedy: str) -> None:
    """Compare all copies that an adapter carries with the base's own weights; the arguments are `check_base`'s."""
    problems = Problems(ExpertError)
    stored, located, _ = locate_all({expert: adapter}, base, problems)
    problems.raise_if_any()

    carried: list[Carried] = []
    for key, place in located[expert].items():
        if place.change.copy is not None:
            own = Whole.of(stored[key].path, stored[key].tensor)
            carried.append(Carried(expert, adapter, key, place.change.copy, own))
    check_base(carried, base, effect=effect, remedy=remedy)


def check_base(carried: Iterable[Carried], base: Checkpoint, *, effect: str, remedy: str) -> None:
    """Compare copies with the base's own weights, up to rounding to the less precise dtype.

    A copy of a resized embedding or head may have more rows than the base; only the base's rows are compared.

    Args:
        carried: the copies.
        base: the base.
        effect: what happens to a copy, for messages: "which PEFT would put in its place".
        remedy: the remedy in messages.
    """
    compared = [entry for entry in carried if entry.own.tensor.dtype in Dtype.FLOATS]
    if not compared:
        return

    problems = Problems(BaseModelError)
    adapters = {entry.adapter.file.path: entry.adapter.file for entry in compared}
    with open_files([*adapters.values(), *base.shards]) as files:
        for entry in compared:
            copy = Comparable.of(entry.copy, files[entry.adapter.file.path])
            base_shape = entry.own.tensor.shape
            if copy.shape[1:] == base_shape[1:] and copy.shape[0] > base_shape[0]:
                copy = copy._replace(shape=base_shape)

            if not copy.is_one_with(Comparable.of(entry.own.tensor, files[entry.own.path])):
                problems.add(
                    f"{entry.expert} was trained on another {entry.name} than {base.name} has: it carries a copy "
                    f"({entry.copy.name}), {effect}",
                    remedy,
                    parameter="base_model",
                )
    problems.raise_if_any()
