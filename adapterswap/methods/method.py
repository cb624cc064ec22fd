"""What a method is: its name, its parameters, where it comes from, and how it combines ΔW.

Written so that listing methods costs no import of numpy. Knows nothing of rules, plans or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["PARAMETERS", "Method", "NonlinearMethod", "Settings"]

PARAMETERS = {
    "scale": "λ: the factor of the combined ΔW",
    "density": "the share of ΔW that is kept",
    "seed": "the seed of what is dropped",
}
"""The parameters that a method may have, as compositions name them. In a rule `scale` is called `lambda`."""


@dataclass(frozen=True)
class Settings:
    """A method's parameters for one module.

    Attributes:
        density: the share of ΔW that is kept, above 0 and up to 1.
        scale: λ, the factor of the result.
        normalize: weights are divided by their sum.
        seed: of random choices.
        module: the module's name; with the seed it decides random choices, so that no order of computation does.
    """

    density: float = 1.0
    scale: float = 1.0
    normalize: bool = False
    seed: int = 0
    module: str = ""


class Method:
    """One way to combine the ΔW of several experts.

    Attributes:
        name: as users type it.
        title: what model cards call it.
        reference: the paper.
        formula: what it computes, in one line.
        parameters: of `PARAMETERS`.
        linear: the result is a weighted sum of the experts' ΔW, so an adapter holds it exactly.
        normalizes: weights are divided by their sum unless the user says otherwise.
        in_rules: a rule's blend may name it; `linear` is what soups and task arithmetic are in rules.
        as_composition: a whole composition may name it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    formula: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ()
    linear: ClassVar[bool] = True
    normalizes: ClassVar[bool] = False
    in_rules: ClassVar[bool] = True
    as_composition: ClassVar[bool] = True


class NonlinearMethod(Method, ABC):
    """A method that needs the dense ΔW of a module: its result has full rank, and is exact in full weights alone."""

    linear: ClassVar[bool] = False

    @abstractmethod
    def combine(
        self,
        deltas: Mapping[str, npt.NDArray[np.float32]],
        weights: Mapping[str, float],
        settings: Settings,
    ) -> npt.NDArray[np.float32]:
        """The merged ΔW of one module.

        Args:
            deltas: the ΔW of each side (an expert, or the average of several), by name; out×in, float32, of one shape.
                They must not be changed in place.
            weights: w_i, by the same names.
            settings: see `Settings`.

        Returns:
            An array of the same shape, float32.
        """
