"""What a method is: its name, its parameters, where it comes from, and how it combines ΔW.

Written so that listing methods costs no import of numpy. Knows nothing of rules, plans or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[np.float32]]

__all__ = [
    "DENSITY",
    "LARGEST",
    "SCALE",
    "SEED",
    "Method",
    "MethodSettings",
    "NonlinearMethod",
    "Parameter",
    "SpanMethod",
]

LARGEST = 1e9  # of weights and factors, so that no sum of them overflows


@dataclass(frozen=True)
class Parameter:
    """A value that a method takes. Options, keys of recipes and of short names, and sweeps' grids follow from it.

    Attributes:
        name: as users type it: lower-case letters, digits and _.
        description: one line.
        default: its type (float, int, bool or str) is the parameter's type. Write 1.0 for a float.
        gt, ge, lt, le: bounds: above, at least, below, at most. Floats are finite in any case.
        choices: the strings that are allowed.
        required: a whole composition must say it; `default` is then what rules have.
        rule_name: what rules call it, if not `name`.
        shared: all rules of a composition have one value, so it is a field of compositions, and of no rule.
    """

    name: str
    description: str
    default: float | bool | str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    rule_name: str = ""
    shared: bool = False

    @property
    def kind(self) -> type[float | bool | str]:
        return type(self.default)

    def called(self, *, in_rules: bool) -> str:
        """Its name in rules, or in compositions."""
        return (in_rules and self.rule_name) or self.name

    @property
    def allowed(self) -> str:
        """Which values it may have, in words: `above 0, at most 1`."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        bounds = {"above": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        named = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None and abs(bound) < LARGEST]
        return ", ".join(named) or ("a whole number" if self.kind is int else "a number")


SCALE = Parameter(
    "scale", "factor λ of the combined ΔW", 1.0, ge=-LARGEST, le=LARGEST, rule_name="lambda"
)  # fmt: skip
DENSITY = Parameter("density", "share of ΔW that is kept", 1.0, gt=0, le=1, required=True)
SEED = Parameter("seed", "seed of what is dropped", 0, ge=0, shared=True)


@dataclass(frozen=True)
class MethodSettings:
    """What a method computes one module with. `settings["density"]` is a parameter's value.

    Attributes:
        values: of the method's parameters, by name.
        normalize: weights are divided by their sum.
        module: the module's name; with the seed it decides random choices, so that no order of computation does.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    normalize: bool = False
    module: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Method:
    """One way to combine the ΔW of several experts.

    Attributes:
        name: as users type it.
        title: what model cards call it.
        reference: the paper.
        formula: what it computes, in one line.
        notes: what else a reader should know, such as where it differs from mergekit.
        parameters: what it takes beside weights.
        published: values of its parameters that the paper uses where nothing is tuned. A sweep marks a configuration
            with these values, and with the defaults of all others, as the paper's.
        linear: the result is a weighted sum of the experts' ΔW, so an adapter holds it exactly.
        normalizes: weights are divided by their sum unless the user says otherwise.
        acts_on: `delta` combines ΔW; `weights` combines whole weights W, so only full weights can hold the result.
        weighted: experts may have weights; otherwise all count the same.
        sides: how many experts (averages count as one) it combines at least and at most; None is any number.
        needs_factors: it works on LoRA's factors, so that full checkpoints are refused.
        counts_absent: an expert that does not change a module enters with ΔW = 0. Otherwise it is left out.
        in_rules: a rule's blend may name it; `linear` is what soups and task arithmetic are in rules.
        as_composition: a whole composition may name it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str]
    formula: ClassVar[str]
    notes: ClassVar[str] = ""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    published: ClassVar[Mapping[str, Any]] = {}
    linear: ClassVar[bool] = True
    normalizes: ClassVar[bool] = False
    acts_on: ClassVar[Literal["delta", "weights"]] = "delta"
    weighted: ClassVar[bool] = True
    sides: ClassVar[tuple[int, int | None]] = (1, None)
    needs_factors: ClassVar[bool] = False
    counts_absent: ClassVar[bool] = False
    in_rules: ClassVar[bool] = True
    as_composition: ClassVar[bool] = True

    def has(self, parameter: Parameter) -> bool:
        """Whether a parameter of this one's name is among its own."""
        return any(own.name == parameter.name for own in self.parameters)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError if the values of the parameters do not go together."""

    def spans(self, values: Mapping[str, Any]) -> bool:
        """Whether the result is a weighted sum whose coefficients depend on the experts' inner products alone."""
        return False

    def exact_in_adapters(self, values: Mapping[str, Any]) -> bool:
        """Whether an adapter holds the result as it is, with these values of the parameters."""
        return self.linear


class NonlinearMethod(Method, ABC):
    """A method that needs the dense ΔW of a module: an adapter holds its result as far as a rank allows.

    Where `acts_on` is `weights`, W stands for ΔW below.
    """

    linear: ClassVar[bool] = False

    @abstractmethod
    def combine(
        self,
        deltas: Arrays,
        weights: Mapping[str, float],
        settings: MethodSettings,
    ) -> npt.NDArray[np.float32]:
        """The merged ΔW of one module.

        Args:
            deltas: the ΔW of each side (an expert, or the average of several), by name; float32, of one shape: out×in,
                or that of a stored tensor of any number of axes. They must not be changed in place.
            weights: w_i, by the same names.
            settings: see `MethodSettings`.

        Returns:
            An array of the same shape, float32.
        """


class SpanMethod(Method, ABC):
    """A method whose result is a weighted sum of the ΔW, with coefficients found from their inner products.

    So an adapter holds the result exactly, and no dense ΔW is formed for it.
    """

    counts_absent: ClassVar[bool] = True

    def spans(self, values: Mapping[str, Any]) -> bool:
        return True

    def exact_in_adapters(self, values: Mapping[str, Any]) -> bool:
        return self.spans(values)

    @abstractmethod
    def coefficients(
        self, gram: npt.NDArray[np.float64], weights: Sequence[float], settings: MethodSettings
    ) -> Sequence[float]:
        """The coefficient of each side's ΔW.

        Args:
            gram: ⟨ΔW_i, ΔW_j⟩ of all sides, n×n.
            weights: w_i, in the same order.
            settings: see `MethodSettings`.
        """

    def combine(
        self, deltas: Arrays, weights: Mapping[str, float], settings: MethodSettings
    ) -> npt.NDArray[np.float32]:
        """The same of dense ΔW; see `NonlinearMethod.combine`."""
        from adapterswap.methods.dense import gram_of, summed

        listed = list(deltas.values())
        coefficients = self.coefficients(gram_of(listed), [weights[name] for name in deltas], settings)
        return summed(listed, coefficients)
