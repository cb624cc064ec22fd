"""What becomes of one stored tensor of a model: which experts' weights and ΔW enter, with which coefficients.

    W' = Σ_full c_i·W_i + (1 - Σ_full c_i)·W_base + Σ_lora c_i·s_i·B_i·A_i

is the linear form: a full checkpoint's ΔW_i is W_i - W_base, an adapter's is s_i·B_i·A_i. Pure data. Knows experts'
tensors and rules; knows nothing of whole plans, nor of how a tensor is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterswap.experts.adapters import LoraModule
from adapterswap.experts.checkpoints import Parameter
from adapterswap.experts.layers import Kind
from adapterswap.files.tensorfile import Tensor
from adapterswap.planning.allocation import BlendMethod, Rule
from adapterswap.planning.modules import asked_of, owner_of

__all__ = ["LowRankTerm", "ParameterPlan", "Stored", "WholeTerm"]

_NOTHING = 1e-12  # a coefficient of the base below this is a rounding of the experts' coefficients


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    tensor: Tensor

    @classmethod
    def of(cls, parameter: Parameter) -> Stored:
        return cls(parameter.path, parameter.tensor)


@dataclass(frozen=True)
class WholeTerm:
    """One expert's part W_i: a full checkpoint's tensor, or one that an adapter trained in full (`modules_to_save`).

    `side`: see `modules.Term`.
    """

    expert: str
    side: str
    coefficient: float
    stored: Stored


@dataclass(frozen=True)
class LowRankTerm:
    """One adapter's part s·B·A.

    `transposed` says that the model stores the weight in×out: an embedding, or GPT-2's Conv1D.
    """

    expert: str
    side: str
    coefficient: float
    module: LoraModule
    path: Path
    transposed: bool


@dataclass(frozen=True)
class ParameterPlan:
    """What becomes of one stored tensor.

    Attributes:
        name: its key in the output.
        module: the name of the module that it belongs to, as adapters name it where one adapts it.
        layer, kind: as for modules.
        dtype, shape: as the model stores it.
        base: the base's own tensor; None where the plan has no base.
        terms: none leaves the base unchanged.
        weights: of the sides that the rule combines, before experts that do not change the tensor were left out.
        rule: the rule that matched; None where no expert adapts the tensor.
        method: how the terms are combined; linear where SLERP's coefficients are already known.
    """

    name: str
    module: str
    layer: int | None
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    base: Stored | None
    terms: tuple[WholeTerm | LowRankTerm, ...]
    weights: Mapping[str, float]
    rule: Rule | None
    method: BlendMethod = "linear"

    @property
    def asked(self) -> Mapping[str, float]:
        """Each expert's coefficient by the rule, before experts that do not change the tensor were left out."""
        return asked_of(self.rule, self.weights) if self.rule else {}

    @property
    def whole(self) -> tuple[WholeTerm, ...]:
        return tuple(term for term in self.terms if isinstance(term, WholeTerm))

    @property
    def low_rank(self) -> tuple[LowRankTerm, ...]:
        return tuple(term for term in self.terms if isinstance(term, LowRankTerm))

    @property
    def is_linear(self) -> bool:
        return self.method == "linear"

    @property
    def rest(self) -> float:
        """The base's coefficient in the linear form, 1 - Σ_full c_i."""
        rest = 1 - math.fsum(term.coefficient for term in self.whole)
        return rest if abs(rest) > _NOTHING else 0.0

    @property
    def needs_base(self) -> bool:
        """Whether the base's own numbers enter."""
        waits = self.rule is not None and self.rule.weights is not None and bool(self.terms)
        return not self.is_linear or waits or self.rest != 0

    @property
    def copied(self) -> Stored | None:
        """The tensor whose numbers are the result, unchanged; None where something is computed."""
        if not self.terms:
            return self.base
        alone = self.owner is not None and isinstance(self.terms[0], WholeTerm)
        return self.whole[0].stored if alone else None

    @property
    def owner(self) -> str | None:
        """The expert whose weights or ΔW it gets, `base` for no change, None for a blend."""
        return owner_of(self.terms, linear=self.is_linear)
