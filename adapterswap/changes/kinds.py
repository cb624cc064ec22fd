"""The kinds of changes: a product of factors, weights that replace the base's, or a function of the base's weight that
is copied as it is. Pure data: where the numbers lie.

An adapter and a full checkpoint are both sets of changes to named weights of one base; what is done with changes does
not depend on which of the two they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from adapterswap.experts.adapters import LoraModule, OpaqueModule
from adapterswap.files.tensorfile import Tensor

__all__ = ["Change", "ExpertRows", "LowRank", "Opaque", "Whole"]


@dataclass(frozen=True)
class ExpertRows:
    """Rows `start` to `stop` of one expert's matrix in a mixture."""

    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class LowRank:
    """ΔW = s·B·A, with B out×rank and A rank×in.

    Attributes:
        lora: the factors and their scale s.
        path: the file that holds them.
        transposed: the model stores the weight in×out: an embedding, or GPT-2's Conv1D.
        within: what the stored tensor is of the experts whose factors these are; None where it is all of them.
    """

    lora: LoraModule
    path: Path
    transposed: bool = False
    within: ExpertRows | None = None

    @property
    def matrices(self) -> int:
        """How many matrices the weight holds, one for each expert of a mixture."""
        return self.lora.experts if self.within is None else 1


@dataclass(frozen=True)
class Whole:
    """Tensors that replace the base's: ΔW = W - W_base.

    A full checkpoint's weight, or a module that an adapter trained in full (`modules_to_save`), which may have several.

    Attributes:
        path: the file that holds them.
        tensors: by the name within the module, such as `weight`.
        rows: the rows of the weight that the only tensor replaces, in its order; empty where it replaces them all.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, path: Path, tensor: Tensor) -> Whole:
        """A single tensor."""
        return cls(path, {tensor.name.rpartition(".")[2]: tensor})

    @property
    def tensor(self) -> Tensor:
        """The tensor, where there is one."""
        (tensor,) = self.tensors.values()
        return tensor

    def place_of(self, row: int) -> int:
        """Where a row of the weight lies among the tensor's rows."""
        return self._places[row] if self.rows else row

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {row: place for place, row in enumerate(self.rows)}


@dataclass(frozen=True)
class Opaque:
    """What PEFT makes of the base's weight by tensors of another kind (DoRA, OFT, …): W' = f(W).

    It is copied exactly, and averaged only where the base is at hand.

    Attributes:
        part: the module's tensors and settings.
        path: the file that holds them.
        transposed: as for `LowRank`.
    """

    part: OpaqueModule
    path: Path
    transposed: bool = False


Change = LowRank | Whole | Opaque
