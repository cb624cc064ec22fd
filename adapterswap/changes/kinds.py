"""The kinds of changes: a product of factors, or weights that replace the base's. Pure data: where the numbers lie.

An adapter and a full checkpoint are both sets of changes to named weights of one base; what is done with changes does
not depend on which of the two they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterswap.experts.adapters import LoraModule
from adapterswap.files.tensorfile import Tensor

__all__ = ["Change", "LowRank", "Whole"]


@dataclass(frozen=True)
class LowRank:
    """ΔW = s·B·A, with B out×rank and A rank×in.

    Attributes:
        lora: the factors and their scale s.
        path: the file that holds them.
        transposed: the model stores the weight in×out: an embedding, or GPT-2's Conv1D.
    """

    lora: LoraModule
    path: Path
    transposed: bool = False


@dataclass(frozen=True)
class Whole:
    """Tensors that replace the base's: ΔW = W - W_base.

    A full checkpoint's weight, or a module that an adapter trained in full (`modules_to_save`), which may have several.

    Attributes:
        path: the file that holds them.
        tensors: by the name within the module, such as `weight`.
    """

    path: Path
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, path: Path, tensor: Tensor) -> Whole:
        """A single tensor."""
        return cls(path, {tensor.name.rpartition(".")[2]: tensor})

    @property
    def tensor(self) -> Tensor:
        """The tensor, where there is one."""
        (tensor,) = self.tensors.values()
        return tensor


Change = LowRank | Whole
