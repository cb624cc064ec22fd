"""The result of an extraction, as data: ranks, errors, and what was left out. Reads and prints nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adapterswap.experts.layers import Kind
from adapterswap.extracting.cutting import Cut
from adapterswap.extracting.pairing import Reason

__all__ = ["Extracted", "Extraction", "Lost", "shortened"]


@dataclass(frozen=True)
class Extracted:
    """One module of the adapter.

    Attributes:
        name, layer, kind: the module.
        out_features, in_features: the size of its ΔW.
        rank: the rank of its factors.
        norm: ‖ΔW‖, the Frobenius norm.
        error: ‖ΔW - B·A‖ / ‖ΔW‖, with the factors as they are written.
        dtype: the dtype of its factors, by its name in files.
    """

    name: str
    layer: int | None
    kind: Kind
    out_features: int
    in_features: int
    rank: int
    norm: float
    error: float
    dtype: str

    @classmethod
    def of(cls, cut: Cut) -> Extracted:
        weight = cut.matrix.weight
        return cls(weight.name, weight.layer, weight.kind, *cut.matrix.shape, cut.rank, cut.norm, cut.error, cut.dtype)


@dataclass(frozen=True)
class Lost:
    """A parameter that the fine-tune changed and the adapter does not hold: why, and ‖W_full - W_base‖."""

    name: str
    reason: Reason
    norm: float


@dataclass(frozen=True)
class Extraction:
    """What was cut out of a full fine-tune.

    Attributes:
        modules: the adapter's.
        unchanged: modules that the fine-tune did not change; the adapter leaves them out.
        lost: everything else that it changed.
    """

    modules: tuple[Extracted, ...]
    unchanged: tuple[str, ...]
    lost: tuple[Lost, ...]

    def __repr__(self) -> str:
        return f"<Extraction of {len(self.modules)} modules, rank {self.ranks}, relative error {self.error:.4g}>"

    @property
    def norm(self) -> float:
        """‖ΔW‖ over all of the adapter's modules together."""
        return _norm(module.norm for module in self.modules)

    @property
    def ranks(self) -> str:
        """The rank of the modules, or the lowest and the highest: `4–64`."""
        ranks = sorted({module.rank for module in self.modules})
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"

    @property
    def error(self) -> float:
        """‖ΔW - B·A‖ / ‖ΔW‖ over all of the adapter's modules together."""
        return _norm(module.norm * module.error for module in self.modules) / self.norm

    @property
    def whole_error(self) -> float:
        """The same over everything that the fine-tune changed; the part that was left out counts in full."""
        lost = _norm(parameter.norm for parameter in self.lost)
        return math.hypot(lost, self.norm * self.error) / math.hypot(lost, self.norm)

    @property
    def lost_share(self) -> float:
        """The part of ‖W_full - W_base‖ over all parameters that lies outside the adapter's modules."""
        lost = _norm(parameter.norm for parameter in self.lost)
        return lost / math.hypot(lost, self.norm)

    @property
    def lost_by_reason(self) -> Mapping[Reason, tuple[int, float]]:
        """For each reason the number of parameters, and their share as in `lost_share`."""
        total = math.hypot(_norm(parameter.norm for parameter in self.lost), self.norm)
        reasons = sorted({parameter.reason for parameter in self.lost})
        groups = {
            reason: [parameter.norm for parameter in self.lost if parameter.reason == reason] for reason in reasons
        }
        return {reason: (len(norms), _norm(norms) / total) for reason, norms in groups.items()}


def shortened(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers written as one, such as `model.layers.*.mlp.router.weight`."""
    return sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(value**2 for value in values))
