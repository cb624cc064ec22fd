"""The result of a conversion, module by module. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Conversion", "ConvertedModule"]


@dataclass(frozen=True)
class ConvertedModule:
    """A module of a converted adapter.

    Attributes:
        name: its full name in the written adapter.
        rank: the rank of its factors.
        norm: ‖ΔW‖ before the conversion (Frobenius).
        error: ‖ΔW - ΔW'‖ / ‖ΔW‖ with the factors as written; 0 if it is below 5e-8.
    """

    name: str
    rank: int
    norm: float
    error: float


@dataclass(frozen=True)
class Conversion:
    """What `convert` wrote, or would write.

    Attributes:
        out_path: the folder.
        peft_type: the adapter's kind before, such as LORA, DORA or LOHA.
        pickled: whether its weights were a pickle.
        modules: its LoRA modules.
    """

    out_path: Path
    peft_type: str
    pickled: bool
    modules: tuple[ConvertedModule, ...]

    @property
    def relative_error(self) -> float:
        """‖ΔW - ΔW'‖ / ‖ΔW‖ over all modules together."""
        norm = math.sqrt(math.fsum(module.norm**2 for module in self.modules))
        distance = math.sqrt(math.fsum((module.norm * module.error) ** 2 for module in self.modules))
        return distance / norm if norm else 0.0

    @property
    def worst(self) -> ConvertedModule:
        """The module with the largest error."""
        return max(self.modules, key=lambda module: module.error)
